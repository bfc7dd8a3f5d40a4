"""What one step did to one parameter, as sums.

Sums, not ratios: they can be added over parameters, steps and ranks, and a fused kernel computes them from
registers. There are two effective updates. The *stored* one is the change of everything that is stored, low words
included: what the optimizer will remember. The *visible* one is the change of the parameter alone: what the model's
next forward pass reads, as in Collage's Equation 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge._update_sums import FIELDS, SUMS, update_terms


@dataclass(frozen=True)
class UpdateStats:
    """Sums over the elements of one parameter, or of many.

    Attributes:
        sums: float64 tensor (8,): the squared norm of the intended update; its dot products with the stored and
            with the visible effective update; how many intended updates are not zero; how many of those
            changed nothing stored, and nothing visible; the sum of g^2 / max(v_hat, eps^2) and its number of
            elements, both 0 without a second moment. The last two may be left out.
    """

    sums: Tensor

    def __post_init__(self) -> None:
        missing = SUMS - self.sums.numel()
        if missing:
            object.__setattr__(self, "sums", torch.nn.functional.pad(self.sums, (0, missing)))

    @classmethod
    def measure(
        cls,
        intended: Tensor,
        before: tuple[Tensor, Tensor],
        after: tuple[Tensor, Tensor],
        ratio: Tensor | None = None,
    ) -> UpdateStats:
        """The sums of one update.

        In the counts a NaN update is zero, and a weight that is or becomes NaN has not changed.

        Args:
            intended: the update.
            before, after: (all that is stored, what is visible) in its shape, float64.
            ratio: g^2 / max(v_hat, eps^2) in its shape, if the rule has a second moment.
        """
        terms = update_terms(intended.to(torch.float64), after[0] - before[0], after[1] - before[1])
        sums = [term.sum() for term in terms]
        if ratio is not None:
            sums += [ratio.to(torch.float64).sum(), torch.full_like(sums[0], ratio.numel())]
        return cls(torch.stack([value.to(torch.float64) for value in sums]))

    @classmethod
    def none(cls, device: torch.device) -> UpdateStats:
        """The sums of a step that was not taken: zeros."""
        return cls(torch.zeros(SUMS, dtype=torch.float64, device=device))

    def where(self, taken: Tensor | bool) -> UpdateStats:
        """These sums if `taken` is true (a bool, or a 0-d bool tensor), else zeros."""
        return self if taken is True else UpdateStats(torch.where(torch.as_tensor(taken), self.sums, 0.0))

    @classmethod
    def total(cls, stats: list[UpdateStats]) -> UpdateStats:
        """The sums over several parameters or steps.

        Raises:
            ValueError: for an empty list.
        """
        if not stats:
            raise ValueError("stats must not be empty")
        device = stats[0].sums.device
        return cls(torch.stack([s.sums.to(device) for s in stats]).sum(dim=0))

    def __getattr__(self, name: str) -> float:
        if name in FIELDS:
            return float(self.sums[FIELDS.index(name)])
        raise AttributeError(name)

    @property
    def effective_descent_quality(self) -> float:
        """Projection of the stored update on the intended one, over the latter's norm: 1 if nothing is lost.

        Source: Collage, Definition 3.3, divided by the norm of the intended update; NaN if that is zero.
        """
        return self._ratio(self.stored_dot, self.intended_squared)

    @property
    def visible_descent_quality(self) -> float:
        """The same for the visible update: the paper's definition, which credits no low word."""
        return self._ratio(self.visible_dot, self.intended_squared)

    @property
    def lost_updates(self) -> float:
        """Share of the intended updates other than zero that changed nothing stored (Collage, Definition 3.2)."""
        return self._ratio(self.stored_lost, self.intended_nonzero)

    @property
    def lost_visible_updates(self) -> float:
        """Share of the intended updates other than zero that left the parameter as it was."""
        return self._ratio(self.visible_lost, self.intended_nonzero)

    @property
    def rms(self) -> float:
        """RMS_t, the root of the mean of g^2 / max(v_hat, eps^2): about 1 while v_hat is an honest average of g^2.

        Source: Wortsman et al. 2023, Section 3.4. NaN for rules without a second moment.
        """
        return math.sqrt(self._ratio(self.ratio_squares, self.ratio_elements))

    @staticmethod
    def _ratio(part: float, whole: float) -> float:
        return part / whole if whole else float("nan")


class StepStats(Mapping[str, UpdateStats]):
    """What one step did, by the name of the parameter.

    Rows of a kernel's table become `UpdateStats` on first access, as making three hundred of them takes time.
    """

    def __init__(self) -> None:
        self._stats: dict[str, UpdateStats] = {}
        self._tables: list[tuple[Sequence[str], Tensor]] = []

    def add_table(self, names: Sequence[str], rows: Tensor) -> None:
        """Add the sums of some parameters: float64 (parameters, 8)."""
        self._tables.append((names, rows))
        self._stats = {}

    def tables(self) -> list[tuple[Sequence[str], Tensor]]:
        """All sums on their devices: names of parameters, and float64 (parameters, 8).

        The names of a kernel's table are the same list at every step.
        """
        return list(self._tables)

    def _all(self) -> dict[str, UpdateStats]:
        if not self._stats:
            for names, rows in self._tables:
                self._stats |= zip(names, map(UpdateStats, rows.unbind()), strict=True)
        return self._stats

    def __getitem__(self, name: str) -> UpdateStats:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return sum(len(names) for names, _ in self._tables)
