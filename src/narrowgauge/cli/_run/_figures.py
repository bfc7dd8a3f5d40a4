"""Which figures there are, in the order of the page, and which a run has no records for."""

from __future__ import annotations

from collections.abc import Callable

from narrowgauge.gauges._history import History

from ._codes import maps, usage
from ._figure import Figure
from ._ranges import features, formats, loss_scale
from ._updates import loss, lost, quality

# Neighbours are of about the same height: they stand side by side.
MAKERS: tuple[Callable[[History], Figure | str], ...] = (
    loss,
    quality,
    lost,
    formats("gradient", "gradients"),
    formats("activation", "activations"),
    formats("activation_gradient", "gradients of activations"),
    features,
    loss_scale,
    maps,
    usage,
)


def figures(history: History) -> tuple[list[Figure], list[str]]:
    """All figures there are records for, and a sentence for each that has none."""
    made = [make(history) for make in MAKERS]
    return [f for f in made if isinstance(f, Figure)], [f for f in made if isinstance(f, str)]
