"""What an optimizer offers to those who watch a training: by parameter, as tensors that stay on the device.

Two things. What the last step measured, as tables, so that three hundred parameters are one transfer. And what the
next step will write to its quantized moments, beside the numbers that they stand for: those exist in registers
only, and only during the step, so they are worked out here once more, by the specification that kernels match.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from narrowgauge.optim._foreseen import Foreseen, QuantizedMoment, foresee, foresee_samples
from narrowgauge.optim._options import LIMIT
from narrowgauge.optim._stats import StepStats

if TYPE_CHECKING:
    from narrowgauge.optim._optimizer import NarrowOptimizer


class Watched(torch.optim.Optimizer):
    """An optimizer whose steps can be looked at; see the module."""

    last_stats: StepStats
    _ratios: dict[Tensor, Tensor | None]
    _turn: int

    def measured(self) -> list[tuple[list[Tensor], Tensor]]:
        """The sums in `last_stats`: for some parameters at a time, these and a float64 table (parameters, 8)."""
        owners = {plan.name: p for p, plan in cast("NarrowOptimizer", self)._all_plans()}
        return [([owners[name] for name in names], rows) for names, rows in self.last_stats.tables()]

    def names_of(self, ps: Iterable[Tensor]) -> dict[Tensor, str]:
        """What `last_stats` calls some parameters."""
        wanted = set(ps)
        return {p: plan.name for p, plan in cast("NarrowOptimizer", self)._all_plans() if p in wanted}

    def measure_ratios(self, ps: Iterable[Tensor], turn: int) -> None:
        """Have the next step measure g^2 / max(v_hat, eps^2), and nothing else, of some parameters.

        Of those that are stepped one by one, as on a CPU: kernels that step lists of them measure all or none (see
        `gauges`). `ratios` ends it.

        Args:
            ps: the parameters.
            turn: which sample is taken of long ones.
        """
        self._ratios, self._turn = dict.fromkeys(ps), turn

    def ratios(self) -> dict[Tensor, Tensor]:
        """What a step found of what `measure_ratios` asked for: float64 (2,), the sum and of how many elements.

        Zeros where the step of a parameter was skipped; no entry without gradient or second moment.
        """
        found, self._ratios = self._ratios, {}
        return {p: sums for p, sums in found.items() if sums is not None}

    def cannot_foresee(self, p: Tensor | None = None, group: Mapping[str, Any] | None = None) -> str | None:
        """Why `foresee` cannot say what the next step does, or None; given a parameter and its group, to it."""
        if group is not None and group.get("percentile_clipping", 100) < 100:
            return "percentile_clipping decides on gradients within the step"
        if hasattr(p, "to_local"):
            return "it is sharded"
        if getattr(self, "in_backward", None) is not None:
            return "parameters are stepped in backward"
        if any(group[LIMIT] is not None for group in self.param_groups):
            return f"{LIMIT} makes each step depend on all gradients"
        return None

    def keeps_codes(self, p: Tensor) -> bool:
        """Whether a moment of a parameter is quantized."""
        return any(slot.storage.quantized for slot in cast("NarrowOptimizer", self)._plan(p).slots)

    @torch.no_grad()
    def foresee(self, p: Tensor, group: Mapping[str, Any]) -> list[QuantizedMoment]:
        """What the next step will write to a parameter's quantized moments; nothing is changed.

        Waits for the device. The step count and random numbers are those that the step itself will use.

        Args:
            p, group: the parameter and its group.

        Returns:
            One an entry; none if no moment is quantized, or the parameter has no gradient, none that is finite, or
            none that an optimizer of its kind takes.
        """
        return foresee(cast("NarrowOptimizer", self), p, group)

    @torch.no_grad()
    def foresee_samples(self, turn: int) -> list[Foreseen]:
        """The same of all parameters of which it can be said, from samples of the long ones.

        Where a format rounds by chance the random numbers are others than those of the step, and with them some of
        the codes: their errors are as large.

        Args:
            turn: which sample is taken.
        """
        return foresee_samples(cast("NarrowOptimizer", self), turn)

    def inverse_scale(self) -> Tensor | None:
        """What a loss scaler has asked the present step to multiply gradients by: float32, 0-d; None for
        nothing.
        """
        asked = cast("NarrowOptimizer", self)._unscaling
        scale = getattr(self, "grad_scale", None)
        if asked is not None:
            return asked.inverse
        return scale.double().reciprocal().float() if scale is not None else None
