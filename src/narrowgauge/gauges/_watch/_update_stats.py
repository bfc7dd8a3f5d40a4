"""What a due step did to every parameter: eight sums each, and the records made of them.

Optimizers of narrowgauge measure their steps themselves. Steps of other optimizers are measured around: before the
step the weights, or samples of the long ones, are copied; after it the change is compared with the intended update,
which torch's Adam, AdamW, SGD and Adagrad leave to be computed again (`_intended_update`). Of any other optimizer
only the change is known: its norm, and where a gradient other than zero moved nothing.

The sums are those of `narrowgauge.optim.UpdateStats`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from narrowgauge import rules
from narrowgauge._update_sums import SUMS, update_terms
from narrowgauge.gauges._magnitudes import kernels_take
from narrowgauge.gauges._records import Record, rounded
from narrowgauge.gauges._watch._batched_rows import (
    STRIDE,
    BatchedRows,
    Sample,
    chunks,
    flat,
    flat_gradient,
    to_device,
)
from narrowgauge.gauges._watch._intended_update import (
    AfterStep,
    moments_of,
    ratio_graph,
    rule_of,
    scalars_of,
    table_of,
    update_graph,
)

Updates = Literal["sampled"] | bool
Table = tuple[list[Tensor], Tensor, str]  # parameters; their sums, float64 (parameters, 8); how they were measured


def measures_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is an optimizer of narrowgauge, which this package may not import."""
    return hasattr(type(optimizer), "measured") and hasattr(type(optimizer), "preview_unavailable")


def stats_of(optimizer: torch.optim.Optimizer, updates: Updates) -> OwnStats | MeasuredAround | None:
    """What measures an optimizer's steps; None if `updates` is False."""
    if not updates:
        return None
    return OwnStats(optimizer) if measures_itself(optimizer) else MeasuredAround(optimizer, updates)


class OwnStats:
    """Steps of narrowgauge's optimizers, which measure all of each tensor within the step."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._setting: bool | None = None  # the user's

    def begin(self, index: int) -> None:
        """Before a due step; `index` is the number of the sample."""
        self._setting = self._optimizer.gauges
        self._optimizer.gauges = True

    def end(self) -> list[Table]:
        """After the step."""
        tables = [(ps, rows, "fused") for ps, rows in self._optimizer.measured()]
        self.abandon()
        return tables

    def abandon(self) -> None:
        """Leave the optimizer as it was."""
        if self._setting is False:
            self._optimizer.gauges = False
            self._optimizer.last_stats = type(self._optimizer.last_stats)()
        self._setting = None


@dataclass(frozen=True, eq=False)
class _Batch:
    """Parameters of one group and device, whose update one equation gives.

    Attributes:
        group: their group.
        rule: None if not known.
        ps: the parameters.
        moments: of each parameter, by slot; empty dicts without a rule.
        grads: of each parameter, flat, made when they are needed; samples where the step writes over the gradient.
    """

    group: Mapping[str, Any]
    rule: rules.Rule | None
    ps: list[Tensor]
    moments: list[dict[str, Any]]
    grads: list[Tensor] = field(default_factory=list)


class MeasuredAround:
    """Steps of other optimizers; `updates` as in `watch`."""

    def __init__(self, optimizer: torch.optim.Optimizer, updates: Updates) -> None:
        self._optimizer, self._stride = optimizer, STRIDE if updates == "sampled" else 1
        self.abandon()

    def abandon(self) -> None:
        self._before: dict[Tensor, Tensor] = {}
        self._grads: dict[Tensor, Tensor] = {}
        self._found_inf: Tensor | None = None

    def begin(self, index: int) -> None:
        self._sample = Sample(index, self._stride)
        ps = [(group, p) for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._before = self._copies({p: p for _, p in ps})
        # torch's SGD with Nesterov's momentum adds to the gradients where it steps lists of parameters ("foreach").
        self._grads = self._copies(
            {p: flat_gradient(p, p.grad) for group, p in ps if group.get("nesterov") and p.grad is not None}
        )
        # Set by torch's GradScaler for optimizers that skip on the device.
        self._found_inf = getattr(self._optimizer, "found_inf", None)

    def _copies(self, tensors: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Samples of parameters' tensors; padded with zeros where kernels make them."""
        found: dict[Tensor, Tensor] = {}
        devices: dict[torch.device, dict[Tensor, Tensor]] = {}
        for p, tensor in tensors.items():
            vector = flat(tensor)
            devices.setdefault(vector.device, {})[p] = vector
        for some in devices.values():
            vectors = list(some.values())
            if kernels_take(vectors):
                from narrowgauge.kernels._updates import gather  # here: importing it imports triton

                found |= zip(some, gather(vectors, self._rows(vectors)), strict=True)
            else:
                found |= {p: self._sample.copy_of(vector) for p, vector in some.items()}
        return found

    def _rows(self, vectors: Sequence[Tensor]) -> list[tuple[int, int]]:
        return [self._sample.rows_of(vector.numel()) for vector in vectors]

    def end(self) -> list[Table]:
        batches = self._batches()
        tables = [(b.ps, self._sums(b), "rule" if b.rule is not None else "difference") for b in batches]
        self.abandon()
        return tables

    def _batches(self) -> list[_Batch]:
        found: dict[tuple[Any, ...], _Batch] = {}
        for number, group in enumerate(self._optimizer.param_groups):
            rule = rule_of(self._optimizer, group)
            needed = {slot.name for slot in rule.slots(group)} if rule is not None else set()
            for p in group["params"]:
                if p not in self._before or p.grad is None or p.is_complex():
                    continue
                moments = moments_of(group, self._optimizer.state.get(p, {})) if rule is not None else {}
                known = rule if needed == set(moments) else None  # a parameter that was not stepped has no moments
                key = (number, p.device, known, tuple(moments))
                batch = found.setdefault(key, _Batch(group, known, [], []))
                batch.ps.append(p)
                batch.moments.append(moments if known is not None else {})
        return list(found.values())

    def _sums(self, batch: _Batch) -> Tensor:
        grads = [self._grads[p] if p in self._grads else flat_gradient(p, p.grad) for p in batch.ps]
        batch = replace(batch, grads=grads)
        sums = self._by_kernels(batch)
        if sums is None:
            parts = [
                replace(batch, ps=batch.ps[cut], moments=batch.moments[cut], grads=batch.grads[cut])
                for cut in chunks([self._before[p].numel() for p in batch.ps])
            ]
            sums = torch.cat([self._in_torch(part) for part in parts])
        sums = unless_skipped(sums, self._found_inf)
        sizes = [flat(p).numel() for p in batch.ps]
        factors = [n / max(1, self._sample.size(n)) for n in sizes]
        if any(factor != 1 for factor in factors):
            sums = sums * to_device(factors, sums.device, np.float64)[:, None]
        return sums

    def _scalars(self, batch: _Batch, device: torch.device) -> dict[str, rules.Scalar]:
        states = [self._optimizer.state.get(p, {}) for p in batch.ps]
        return scalars_of(batch.rule, batch.group, states, device) if batch.rule is not None else {}

    def _by_kernels(self, batch: _Batch) -> Tensor | None:
        """The sums by kernels, float64 (parameters, 8); None if there are none for these tensors."""
        whole = {"after": [flat(p) for p in batch.ps]}
        whole |= {slot: [flat(one[slot]) for one in batch.moments] for slot in batch.moments[0]}
        copies = {"weight": [self._before[p] for p in batch.ps]}
        (copies if batch.ps[0] in self._grads else whole)["grad"] = batch.grads
        if not kernels_take([x for vectors in (*whole.values(), *copies.values()) for x in vectors]):
            return None
        from narrowgauge.kernels._updates import measure

        after = whole["after"]
        scalars = self._scalars(batch, after[0].device)
        names, slots = tuple(scalars), tuple(batch.moments[0])
        delta = update_graph(batch.rule, slots, names) if batch.rule is not None else None
        ratio = ratio_graph(batch.rule, names) if batch.rule is not None and "v" in slots else None
        return measure(
            delta, ratio, names, table_of(scalars, len(after), after[0].device), whole | copies, tuple(copies),
            self._rows(after), bool(batch.rule is not None and batch.group.get("maximize")),
        )  # fmt: skip

    def _in_torch(self, batch: _Batch) -> Tensor:
        """The same in eager torch: the specification."""
        sample = self._sample
        now = [sample.of(flat(p)) for p in batch.ps]
        batched = BatchedRows.of(now)

        def rows(vectors: Iterable[Tensor]) -> Tensor:
            # Copies by kernels are padded to whole rows.
            pairs = zip(vectors, batched.lengths, strict=True)
            return batched.rows([x if len(x) == n else x[:n] for x, n in pairs], torch.float64)

        before = rows(self._before[p] for p in batch.ps)
        change = rows(now) - before
        grad = rows(g if p in self._grads else sample.of(g) for p, g in zip(batch.ps, batch.grads, strict=True))
        if batch.rule is None:
            unknown = torch.full_like(change[:, :1], math.nan)
            _, _, _, *counts = update_terms(grad, change, change)
            zeros = torch.zeros_like(change)
            return batched.sums([change.square(), unknown, unknown, *counts, zeros, zeros])
        if batch.group.get("maximize"):
            grad = -grad
        moments = {slot: rows(sample.of(flat(one[slot])) for one in batch.moments) for slot in batch.moments[0]}
        scalars = batched.columns(self._scalars(batch, batched.device))
        intended, _ = batch.rule.update(AfterStep(), before, grad, moments, scalars)
        inside = batched.inside()
        intended = torch.where(inside, intended, 0.0)  # an eps of 0 divides by zero in the padding
        terms = update_terms(intended, change, change)
        ratio = None
        if "v" in moments:
            ratio = rules.squared_ratio(batch.rule, AfterStep(), before, grad, moments, scalars)
        if ratio is None:
            terms += [torch.zeros_like(change)] * 2
        else:
            terms += [torch.where(inside, ratio, 0.0), inside.expand_as(ratio)]
        return batched.sums(terms)


def unless_skipped(sums: Tensor, found_inf: Tensor | None) -> Tensor:
    """Sums, or zeros if torch's GradScaler let the device skip the step."""
    if found_inf is None:
        return sums
    return torch.where(torch.as_tensor(found_inf).to(sums.device).reshape(()) > 0, 0.0, sums)


def update_records(
    step: int, names: Sequence[str], elements: Sequence[int], table: Tensor, measured: Sequence[str]
) -> list[Record]:
    """Records of the whole model and of all parameters that took part in a step.

    Args:
        step: its number.
        names, elements, measured: by parameter.
        table: float64 (parameters, 9) on the host: the sums, and whether the parameter took part.
    """
    indices = [index for index, row in enumerate(table[:, SUMS].tolist()) if row > 0]
    if not indices:
        return []
    kinds = [measured[index] for index in indices]
    # If one intended update is not known, that of the model is not either.
    kinds.insert(0, "difference" if "difference" in kinds else kinds[0])
    rows = table[indices, :SUMS]
    rows = torch.cat([rows.sum(0, keepdim=True), rows])
    squared, stored, visible, nonzero, lost, lost_visible, ratios, counted = rows.unbind(1)
    values = torch.stack(
        [
            squared.sqrt(), stored / squared, visible / squared, lost / nonzero, lost_visible / nonzero,
            (ratios / counted).sqrt(),
        ],
        dim=1,
    )  # fmt: skip
    heads = [("", sum(elements[i] for i in indices)), *((names[i], elements[i]) for i in indices)]
    records: list[Record] = []
    for (name, count), numbers, sums, how in zip(
        heads, rounded(values).tolist(), rounded(rows).tolist(), kinds, strict=True
    ):
        norm, quality, visible_quality, lost_share, lost_visible_share, rms = numbers
        record: Record = {"kind": "update", "step": step, "name": name, "elements": count, "norm": norm}
        if how != "difference":
            record |= {"descent_quality": quality, "visible_descent_quality": visible_quality}
        record |= {"lost": lost_share, "lost_visible": lost_visible_share, "nonzero": round(sums[3])}
        if sums[-1]:
            record["rms"] = rms
        records.append(record | {"sums": sums, "measured": how})
    return records
