"""Steps of parameters whose gradients are on their way: each is stepped as soon as its own is there.

A step that treats parameters one by one needs one gradient at a time. One that has to look at all gradients before
anything moves (a norm, a loss scaler's verdict, `nonfinite="raise"`) waits for all of them, and then only what it
has written can travel beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from narrowgauge.optim._dispatch import Dispatch, Turn
from narrowgauge.optim._gradient_factor import GradientFactor

if TYPE_CHECKING:
    from narrowgauge.optim._judged import Judged
    from narrowgauge.optim._optimizer import NarrowOptimizer


class Carrier(Protocol):
    """Who brings gradients, and takes weights away."""

    def order(self, ps: Sequence[Tensor]) -> Sequence[int]:
        """The places of some parameters in the order in which their gradients arrive."""

    def arrive(self, p: Tensor) -> None:
        """Wait until a parameter and its gradient are there."""

    def leave(self, p: Tensor) -> None:
        """A parameter has been stepped; waits for nothing."""


class ArrivingDispatch(Dispatch):
    """The steps of one optimizer of parameters on a CPU, in the order of arrival.

    Args:
        carrier: brings gradients.
    """

    def __init__(self, carrier: Carrier) -> None:
        super().__init__()
        self._carrier = carrier
        self.eager = "parameters are stepped one by one, as their gradients arrive"

    def step(self, optimizer: NarrowOptimizer) -> None:
        groups = optimizer.param_groups
        looks = any(group["nonfinite"] == "raise" for group in groups)
        if looks or GradientFactor.of(optimizer) is not None:
            for group in groups:
                for p in group["params"]:
                    self._carrier.arrive(p)
        super().step(optimizer)

    def _step_alone(
        self,
        optimizer: NarrowOptimizer,
        turns: Mapping[int, Turn],
        factor: GradientFactor | None,
        judge: Judged | None,
    ) -> None:
        places = list(turns)
        for number in self._carrier.order([turn[1] for turn in turns.values()]):
            place = places[number]
            p = turns[place][1]
            self._carrier.arrive(p)
            super()._step_alone(optimizer, {place: turns[place]}, factor, judge)
            self._carrier.leave(p)
