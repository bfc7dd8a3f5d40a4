"""A rule's equation as a graph of operations, for kernels.

Rules are Python on torch tensors, and that is their only form: no rule is written twice, and one that somebody adds
is as fast as ours. The scalars of a rule, the sums of its terms among them, are the numbers of the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.kernels._algebra import simplified
from narrowgauge.kernels._graph import Node, Recorder
from narrowgauge.optim._arithmetic import Fp32Arithmetic
from narrowgauge.rules import Rule, squared_ratio

# The number that every gradient of a step is multiplied by, where there is one: a rule does not know of it.
FACTOR = "grad_factor"


@dataclass(frozen=True)
class Equation:
    """What a rule computes for one element.

    Attributes:
        slots: names of the moments.
        terms: what to sum before the rest can be computed, by name; empty for most rules.
        delta: the update.
        moments: the new moments.
        reach: what a unit of each moment will still add to the weight; for those that have it.
        ratio: the gradient's square over the second moment (`squared_ratio`), for gauges; None without one.
    """

    slots: tuple[str, ...]
    terms: Mapping[str, Node]
    delta: Node
    moments: Mapping[str, Node]
    reach: Mapping[str, Node]
    ratio: Node | None

    def roots(self) -> tuple[Node, ...]:
        """Everything that the step itself computes."""
        return (self.delta, *self.moments.values(), *self.reach.values())


@functools.lru_cache(maxsize=256)
def equation(rule: Rule, slots: tuple[str, ...], numbers: tuple[str, ...]) -> Equation:
    """The equation of a rule.

    Args:
        rule: the rule.
        slots: names of the moments that it keeps.
        numbers: names of the scalars that it is given; where `FACTOR` is one, the gradient times it too.

    Raises:
        NotImplementedError: if it does something that is not elementwise, or that is not known here.
    """
    try:
        found, again = (_recorded(Recorder(shape), rule, slots, numbers) for shape in ((2, 3), (5, 4)))
    except NotImplementedError:
        raise
    except Exception as error:  # a rule is anybody's, and may not expect such tensors
        raise NotImplementedError(f"recording it failed: {error}") from error
    if found != again:
        raise NotImplementedError("what it does depends on the shape: it has no kernel")
    return found


def _recorded(record: Recorder, rule: Rule, slots: tuple[str, ...], numbers: tuple[str, ...]) -> Equation:
    weight = record.element("weight")
    # A product of its own. Taken into the numbers of a square it would be squared there, and a factor of 1e-20, for
    # gradients that explode, is none any more: v would stay 0, and m over its root would not.
    grad = record.scaled("grad", FACTOR) if FACTOR in numbers else record.element("grad")
    moments = {name: record.element(name) for name in slots}
    s = {name: record.number(name) for name in numbers}
    arithmetic = Fp32Arithmetic()
    with torch.no_grad(), record:
        terms = rule.terms(arithmetic, weight, grad, moments, s)
        s |= {name: record.number(name) for name in (*terms, *(("elements",) if terms else ()))}
        delta, new = rule.update(arithmetic, weight, grad, moments, s)
        reach = rule.reach(arithmetic, weight, new, s)
        ratio = squared_ratio(rule, arithmetic, weight, grad, moments, s)
    made: dict[Any, Any] = {("", "delta"): delta}
    made |= {("moments", name): value for name, value in new.items()}
    made |= {("reach", name): value for name, value in reach.items()}
    gauged = {"ratio": record.node(ratio)} if ratio is not None else {}
    step = simplified({key: record.node(value) for key, value in made.items()}, gauged)
    return Equation(
        slots,
        simplified({name: record.node(value) for name, value in terms.items()}),
        step["", "delta"],
        {name: step["moments", name] for name in new},
        {name: step["reach", name] for name in reach},
        step.get("ratio"),
    )


@functools.lru_cache(maxsize=256)
def scalar_graph(rule: Rule, numbers: tuple[str, ...], others: tuple[tuple[str, Any], ...]) -> dict[str, Node]:
    """A rule's scalars as graphs of its hyperparameters and of ``"step"``.

    Args:
        rule: the rule.
        numbers: names of the hyperparameters that are numbers; the parts of a tuple are ``name.0`` and so on.
        others: the hyperparameters that are none, and what they are.

    Raises:
        NotImplementedError: if it decides by a number what to compute.
    """
    record = Recorder(())
    group: dict[str, Any] = dict(others)
    for name in numbers:
        key, dot, _ = name.partition(".")
        group[key] = (*group.get(key, ()), record.number(name)) if dot else record.number(name)
    step = record.number("step")
    with torch.no_grad(), record:
        scalars = rule.scalars(group, step)
    return {name: record.node(value) for name, value in scalars.items()}
