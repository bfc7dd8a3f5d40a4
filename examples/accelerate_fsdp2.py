"""FSDP2 through accelerate: bf16 weights of 24 bits and 8-bit states in shards, linear layers in float8.

    torchrun --nproc-per-node 8 examples/accelerate_fsdp2.py --text mine.txt
    python examples/accelerate_fsdp2.py --smoke     # seconds on a CPU, where accelerate does not shard

Guide: docs/guides/accelerate.md
"""

import argparse
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from transformers import GPT2Config, GPT2LMHeadModel

import narrowgauge as ng

parser = argparse.ArgumentParser()
parser.add_argument("--text", help="a text file", required="--smoke" not in sys.argv)
parser.add_argument("--out", default="accelerate-run")
parser.add_argument("--smoke", action="store_true")
given = parser.parse_args()

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
)
# With another mixed_precision accelerate makes the bf16 weights float32.
accelerator = Accelerator(mixed_precision="no", fsdp_plugin=plugin, cpu=given.smoke)

text = b"a made text. " * 200 if given.smoke else Path(given.text).read_bytes()
length, steps, lr = (32, 10, 3e-3) if given.smoke else (512, 2000, 3e-4)
tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
rows = tokens[: len(tokens) // length * length].view(-1, length)
loader = torch.utils.data.DataLoader(rows, 8, shuffle=True, drop_last=True)
sizes = {"n_layer": 1, "n_head": 2, "n_embd": 64} if given.smoke else {}
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=length, bos_token_id=0, eos_token_id=0, **sizes))

# Cast and make the optimizer, swap; then prepare all together.
optimizer = ng.recipes.get("adamw8bit-split8").apply(model, lr=lr, weight_decay=0.1)
ng.linear.swap_linears(model, "SWITCHBACK:e4m3")
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps * accelerator.num_processes)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

done = 0
while done < steps:
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        done += 1
        if done == steps:
            break
accelerator.save_state(given.out)  # accelerator.load_state(given.out) goes on from here
accelerator.print(f"{next(model.parameters()).dtype}, loss {loss.item():.3f}")
accelerator.end_training()
