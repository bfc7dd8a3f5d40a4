"""What one step did to a parameter, as terms of eight sums."""

from __future__ import annotations

from torch import Tensor

FIELDS = (
    "intended_squared", "stored_dot", "visible_dot", "intended_nonzero", "stored_lost", "visible_lost",
    "ratio_squares", "ratio_elements",
)  # fmt: skip
SUMS = len(FIELDS)
# Ours. An update below this share of its tensor's longest comes at the end of a learning rate's decay. All of them
# together are half a percent of what a cosine to zero moves a weight.
SHORT = 0.05


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
