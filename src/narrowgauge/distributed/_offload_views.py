"""What an offloaded optimizer says of itself: all of it is said by the optimizer inside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from narrowgauge.distributed._offload_pieces import Pieces
from narrowgauge.optim import Description, NarrowOptimizer, UpdateStats


class ShowsInner(torch.optim.Optimizer):
    """An optimizer around another one, of copies of its parameters; see `CPUOffload`."""

    _inner: NarrowOptimizer | None = None
    _pieces: Pieces
    _within = False  # a loss scaler's step

    def _prepare(self) -> None:
        """Let `inner` know what has changed since the last time."""
        raise NotImplementedError

    @property
    def inner(self) -> NarrowOptimizer:
        """The optimizer of the copies on the CPU."""
        assert self._inner is not None
        return self._inner

    @contextmanager
    def unscaling(self, inverse: Tensor, whole: bool) -> Iterator[Any]:
        """As `NarrowOptimizer.unscaling`: for loss scalers."""
        self._within = True
        try:
            with self.inner.unscaling(inverse, whole) as asked:
                yield asked
        finally:
            self._within = False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return self.inner._step_supports_amp_scaling

    def torch_state_dict(self) -> dict[str, Any]:
        """As `NarrowOptimizer.torch_state_dict`."""
        self._prepare()
        return self.inner.torch_state_dict()

    def describe(self) -> Description:
        """As `NarrowOptimizer.describe`, of the copies on the CPU."""
        self._prepare()
        return self.inner.describe()

    def state_bytes(self) -> int:
        """Bytes of states on the CPU."""
        return self.inner.state_bytes()

    def host_bytes(self) -> int:
        """Bytes on the CPU beside the states: a copy of each weight, and room for each gradient."""
        return self._pieces.nbytes()

    @property
    def skipped(self) -> dict[str, int]:
        """Steps refused because of a gradient that was not finite, by parameter; those with none left out."""
        return self.inner.skipped

    @property
    def grad_norm(self) -> Tensor:
        """The norm that the last step clipped by: 0-d, float32, on the CPU.

        Raises:
            RuntimeError: if no step has measured it.
        """
        return self.inner.grad_norm

    @property
    def gauges(self) -> bool | Literal["sampled"]:
        """As of `NarrowOptimizer`: whether steps measure what they did."""
        return self.inner.gauges

    @gauges.setter
    def gauges(self, value: bool | Literal["sampled"]) -> None:
        self.inner.gauges = value

    @property
    def last_stats(self) -> Mapping[str, UpdateStats]:
        """What the last step measured, by parameter name."""
        return self.inner.last_stats
