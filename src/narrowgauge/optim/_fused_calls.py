"""Calls of the compiled steps of one optimizer, with what its parameters have in common worked out once.

A model has hundreds of small parameters, whose steps take the processor a microsecond each. So the numbers of a
group are worked out once a step for all of its parameters, and what belongs to a parameter's plan stays with it.
Everything that may change in between is looked at: options, tensors, their dtypes and where they lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.optim._equation import FACTOR
from narrowgauge.optim._fused_cpu import kernel_for, words_for
from narrowgauge.optim._fused_cpu_kernel import Kernel, Place
from narrowgauge.optim._plan import ParameterPlan
from narrowgauge.optim._shards import origin_of, whole_of
from narrowgauge.optim._unchanged import Settled
from narrowgauge.optim._update import numbers
from narrowgauge.rules import Rule

_CPU = torch.device("cpu")
# Numbers of steps that parameters of one group are at.
_COUNTS = 8


@dataclass(slots=True)
class Call:
    """One parameter's step, not taken yet."""

    kernel: Kernel
    words: list[Tensor]
    given: Mapping[str, Any]
    place: Place
    maximize: bool

    def finite(self, grad: Tensor) -> bool:
        """Whether all of a gradient is."""
        return self.kernel.finite(grad)

    def sums(self) -> dict[str, float]:
        """The sums of the rule's terms over what lies here, by name."""
        return self.kernel.sums(self.words, self.given, self.place, self.maximize)

    def take(self, summed: Mapping[str, float] | None = None) -> None:
        """Take it: parameter and state are written over; with sums over all of it where ranks share it."""
        self.kernel.take(self.words, self.given, self.place, self.maximize, summed)


class Calls:
    """One optimizer's."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}

    def of(
        self,
        plan: ParameterPlan,
        p: Tensor,
        grad: Tensor,
        state: Mapping[str, Tensor],
        group: Mapping[str, Any],
        factor: float | None = None,
    ) -> Call | None:
        """What steps a parameter in one pass; None where the eager step has to.

        Args:
            plan, p, grad, state, group: as of `update`.
            factor: what the gradient is multiplied by, if anything.
        """
        if not p.is_cpu:
            return None
        count = int(state["step"].item()) + 1
        known = self._groups.get(id(group))
        if known is None or not known.holds(group):
            known = self._groups[id(group)] = _Group(group)
        given = known.scalars(plan.rule, count, factor)
        kernel = kernel_for(plan, p, group, given)
        if not isinstance(kernel, Kernel):
            return None
        words = words_for(kernel, plan, p, grad, state)
        place = Place(group["seed"], plan.index, count, origin_of(plan.shard), whole_of(p, plan.shard))
        return Call(kernel, words, given, place, group["maximize"]) if words is not None else None


class _Group:
    """A group's numbers, as they were when this was made."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        self._group, self._settled = group, Settled(group)
        self._scalars: dict[tuple[int, int, float | None], tuple[Rule, Mapping[str, Any]]] = {}

    def holds(self, group: Mapping[str, Any]) -> bool:
        """Whether they are this group's still."""
        return self._group is group and self._settled.holds(group)

    def scalars(self, rule: Rule, count: int, factor: float | None) -> Mapping[str, Any]:
        """A rule's scalars at a step, the factor among them: always the same object for the same ones."""
        known = self._scalars.get((id(rule), count, factor))
        if known is None:
            if len(self._scalars) >= _COUNTS:
                self._scalars.clear()
            # With the rule, whose identity is of no use once it is gone.
            given = rule.scalars(numbers(self._group, _CPU), count)
            given = given if factor is None else {**given, FACTOR: factor}
            known = self._scalars[id(rule), count, factor] = rule, given
        return known[1]
