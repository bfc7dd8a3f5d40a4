"""What an offloaded optimizer says of itself: all of it is said by the optimizer inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from narrowgauge.distributed._offload_pieces import Pieces
from narrowgauge.optim import Description, NarrowOptimizer
from narrowgauge.optim._preview import ParameterView
from narrowgauge.optim._stats import StepStats


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
    def gauges(self) -> bool:
        """As of `NarrowOptimizer`: whether steps measure what they did."""
        return self.inner.gauges

    @gauges.setter
    def gauges(self, value: bool) -> None:
        self.inner.gauges = value

    @property
    def last_stats(self) -> StepStats:
        """What the last step measured, by parameter name."""
        return self.inner.last_stats

    @last_stats.setter
    def last_stats(self, value: StepStats) -> None:
        self.inner.last_stats = value

    # What gauges read, as of `narrowgauge.optim.NarrowOptimizer`.

    def measured(self) -> list[tuple[list[Tensor], Tensor]]:
        """The sums in `last_stats`, with the parameters as the model has them; tables on the CPU."""
        return [([self._pieces.parameter(p) for p in ps], rows) for ps, rows in self.inner.measured()]

    def parameter_view(self, p: Tensor) -> ParameterView | None:
        """As of `NarrowOptimizer`: what lies on the CPU."""
        piece = self._pieces.by_parameter.get(p)
        return self.inner.parameter_view(piece.host) if piece is not None else None

    def preview_unavailable(self, p: Tensor) -> str:
        """Why no moments are previewed: a step begins before its gradients are there."""
        return "gradients are on their way to the CPU until they are stepped"

    def inverse_scale(self) -> Tensor | None:
        """As of `NarrowOptimizer`; on the scaler's device."""
        scale = getattr(self, "grad_scale", None)
        return self.inner.inverse_scale() if scale is None else scale.double().reciprocal().float()

    def keeps_codes(self, p: Tensor) -> bool:
        """Whether a moment of a parameter is quantized."""
        return self.inner.keeps_codes(self._pieces.by_parameter[p].host)
