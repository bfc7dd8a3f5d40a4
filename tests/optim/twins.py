"""Two short trainings that differ in the optimizer alone: ours and torch's of the same name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from narrowgauge import optim

NAMESAKES = ("Adam", "AdamW", "SGD", "Adafactor", "Adagrad", "Muon", "RMSprop", "NAdam")
SHAPES = ((12, 8), (5, 9))


def ours(name: str) -> type[torch.optim.Optimizer]:
    return getattr(optim, name)


def torchs(name: str) -> type[torch.optim.Optimizer]:
    return getattr(torch.optim, name)


def parameters(device: str = "cpu") -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in SHAPES]


def backward(ps: list[torch.nn.Parameter], step: int) -> torch.Tensor:
    """A loss with noise that depends on the parameters, and its gradients."""
    generator = torch.Generator().manual_seed(step)
    noise = [torch.randn(p.shape, generator=generator).to(p.device) for p in ps]
    loss = sum(((p - n) ** 2).sum() / 2 for p, n in zip(ps, noise, strict=True))
    loss.backward()
    return loss.detach()


def values(ps: list[torch.nn.Parameter]) -> torch.Tensor:
    return torch.cat([p.detach().double().cpu().reshape(-1) for p in ps])


def train(
    cls: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    steps: int = 20,
    device: str = "cpu",
    schedulers: Callable[[torch.optim.Optimizer], list[Any]] = lambda _: [],
) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Where a short training ends, and the group's hyperparameters at each of its steps."""
    ps = parameters(device)
    optimizer = cls(ps, **copy.deepcopy(dict(options)))
    made, seen = schedulers(optimizer), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = backward(ps, step)
        optimizer.step()
        for scheduler in made:
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(loss) if plateau else scheduler.step()
        group = {key: optimizer.param_groups[0].get(key) for key in ("lr", "betas", "momentum")}
        seen.append(copy.deepcopy(group))
    return values(ps), seen


def distance(ours: torch.Tensor, torchs: torch.Tensor) -> float:
    """How far two ends are from each other, of the way from the start."""
    start = values(parameters())
    return float((ours - torchs).norm() / (torchs - start).norm())
