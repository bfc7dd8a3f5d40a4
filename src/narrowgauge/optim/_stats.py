"""What one step did to one parameter, as sums.

Sums, not ratios: they can be added over parameters, steps and ranks, and a fused kernel can make them while the
numbers are in registers. Two effective updates are told apart. The *stored* one is the change of all that is
kept, low words included: what the optimizer will remember. The *visible* one is the change of the parameter
alone: what the model's next forward pass sees, and what Collage's Equation 2 defines.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_FIELDS = ("intended_squared", "stored_dot", "visible_dot", "intended_nonzero", "stored_lost", "visible_lost")


@dataclass(frozen=True)
class UpdateStats:
    """Sums over the elements of one parameter, or of many.

    Attributes:
        sums: float64 tensor (6,): the squared norm of the intended update; its dot products with the stored and
            with the visible effective update; how many intended updates are not zero; how many of those
            changed nothing that is stored; how many changed nothing that the model sees.
    """

    sums: Tensor

    @classmethod
    def measure(cls, intended: Tensor, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> UpdateStats:
        """The sums of one update.

        Args:
            intended: the update.
            before, after: (all that is stored, what is visible) in its shape, float64.
        """
        intended = intended.to(torch.float64)
        stored, visible = after[0] - before[0], after[1] - before[1]
        nonzero = intended != 0
        sums = (
            intended.square().sum(),
            (intended * stored).sum(),
            (intended * visible).sum(),
            nonzero.sum(),
            (nonzero & (stored == 0)).sum(),
            (nonzero & (visible == 0)).sum(),
        )
        return cls(torch.stack([value.to(torch.float64) for value in sums]))

    def where(self, taken: Tensor) -> UpdateStats:
        """These sums if `taken`, a 0-d bool tensor, is true; zeros otherwise."""
        return UpdateStats(torch.where(taken, self.sums, 0.0))

    @classmethod
    def total(cls, stats: list[UpdateStats]) -> UpdateStats:
        """The sums over several parameters or steps.

        Raises:
            ValueError: for an empty list.
        """
        if not stats:
            raise ValueError("stats: got an empty list, takes at least one")
        device = stats[0].sums.device
        return cls(torch.stack([s.sums.to(device) for s in stats]).sum(dim=0))

    def __getattr__(self, name: str) -> float:
        if name in _FIELDS:
            return float(self.sums[_FIELDS.index(name)])
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

    @staticmethod
    def _ratio(part: float, whole: float) -> float:
        return part / whole if whole else float("nan")
