"""Measurements of a model's tensors: updates, gradients and features at due steps, RMS_t and moments at theirs.

Every table has a row for each parameter, or each watched module, so that the tables of ranks can be added. A row of
zeros makes no record.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from narrowgauge._text import listed
from narrowgauge._update_sums import SUMS
from narrowgauge.gauges._records import LOG, MISSED, Record
from narrowgauge.gauges._watch._batched_magnitudes import as_records, table_of, width
from narrowgauge.gauges._watch._batched_rows import Sample, flat, flat_gradient, to_device
from narrowgauge.gauges._watch._features import Features
from narrowgauge.gauges._watch._moment_preview import MomentPreview, preview_unavailable
from narrowgauge.gauges._watch._ranks import Part, Ranks
from narrowgauge.gauges._watch._sources import Sources, parameters_of, parameters_with_rms, watched_modules
from narrowgauge.gauges._watch._step_rms import StepRms
from narrowgauge.gauges._watch._update_stats import measures_itself, stats_of, update_records


class Measurements:
    """What is measured of a model's tensors.

    Args:
        model: without wrappers.
        optimizer: over its parameters.
        sources: what is measured.
        names: of the parameters.

    Attributes:
        names: the same; parameters that the optimizer gets later are added.
        rms_of: parameters whose RMS_t is measured between due steps.
        home: the device on which tables are put together.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, sources: Sources, names: dict[Tensor, str]
    ) -> None:
        self.names = names
        self._model, self._optimizer, self._sources = model, optimizer, sources
        self._index = {p: index for index, p in enumerate(names)}
        self.home = flat(next(iter(names))).device
        self.features = Features(watched_modules(model, sources.activations), sources.targets)
        self._updates = stats_of(optimizer, sources.updates)
        self.rms_of = parameters_with_rms(model, names, sources.rms_of) if sources.rms_every else []
        self._step_rms = StepRms(optimizer, self.rms_of)
        self._preview: MomentPreview | None = None
        self._gradients: dict[int, Tensor] = {}  # rows of the gradients' table, by the parameter's index
        self._hooks: list[RemovableHandle] = []  # on parameters that are stepped in the backward pass
        self._begun = False
        self._reported_states = self._reported_features = False

    def detach(self) -> None:
        """Leave model and optimizer as they were."""
        self.features.detach()
        self._step_rms.abandon()
        self._preview = None
        self._forget()

    def _forget(self) -> None:
        if self._begun and self._updates is not None:
            self._updates.abandon()
        for handle in self._hooks:
            handle.remove()
        self._begun = False
        self._hooks, self._gradients = [], {}

    def _due(self, step: int) -> bool:
        return step % self._sources.every == 0

    def _sample(self, step: int) -> Sample:
        return Sample(step // self._sources.every)

    # Before a step

    @property
    def _in_backward(self) -> bool:
        return getattr(self._optimizer, "in_backward", None) is not None

    def expect(self, step: int) -> None:
        """Before the forward pass of a step."""
        due = self._due(step)
        self.features.expect(due)
        if not self._in_backward:
            return
        self._begin_rms(step)
        if due:
            self._begin_updates(step)
            if self._sources.gradients:
                self._hooks = [self._hook(p, step) for p in self.names if p.requires_grad]

    def begin(self, step: int) -> None:
        """The gradients are there, and the step is about to be taken."""
        if self._in_backward:
            return
        self._begin_rms(step)
        if not self._due(step):
            self._forget()  # of a step that raised
            return
        self._begin_updates(step)
        if self._sources.gradients:
            self._gradients = self._rows({p: p.grad for p in self.names if p.grad is not None}, step)

    def _begin_updates(self, step: int) -> None:
        self._add_new_parameters()
        if self._updates is not None:
            if self._begun:  # by a step that raised
                self._updates.abandon()
            self._updates.begin(self._sample(step).index)
        self._begun = True

    def _begin_rms(self, step: int) -> None:
        # Where all updates are measured, RMS_t is among the sums.
        with_updates = self._updates is not None and self._due(step)
        if self.rms_of and not with_updates and step % self._sources.rms_every == 0:
            self._step_rms.begin(step // self._sources.rms_every)

    def _add_new_parameters(self) -> None:
        """Take in parameters that the optimizer was given during training: an unfrozen layer, a new head."""
        groups = self._optimizer.param_groups
        if all(p in self._index for group in groups for p in group["params"]):
            return
        new = {p: n for p, n in parameters_of(self._model, self._optimizer).items() if p not in self.names}
        LOG.info("the optimizer has new parameters: %s", ", ".join(new.values()))
        self.names |= new
        self._index = {p: index for index, p in enumerate(self.names)}

    def _hook(self, p: Tensor, step: int) -> RemovableHandle:
        """Measure a gradient in the backward pass, before the parameter's step frees it."""

        def measure(grad: Tensor) -> None:
            self._gradients |= self._rows({p: grad}, step)

        handle: RemovableHandle = p.register_hook(measure)  # type: ignore[no-untyped-call]
        return handle

    @torch.no_grad()
    def _rows(self, grads: Mapping[Tensor, Tensor | None], step: int) -> dict[int, Tensor]:
        """Rows of the gradients' table, by the parameters' index."""
        inverse = self._inverse_scale()
        by_device: dict[torch.device, dict[int, Tensor]] = {}
        for p, grad in grads.items():
            if grad is None or not grad.is_floating_point():
                continue
            # Of a sparse gradient the rows that it has.
            x = flat_gradient(p, grad) if grad.layout is torch.strided else flat(grad.coalesce().values())
            if inverse is not None:
                x = x.to(torch.float32) * inverse.to(x.device, non_blocking=True)
            if x.numel():
                by_device.setdefault(x.device, {})[self._index[p]] = x
        found: dict[int, Tensor] = {}
        for some in by_device.values():
            table = table_of(list(some.values()), self._sources.targets, self._sample(step))
            found |= zip(some, table.to(self.home, non_blocking=True).unbind(), strict=True)
        return found

    def _inverse_scale(self) -> Tensor | None:
        """What a loss scaler lets the step multiply gradients by."""
        optimizer: Any = self._optimizer
        if measures_itself(optimizer):
            inverse: Tensor | None = optimizer.inverse_scale()
            return inverse
        scale = getattr(optimizer, "grad_scale", None)
        return None if scale is None else torch.as_tensor(scale).to(torch.float64).reciprocal().to(torch.float32)

    def preview_moments(self, step: int) -> list[Record]:
        """Preview a parameter's moments, if due. Returns records of what cannot be previewed, once."""
        every, optimizer = self._sources.states_every, self._optimizer
        self._preview = None
        if not every or step % every or not measures_itself(optimizer):
            return []
        self._preview = MomentPreview(optimizer, self.names, step, step // every)
        if self._reported_states:
            return []
        self._reported_states = True
        reasons = preview_unavailable(optimizer, self.names)
        return [_missing("state", step, names, why) for why, names in reasons.items()]

    # After a step

    def moments(self) -> list[Part]:
        """The tables of the previewed moments."""
        preview, self._preview = self._preview, None
        return preview.parts() if preview is not None else []

    def rms(self, ranks: Ranks) -> Tensor | None:
        """The sums of RMS_t of `rms_of`, float64 (parameters, 2); None if not due."""
        rows = self._step_rms.end(self.home)
        return _own_rows(rows, self.rms_of, ranks) if rows is not None else None

    def unseen_features(self, step: int) -> list[Record]:
        """After the first due step: a record of the watched modules that no hook saw return a tensor."""
        if self._reported_features or not self._due(step):
            return []
        self._reported_features = True
        names = self.features.unseen
        if not names:
            return []
        why = "no hook saw it return: inside a compiled region, not called while training, or returns no tensor"
        # One module may not be called on purpose; a model without any features is worth a warning.
        level = logging.WARNING if len(names) == len(self.features.modules) else logging.INFO
        return [_missing("activation", step, names, why, level)]

    def end(self, step: int, ranks: Ranks) -> list[Part]:
        """The tables of a due step."""
        if not self._due(step):
            return []
        parts: list[Part] = []
        if self._updates is not None and self._begun:
            parts.append(self._update_part(step, ranks))
        if self._sources.gradients:
            parts.append(self._gradient_part(step, ranks))
        parts += self.features.parts(step, self.home)
        self._begun = False
        self._forget()
        return parts

    def _update_part(self, step: int, ranks: Ranks) -> Part:
        assert self._updates is not None
        whole = torch.zeros(len(self.names), SUMS + 1, dtype=torch.float64, device=self.home)
        measured = [""] * len(self.names)
        for ps, sums, how in self._updates.end():
            part = torch.cat([sums, torch.ones_like(sums[:, :1])], dim=1).to(self.home, non_blocking=True)
            indices = [self._index[p] for p in ps]
            for index in indices:
                measured[index] = how
            whole.index_copy_(0, to_device(indices, self.home), _own_rows(part, ps, ranks))
        names, elements = list(self.names.values()), [p.numel() for p in self.names]
        return Part(whole, lambda table: update_records(step, names, elements, table, measured))

    def _gradient_part(self, step: int, ranks: Ranks) -> Part:
        targets, rows = self._sources.targets, self._gradients
        table = torch.zeros(len(self.names), width(targets), dtype=torch.float64, device=self.home)
        if rows:
            table.index_copy_(0, to_device(list(rows), self.home), torch.stack(list(rows.values())))
        records = as_records("gradient", list(self.names.values()), targets, step)
        return Part(_own_rows(table, self.names, ranks), records, (0,))


def _own_rows(table: Tensor, ps: Iterable[Tensor], ranks: Ranks) -> Tensor:
    """A table with zeros in the rows that another rank counts."""
    if ranks.group is None:
        return table
    own = to_device([ranks.owns(p) for p in ps], table.device, np.bool_)
    return torch.where(own[:, None], table, 0.0)


def _missing(what: str, step: int, names: Sequence[str], why: str, level: int = logging.WARNING) -> Record:
    """A record, and a line in the log, that something will not be recorded."""
    LOG.log(level, "no records of %s: %s (%s)", MISSED[what], why, listed(names))
    return {"kind": "missing", "step": step, "of": what, "names": list(names), "why": why}
