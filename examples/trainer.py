"""Hugging Face's Trainer by a recipe: bf16 weights of 24 bits, 8-bit states, linear layers in float8.

    python examples/trainer.py --model Qwen/Qwen3-0.6B --text mine.txt
    python examples/trainer.py --smoke     # seconds on a CPU: a tiny model, made data, no network

Started again, it goes on from its last checkpoint, to the same bits. Guide: docs/guides/trainer.md
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from narrowgauge.integrations.transformers import RecipeFactory

parser = argparse.ArgumentParser()
parser.add_argument("--model", required="--smoke" not in sys.argv)
parser.add_argument("--text", help="a text file", required="--smoke" not in sys.argv)
parser.add_argument("--out", default="trainer-run")
parser.add_argument("--smoke", action="store_true")
given = parser.parse_args()

if given.smoke:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=64, vocab_size=128, n_positions=32))
    tokens = torch.arange(64 * 32) % 97
else:
    model = AutoModelForCausalLM.from_pretrained(given.model)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    tokens = torch.tensor(tokenizer(Path(given.text).read_text())["input_ids"])
length = 32 if given.smoke else 512
rows = tokens[: len(tokens) // length * length].view(-1, length)
data = [{"input_ids": row, "labels": row} for row in rows]

args = TrainingArguments(
    output_dir=given.out,
    learning_rate=3e-3 if given.smoke else 1e-5,
    weight_decay=0.1,
    lr_scheduler_type="cosine",
    warmup_steps=2,
    per_device_train_batch_size=8,
    num_train_epochs=2,
    use_cpu=given.smoke,
    report_to=[],
)
options = {"recipe": "adamw8bit-split8", "args": args, "linear": "SWITCHBACK:e4m3"}
trainer = Trainer(model, args, train_dataset=data, optimizer_cls_and_kwargs=(RecipeFactory, options))
resume = Path(given.out).is_dir() and get_last_checkpoint(given.out)
result = trainer.train(resume_from_checkpoint=resume or None)
if resume and resume.endswith(f"-{result.global_step}"):
    print(f"the training in {given.out} has ended; to train anew, give another folder: --out")
else:
    print(f"{model.dtype}, mean loss {result.training_loss:.3f}")
