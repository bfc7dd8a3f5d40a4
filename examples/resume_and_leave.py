"""Stop a training, resume it to the same bits, then go on with torch alone.

    python examples/resume_and_leave.py             # or with --smoke, which is the same

Guides: docs/guides/resume.md, docs/guides/back_to_torch.md
"""

import argparse

import torch
from torch import nn

import narrowgauge as ng

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="resume-run", help="a folder for checkpoints")
parser.add_argument("--smoke", action="store_true")
given = parser.parse_args()


def make():
    """A new model in bf16, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)).bfloat16()
    return model, ng.optim.AdamW8bit(model.named_parameters(), lr=1e-3)


def train(model, optimizer, first, last):
    """Steps first + 1 to last; the batch of a step depends on its number alone."""
    for step in range(first + 1, last + 1):
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
        loss = (model(x.to(next(model.parameters()).dtype)).float() - x.roll(1, 1).relu()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


model, optimizer = make()  # a run of 40 steps, saved at step 20
train(model, optimizer, 0, 20)
path = ng.distributed.save_checkpoint(given.out, model=model, optimizer=optimizer, step=20)
train(model, optimizer, 20, 40)

resumed, its_optimizer = make()  # as another process would begin
step, _ = ng.distributed.load_checkpoint(path, model=resumed, optimizer=its_optimizer)
loss = train(resumed, its_optimizer, step, 40)
pairs = zip(optimizer.full_weights().values(), its_optimizer.full_weights().values(), strict=True)
same = all(torch.equal(p, q) for p, q in pairs)
print(f"resumed at step {step}; at step 40 loss {loss:.4f}, the same bits: {same}")

wide, theirs = ng.to_torch(resumed, its_optimizer)
loss = train(wide, theirs, 40, 60)
print(f"{type(theirs).__module__}.{type(theirs).__name__} on {next(wide.parameters()).dtype}: loss {loss:.4f}")
