"""What one step did to a parameter, as terms of eight sums, and which steps are short."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

FIELDS = (
    "intended_squared", "stored_dot", "visible_dot", "intended_nonzero", "stored_lost", "visible_lost",
    "ratio_squares", "ratio_elements",
)  # fmt: skip
SUMS = len(FIELDS)
# Ours. Updates below this share of their tensor's longest come at the end of a learning rate's decay. All of them
# together are half a percent of what a cosine to zero moves a weight.
_SHORT = 0.05


class Longest:
    """Tells by tensor which updates are short beside its longest; a single outlier is no longest update.

    Attributes:
        seen: by name, the largest median of three norms in a row, and the last two norms; plain values.
    """

    def __init__(self, seen: Mapping[str, Sequence[float]] | None = None) -> None:
        self.seen = {name: list(values) for name, values in (seen or {}).items()}

    def is_short(self, name: str, norm: float) -> bool:
        """Take in the norm of an update; whether it is short. One of 0, or not finite, says nothing."""
        if not 0 < norm < math.inf:
            return False
        longest, *last = self.seen.get(name, [0.0])
        last.append(norm)
        if len(last) == 3:
            longest = max(longest, sorted(last)[1])
        self.seen[name] = [longest, *last[-2:]]
        return norm < _SHORT * longest


def update_terms(intended: Tensor, stored: Tensor, visible: Tensor) -> list[Tensor]:
    """The terms, by element, of the first six sums; the other two are g^2 / max(v_hat, eps^2) and 1.

    Args:
        intended: the intended update; NaN counts as zero.
        stored: the change of everything that is stored.
        visible: the change of the parameter. A change to or from NaN counts as none.
    """
    nonzero = intended.abs() > 0
    dots = [intended * change for change in ([stored] if visible is stored else [stored, visible])]
    lost = [nonzero & ~(change.abs() > 0) for change in ([stored] if visible is stored else [stored, visible])]
    return [intended.square(), dots[0], dots[-1], nonzero, lost[0], lost[-1]]
