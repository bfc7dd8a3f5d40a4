"""What a step did to every parameter, measured around optimizers that do not measure it themselves.

Before a due step the weights, or a sample of the long ones, are copied; after it the change is compared with
what was intended, which torch's Adam, AdamW, SGD and Adagrad leave to be known (see `_intended`). Of any other
optimizer only the change is known: its norm, and where a gradient that is not zero moved nothing.

The sums are those of `narrowgauge.optim.UpdateStats`: the squared norm of the intended update, its dot products
with the stored and with the visible effective one (the same here), how many intended updates are not zero, how
many of those changed nothing stored, nothing visible, and the sum of g^2 / max(v_hat, eps^2) and its elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge import rules
from narrowgauge.gauges._features import kernels_take
from narrowgauge.gauges._intended import (
    After,
    moments_of,
    ratio_graph,
    rule_of,
    scalars_of,
    table_of,
    update_graph,
)
from narrowgauge.gauges._segments import Segments, chunks, flat, is_sampled, kept, kept_sample, sample
from narrowgauge.kernels._tables import sent

SUMS = 8


@dataclass(frozen=True, eq=False)
class _Alike:
    """Parameters that one equation serves: of one group and device, with the same moments.

    Attributes:
        group: theirs.
        rule: None where it is not known.
        ps: the parameters.
    """

    group: Mapping[str, Any]
    rule: rules.Rule | None
    ps: list[Tensor]


class MeasuredStep:
    """One step of an optimizer, from before to after.

    Args:
        optimizer: the optimizer.
        turn: which sample of long tensors is taken.
        share: one row of so many, or 1 for every element.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, turn: int, share: int) -> None:
        self._optimizer, self._turn, self._share = optimizer, turn, share
        groups = optimizer.param_groups
        ps = [(group, p) for group in groups for p in group["params"] if p.requires_grad]
        self._before = self._copies({p: p for _, p in ps})
        # torch's SGD with Nesterov's momentum steps lists of parameters ("foreach") by adding to their gradients.
        self._grads = self._copies(
            {p: dense(p.grad) for group, p in ps if group.get("nesterov") and p.grad is not None}
        )
        # By torch's GradScaler, for optimizers that skip on the device.
        self._held: Tensor | None = getattr(optimizer, "found_inf", None)

    def _copies(self, tensors: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Samples of parameters' tensors; with zeros behind where kernels make them."""
        found: dict[Tensor, Tensor] = {}
        devices: dict[torch.device, dict[Tensor, Tensor]] = {}
        for p, tensor in tensors.items():
            vector = flat(tensor)
            devices.setdefault(vector.device, {})[p] = vector
        for some in devices.values():
            vectors = list(some.values())
            if kernels_take(vectors):
                from narrowgauge.kernels._updates import gathered  # here and not above: it brings triton

                found |= zip(some, gathered(vectors, self._samples(vectors)), strict=True)
            else:
                found |= {p: kept_sample(vector, self._turn, self._share) for p, vector in some.items()}
        return found

    def _samples(self, vectors: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Every how many rows one is taken, and from which."""
        share = self._share
        return [(share, self._turn % share) if is_sampled(x.numel(), share) else (1, 0) for x in vectors]

    def after(self) -> list[tuple[list[Tensor], Tensor, str]]:
        """Parameters, their sums (parameters, 8) in float64, and how they were measured: by "rule", or
        "difference".
        """
        return [
            (some.ps, self._sums(some), "rule" if some.rule is not None else "difference") for some in self._alike()
        ]

    def _alike(self) -> list[_Alike]:
        found: dict[tuple[Any, ...], _Alike] = {}
        for number, group in enumerate(self._optimizer.param_groups):
            rule = rule_of(self._optimizer, group)
            for p in group["params"]:
                if p not in self._before or p.grad is None or p.is_complex():
                    continue
                state = self._optimizer.state.get(p, {})
                slots = moments_of(group, state) if rule is not None else {}
                needed = {slot.name for slot in rule.slots(group)} if rule is not None else set()
                known = rule if needed == set(slots) else None  # a parameter that was not stepped has none
                found.setdefault((number, p.device, known, tuple(slots)), _Alike(group, known, [])).ps.append(p)
        return list(found.values())

    def _sums(self, some: _Alike) -> Tensor:
        sums = self._by_kernels(some)
        if sums is None:
            cuts = chunks([self._before[p].numel() for p in some.ps])
            sums = torch.cat([self._in_torch(replace(some, ps=some.ps[cut])) for cut in cuts])
        if self._held is not None:
            held = torch.as_tensor(self._held).to(sums.device).reshape(()) > 0
            sums = torch.where(held, 0.0, sums)
        whole = [flat(p).numel() for p in some.ps]
        scale = [n / max(1, kept(n, self._turn, self._share)) for n in whole]
        if any(factor != 1 for factor in scale):
            factors = sent(np.array(scale, dtype=np.float64), sums.device)
            sums = sums * factors[:, None]
        return sums

    def _moments(self, some: _Alike) -> tuple[list[Mapping[str, Any]], list[dict[str, Any]]]:
        """States, and the moments in them."""
        states = [self._optimizer.state.get(p, {}) for p in some.ps]
        return states, [moments_of(some.group, state) if some.rule is not None else {} for state in states]

    def _by_kernels(self, some: _Alike) -> Tensor | None:
        """The sums by kernels, float64 (parameters, 8); None if there are none for these."""
        states, moments = self._moments(some)
        whole = {"after": [flat(p) for p in some.ps]}
        whole |= {slot: [flat(one[slot]) for one in moments] for slot in moments[0]}
        copies = {"weight": [self._before[p] for p in some.ps]}
        (copies if some.ps[0] in self._grads else whole)["grad"] = [
            self._grads[p] if p in self._grads else flat(dense(p.grad)) for p in some.ps
        ]
        if not kernels_take([x for vectors in (*whole.values(), *copies.values()) for x in vectors]):
            return None
        from narrowgauge.kernels._updates import measured

        after = whole["after"]
        scalars = scalars_of(some.rule, some.group, states, after[0].device) if some.rule is not None else {}
        names, slots = tuple(scalars), tuple(moments[0])
        delta = update_graph(some.rule, slots, names) if some.rule is not None else None  # type: ignore[arg-type]
        ratio = ratio_graph(some.rule, names) if some.rule is not None and "v" in slots else None  # type: ignore[arg-type]
        return measured(
            delta, ratio, names, table_of(scalars, len(after), after[0].device), whole | copies, tuple(copies),
            self._samples(after), bool(some.rule is not None and some.group.get("maximize")),
        )  # fmt: skip

    def _in_torch(self, some: _Alike) -> Tensor:
        """The same in eager torch: the specification."""
        now = [sample(flat(p), self._turn, self._share) for p in some.ps]
        segments = Segments.of(now)
        before = segments.rows(
            [self._before[p][: x.numel()] for p, x in zip(some.ps, now, strict=True)], torch.float64
        )
        change = segments.rows(now, torch.float64) - before
        grads = [
            self._grads[p][: x.numel()]
            if p in self._grads
            else sample(flat(dense(p.grad)), self._turn, self._share)
            for p, x in zip(some.ps, now, strict=True)
        ]
        grad = segments.rows(grads, torch.float64)
        if some.rule is None:
            return _of_change(segments, grad, change)
        return self._of_rule(some, segments, before, change, -grad if some.group.get("maximize") else grad)

    def _of_rule(self, some: _Alike, segments: Segments, before: Tensor, change: Tensor, grad: Tensor) -> Tensor:
        assert some.rule is not None
        states, kept = self._moments(some)
        moments = {
            slot: segments.rows([sample(flat(one[slot]), self._turn, self._share) for one in kept], torch.float64)
            for slot in kept[0]
        }
        scalars = segments.columns(scalars_of(some.rule, some.group, states, segments.device))
        intended, _ = some.rule.update(After(), before, grad, moments, scalars)
        # Behind the end of a vector an eps of 0 would divide by it.
        inside = segments.inside()
        intended = torch.where(inside, intended, 0.0)
        nonzero = intended.abs() > 0
        lost = nonzero & ~(change.abs() > 0)
        dot = intended * change
        columns = [intended.square(), dot, dot, nonzero, lost, lost]
        ratio = None
        if "v" in moments:
            ratio = rules.squared_ratio(some.rule, After(), before, grad, moments, scalars)
        if ratio is None:
            columns += [torch.zeros_like(nonzero)] * 2
        else:
            columns += [torch.where(inside, ratio, 0.0), inside.expand_as(ratio)]
        return segments.sums(columns)


def _of_change(segments: Segments, grad: Tensor, change: Tensor) -> Tensor:
    moved = grad.abs() > 0
    lost = moved & ~(change.abs() > 0)
    nothing = torch.full_like(change[:, :1], math.nan)  # the intended update is not known
    none = torch.zeros_like(moved)
    return segments.sums([change.square(), nothing, nothing, moved, lost, lost, none, none])


def dense(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.to_dense() if grad.layout is not torch.strided else grad
