"""A few parameters of odd shapes, and steps with gradients that depend on the step alone."""

import copy
from typing import Any

import torch

from narrowgauge.optim import NarrowOptimizer


def model(dtype: torch.dtype = torch.bfloat16) -> list[tuple[str, torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"weight": (33, 40), "odd": (7, 13), "bias": (10,)}
    return [
        (name, torch.nn.Parameter((1 + 0.3 * torch.randn(shape, generator=generator)).to(dtype)))
        for name, shape in shapes.items()
    ]


def drive(optimizer: NarrowOptimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def everything(optimizer: NarrowOptimizer) -> list[Any]:
    """All that load_state_dict may change, copied."""
    return copy.deepcopy([list(optimizer.state.values()), [g | {"params": None} for g in optimizer.param_groups]])


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b
