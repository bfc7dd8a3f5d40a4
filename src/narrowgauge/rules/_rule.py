"""What an update rule is.

A rule is a pure function of one parameter's numbers: weight, gradient and moments in, update and moments out. It
does not know where these numbers are stored, in how many bits or on which device. Only averages depend on the
storage (Collage averages an expansion by other means than a float), so the rule asks an `Arithmetic` for them; the
rest of the equation is written with the ordinary operators.

Most updates are a direction times the learning rate, and perhaps a decay. Such a rule writes the two parts,
`direction` and `delta`, and `update` puts them together: options that change the direction alone (`_cautious`) then
leave the decay as it is. A rule that has no such parts writes `update` itself.

A momentum is spent over many steps. If the rule can say how far it will still move the weight (`remaining_effect`),
a storage that rounds the momentum can pass the rounding error on to the weight.

Most rules treat every element by itself. A rule that needs a number of the whole parameter (the norm of its
weights, the mean square of its update) names the elementwise terms to sum (`terms`) and finds the sums among its
scalars. A kernel, or ranks that hold shards of one parameter, can then add them up in their own way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

Scalar = float | Tensor
Scalars = Mapping[str, Scalar]
Moments = Mapping[str, Any]
Terms = dict[str, Tensor]
Effects = dict[str, Tensor | Scalar]
# What to add to the weight, or its direction, and the new moments.
Update = tuple[Tensor, dict[str, Any]]
# The new v, and v corrected for its start at zero.
Second = tuple[Any, Tensor]
# `Slot.start` of a slot that starts at the weight.
WEIGHT = "weight"


@dataclass(frozen=True)
class Slot:
    """A moment of a rule.

    Attributes:
        name: its letter in the equation: ``m`` for the momentum, ``v`` for the second moment.
        signed: False for averages of squares, whose codes need no sign.
        preset: its storage under ``states="expansion"``, given as one name for all slots.
        torch_key: its name in the state of torch's optimizer of the same name, or in the usual one's if torch has
            none.
        torch_factors: the names of its row means and column means there, if torch's optimizer factors matrices.
        start: the option that holds its first value, or `WEIGHT`: it starts at the weight; without one at zero.
        option: the option that switches it on; without one it is always on.
        normalizer: the slot whose root the update divides this one by; the root is a natural unit for storing it.
        storages: the names of the storages that it may have, the first by default; empty for all. For a slot that
            is a weight: codes made for moments lose the digits in which it moves.
    """

    name: str
    signed: bool
    preset: str = "expansion"
    torch_key: str | None = None
    torch_factors: tuple[str, str] | None = None
    start: str | None = None
    option: str | None = None
    normalizer: str | None = None
    storages: tuple[str, ...] = ()


class Arithmetic(Protocol):
    """How a moment is averaged and read, whatever its storage."""

    def accumulate(self, average: Any, x: Tensor, decay: Scalar, new_weight: Scalar) -> Any:
        """decay * average + new_weight * x."""

    def accumulate_square(self, average: Any, x: Tensor, decay: Scalar, new_weight: Scalar) -> Any:
        """decay * average + new_weight * x^2, without overflow where only the square of x would."""

    def square(self, x: Tensor) -> Tensor:
        """x^2 as a term of a sum, wider than float32 except in strict arithmetic."""

    def of_whole(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A function of the whole parameter's x that is not elementwise; ranks may hold parts of x."""

    def value(self, average: Any) -> Tensor:
        """The number that the equation reads."""

    def factored(self, slot: str, average: Any, least: Scalar) -> Tensor:
        """`value`; of a slot that is stored as row means r and column means c, r c / max(mean(r), least)."""

    def root(self, x: Tensor, by: Scalar) -> Tensor:
        """The square root of x / by."""


class Rule(Protocol):
    """An update rule.

    Attributes:
        name: the rule's name, as printed.
        moments: every moment it can have, under any hyperparameters.
        averaging: names of the scalars that only decay or weigh averages. Strict arithmetic rounds them to the
            moment's format, the others to the equation's.
        betas: how many decay rates the group's ``betas`` hold.
        torch_numbers: the scalars that torch's optimizer of the same name has in its state; here they follow from
            the step.
        given_factors: the rule for kernels, if this one asks `Arithmetic.factored`. Its moment is what `factored`
            returned, and it returns that unchanged; `second_moment` of this one must not read the weight. None:
            eager torch takes the steps.
    """

    name: str
    moments: tuple[Slot, ...] = ()
    averaging: tuple[str, ...] = ()
    betas: int = 2
    torch_numbers: tuple[str, ...] = ()
    given_factors: Rule | None = None

    def __hash__(self) -> int:  # rules are values; mypy wants it said of a protocol
        return object.__hash__(self)

    def slots(self, group: Mapping[str, Any]) -> tuple[Slot, ...]:
        """The moments that are on under these hyperparameters."""
        return tuple(slot for slot in self.moments if slot.option is None or group.get(slot.option))

    def of_dim(self, dim: int) -> Rule:
        """The rule of a parameter with so many dimensions: this one, or another for vectors and scalars."""
        return self

    def scalars(self, group: Mapping[str, Any], step: Scalar) -> dict[str, Scalar]:
        """The equation's scalars from a parameter group's hyperparameters, in double precision on the host.

        Args:
            group: hyperparameters.
            step: the number of this parameter's present step, from 1; a 0-d tensor on the device gives scalars on
                the device.
        """

    def terms(self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars) -> Terms:
        """Terms to sum over the whole parameter before `update`: by name, a tensor of the parameter's shape.

        The sums are among the scalars of `update` under the same names, and so is ``elements``, the number of
        elements of the whole parameter.
        """
        return {}

    def direction(
        self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars
    ) -> Update:
        """The direction of a step, without learning rate and decoupled decay, and the new moments.

        The arguments are those of `update`, the sums of `terms` not among the scalars.
        """
        missing = f"{self.name} writes its update as a whole"  # a rule may: this method is not abstract
        raise NotImplementedError(missing)

    def delta(self, u: Tensor, weight: Tensor, s: Scalars) -> Tensor:
        """What to add to the weight along a direction u: -lr u, unless the decay is decoupled."""
        return -s["lr"] * u

    def update(self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars) -> Update:
        """One step: `delta` along `direction`, or an equation that has no such parts.

        Args:
            arithmetic: averages and reads moments.
            weight, grad: tensors of one shape.
            moments: one per slot.
            s: what `scalars` returned, and the sums of `terms`.

        Returns:
            (delta, moments): what to add to the weight, and the new moments.
        """
        u, moments = self.direction(arithmetic, weight, grad, moments, s)
        return self.delta(u, weight, s), moments

    def remaining_effect(self, arithmetic: Arithmetic, weight: Tensor, moments: Moments, s: Scalars) -> Effects:
        """How much one unit of each new moment will add to the weight in all later steps together.

        It assumes that the learning rate and everything else the moment is multiplied by stay as they are. A
        storage that rounds a moment gives the rounding error times this factor to the weight. Only moments in
        which the update is linear have one; the others are left out.

        Args:
            arithmetic, weight: the arguments of `update`.
            moments: the moments that `update` returned.
            s: the scalars that `update` was given.
        """
        return {}


class Around(Rule):
    """An option of a step, as a rule around another: its moments and scalars, its name and a `suffix`."""

    suffix: str
    rule: Rule

    def __init__(self, rule: Rule) -> None:
        self.name = f"{rule.name}, {self.suffix}"
        self.moments = rule.moments
        self.averaging = rule.averaging
        self.betas = rule.betas
        self.rule = rule

    def slots(self, group: Mapping[str, Any]) -> tuple[Slot, ...]:
        return self.rule.slots(group)

    def scalars(self, group: Mapping[str, Any], step: Scalar) -> dict[str, Scalar]:
        return self.rule.scalars(group, step)


def bare(rule: Rule) -> Rule:
    """A rule without the options around it."""
    return bare(rule.rule) if isinstance(rule, Around) else rule


def smaller(a: Scalar, b: Scalar) -> Scalar:
    """The smaller of two scalars, without waiting for a device."""
    if isinstance(b, Tensor):
        return b.clamp_max(a)
    return a.clamp_max(b) if isinstance(a, Tensor) else min(a, b)


def larger(a: Scalar, b: Scalar) -> Scalar:
    """The larger of two scalars, without waiting for a device."""
    return -smaller(-a, -b)


def has_terms(rule: Rule) -> bool:
    """Whether a rule needs sums over a parameter."""
    return type(rule).terms is not Rule.terms
