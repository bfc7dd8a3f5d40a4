"""The tensors of a model at its due steps: updates, gradients, features and quantized moments, as tables.

Every table has a row for each parameter, or each watched module, whether or not there is something to say of
it, so that ranks' tables fit together. What has nothing has zeros and makes no record.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from narrowgauge._version import __version__
from narrowgauge.gauges._alarms import LOG
from narrowgauge.gauges._formats import Target
from narrowgauge.gauges._magnitudes import added, as_record, counts_of, magnitudes, table_of, width
from narrowgauge.gauges._measured_steps import SUMS
from narrowgauge.gauges._modules import FeatureHooks, chosen, depths, plain_name
from narrowgauge.gauges._moment_errors import moment_records
from narrowgauge.gauges._rank_sums import Ranks
from narrowgauge.gauges._records import VERSION, Record
from narrowgauge.gauges._segments import SHARE, flat, sample
from narrowgauge.gauges._update_records import OtherSteps, OwnSteps, Updates, measures_itself, update_records

Part = tuple[Tensor, tuple[int, ...], Callable[[Tensor], list[Record]]]  # table, columns of maxima, its records
_KINDS = ("activation", "activation_gradient")
_WIDEST = 1 << 18  # elements of one feature that formats are asked about


@dataclass(frozen=True)
class Sources:
    """What is measured, and when; see `watch`."""

    updates: Updates
    gradients: bool
    activations: bool | Iterable[str]
    targets: tuple[Target, ...]
    every: int
    states_every: int


def parameters_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """Names of the parameters that can move, in the model's order, shared ones once, by their first name.

    What the optimizer has and the model has not comes last, by its place among the groups.

    Raises:
        ValueError: if there are none, or none that the optimizer has.
    """
    names: dict[Tensor, str] = {p: plain_name(name) for name, p in model.named_parameters()}
    if not names:
        raise ValueError("model: got one without parameters, takes one with some")
    places = {
        p: f"{n}.{i}" for n, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"])
    }
    if not any(p in names for p in places):
        raise ValueError("optimizer: got one that has no parameter of the model, takes the model's own")
    return names | {p: f"param_groups.{place}" for p, place in places.items() if p not in names}


class WatchedTensors:
    """What is measured of a model's tensors.

    Args:
        model: without wrappers.
        optimizer: over its parameters.
        sources: what is measured.
        names: of the parameters.

    Attributes:
        names: the same.
        home: the device on which tables are put together.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, sources: Sources, names: dict[Tensor, str]
    ) -> None:
        self.names = names
        self._optimizer, self._sources = optimizer, sources
        self._places = {p: place for place, p in enumerate(names)}
        self._elements = [p.numel() for p in names]
        self._modules = chosen(model, sources.activations)
        self._rows = {name: row for row, name in enumerate(self._modules)}
        self.home = flat(next(iter(names))).device
        kind = OwnSteps if measures_itself(optimizer) else OtherSteps
        self._updates = kind(optimizer, sources.updates) if sources.updates else None
        self._hooks: FeatureHooks | None = None
        self._features: dict[str, list[tuple[int, Tensor, Tensor]]] = {kind: [] for kind in _KINDS}
        self._gradients: Tensor | None = None
        self._early: list[RemovableHandle] = []  # hooks on parameters that are stepped in backward
        self._caught: dict[Tensor, Tensor] = {}
        self._begun = False
        self._step = 0
        self._said = False

    def attach(self) -> None:
        """Hook into the modules."""
        self._hooks = FeatureHooks(self._modules, self._feature)

    def detach(self) -> None:
        """Leave model and optimizer as they were."""
        if self._hooks is not None:
            self._hooks.remove()
        self._forget()

    def due(self, step: int) -> bool:
        return step % self._sources.every == 0

    @property
    def _in_backward(self) -> bool:
        return getattr(self._optimizer, "in_backward", None) is not None

    def expect(self, step: int) -> None:
        """The step that comes next: what of it has to be prepared before the forward pass."""
        due = self.due(step)
        if self._hooks is not None:
            self._hooks.due = due
        if due and self._in_backward:
            self._begin(step)
            if self._sources.gradients:
                self._early = [self._early_hook(p) for p in self.names if p.requires_grad]

    def begin(self, step: int) -> None:
        """A step is about to be taken."""
        if not self.due(step) or self._in_backward:
            return
        self._begin(step)
        if self._sources.gradients:
            self._gradients = self._of_gradients({p: p.grad for p in self.names if p.grad is not None}, step)

    def _begin(self, step: int) -> None:
        if self._begun and self._updates is not None:  # a step that raised
            self._updates.abandon()
        self._begun, self._step = True, step
        if self._updates is not None:
            self._updates.begin(self._turn(step))

    def moments(self, step: int) -> Iterator[Record]:
        """Records of the quantized moments, if they are due; before the step is taken."""
        every, optimizer = self._sources.states_every, cast(Any, self._optimizer)
        if not every or step % every or not measures_itself(optimizer):
            return
        why = optimizer.cannot_foresee()
        if why is None:
            yield from moment_records(optimizer, self.names, step)
        elif not self._said:
            self._said = True
            LOG.info("no records of quantized moments: %s", why)

    def end(self, step: int, ranks: Ranks) -> list[Part]:
        """A step has been taken: the tables of a due one."""
        if not self.due(step):
            return []
        parts: list[Part] = []
        if self._updates is not None and self._begun:
            parts.append(self._of_updates(step, ranks))
        if self._caught:
            self._gradients = added(torch.stack(list(self._caught.values())))
        if self._sources.gradients:
            parts.append(self._gradient_part(step, ranks))
        parts += [self._feature_part(kind, step) for kind in (_KINDS if self._modules else ())]
        self._begun = False
        self._forget()
        return parts

    def _forget(self) -> None:
        if self._begun and self._updates is not None:
            self._updates.abandon()
        for handle in self._early:
            handle.remove()
        self._begun = False
        self._early, self._caught, self._gradients = [], {}, None
        for features in self._features.values():
            features.clear()

    def _turn(self, step: int) -> int:
        return step // self._sources.every

    def _early_hook(self, p: Tensor) -> RemovableHandle:
        """Measure a gradient before the parameter's step in the backward pass, which frees it."""

        def hook(grad: Tensor) -> None:
            self._caught[p] = self._of_gradients({p: grad}, self._step)

        handle: RemovableHandle = p.register_hook(hook)  # type: ignore[no-untyped-call]
        return handle

    # Updates

    def _of_updates(self, step: int, ranks: Ranks) -> Part:
        assert self._updates is not None
        whole = torch.zeros(len(self.names), SUMS + 1, dtype=torch.float64, device=self.home)
        measured = [""] * len(self.names)
        for ps, sums, how in self._updates.end():
            part = torch.cat([sums, torch.ones_like(sums[:, :1])], dim=1).to(self.home, non_blocking=True)
            places = [self._places[p] for p in ps]
            for place in places:
                measured[place] = how
            whole.index_copy_(0, self._index(places), self._own(part, ps, ranks))
        names, elements = list(self.names.values()), self._elements
        return whole, (), lambda table: update_records(step, names, elements, table, measured)

    def _own(self, table: Tensor, ps: Iterable[Tensor], ranks: Ranks) -> Tensor:
        """The rows that this rank counts, zeros in the others."""
        if ranks.group is None:
            return table
        mine = torch.tensor([ranks.owns(p) for p in ps], device="cpu").to(table.device, non_blocking=True)
        return torch.where(mine[:, None], table, 0.0)

    def _index(self, places: Sequence[int]) -> Tensor:
        return torch.tensor(places, device="cpu").to(self.home, non_blocking=True)

    # Gradients

    def _of_gradients(self, grads: Mapping[Tensor, Tensor | None], step: int) -> Tensor:
        """The table of all parameters, without regard to ranks."""
        table = torch.zeros(len(self.names), width(self._sources.targets), dtype=torch.float64, device=self.home)
        inverse = self._inverse()
        by_device: dict[torch.device, dict[int, Tensor]] = {}
        for p, grad in grads.items():
            if grad is None or not grad.is_floating_point():
                continue
            if grad.layout is not torch.strided:
                grad = grad.coalesce().values()  # the rows that it has
            x = flat(grad)
            if inverse is not None:
                x = x.to(torch.float32) * inverse.to(x.device, non_blocking=True)
            if x.numel():
                by_device.setdefault(x.device, {})[self._places[p]] = x
        for some in by_device.values():
            part = table_of(list(some.values()), self._sources.targets, self._turn(step))
            table.index_copy_(0, self._index(list(some)), part.to(self.home, non_blocking=True))
        return table

    def _inverse(self) -> Tensor | None:
        """What a loss scaler leaves to the step to multiply gradients by."""
        optimizer: Any = self._optimizer
        if measures_itself(optimizer):
            inverse: Tensor | None = optimizer.inverse_scale()
            return inverse
        scale = getattr(optimizer, "grad_scale", None)
        return (
            torch.as_tensor(scale).to(torch.float64).reciprocal().to(torch.float32) if scale is not None else None
        )

    def _gradient_part(self, step: int, ranks: Ranks) -> Part:
        if self._gradients is None:
            self._gradients = self._of_gradients({}, step)
        table = self._own(self._gradients, self.names, ranks)
        return table, (0,), self._records_of("gradient", list(self.names.values()), step)

    # Features

    def _feature(self, kind: str, name: str, x: Tensor) -> None:
        """A module has returned a feature, or its gradient has come."""
        with torch.no_grad():
            vector = flat(x)
            if not vector.numel():
                return
            # What is kept is a copy: the memory of a feature is the model's to free, and to write to.
            share = max(SHARE, -(-vector.numel() // _WIDEST))
            kept = sample(vector, len(self._features[kind]), share).clone()
            self._features[kind].append((self._rows[name], magnitudes(vector), kept))

    def _feature_part(self, kind: str, step: int) -> Part:
        targets, seen = self._sources.targets, self._features[kind]
        table = torch.zeros(len(self._modules), width(targets), dtype=torch.float64, device=self.home)
        by_device: dict[torch.device, list[tuple[int, Tensor, Tensor]]] = {}
        for one in seen:
            by_device.setdefault(one[2].device, []).append(one)
        for some in by_device.values():
            rows = torch.stack([found for _, found, _ in some])
            counts = counts_of([kept for _, _, kept in some], rows[:, 0], targets)
            part = torch.cat([rows, counts], dim=1).to(self.home, non_blocking=True)
            index = self._index([row for row, _, _ in some])
            largest = torch.zeros_like(table[:, 0]).scatter_reduce_(0, index, part[:, 0], "amax")
            sums = torch.zeros_like(table).index_add_(0, index, part)[:, 1:]
            table = added(torch.stack([table, torch.cat([largest[:, None], sums], dim=1)]))
        return table, (0,), self._records_of(kind, list(self._modules), step)

    def _records_of(self, kind: str, names: list[str], step: int) -> Callable[[Tensor], list[Record]]:
        targets = self._sources.targets

        def records(table: Tensor) -> list[Record]:
            return [
                {"kind": kind, "step": step, "name": name, **as_record(row, targets)}
                for name, row in zip(names, table, strict=True)
                if row[1] > 0
            ]

        return records


def header(
    model: nn.Module, optimizer: torch.optim.Optimizer, sources: Sources, names: Mapping[Tensor, str]
) -> Record:
    """The first record of a run."""
    device = flat(next(iter(names))).device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "kind": "run", "version": VERSION, "every": sources.every, "optimizer": type(optimizer).__name__,
        "device": kind, "torch": torch.__version__, "narrowgauge": __version__,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "parameters": {name: list(p.shape) for p, name in names.items()}, "depth": depths(model),
    }  # fmt: skip
