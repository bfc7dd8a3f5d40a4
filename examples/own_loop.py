"""A plain training loop: a recipe, a schedule, clipping in the step, and gauges that watch every tenth step.

    python examples/own_loop.py --text mine.txt
    python examples/own_loop.py --smoke     # seconds on a CPU: a tiny model, made data

Then `narrowgauge report own-loop-run`. Guide: docs/training_loops.md
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

import narrowgauge as ng

parser = argparse.ArgumentParser()
parser.add_argument("--text", help="a text file", required="--smoke" not in sys.argv)
parser.add_argument("--out", default="own-loop-run")
parser.add_argument("--smoke", action="store_true")
given = parser.parse_args()
if Path(given.out, "gauges.jsonl").exists():
    parser.error(f"{given.out} has a training; to train anew, give another folder: --out")

text = b"a made text. " * 200 if given.smoke else Path(given.text).read_bytes()
length, width, steps = (32, 64, 30) if given.smoke else (256, 512, 2000)
tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
rows = tokens[: len(tokens) // length * length].view(-1, length)
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(256, width),
    nn.Linear(width, 4 * width),
    nn.GELU(),
    nn.LayerNorm(4 * width),
    nn.Linear(4 * width, 256),
).to(device)

# apply casts the model to bf16 and leaves norms and biases without weight decay.
optimizer = ng.recipes.get("adamw8bit-split8").apply(model, lr=3e-3, weight_decay=0.1, max_grad_norm=1.0)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)

Path(given.out).mkdir(exist_ok=True)
with ng.gauges.watch(model, optimizer, every=10, path=given.out) as gauges:
    for step in range(1, steps + 1):
        batch = rows[torch.randint(len(rows), (8,))].to(device)
        logits = model(batch[:, :-1]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        gauges.loss(loss)  # a model that returns its loss does not need this line
        optimizer.step()  # clips, too
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, gradients' norm {optimizer.grad_norm.item():.3f}")
print(optimizer.describe())
