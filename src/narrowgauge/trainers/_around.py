"""What surrounds a run's steps: the time they take, torch's promise to repeat itself, a warning that is none."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator

import torch


class Clock:
    """Seconds of training: pauses do not count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start, self._away = self._now(), 0.0

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = self._now()
        seconds, self._start, self._away = now - self._start - self._away, now, 0.0
        return max(seconds, 1e-9)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens in this context takes no time."""
        before = self._now()
        yield
        self._away += self._now() - before


@contextlib.contextmanager
def determinism(asked: bool) -> Iterator[None]:
    """Have torch take kernels that give the same bits each time, and refuse where there is none."""
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


@contextlib.contextmanager
def unwarned() -> Iterator[None]:
    """Without FSDP2's warning of models that return views, as CLIP's logits are: nothing here writes to them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        yield
