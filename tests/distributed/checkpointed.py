"""A small model, optimizers of several kinds, and training whose losses say whether two runs are one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import narrowgauge as ng

DIM, BATCH = 24, 8

# What is kept how: the weights' dtype and the optimizer over (name, parameter) pairs.
KINDS: dict[str, tuple[torch.dtype, Callable]] = {
    "torch AdamW": (torch.float32, lambda ps: torch.optim.AdamW(ps, lr=1e-2)),
    "fp32": (torch.float32, lambda ps: ng.optim.AdamW(ps, lr=1e-2)),
    "split, 8bit": (torch.bfloat16, lambda ps: ours(ps, weights="split", states="8bit")),
    "split8, log8": (torch.bfloat16, lambda ps: ours(ps, weights="split8", states="log8")),
    "expansion, log4": (torch.bfloat16, lambda ps: ours(ps, weights="expansion", states="log4")),
    "split8, factored": (
        torch.bfloat16,
        lambda ps: ours(ps, weights="split8", states={"m": "log8", "v": "factored"}),
    ),
    "kahan, fp8": (torch.bfloat16, lambda ps: ours(ps, weights="kahan", states="fp8")),
    "split4, 4bit": (torch.bfloat16, lambda ps: ours(ps, weights="split4", states="4bit")),
    "master, expansion": (torch.float16, lambda ps: ours(ps, weights="master", states="expansion")),
    "SGD": (torch.bfloat16, lambda ps: ng.optim.SGD(ps, lr=1e-2, momentum=0.9, weights="split", states="bf16")),
    "clipped": (torch.float32, lambda ps: ng.optim.StableAdamW(ps, lr=1e-2, max_grad_norm=0.5)),
}


# What is killed and damaged.
KIND = "split8, log8"


def ours(ps: list, **options: Any) -> ng.optim.AdamW:
    return ng.optim.AdamW(ps, lr=1e-2, min_quantized_size=100, block_size=64, **options)


class Net(nn.Module):
    """Two layers and a buffer that moves."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(DIM, 33, dtype=dtype)
        self.down = nn.Linear(33, 5, dtype=dtype)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.down(torch.tanh(self.up(x)))


def made(kind: str, seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    dtype, optimizer = KINDS[kind]
    net = Net(dtype, seed)
    return net, optimizer(list(net.named_parameters()))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Steps on batches that depend on the step alone; the losses."""
    losses = []
    dtype = next(model.parameters()).dtype
    for step in steps:
        x = torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = (model(x).float() - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under a folder, by name."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def curve(steps: int) -> dict[int, str]:
    """The losses of a run that nobody kills."""
    net, optimizer = made(KIND)
    return {step + 1: loss.hex() for step, loss in enumerate(train(net, optimizer, range(steps)))}


def newest(run: Path) -> Path:
    return run / "step-000000004"
