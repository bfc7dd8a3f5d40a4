"""What an update rule is.

A rule is a pure function of one parameter's numbers: weight, gradient and moments in, update and moments out.
Where those numbers live, in how many bits, on which device and in whose memory, is somebody else's business.
Averages are the one operation that depends on the storage (Collage averages an expansion by other means than a
float), so the rule asks an `Arithmetic` for them; the rest is written with the ordinary operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

Scalar = float | Tensor


@dataclass(frozen=True)
class Slot:
    """A moment that a rule keeps.

    Attributes:
        name: the equation's letter for it.
        signed: False for averages of squares, which spend no code on a sign.
        preset: what the storage name ``"expansion"``, given for all slots at once, means for this one.
    """

    name: str
    signed: bool
    preset: str = "expansion"


class Arithmetic(Protocol):
    """How a moment, whatever it is made of, is averaged and read."""

    def ema(self, average: Any, x: Tensor, beta: float) -> Any:
        """beta * average + (1 - beta) * x."""

    def ema_of_square(self, average: Any, x: Tensor, beta: float) -> Any:
        """beta * average + (1 - beta) * x^2, without overflow where only the square of x would."""

    def value(self, average: Any) -> Tensor:
        """The number that the equation reads."""

    def sqrt(self, x: Tensor) -> Tensor:
        """The square root."""


class Rule(Protocol):
    """An update rule.

    Attributes:
        name: the rule's name, as printed.
        slots: the moments that it keeps.
    """

    @property
    def name(self) -> str: ...

    @property
    def slots(self) -> tuple[Slot, ...]: ...

    def scalars(self, group: Mapping[str, Any], step: Scalar) -> dict[str, Scalar]:
        """The equation's scalars from a parameter group's hyperparameters, in double precision on the host.

        Args:
            group: hyperparameters.
            step: how many steps this parameter has taken, the present one included; a 0-d tensor on the device
                gives scalars on the device.
        """

    def update(
        self,
        arithmetic: Arithmetic,
        weight: Tensor,
        grad: Tensor,
        moments: Mapping[str, Any],
        s: Mapping[str, Scalar],
    ) -> tuple[Tensor, dict[str, Any]]:
        """One step.

        Args:
            arithmetic: averages and reads moments.
            weight, grad: tensors of one shape.
            moments: one a slot.
            s: what `scalars` gave.

        Returns:
            (delta, moments): what to add to the weight, and the new moments.
        """
