"""Counters of skipped tensors that live on the gradients' devices until somebody asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from narrowgauge.scaling._gradients import slots_of


class SkipCounts:
    """How often each tensor of each optimizer had inf or NaN.

    Args:
        counted: counts to go on from, by tensor name.
    """

    def __init__(self, counted: Mapping[str, int] | None = None) -> None:
        self._counted = dict(counted or {})
        # An optimizer that is gone takes its counts with it.
        self._live: WeakKeyDictionary[torch.optim.Optimizer, dict[torch.device, Tensor]] = WeakKeyDictionary()
        self._counting: WeakSet[torch.optim.Optimizer] = WeakSet()

    def add(self, optimizer: torch.optim.Optimizer, flags: Mapping[torch.device, Tensor]) -> None:
        """Count one step's flags (one bool per parameter of the optimizer) without reading them."""
        live = self._live.setdefault(optimizer, {})
        for device, vector in flags.items():
            old = live.get(device)
            if old is None:
                live[device] = vector.to(torch.int64)
            else:
                # Groups may have been added since; they come last.
                grown = torch.nn.functional.pad(old, (0, len(vector) - len(old))) if len(old) < len(vector) else old
                live[device] = grown + vector

    def restart(self, counted: Mapping[str, int]) -> None:
        """Go on from these counts instead; the optimizers stay known."""
        self._counted = dict(counted)
        for live in self._live.values():
            live.clear()

    def counts_itself(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember an optimizer that counts some of its tensors, in its property `skipped`."""
        self._live.setdefault(optimizer, {})
        self._counting.add(optimizer)

    def read(self, *, with_optimizers: bool) -> dict[str, int]:
        """The counts by tensor name, those with none left out; one copy to the host per optimizer and device.

        Args:
            with_optimizers: add what the optimizers counted by themselves.
        """
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
