"""The examples that a run validates on: read by all processes, a part at a time.

A part is no larger than one that is trained on, which needs more memory. The results do not depend on the number of
processes, but for rounding: means are over all examples, and rows are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ._examples import Examples, count, divided, to_device
from ._parallel import ProcessGroup


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Examples, and the model that is validated.

    Attributes:
        model: in evaluation mode, not compiled.
        group: the processes, which all call every method.
        examples: on the CPU.
        batch: how many examples a step has.
        size: how many the model reads at a time.
        device: the model's.
    """

    model: nn.Module
    group: ProcessGroup
    examples: Examples
    batch: int
    size: int
    device: torch.device

    def mean(self, loss: Callable[[nn.Module, Examples], Tensor]) -> float:
        """The mean over all examples of a loss that is the mean over a part."""
        parts = self._divided()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for number, counts in self.group.turns(len(parts)):
            mean = loss(self.model, to_device(parts[number], self.device)).double()
            if counts:
                n = count(parts[number])
                sums += torch.stack([mean * n, torch.full_like(mean, n)])
        total, examples_read = self.group.sum(sums).tolist()
        return float(total / examples_read)

    def rows(self, features: Callable[[nn.Module, Examples], Tensor]) -> Tensor:
        """A row for each example, in order: (examples, ...), by each part's (its examples, ...)."""
        parts, most = self._divided(), count(self.examples)
        rows: Tensor | None = None
        for number, counts in self.group.turns(len(parts)):
            made = features(self.model, to_device(parts[number], self.device))
            rows = made.new_zeros(most, *made.shape[1:]) if rows is None else rows
            if counts:
                first = number * count(parts[0])
                rows[first : first + len(made)] = made
        assert rows is not None  # every process has a turn
        return self.group.sum(rows).to(rows.dtype)  # the others have zeros there: not a bit changes

    def parts(self) -> Iterator[Examples]:
        """The examples, a part at a time, on the model's device."""
        for part in self._divided():
            yield to_device(part, self.device)

    def _divided(self) -> list[Examples]:
        return divided(self.examples, math.ceil(count(self.examples) / self.size))
