"""The curve of the learning rate."""

from __future__ import annotations

import math

SCHEDULES = ("constant", "linear", "cosine")


def schedule(kind: str, number: int, *, steps: int, warmup: int, final: float) -> float:
    """The factor of the learning rate at a step: a linear rise, then constant, or down to a share of itself.

    It depends on the step's number alone. So a resumed run needs no scheduler's state, and one whose number of
    steps is changed takes the new curve from where it is.

    Args:
        kind: after the rise, one of `SCHEDULES`; ``"cosine"`` is one cycle of Loshchilov and Hutter 2017.
        number: of the step, from 1.
        steps: of the run; what falls reaches `final` at the last one.
        warmup: steps of the linear rise; 0 for none.
        final: the last factor, from 0 to 1, of a schedule that falls.
    """
    if number <= warmup or kind == "constant":
        return min(1.0, number / max(1, warmup))
    done = min(1.0, (number - warmup) / max(1, steps - warmup))
    left = 1.0 - done if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return final + (1.0 - final) * left
