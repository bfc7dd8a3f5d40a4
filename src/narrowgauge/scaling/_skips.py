"""Skipped tensors and steps: counted on the device, and reported to the host without waiting for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from narrowgauge._text import listed
from narrowgauge.scaling._unscale import slots_of

# Of an optimizer's parameters, which gradients have inf or NaN: a bool vector on each device.
Flags = Mapping[torch.device, Tensor]


class SkipCounts:
    """How often each tensor of each optimizer had inf or NaN, from `counted` on."""

    def __init__(self, counted: Mapping[str, int] | None = None) -> None:
        self._counted = dict(counted or {})
        # By optimizer, weakly: the counts of a deleted optimizer go with it.
        self._live: WeakKeyDictionary[torch.optim.Optimizer, dict[torch.device, Tensor]] = WeakKeyDictionary()
        self._counting: WeakSet[torch.optim.Optimizer] = WeakSet()

    def add(self, optimizer: torch.optim.Optimizer, flags: Flags) -> None:
        """Count the flags of one step without reading them."""
        live = self._live.setdefault(optimizer, {})
        for device, vector in flags.items():
            old = live.get(device)
            if old is None:
                live[device] = vector.to(torch.int64)
            else:
                # Groups that were added since come last.
                grown = torch.nn.functional.pad(old, (0, len(vector) - len(old))) if len(old) < len(vector) else old
                live[device] = grown + vector

    def restart(self, counted: Mapping[str, int]) -> None:
        """Continue from these counts instead; the optimizers stay known."""
        self._counted = dict(counted)
        for live in self._live.values():
            live.clear()

    def counts_itself(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember an optimizer that counts some of its tensors, in its property `skipped`."""
        self._live.setdefault(optimizer, {})
        self._counting.add(optimizer)

    def read(self, *, with_optimizers: bool) -> dict[str, int]:
        """The counts above 0, by tensor name; with what optimizers counted themselves, if asked for."""
        total = Counter(self._counted)
        taken: set[str] = set()
        for number, (optimizer, live) in enumerate(self._live.items()):
            names = [slot.name for slot in slots_of(optimizer)]
            # Two optimizers may use one name.
            unique = {name: name if name not in taken else f"{number}/{name}" for name in names}
            taken.update(unique.values())
            for vector in live.values():
                for name, count in zip(names, vector.tolist(), strict=False):
                    total[unique[name]] += count
            if with_optimizers and optimizer in self._counting:
                for name, count in optimizer.skipped.items():  # type: ignore[attr-defined]
                    total[unique.get(name, name)] += count
        return {name: count for name, count in total.items() if count}


class SkipNotices:
    """Flags and scales of steps, on their way to the host in pinned memory."""

    def __init__(self) -> None:
        self._sent: list[tuple[list[Any], list[Tensor], Tensor, list[str]]] = []

    def send(self, flags: Flags, scale: Tensor, names: Sequence[str]) -> None:
        """Send the flags of one step, a bool for each name from each device, and its scale."""
        events: list[Any] = []
        vectors = [_to_host(vector, events) for vector in flags.values()]
        self._sent.append((events, vectors, _to_host(scale, events), list(names)))

    def deliver(self, report: Callable[[str, float], None]) -> None:
        """Call `report` with names and scale of each skipped step that has arrived; never waits."""
        while self._sent and all(event.query() for event in self._sent[0][0]):
            _, vectors, scale, names = self._sent.pop(0)
            bad = torch.stack(vectors).any(0).tolist() if vectors else []
            if any(bad):
                report(listed([name for name, flag in zip(names, bad, strict=True) if flag]), float(scale))


def _to_host(there: Tensor, events: list[Any]) -> Tensor:
    """Start a copy to the host, and add an event at its end."""
    if there.device.type != "cuda":
        return there.to("cpu", copy=True)
    here = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
    with torch.cuda.device(there.device):
        here.copy_(there, non_blocking=True)
        events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        events[-1].record()
    return here
