"""The one number that a step multiplies its gradients by: a loss scale's inverse, and clipping by the norm of all.

    norm   = inverse * sqrt(sum of g^2 over all gradients)
    factor = inverse * min(1, max_grad_norm / (norm + 1e-6))
    g      <- g * factor, in float32, rounded once; then the rule

What is in memory stays as it is. The squares are summed, in float64, in the pass that looks for inf and NaN, and
the product is part of the step: beside torch's three passes (unscale, norm, multiply) that is one that only reads.
So a step has two halves. Every gradient is looked at first, on all devices; what is found is put together in a few
numbers on the device, for which nobody waits; then the parameters move, or a loss scaler's verdict holds them all.

Where ranks share parameters, it is between the halves that they agree (`_shard_sums`): each has looked at what it
has, and none has moved. A step whose parameters are shared therefore has a factor, of 1 where nobody asks for more.

A gradient counts as not finite if it is so after unscaling: a scale below 1 makes it larger. It does not count in
the norm, whatever `nonfinite` makes of it: one inf would stop all others.

The formula is that of `torch.nn.utils.clip_grad_norm_`, with norm 2 over all parameters that have a gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from narrowgauge.kernels._c_squares import squares as squares_by_c
from narrowgauge.optim._admission import nonfinite_message
from narrowgauge.optim._options import LIMIT, check_limits
from narrowgauge.optim._shards import FLAGS, SQUARES
from narrowgauge.optim._unscaling import Unscaling, flag_vectors

if TYPE_CHECKING:
    from narrowgauge.optim._fused_board import Found
    from narrowgauge.optim._optimizer import NarrowOptimizer
    from narrowgauge.optim._shard_sums import Rows, ShardSums

_CPU = torch.device("cpu")
_LEAST = 1e-6  # torch's, so that no gradients at all are not divided by 0


class GradientFactor:
    """The factor of one step.

    Args:
        limit: `max_grad_norm`.
        inverse: float32, 0-d; None where nothing is unscaled.
        found: 0-d; the step is held where it is above 0: what torch's GradScaler has found.
        asked: by a loss scaler.
        shards: what ranks add up; None where they share no parameter, or have nothing to agree on.
        norms: whether norms of single gradients are asked for, which ranks have to add up.
    """

    def __init__(
        self,
        limit: float | None,
        inverse: Tensor | None,
        found: Tensor | None,
        asked: Unscaling | None,
        shards: ShardSums | None = None,
        norms: bool = False,
    ) -> None:
        self.limit = limit
        self.shards = shards
        self._norms = norms
        self.norm: Tensor | None = None
        self._inverse, self._found, self._asked = inverse, found, asked
        self._whole = asked is not None and asked.whole
        self._inverses: dict[torch.device, Tensor] = {}
        self._there: dict[torch.device, Tensor] = {}
        self._alone: dict[torch.device, tuple[list[int], Tensor]] = {}
        self._bad: dict[int, bool | Tensor] = {}
        self._squares: dict[int, Tensor] = {}

    @classmethod
    def of(cls, optimizer: NarrowOptimizer) -> GradientFactor | None:
        """That of the step which begins; None if gradients are taken as they are."""
        groups, asked = optimizer.param_groups, optimizer._unscaling
        limit = groups[0][LIMIT] if groups else None
        if limit is not None:
            check_limits(groups)
        shards, norms = optimizer._shard_sums(), False
        if shards is not None:
            norms = any(group.get("percentile_clipping", 100) < 100 for group in groups)
        if asked is not None:
            return cls(limit, asked.inverse, None, asked, shards, norms)
        # torch's GradScaler leaves these for the time of a step.
        scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        if limit is None and scale is None and found is None and shards is None:
            return None
        # A number, 0, where the optimizer has no gradients.
        found = torch.as_tensor(found) if found is not None else None
        inverse = scale.double().reciprocal().float() if scale is not None else None
        return cls(limit, inverse, found, None, shards, norms)

    @property
    def squares(self) -> bool:
        """Whether squares are summed."""
        return self.limit is not None

    @property
    def held_by_others(self) -> bool:
        """Whether somebody else sees to what is not finite."""
        return self._whole or self._found is not None

    def inverse_on(self, device: torch.device) -> Tensor:
        """What gradients are multiplied by, whatever their norm: float32, 0-d."""
        if device not in self._inverses:
            given = self._inverse
            self._inverses[device] = torch.ones((), device=device) if given is None else _sent(given, device)
        return self._inverses[device]

    def look(self, grads: Mapping[int, Tensor]) -> None:
        """Look at gradients of parameters that are stepped one by one, by their places."""
        inverse = np.float32(1.0)
        if self._inverse is not None and any(grad.is_cpu for grad in grads.values()):
            inverse = np.float32(self._inverse.item())
        host: dict[int, tuple[float, float]] = {}
        rows: dict[torch.device, dict[int, tuple[Tensor, Tensor]]] = {}
        for place, grad in grads.items():
            seen = squares_by_c(grad)
            if seen is None:
                rows.setdefault(grad.device, {})[place] = self._seen(grad)
                continue
            with np.errstate(over="ignore", invalid="ignore"):
                largest = np.float32(seen[1]) * inverse
            host[place] = seen[0], float(not (math.isfinite(seen[0]) and np.isfinite(largest)))
        self._alone = {
            device: (list(some), torch.stack([torch.stack(row) for row in some.values()]))
            for device, some in rows.items()
        }
        if host:
            places, table = self._alone.get(_CPU, ([], torch.empty(0, 2, dtype=torch.float64)))
            more = torch.tensor(list(host.values()), dtype=torch.float64)
            self._alone[_CPU] = [*places, *host], torch.cat([table, more])

    def _seen(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """(the sum of its squares, how many elements are not finite): 0-d, float64."""
        # As steps take it: what float32 does not hold is infinite.
        unscaled = grad.to(torch.float32) if grad.dtype == torch.float64 else grad
        if self._inverse is not None:
            unscaled = grad.to(torch.float32) * self.inverse_on(grad.device)
        bad = (~torch.isfinite(unscaled)).sum(dtype=torch.float64)
        if not (self.squares or self._norms):
            return torch.zeros_like(bad), bad
        norm = torch.linalg.vector_norm(grad, dtype=torch.float64)
        return norm * norm, bad

    @property
    def sums_wait(self) -> bool:
        """Whether sums over parameters can only be made once gradients have been judged."""
        return self.limit is not None or self._norms

    def judge(
        self, found: Sequence[Found], places: Sequence[int], count: int, sums: Sequence[Rows] | None = None
    ) -> None:
        """Put together what has been seen everywhere.

        Args:
            found: by kernels for lists.
            places: of the parameters that they were given.
            count: of all parameters.
            sums: sums of rules that ranks add up; None where there are none on any.
        """
        if self.shards is not None:
            self._agree(found, places, sums or (), sums is not None)
        flags = {device: (some, table[:, 1] > 0) for device, (some, table) in self._alone.items()}
        squares = [
            torch.where(flags[device][1], 0.0, table[:, 0]).sum() for device, (_, table) in self._alone.items()
        ]
        squares += [one.squares.sum() for one in found if one.squares is not None]
        devices = [*flags, *(one.flags.device for one in found)]
        home = next((device for device in devices if device.type != "cpu"), _CPU)
        factor = self.inverse_on(home).to(torch.float64)
        if self.limit is not None:
            total = torch.stack([x.to(home) for x in squares]).sum() if squares else torch.zeros_like(factor)
            norm = total.sqrt() * factor
            self.norm = norm.to(torch.float32)
            factor = factor * (self.limit / (norm + _LEAST)).clamp_max(1.0)
        held = torch.zeros((), dtype=torch.bool, device=home)
        if self._whole and devices:
            bad = [flag.any() for _, flag in flags.values()] + [one.flags.any() for one in found]
            held = torch.stack([flag.to(home) for flag in bad]).any()
        if self._found is not None:
            held = held | (_sent(self._found, home).reshape(()) > 0)
        self._there = {home: torch.stack([factor.to(torch.float32), held.to(torch.float32)])}
        for device, (some, flag) in flags.items():
            self._bad |= zip(some, flag.tolist() if device == _CPU else flag.unbind(), strict=True)
        for some, table in self._alone.values() if self._norms else ():
            self._squares |= zip(some, table[:, SQUARES], strict=True)
        if self._whole and self._asked is not None:
            self._asked.flags = flag_vectors(flags, found, places, count)

    def _agree(self, found: Sequence[Found], places: Sequence[int], sums: Sequence[Rows], with_terms: bool) -> None:
        """Add up over ranks what has been seen here. What is not finite on one is so on all."""
        assert self.shards is not None
        rows = [*sums, *((some, SQUARES, table) for some, table in self._alone.values())]
        flags = [(one, one.flags[:, None].to(torch.float64)) for one in found]
        for one, flag in flags:
            mine = [places[member] for member in one.members.tolist()]
            rows.append((mine, FLAGS, flag))
            if one.squares is not None:
                rows.append((mine, SQUARES, one.squares[:, None]))
        if self.shards.agreed is not None and not (with_terms or self.squares or self._norms):
            self.shards.recall(rows)
        else:
            self.shards.add_up(rows, with_terms)
        for one, flag in flags:
            one.flags.copy_(flag[:, 0] > 0)
            if one.squares is not None:
                one.squares.masked_fill_(flag[:, 0] > 0, 0.0)

    def norm_of(self, place: int) -> Tensor | None:
        """The norm of a whole gradient, in float64 and times the factor; None where this rank has all of it."""
        if self.shards is None or place not in self.shards.places:
            return None
        square = self._squares[place]
        factor = self.number() if square.is_cpu else self.on(square.device)[0]
        return square.sqrt() * factor

    def verdict(self, device: torch.device) -> Tensor:
        """As `on`; before it is decided, what it will be if nothing is found: for sums that do not wait for it."""
        if self._there:
            return self.on(device)
        inverse = self.inverse_on(device)
        return torch.stack([inverse, torch.zeros_like(inverse)])

    def refuse(
        self, found: Sequence[Found], places: Sequence[int], raising: Collection[int], name: Callable[[int], str]
    ) -> None:
        """Raise for gradients that ranks have found not to be finite; waits for each device.

        Args:
            found, places: as of `judge`, which was called.
            raising: places of parameters whose `nonfinite` is ``"raise"``.
            name: gives a parameter's name, by its place.

        Raises:
            FloatingPointError: naming the first bad one.
        """
        bad = [place for place, flag in self._bad.items() if place in raising and bool(flag)]
        for one in found:
            some = one.members[one.flags.cpu().numpy() > 0].tolist()
            bad += [places[member] for member in some if places[member] in raising]
        if not bad:
            return
        for one in found:
            one.flags.zero_()  # which the step would have taken down
        raise FloatingPointError(nonfinite_message(name(min(bad))))

    def on(self, device: torch.device) -> Tensor:
        """float32 (2,): the factor, and whether the step is held."""
        if device not in self._there:
            self._there[device] = _sent(next(iter(self._there.values())), device)
        return self._there[device]

    @functools.cached_property
    def _host(self) -> tuple[float, bool]:
        factor, held = self.on(_CPU).tolist()
        return factor, held > 0

    def number(self) -> float:
        """The factor, on the host."""
        return self._host[0] if self._there else float(self.verdict(_CPU)[0])

    def times(self, grad: Tensor) -> Tensor:
        """A gradient times the factor, in float32."""
        return grad.to(torch.float32) * (self.number() if grad.is_cpu else self.verdict(grad.device)[0])

    def admit(self, place: int, nonfinite: str, state: Mapping[str, Tensor], device: torch.device) -> bool | Tensor:
        """Whether a parameter takes the step: a bool, or on a GPU a 0-d tensor. Counts refusals."""
        bad = self._bad[place] if nonfinite == "skip" else False
        if device.type == "cpu":
            if self._host[1]:
                return False
            if bad:
                state["skipped"].add_(1)
            return not bad
        keep = self.on(device)[1] == 0
        if nonfinite == "skip":
            state["skipped"].add_(keep & bad)
            keep = keep & ~torch.as_tensor(bad)
        return keep


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; the host waits only for what it is to read."""
    return x.to(device, non_blocking=device.type != "cpu")
