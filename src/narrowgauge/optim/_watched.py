"""What an optimizer offers to those who watch a training: by parameter, as tensors that stay on the device.

Two things. What the last step measured, as tables, so that three hundred parameters are one transfer. And what the
next step will write to its quantized moments, beside the numbers that they stand for: those exist in registers
only, and only during the step, so they are worked out here once more, by the specification that kernels match.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from narrowgauge.optim._clip_gradients import HISTORY
from narrowgauge.optim._options import LIMIT
from narrowgauge.optim._stats import StepStats
from narrowgauge.optim._update import Noise, next_moments

if TYPE_CHECKING:
    from narrowgauge.optim._optimizer import NarrowOptimizer


@dataclass(frozen=True, eq=False)
class QuantizedMoment:
    """A moment as a step makes it, and as it is kept.

    Attributes:
        slot: the equation's letter.
        format: the storage's name.
        exact: float32, in the parameter's shape.
        codes: uint8, in the same shape, one a byte.
        kept: what the codes stand for, float32, in the same shape.
        correction: what the equation divides the moment by because it began at zero; 1 where it does not.
        eps: what the equation adds to the root of the second moment; None in rules that do not divide
            a first moment by one.
    """

    slot: str
    format: str
    exact: Tensor
    codes: Tensor
    kept: Tensor
    correction: float
    eps: float | None

    def dequantize(self) -> Tensor:
        """What the codes stand for."""
        return self.kept


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
        optimizer = cast("NarrowOptimizer", self)
        plan = optimizer._plan(p)
        slots = [slot for slot in plan.slots if slot.storage.quantized]
        grad = p.grad
        if not slots or plan.strict or grad is None or grad.layout is not torch.strided:
            return []
        inverse = self.inverse_scale()
        if inverse is not None:
            grad = grad.to(torch.float32) * inverse.to(grad.device)
        if not torch.isfinite(grad).all():
            return []
        state = self.state.get(p) or plan.init(p, group)
        if HISTORY in state:
            return []
        step = int(state["step"].item()) + 1
        if group["maximize"]:
            grad = -grad
        noise = Noise(group["seed"], plan.index, step, p)
        moments, new, scalars = next_moments(plan, p, grad, state, group, step, noise)
        return [
            QuantizedMoment(
                slot=slot.slot.name,
                format=slot.storage.name,
                exact=moments[slot.slot.name],
                codes=slot.codes(new, p.shape),
                kept=slot.decode(new, p.shape),
                correction=_number(scalars, {"m": "correction1", "v": "correction2"}.get(slot.slot.name)),
                eps=float(scalars["eps"]) if "correction1" in scalars else None,
            )
            for slot in slots
        ]

    def inverse_scale(self) -> Tensor | None:
        """What a loss scaler has asked the present step to multiply gradients by: float32, 0-d; None for
        nothing.
        """
        asked = cast("NarrowOptimizer", self)._unscaling
        scale = getattr(self, "grad_scale", None)
        if asked is not None:
            return asked.inverse
        return scale.double().reciprocal().float() if scale is not None else None


def _number(scalars: Mapping[str, Any], name: str | None) -> float:
    return float(scalars[name]) if name is not None and name in scalars else 1.0
