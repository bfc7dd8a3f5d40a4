"""The verdict on a step: what gradients are multiplied by, which parameters move, and what ranks agree on.

    norm   = inverse * sqrt(sum of g^2 over all gradients)
    factor = inverse * min(1, max_grad_norm / (norm + 1e-6))
    g      <- g * factor, in float32, rounded once; then the rule

A loss scaler gives the inverse of its scale, `max_grad_norm` the limit. Gradients in memory do not change:
one pass reads them, looks for inf and NaN and sums the squares in float64; the step itself multiplies. torch makes
three passes (unscale, norm, multiply).

Such a step has two halves. Every gradient is inspected first, on all devices. The verdict is a few numbers on the
device, for which the host does not wait. Then the parameters move, or all are held.

Where ranks share parameters they agree between the halves, in one collective: each has inspected its part, and no
parameter has moved. A step with shared parameters therefore has a verdict even where the factor is 1.

A gradient is flagged if it is not finite after unscaling: a scale below 1 makes it larger. The norm leaves it out,
whatever `nonfinite` is: one inf would stop all other parameters.

The formula is that of `torch.nn.utils.clip_grad_norm_`, with norm 2 over all parameters that have a gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from narrowgauge.kernels._c_squares import sums_of_squares
from narrowgauge.optim._plan import ParamStep, State
from narrowgauge.optim._sharding import FLAGS, SQUARES, Collective, Rows, to_device

_CPU = torch.device("cpu")
# What a step measured: names of parameters, and float64 (parameters, 8) in the order of `UpdateStats`.
Measured = list[tuple[list[str], Tensor]]
_LEAST = 1e-6  # torch's, so that a norm of 0 is not divided by


class Arrival(Protocol):
    """Copies gradients to the host and weights back to the device, while other parameters are stepped."""

    def order(self, params: Sequence[Tensor]) -> Sequence[int]:
        """The positions of some parameters in the order in which their gradients arrive."""

    def wait(self, param: Tensor) -> None:
        """Wait until a parameter and its gradient have arrived."""

    def done(self, param: Tensor) -> None:
        """A parameter has been stepped; does not wait."""


@dataclass(frozen=True)
class StepRequest:
    """All that a step may be asked for.

    Attributes:
        inverse_scale: what gradients are multiplied by, of a loss scaler: float32, 0-d, on any device.
        found_inf: of torch's GradScaler: every parameter is held if it is above 0.
        all_or_nothing: hold every parameter, and count no skip, if one gradient is not finite.
        max_norm: the limit of the norm of all gradients; inf to measure it only.
        measured: whether to measure what the step does to each parameter.
        arrival: brings gradients one by one; None if all are there.
    """

    inverse_scale: Tensor | None = None
    found_inf: Tensor | None = None
    all_or_nothing: bool = False
    max_norm: float | None = None
    measured: bool = False
    arrival: Arrival | None = None


@dataclass
class Unscaling:
    """What a loss scaler asks of one step, and what the step reports.

    Attributes:
        inverse: what gradients are multiplied by: float32, 0-d, on any device.
        whole: whether no parameter moves if any gradient is not finite.
        flags: after such a step, by device a bool vector over the optimizer's parameters: whose gradient is not
            finite. Parameters on other devices and without gradient are not flagged.
    """

    inverse: Tensor
    whole: bool
    flags: dict[torch.device, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class GradientReport:
    """What the inspection of some gradients on one device has found.

    Attributes:
        indices: of the parameters.
        flags: one each, above 0 where the gradient is not finite; `agree` overwrites them.
        squares: float64, the sums of squares, 0 for those flagged; None where no norm is asked for.
    """

    indices: npt.NDArray[np.int64]
    flags: Tensor
    squares: Tensor | None


class Verdict:
    """The verdict on one step; `norm` is of all gradients, unscaled, if a limit was asked for: 0-d, on the
    device.
    """

    def __init__(self, request: StepRequest) -> None:
        self.request = request
        self.norm: Tensor | None = None
        self._inverses: dict[torch.device, Tensor] = {}
        self._there: dict[torch.device, Tensor] = {}

    def inverse_on(self, device: torch.device) -> Tensor:
        """The inverse of the loss scale, 1 without one: float32, 0-d."""
        if device not in self._inverses:
            given = self.request.inverse_scale
            self._inverses[device] = torch.ones((), device=device) if given is None else _sent(given, device)
        return self._inverses[device]

    def decide(self, reports: Sequence[GradientReport]) -> None:
        """Put together what was found in all gradients."""
        request = self.request
        home = next((r.flags.device for r in reports if r.flags.device.type != "cpu"), _CPU)
        factor = self.inverse_on(home).to(torch.float64)
        if request.max_norm is not None:
            squares = [r.squares.sum() for r in reports if r.squares is not None]
            total = torch.stack([x.to(home) for x in squares]).sum() if squares else torch.zeros_like(factor)
            norm = total.sqrt() * factor
            self.norm = norm.to(torch.float32)
            factor = factor * clipping(request.max_norm, norm)
        held = torch.zeros((), dtype=torch.bool, device=home)
        if request.all_or_nothing and reports:
            held = torch.stack([(r.flags > 0).any().to(home) for r in reports]).any()
        if request.found_inf is not None:
            held = held | (_sent(request.found_inf, home).reshape(()) > 0)
        self._there = {home: torch.stack([factor.to(torch.float32), held.to(torch.float32)])}

    def on_device(self, device: torch.device) -> Tensor:
        """float32 (2,): the factor, and whether all parameters are held.

        Before `decide` it assumes that nothing will be found: for sums that need not wait.
        """
        if not self._there:
            inverse = self.inverse_on(device)
            return torch.stack([inverse, torch.zeros_like(inverse)])
        if device not in self._there:
            self._there[device] = _sent(next(iter(self._there.values())), device)
        return self._there[device]

    @functools.cached_property
    def _host(self) -> tuple[float, bool]:
        factor, held = self.on_device(_CPU).tolist()
        return factor, held > 0

    @property
    def factor(self) -> float:
        """The factor, on the host."""
        return self._host[0] if self._there else float(self.on_device(_CPU)[0])

    @property
    def held(self) -> bool:
        """Whether all parameters are held, on the host."""
        return self._host[1]

    def scaled(self, grad: Tensor) -> Tensor:
        """A gradient times the factor, in float32."""
        return grad.to(torch.float32) * (self.factor if grad.is_cpu else self.on_device(grad.device)[0])

    def admit(self, step: ParamStep, flag: bool | Tensor) -> bool | Tensor:
        """Whether a parameter takes the step: a bool, or on a GPU a 0-d tensor. Counts a skip in its state.

        `flag` says whether its gradient is not finite.
        """
        skips = step.group["nonfinite"] == "skip"
        if step.param.is_cpu:
            if self.held:
                return False
            if skips and bool(flag):
                step.state["skipped"].add_(1)
                return False
            return True
        keep: Tensor = self.on_device(step.param.device)[1] == 0
        if skips:
            step.state["skipped"].add_(keep & flag)
            keep = keep & ~torch.as_tensor(flag)
        return keep


def clipping(limit: float, norm: Tensor) -> Tensor:
    """What gradients of this norm are multiplied by so that it is no more than the limit."""
    return (limit / (norm + _LEAST)).clamp_max(1.0)


def inspect_gradients(steps: Sequence[ParamStep], verdict: Verdict) -> GradientReport:
    """Inspect gradients on one device: by compiled loops on a CPU, else by torch."""
    indices = np.array([step.index for step in steps], dtype=np.int64)
    grads = [step.grad for step in steps]
    norm = verdict.request.max_norm is not None
    if grads[0].is_cpu and (seen := sums_of_squares(grads)) is not None:
        squares, peaks = seen
        inverse = np.float32(verdict.inverse_on(_CPU).item())
        with np.errstate(over="ignore", invalid="ignore"):
            bad = ~(np.isfinite(squares) & np.isfinite(peaks * inverse))
        squares[bad] = 0.0
        return GradientReport(indices, torch.from_numpy(bad), torch.from_numpy(squares) if norm else None)
    rows = [_inspected(grad, verdict, norm) for grad in grads]
    flags = torch.stack([bad for _, bad in rows])
    return GradientReport(
        indices, flags, torch.where(flags, 0.0, torch.stack([square for square, _ in rows])) if norm else None
    )


def _inspected(grad: Tensor, verdict: Verdict, norm: bool) -> tuple[Tensor, Tensor]:
    """(the sum of a gradient's squares, whether it is not finite after unscaling): 0-d."""
    # Steps compute in float32: what that does not hold is infinite.
    unscaled = grad.to(torch.float32) if grad.dtype == torch.float64 else grad
    if verdict.request.inverse_scale is not None:
        unscaled = grad.to(torch.float32) * verdict.inverse_on(grad.device)
    bad = ~torch.isfinite(unscaled).all()
    if not norm:
        return torch.zeros((), dtype=torch.float64, device=grad.device), bad
    length = torch.linalg.vector_norm(grad, dtype=torch.float64)
    return length * length, bad


def agree(
    collective: Collective, reports: Sequence[GradientReport], terms: Sequence[Rows], with_terms: bool
) -> None:
    """Add up over ranks what was found on each; a gradient that is not finite on one rank is so on all.

    The reports of this rank's parts, and the sums of rules' `terms`, which share the collective, are written over.
    `with_terms` says whether any rank has such sums.
    """
    rows, flags = list(terms), []
    for report in reports:
        flag = report.flags[:, None].to(torch.float64)
        rows.append((report.indices.tolist(), FLAGS, flag))
        flags.append(flag)
        if report.squares is not None:
            rows.append((report.indices.tolist(), SQUARES, report.squares[:, None]))
    collective.all_reduce(rows, with_terms)
    for report, flag in zip(reports, flags, strict=True):
        report.flags.copy_(flag[:, 0] > 0)
        if report.squares is not None:
            report.squares.masked_fill_(flag[:, 0] > 0, 0.0)


def flag_vectors(reports: Iterable[GradientReport], count: int) -> dict[torch.device, Tensor]:
    """By device a bool for each of `count` parameters: whether its gradient is not finite."""
    parts: dict[torch.device, tuple[list[int], list[Tensor]]] = {}
    for report in reports:
        indices, flags = parts.setdefault(report.flags.device, ([], []))
        indices += report.indices.tolist()
        flags.append(report.flags > 0)
    found = {}
    for device, (indices, flags) in parts.items():
        at = to_device(torch.tensor(indices, dtype=torch.int64), device)
        found[device] = torch.zeros(count, dtype=torch.bool, device=device).scatter_(0, at, torch.cat(flags))
    return found


def refuse_flagged(reports: Sequence[GradientReport], raising: Mapping[int, str]) -> None:
    """Raise FloatingPointError for a gradient that was found not to be finite; waits for each device.

    `raising` has the names of the parameters whose `nonfinite` is ``"raise"``, by index.
    """
    flagged = [index for r in reports for index in r.indices[r.flags.cpu().numpy() > 0].tolist()]
    if bad := raising.keys() & flagged:
        for report in reports:
            report.flags.zero_()  # the step would have cleared them
        raise FloatingPointError(_nonfinite(raising[min(bad)]))


def refuse_nonfinite(steps: Sequence[ParamStep]) -> None:
    """Raise FloatingPointError for an inf or NaN in the gradients of a step without a verdict; waits for
    devices.
    """
    devices: dict[torch.device, list[ParamStep]] = {}
    bad: list[ParamStep] = []
    for step in steps:
        if type(step.grad) is Tensor and step.grad.device.type != "cpu" and step.grad.numel():
            devices.setdefault(step.grad.device, []).append(step)
        elif not torch.isfinite(step.grad.to(torch.float32)).all():
            bad.append(step)
    for some in devices.values():
        # The largest magnitude is exact in any format, and inf or NaN if one is there.
        largest = torch._foreach_norm([step.grad for step in some], math.inf)
        finite = torch.isfinite(torch.stack([value.to(torch.float32) for value in largest])).tolist()
        bad += [step for step, whole in zip(some, finite, strict=True) if not whole]
    if bad:
        raise FloatingPointError(_nonfinite(min(bad, key=lambda step: step.index).plan.name))


def _nonfinite(name: str) -> str:
    return f"{name}: the gradient has inf or NaN (nonfinite='raise'); no parameter was changed"


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; the host waits only for what it reads."""
    return x.to(device, non_blocking=device.type != "cpu")


class StepList(Protocol):
    """A list of parameters that one backend steps."""

    @property
    def steps(self) -> Sequence[ParamStep]:
        """The parameters."""

    @property
    def watched(self) -> Sequence[ParamStep]:
        """The parameters that `refresh` looks at: with those, of Triton's list, that have no kernel yet."""

    @property
    def reads_steps(self) -> bool:
        """Whether gradients and states are read from `steps`, or from tables that `refresh` keeps."""

    def refresh(self, grads: Sequence[Tensor], states: Sequence[State]) -> bool:
        """Whether the list still holds for the gradients and states of `watched`, whose addresses may change."""

    def inspect(self, verdict: Verdict) -> list[GradientReport]:
        """Inspect all gradients, before a step that depends on them."""

    def terms(self, verdict: Verdict) -> list[Rows]:
        """This rank's sums of the rules' terms; `run` reads them again if `summed` is True."""

    def run(self, verdict: Verdict | None, summed: bool = False, indices: Sequence[int] | None = None) -> Measured:
        """Take the steps.

        Args:
            verdict: the verdict on the step; None where gradients are taken as they are.
            summed: whether to use the sums of `terms`, now added up over ranks.
            indices: the indices of the parameters to step; None for all. A list on a GPU is stepped whole.
        """
