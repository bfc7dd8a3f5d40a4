"""Whether a training step is faster with swapped layers: the step itself is timed, with them and without, in turns.

A layer that is timed alone cannot tell. Eight bits take more launches than nn.Linear; alone, a layer's time on the
device may hide those, and in a step that waits for the host anyway they are what it waits for longer. Only the step
knows which of the two it is.

A gain is one that nearly all rounds show, so what is asked of it grows with the noise of the machine, by itself.
Every rank of a process group takes the same number of steps, whatever its clock says, as steps have collectives in
them; a step is over when the slowest rank has taken it, so a round's time is that of the slowest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.linear._speeds import of_all_ranks, seconds

WARM_UP = 3  # steps of each side: the first compiles, and a compiler's CUDA graphs are recorded in the next
ROUNDS, STEPS = 7, 2  # and so many counted steps of each side in a round
ENOUGH = 6  # rounds; of two equal steps either is faster in so many with a chance of 8 in 128


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a training step, one figure a round.

    Attributes:
        swapped: with the swapped layers.
        plain: without.
    """

    swapped: tuple[float, ...]
    plain: tuple[float, ...]

    @property
    def faster(self) -> bool:
        """Whether the step gains by swapping, beyond noise."""
        return self._wins >= ENOUGH

    @property
    def medians(self) -> tuple[float, float]:
        """Of a step with the swapped layers, and without."""
        return statistics.median(self.swapped), statistics.median(self.plain)

    def __str__(self) -> str:
        return f"faster in {self._wins} of {ROUNDS} rounds: {shown(self.medians)}"

    @property
    def _wins(self) -> int:
        return sum(own < other for own, other in zip(self.swapped, self.plain, strict=True))


def shown(times: tuple[float, float]) -> str:
    """Both times of a step in words."""
    own, plain = (f"{1e3 * value:.{1 if value >= 1e-2 else 3}f}" for value in times)
    return f"{own} ms, {plain} with nn.Linear"


def time_step(step: Callable[[], Any], swap: Callable[[bool], None], devices: Iterable[torch.device]) -> StepTimes:
    """Time a step with swapped layers and without; every rank of a process group has to call it.

    Args:
        step: takes one.
        swap: puts the layers on, or takes them off; they may be already.
        devices: those that the step works on.
    """
    devices = tuple(devices)
    times: dict[bool, list[float]] = {True: [], False: []}
    # Beyond so many versions of a piece of code torch.compile runs it eagerly; here there are those of both sides.
    config: Any = torch._dynamo.config
    with config.patch(recompile_limit=2 * config.recompile_limit):
        for side in (False, True):
            swap(side)
            for _ in range(WARM_UP):
                step()
        for i in range(ROUNDS):
            # Either is first by turns, so that a machine that slows down favours neither.
            for side in (False, True) if i % 2 else (True, False):
                swap(side)
                step()  # the first after a swap finds other versions of its code, and is not counted
                times[side].append(seconds(step, STEPS, *devices))
    ranks = of_all_ranks((times[True], times[False]))
    swapped, plain = (tuple(map(max, zip(*sides, strict=True))) for sides in zip(*ranks, strict=True))
    return StepTimes(swapped, plain)
