"""The training loop of `fit` and of `compare`, its clock, and torch's deterministic mode."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def training_loop(
    numbers: Iterable[int],
    optimizer: Any,
    *,
    rate: Callable[[int], float],
    gradients: Callable[[], Tensor],
    update: Callable[[Tensor], None],
) -> Iterator[tuple[int, Tensor]]:
    """Take one optimizer step for each item that is drawn.

    Args:
        numbers: of the steps.
        optimizer: whose groups get the learning rate, and whose gradients are cleared.
        rate: the learning rate by the number of the step.
        gradients: draws examples, adds their gradients to the parameters', and returns their loss.
        update: takes the optimizer step, or leaves it out, by the loss.

    Yields:
        The number of each finished step and its loss, on the device.
    """

    def step(number: int) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = rate(number)
        optimizer.zero_grad()
        loss = gradients()
        update(loss)
        return loss

    for number in numbers:
        yield number, step(number)  # holds no loss while the next step runs


def now(device: torch.device) -> float:
    """Seconds, once a GPU has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Clock:
    """Seconds of training, without pauses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start, self._paused = now(device), 0.0

    def lap(self) -> float:
        """Seconds since the last lap."""
        end = now(self._device)
        seconds, self._start, self._paused = end - self._start - self._paused, end, 0.0
        return max(seconds, 1e-9)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time does not count."""
        before = now(self._device)
        yield
        self._paused += now(self._device) - before


@contextlib.contextmanager
def determinism(asked: bool) -> Iterator[None]:
    """Have torch choose kernels that give the same bits each time, and raise where there is none."""
    if not asked:
        yield
        return
    # cuBLAS reads it when it first multiplies.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
