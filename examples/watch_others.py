"""Watch a training that has nothing of this library in it: torch's AdamW on bf16 weights, and what it loses.

    python examples/watch_others.py             # 500 steps; needs the extra `train` for the report
    python examples/watch_others.py --smoke     # 40

The loop computes the same bits with the watch and without. Guide: docs/gauges.md
"""

import argparse

import torch
from torch import nn

import narrowgauge as ng

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="watched.html", help="the page to write")
parser.add_argument("--smoke", action="store_true")
given = parser.parse_args()

torch.manual_seed(0)
steps = 40 if given.smoke else 500
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64))
model.bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with ng.gauges.watch(model, optimizer, every=10) as gauges:
    for _ in range(steps):
        ids = torch.randint(64, (8, 32))
        loss = nn.functional.cross_entropy(model(ids).float().flatten(0, 1), (7 * ids % 64).flatten())
        gauges.loss(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

last = {row["name"]: row for row in gauges.rows() if row["kind"] == "update" and row["step"] == steps}
for name, row in last.items():
    print(f"{name or 'the whole model':16} {row['lost']:4.0%} of updates lost, EDQ {row['descent_quality']:4.0%}")
for advice in ng.gauges.advise(gauges.rows()):
    print(f"{advice.urgency}: {advice.finding}")
print(gauges.report(given.out))
