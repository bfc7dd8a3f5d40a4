"""What an update rule is.

A rule is a pure function of one parameter's numbers: weight, gradient and moments in, update and moments out.
Where those numbers live, in how many bits, on which device and in whose memory, is somebody else's business.
Averages are the one operation that depends on the storage (Collage averages an expansion by other means than a
float), so the rule asks an `Arithmetic` for them; the rest is written with the ordinary operators.

A momentum is spent over many steps. How far it will still carry the weight, a rule can often say (`reach`), and a
storage that must round it can then round without loss.

Most rules treat every element by itself. A rule that needs a number of the whole parameter (the norm of its
weights, the mean square of its update) says which elements' numbers to sum (`terms`), and finds the sums among its
scalars: so a kernel, or ranks that hold shards of one parameter, can add them up as they like.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        torch_key: what torch's namesake calls it in its state.
        start: the option that holds its first value; zero without one.
        option: the option that has to be on for it to be kept; kept always without one.
        unit: the slot whose root is this one's natural unit: the update divides by it.
    """

    name: str
    signed: bool
    preset: str = "expansion"
    torch_key: str | None = None
    start: str | None = None
    option: str | None = None
    unit: str | None = None


class Arithmetic(Protocol):
    """How a moment, whatever it is made of, is averaged and read."""

    def accumulate(self, average: Any, x: Tensor, decay: Scalar, share: Scalar) -> Any:
        """decay * average + share * x."""

    def accumulate_square(self, average: Any, x: Tensor, decay: Scalar, share: Scalar) -> Any:
        """decay * average + share * x^2, without overflow where only the square of x would."""

    def square(self, x: Tensor) -> Tensor:
        """x^2 as a term of a sum, in more than float32 unless the algorithm is followed to the letter."""

    def of_whole(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A function of the whole parameter's x, for what is not elementwise: ranks may hold parts of it."""

    def value(self, average: Any) -> Tensor:
        """The number that the equation reads."""

    def root(self, x: Tensor, by: Scalar) -> Tensor:
        """The square root of x / by."""


class Rule(Protocol):
    """An update rule.

    Attributes:
        name: the rule's name, as printed.
        moments: all that it may keep, under any hyperparameters.
        averaging: names of the scalars that only decay or weigh averages: they are numbers of the moment's format,
            whatever that is, and not of the equation's.
        betas: how many decay rates the group's ``betas`` hold.
    """

    name: str
    moments: tuple[Slot, ...] = ()
    averaging: tuple[str, ...] = ()
    betas: int = 2

    def slots(self, group: Mapping[str, Any]) -> tuple[Slot, ...]:
        """The moments it keeps under these hyperparameters."""
        return tuple(slot for slot in self.moments if slot.option is None or group.get(slot.option))

    def scalars(self, group: Mapping[str, Any], step: Scalar) -> dict[str, Scalar]:
        """The equation's scalars from a parameter group's hyperparameters, in double precision on the host.

        Args:
            group: hyperparameters.
            step: how many steps this parameter has taken, the present one included; a 0-d tensor on the device
                gives scalars on the device.
        """

    def terms(
        self,
        arithmetic: Arithmetic,
        weight: Tensor,
        grad: Tensor,
        moments: Mapping[str, Any],
        s: Mapping[str, Scalar],
    ) -> dict[str, Tensor]:
        """What to sum over the whole parameter before `update`: a tensor of the parameter's shape a sum.

        The sums are among the scalars of `update` under the same names, and so is ``elements``, the number of
        elements of the whole parameter.
        """
        return {}

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
            s: what `scalars` gave, and the sums of `terms`.

        Returns:
            (delta, moments): what to add to the weight, and the new moments.
        """
        raise NotImplementedError

    def reach(
        self,
        arithmetic: Arithmetic,
        weight: Tensor,
        moments: Mapping[str, Any],
        s: Mapping[str, Scalar],
    ) -> dict[str, Tensor | Scalar]:
        """What a unit of a new moment will still add to the weight at later steps, all of them together.

        As far as it can be said now: while the learning rate and everything else that the moment is multiplied by
        stay as they are. A storage that cannot keep all of a moment hands the rest over to the weight by this
        factor. It exists where the update is linear in the moment; a moment without it is left out.

        Args:
            arithmetic, weight: as for `update`.
            moments: those that `update` returned.
            s: those that `update` was given.
        """
        return {}


def has_terms(rule: Rule) -> bool:
    """Whether a rule asks for sums over a parameter."""
    return type(rule).terms is not Rule.terms
