"""A small training that tests watch, and the records by kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from narrowgauge import gauges

Make = Callable[[nn.Module], torch.optim.Optimizer]


def model(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """An embedding and two blocks with dropout, 20 000 parameters."""
    torch.manual_seed(seed)
    block = [nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Dropout(0.2), nn.Linear(96, 48)) for _ in range(2)]
    return Net(nn.ModuleList(block)).to(dtype)


class Net(nn.Module):
    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 48)
        self.blocks = blocks
        self.head = nn.Linear(48, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def batch(step: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(40, (rows, 12), generator=generator)
    return ids, (ids * 3 + 1) % 40


def loss_of(net: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(net(ids).float().flatten(0, 1), targets.flatten())


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, watch: Any = None) -> list[float]:
    """The losses of some steps; they are given to the watch, if there is one."""
    torch.manual_seed(1)
    losses = []
    for step in range(steps):
        loss = loss_of(net, *batch(step))
        optimizer.zero_grad()
        loss.backward()
        if watch is not None:
            watch.loss(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def watched(
    make: Make, steps: int, every: int = 1, dtype: torch.dtype = torch.float32, **options: Any
) -> list[dict[str, Any]]:
    """The records of a training."""
    net = model(dtype)
    optimizer = make(net)
    with gauges.watch(net, optimizer, every, **options) as watch:
        train(net, optimizer, steps, watch)
    return watch.rows()


def of_kind(rows: list[dict[str, Any]], kind: str, **values: Any) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == kind and all(row[key] == value for key, value in values.items())]
