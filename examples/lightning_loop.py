"""Lightning's Trainer with bf16 weights of 24 bits, 8-bit states and linear layers in float8.

    python examples/lightning_loop.py --text mine.txt
    python examples/lightning_loop.py --smoke     # seconds on a CPU: a tiny model, made data, no network

Guide: docs/guides/lightning.md
"""

import argparse
import sys
from pathlib import Path

import lightning
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import narrowgauge as ng
from narrowgauge.integrations.lightning import NarrowgaugePrecision


class Language(lightning.LightningModule):
    """A GPT-2 that reads bytes."""

    def __init__(self, steps: int, lr: float, **sizes: int) -> None:
        super().__init__()
        self.steps, self.lr = steps, lr
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes))

    def training_step(self, batch, index):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        groups = ng.optim.split_decay(self, 0.1)
        optimizer = ng.optim.AdamW8bit(groups, lr=self.lr, max_grad_norm=1.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


parser = argparse.ArgumentParser()
parser.add_argument("--text", help="a text file", required="--smoke" not in sys.argv)
parser.add_argument("--out", default="lightning-run")
parser.add_argument("--smoke", action="store_true")
given = parser.parse_args()
if Path(given.out, "gauges.jsonl").exists():
    parser.error(f"{given.out} has a training; to train anew, give another folder: --out")

text = b"a made text. " * 200 if given.smoke else Path(given.text).read_bytes()
length, steps = (32, 10) if given.smoke else (512, 2000)
tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
loader = torch.utils.data.DataLoader(tokens[: len(tokens) // length * length].view(-1, length), 8, shuffle=True)
sizes = {"n_layer": 1, "n_head": 2, "n_embd": 64} if given.smoke else {}
module = Language(steps, 3e-3 if given.smoke else 3e-4, n_positions=length, **sizes)
trainer = lightning.Trainer(
    max_steps=steps,
    plugins=NarrowgaugePrecision("SWITCHBACK:e4m3"),
    callbacks=[ng.gauges.LightningCallback(every=10)],  # gauges.jsonl: narrowgauge report reads it
    default_root_dir=given.out,
    accelerator="cpu" if given.smoke else "auto",
    logger=False,
)
trainer.fit(module, loader)
print(f"{module.model.dtype}, loss {float(trainer.callback_metrics['loss']):.3f}")
