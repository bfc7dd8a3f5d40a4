"""Features and their gradients at due steps: measured as they pass, put together when the step has been taken."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from narrowgauge.gauges._formats import Target
from narrowgauge.gauges._magnitudes import Look, as_records, rows_of, width
from narrowgauge.gauges._modules import FeatureHooks
from narrowgauge.gauges._rank_sums import Part
from narrowgauge.gauges._segments import SHARE, flat, kept_sample
from narrowgauge.kernels._tables import sent

_KINDS = ("activation", "activation_gradient")
_WIDEST = 1 << 18  # elements of one feature that formats are asked about


class WatchedFeatures:
    """What modules return in training, and the gradients of that.

    A module that is called several times in a step (accumulated batches, shared layers) has one row for all.

    Args:
        modules: by name.
        targets: the formats to ask about.
    """

    def __init__(self, modules: Mapping[str, nn.Module], targets: Sequence[Target]) -> None:
        self._modules, self._targets = modules, targets
        self._hooks: FeatureHooks | None = None
        self._seen: dict[str, dict[str, list[Look]]] = {}  # by kind and name, of each call
        self.forget()

    def attach(self) -> None:
        """Hook into the modules."""
        self._hooks = FeatureHooks(self._modules, self._add)

    def detach(self) -> None:
        """Leave the modules as they were."""
        if self._hooks is not None:
            self._hooks.remove()
        self.forget()

    @property
    def count(self) -> int:
        """How many modules are watched."""
        return len(self._modules)

    @property
    def unseen(self) -> list[str]:
        """Modules of which nothing was seen in this step."""
        return [name for name, calls in self._seen["activation"].items() if not calls]

    def expect(self, due: bool) -> None:
        """Whether the step that comes is measured."""
        self.forget()
        if self._hooks is not None:
            self._hooks.due = due

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What passes in this context is not seen."""
        hooks = self._hooks
        if hooks is None:
            yield
            return
        due, hooks.due = hooks.due, False
        try:
            yield
        finally:
            hooks.due = due

    def forget(self) -> None:
        """Drop what has been seen."""
        self._seen = {kind: {name: [] for name in self._modules} for kind in _KINDS}

    def _add(self, kind: str, name: str, x: Tensor) -> None:
        with torch.no_grad():
            vector = flat(x)
            if not vector.numel():
                return
            calls = self._seen[kind][name]
            # What is kept is a copy: the memory of a feature is the model's to free, and to write to.
            share = max(SHARE, -(-vector.numel() // _WIDEST))
            calls.append(Look.at(vector, kept_sample(vector, len(calls), share)))

    def parts(self, step: int, home: torch.device) -> list[Part]:
        """The tables of a step that has been taken."""
        names, targets = list(self._modules), self._targets
        return [
            (self._table(kind, home), (0,), as_records(kind, names, targets, step))
            for kind in (_KINDS if names else ())
        ]

    def _table(self, kind: str, home: torch.device) -> Tensor:
        calls = list(self._seen[kind].values())
        lengths = sent(np.array([len(some) for some in calls], dtype=np.int64), home)
        rows = [rows_of(some, self._targets).to(home, non_blocking=True) for some in _by_device(calls)]
        if not rows:
            return torch.zeros(len(calls), width(self._targets), dtype=torch.float64, device=home)
        table = torch.cat(rows)
        largest, sums = (
            torch.segment_reduce(part, how, lengths=lengths, axis=0, unsafe=True, initial=0)
            for part, how in ((table[:, :1].contiguous(), "max"), (table[:, 1:].contiguous(), "sum"))
        )
        return torch.cat([largest, sums], dim=1)


def _by_device(calls: Sequence[Sequence[Look]]) -> list[list[Look]]:
    """All calls in order, as runs of one device each, and of one way to look at them."""
    runs: list[list[Look]] = []
    for look in (look for some in calls for look in some):
        if not runs or runs[-1][0].device != look.device or bool(runs[-1][0].tiles) != bool(look.tiles):
            runs.append([])
        runs[-1].append(look)
    return runs
