"""The examples that a run validates on: read by all processes, a part at a time.

A part is no larger than one that is trained on, which needs more memory. What is made of them is the same however
many processes read them, but for rounding: means are of all, and rows are brought together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ._examples import Examples, count, divided, moved
from ._team import Team


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Examples, and the model that is validated.

    Attributes:
        model: in evaluation mode, not compiled.
        team: who reads them together; all of them call every method.
        examples: on the CPU.
        batch: how many examples a step has.
        size: how many the model reads at a time.
        device: the model's.
    """

    model: nn.Module
    team: Team
    examples: Examples
    batch: int
    size: int
    device: torch.device

    def mean(self, loss: Callable[[nn.Module, Examples], Tensor]) -> float:
        """The mean over all examples of what is a mean over a part."""
        parts = self._divided()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for number, counts in self.team.turns(len(parts)):
            examples = parts[number]
            mean = loss(self.model, moved(examples, self.device)).double()
            if counts:
                sums += torch.stack([mean * count(examples), torch.full_like(mean, count(examples))])
        total, examples_read = self.team.sum(sums).tolist()
        return float(total / examples_read)

    def rows(self, features: Callable[[nn.Module, Examples], Tensor]) -> Tensor:
        """A row for each example, in order: (examples, ...), of every part's (its examples, ...)."""
        parts, most = self._divided(), count(self.examples)
        rows: Tensor | None = None
        for number, counts in self.team.turns(len(parts)):
            made = features(self.model, moved(parts[number], self.device))
            rows = made.new_zeros(most, *made.shape[1:]) if rows is None else rows
            if counts:
                first = number * count(parts[0])
                rows[first : first + len(made)] = made
        assert rows is not None  # everybody has a turn
        return self.team.sum(rows).to(rows.dtype)  # others have zeros there: not a bit changes

    def parts(self) -> Iterator[Examples]:
        """The examples, a part at a time, on the model's device."""
        for part in self._divided():
            yield moved(part, self.device)

    def _divided(self) -> list[Examples]:
        return divided(self.examples, math.ceil(count(self.examples) / self.size))
