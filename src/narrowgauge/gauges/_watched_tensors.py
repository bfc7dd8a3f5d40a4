"""The tensors of a model at its due steps: updates, gradients, features and quantized moments, as tables.

Every table has a row for each parameter, or each watched module, whether or not there is something to say of
it, so that ranks' tables fit together. What has nothing has zeros and makes no record.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from narrowgauge.gauges._magnitudes import as_records, table_of, width
from narrowgauge.gauges._measured_steps import SUMS
from narrowgauge.gauges._modules import chosen
from narrowgauge.gauges._moment_preview import MomentPreview, reasons
from narrowgauge.gauges._rank_sums import Part, Ranks
from narrowgauge.gauges._records import LOG, MISSED, Record
from narrowgauge.gauges._segments import flat
from narrowgauge.gauges._step_rms import StepRms, parameters_with_rms
from narrowgauge.gauges._update_records import OtherSteps, OwnSteps, measures_itself, update_records
from narrowgauge.gauges._watched_features import WatchedFeatures
from narrowgauge.gauges._watched_run import Sources, parameters_of
from narrowgauge.kernels._tables import sent


class WatchedTensors:
    """What is measured of a model's tensors.

    Args:
        model: without wrappers.
        optimizer: over its parameters.
        sources: what is measured.
        names: of the parameters.

    Attributes:
        names: the same.
        rms_of: parameters whose RMS_t is taken between due steps, too.
        home: the device on which tables are put together.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, sources: Sources, names: dict[Tensor, str]
    ) -> None:
        self.names = names
        self._model, self._optimizer, self._sources = model, optimizer, sources
        self._places = {p: place for place, p in enumerate(names)}
        self._elements = [p.numel() for p in names]
        self._features = WatchedFeatures(chosen(model, sources.activations), sources.targets)
        self.home = flat(next(iter(names))).device
        kind = OwnSteps if measures_itself(optimizer) else OtherSteps
        self._updates = kind(optimizer, sources.updates) if sources.updates else None
        self.rms_of = parameters_with_rms(model, names, sources.rms_of) if sources.rms_every else []
        self._step_rms = StepRms(optimizer, self.rms_of)
        self._gradients: dict[int, Tensor] = {}  # rows by the parameter's place
        self._early: list[RemovableHandle] = []  # hooks on parameters that are stepped in backward
        self._caught: dict[int, Tensor] = {}
        self._preview: MomentPreview | None = None
        self._begun = False
        self._step = 0
        self._said = self._looked = False

    def attach(self) -> None:
        """Hook into the modules."""
        self._features.attach()

    def detach(self) -> None:
        """Leave model and optimizer as they were."""
        self._features.detach()
        self._step_rms.abandon()
        self._preview = None
        self._forget()

    def due(self, step: int) -> bool:
        return step % self._sources.every == 0

    @property
    def _in_backward(self) -> bool:
        return getattr(self._optimizer, "in_backward", None) is not None

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """The context of forward passes whose features are not measured."""
        return self._features.paused()

    def expect(self, step: int) -> None:
        """The step that comes next: what of it has to be prepared before the forward pass."""
        due = self.due(step)
        self._features.expect(due)
        if self._in_backward:
            self._begin_rms(step)
        if due and self._in_backward:
            self._begin(step)
            if self._sources.gradients:
                self._early = [self._early_hook(p) for p in self.names if p.requires_grad]

    def begin(self, step: int) -> None:
        """A step is about to be taken."""
        if self._in_backward:
            return
        self._begin_rms(step)
        if not self.due(step):
            self._forget()  # of a step that raised
            return
        self._begin(step)
        if self._sources.gradients:
            self._gradients = self._rows({p: p.grad for p in self.names if p.grad is not None}, step)

    def _begin_rms(self, step: int) -> None:
        # Where all updates are measured RMS_t comes with them.
        measured = self._updates is not None and self.due(step)
        if self.rms_of and not measured and step % self._sources.rms_every == 0:
            self._step_rms.begin(step // self._sources.rms_every)

    def rms(self, ranks: Ranks) -> Tensor | None:
        """A step has been taken: the sums of RMS_t of `rms_of`, float64 (parameters, 2); None if not due."""
        rows = self._step_rms.end(self.home)
        return self._own(rows, self.rms_of, ranks) if rows is not None else None

    def _learn(self) -> None:
        """Take in parameters that the optimizer was given within the loop: a layer that is unfrozen, a new head."""
        groups = self._optimizer.param_groups
        if all(p in self._places for group in groups for p in group["params"]):
            return
        new = {p: n for p, n in parameters_of(self._model, self._optimizer).items() if p not in self.names}
        LOG.info("the optimizer has new parameters: %s", ", ".join(new.values()))
        self.names |= new
        self._places = {p: place for place, p in enumerate(self.names)}
        self._elements = [p.numel() for p in self.names]

    def _begin(self, step: int) -> None:
        self._learn()
        if self._begun and self._updates is not None:  # a step that raised
            self._updates.abandon()
        self._begun, self._step = True, step
        if self._updates is not None:
            self._updates.begin(self._turn(step))

    def look_at_moments(self, step: int) -> list[Record]:
        """A step is about to be taken: preview a parameter's moments, if due; gives records of what has none."""
        every, optimizer = self._sources.states_every, self._optimizer
        self._preview = None
        if not every or step % every or not measures_itself(optimizer):
            return []
        missing: list[Record] = []
        if not self._said:
            self._said = True
            for why, names in reasons(optimizer, self.names).items():
                missing += _missing("state", step, names, why)
        self._preview = MomentPreview(optimizer, self.names, step, step // every)
        return missing

    def moments(self) -> list[Part]:
        """The step has been taken: the tables of what was previewed."""
        previewed, self._preview = self._preview, None
        return previewed.parts() if previewed is not None else []

    def unseen(self, step: int) -> Iterator[Record]:
        """After the first due step: which watched modules returned nothing that a hook saw."""
        if self._looked or not self.due(step):
            return
        self._looked = True
        names = self._features.unseen
        if names:
            yield from _missing(
                "activation", step, names,
                "no hook saw it return: inside a compiled region, not called while training, or returns no tensor",
                # That one module is not called is nothing to wake anybody for; that none is heard of, is.
                logging.WARNING if len(names) == self._features.count else logging.INFO,
            )  # fmt: skip

    def end(self, step: int, ranks: Ranks) -> list[Part]:
        """A step has been taken: the tables of a due one."""
        if not self.due(step):
            return []
        parts: list[Part] = []
        if self._updates is not None and self._begun:
            parts.append(self._of_updates(step, ranks))
        if self._caught:
            self._gradients = self._caught
        if self._sources.gradients:
            parts.append(self._gradient_part(step, ranks))
        parts += self._features.parts(step, self.home)
        self._begun = False
        self._forget()
        return parts

    def _forget(self) -> None:
        if self._begun and self._updates is not None:
            self._updates.abandon()
        for handle in self._early:
            handle.remove()
        self._begun = False
        self._early, self._caught, self._gradients = [], {}, {}

    def _turn(self, step: int) -> int:
        return step // self._sources.every

    def _early_hook(self, p: Tensor) -> RemovableHandle:
        """Measure a gradient before the parameter's step in the backward pass, which frees it."""

        def hook(grad: Tensor) -> None:
            self._caught |= self._rows({p: grad}, self._step)

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
        mine = sent(np.array([ranks.owns(p) for p in ps], dtype=np.bool_), table.device)
        return torch.where(mine[:, None], table, 0.0)

    def _index(self, places: Sequence[int]) -> Tensor:
        return sent(np.array(places, dtype=np.int64), self.home)

    # Gradients

    @torch.no_grad()
    def _rows(self, grads: Mapping[Tensor, Tensor | None], step: int) -> dict[int, Tensor]:
        """The rows of some gradients, by the places of their parameters."""
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
        found: dict[int, Tensor] = {}
        for some in by_device.values():
            table = table_of(list(some.values()), self._sources.targets, self._turn(step))
            found |= zip(some, table.to(self.home, non_blocking=True).unbind(), strict=True)
        return found

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
        targets = self._sources.targets
        table = torch.zeros(len(self.names), width(targets), dtype=torch.float64, device=self.home)
        if self._gradients:
            rows = torch.stack(list(self._gradients.values()))
            table.index_copy_(0, self._index(list(self._gradients)), rows)
        records = as_records("gradient", list(self.names.values()), targets, step)
        return self._own(table, self.names, ranks), (0,), records


def _missing(
    what: str, step: int, names: Sequence[str], why: str, level: int = logging.WARNING
) -> Iterator[Record]:
    """A record that something will not be recorded, and a line in the log: who waits for it should not wait."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    LOG.log(level, "no records of %s: %s (%s)", MISSED[what], why, shown)
    yield {"kind": "missing", "step": step, "of": what, "names": list(names), "why": why}
