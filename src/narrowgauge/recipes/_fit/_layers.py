"""The choice of a plan for each linear layer, by the errors of its multiplies and the noise of its gradient.

The gradient of a step's batch is a sample. From batch to batch it differs from the mean gradient by n times the
mean: n² is the variance over the squared mean, each summed over the weight's elements. An error ρ of a multiply, as
`_multiplies` measures it, is one more such difference. A multiply is done in eight bits only where

    ρ ≤ tolerance · n    and    ρ ≤ 0.1

The first limit is for errors that do not average out over tokens. They add up as the mean gradient does, to ρ
times the mean. The noise is n times the mean, so such errors are ρ/n of the noise, and `tolerance` is the most that
they may be. Errors that are independent from token to token average out as the noise does: they are ρ of the noise,
for any n. With the second limit they add at most 1 % to its variance.

The second limit also excludes errors that are not noise: numbers that become zero make results smaller. In
`docs/studies/inner_product_noise.md` a third of the error's variance lay along the exact gradient in the layers
with ρ² above 1 % (`c_attn`), and 1.1 % at most in those with ρ² below 0.07 %.

Each layer takes the cheapest plan whose multiplies are all allowed. Like layers with the same plan are one choice,
with the figures of the layer that has the largest error for its noise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from narrowgauge._arguments import Flag, Positive, check
from narrowgauge._text import exact_patterns, listed
from narrowgauge.linear import (
    HIGH_PRECISION,
    LLM_INT8,
    SWITCHBACK,
    SWITCHBACK_Q,
    TENSORWISE_FP8,
    EightBit,
    LinearPlan,
)
from narrowgauge.linear._plan import MULTIPLIES, Multiply
from narrowgauge.linear._quantize import Scaling
from narrowgauge.linear._swap import in_times
from narrowgauge.linear._tune import LayerKind, Timed, times
from narrowgauge.recipes._fit._multiplies import LayerRecords, Recorded, layer_errors
from narrowgauge.recipes._fitted import Computed, LayerChoice

# The largest error in eight bits, for any noise of the gradient; see the module.
MOST_ERROR = 0.1

# The scalings of each multiply's operands, the cheapest first. One scale for a tensor is cheaper than a scale for
# each vector, because several multiplies use the same codes. On an H200 a layer with all three multiplies in eight
# bits is 1.51 times as fast as nn.Linear with tensor-wise scales and 1.27 times with scales of vectors; with two,
# 1.29 and 1.28 (docs/which_linear.md, 32768 x 1280 x 5120: TENSORWISE_FP8, LLM_INT8, SWITCHBACK e4m3, SWITCHBACK_Q
# e4m3). Scales of blocks are left out: on an H100 a layer takes longer with them than with one scale for a tensor,
# and on normal numbers has the same noise (docs/decisions/block-wise-float8.md).
SCALINGS: dict[Multiply, tuple[tuple[Scaling, Scaling], ...]] = {
    "output": (("tensor", "tensor"), ("row", "tensor"), ("row", "row")),
    "grad_input": (("tensor", "tensor"), ("row", "tensor"), ("row", "column")),
    "grad_weight": (("tensor", "tensor"), ("column", "column")),
}
_NAMED = (SWITCHBACK, SWITCHBACK_Q, LLM_INT8, TENSORWISE_FP8)


def cost(plan: LinearPlan) -> tuple[int, int, int]:
    """How plans are ordered: by multiplies in high precision, operands with vector scales, and operands quantized.

    Source: docs/which_linear.md. Most of the time is in the multiplies, the rest in quantizing.
    """
    operands = [operand for name in MULTIPLIES for operand in plan.operands(name) or ()]
    vectors = sum(operand.scaling != "tensor" for operand in operands)
    return sum(getattr(plan, name) is None for name in MULTIPLIES), vectors, len(set(operands))


def plans(formats: Sequence[str]) -> list[LinearPlan]:
    """Every plan in some formats, the cheapest first, in the order of the formats where cost is equal.

    Args:
        formats: such as ``"int8"``, ``"e4m3"``, or ``"e4m3/e5m2"`` with the format of gradients. A plan has one of
            them in all of its multiplies.

    Raises:
        ValueError: for an empty list, unknown formats, or int8 beside float8 in one plan.
    """
    if isinstance(formats, str) or not formats:
        raise ValueError(f"formats must be a list such as ['int8', 'e4m3/e5m2'], got {formats!r}")
    made: dict[LinearPlan, None] = {}
    for text in formats:
        format, _, gradient = text.partition("/")
        for scalings in itertools.product(*((*SCALINGS[name], None) for name in MULTIPLIES)):
            output, grad_input, grad_weight = (None if one is None else EightBit(*one) for one in scalings)
            plan = LinearPlan(output, grad_input, grad_weight).with_format(
                cast(Any, format), cast(Any, gradient or None)
            )
            if plan != HIGH_PRECISION:
                made.setdefault(_with_name(plan))
    return [*sorted(made, key=cost), HIGH_PRECISION]


def _with_name(plan: LinearPlan) -> LinearPlan:
    format, gradient = _formats(plan)
    known = (one.name for one in _NAMED if one.with_format(cast(Any, format), cast(Any, gradient)) == plan)
    return replace(plan, name=next(known, "FITTED"))


def _formats(plan: LinearPlan) -> tuple[str, str]:
    """The format of inputs and weights, and that of gradients."""
    hows = {name: how for name in MULTIPLIES if (how := getattr(plan, name)) is not None}
    format = next(how.formats[1] for how in hows.values())
    return format, next((how.left_format for name, how in hows.items() if name != "output"), format)


@dataclass(frozen=True, eq=False)
class _Layer:
    """A measured layer: its errors, and the noise of its weight's gradient."""

    name: str
    recorded: Recorded
    tokens: int
    noise: float
    errors: Mapping[tuple[Multiply, EightBit], float]

    def of(self, plan: LinearPlan) -> dict[str, float]:
        """The errors of the multiplies that a plan does in eight bits."""
        return {name: self.errors[name, how] for name in MULTIPLIES if (how := getattr(plan, name)) is not None}

    def share(self, plan: LinearPlan) -> float:
        """The largest error over the gradient's noise; inf for errors that are not finite."""
        errors = self.of(plan).values()
        if not all(map(math.isfinite, errors)):
            return math.inf
        largest = max(errors, default=0.0)
        return largest / self.noise if self.noise else math.inf if largest else 0.0

    def limit(self, tolerance: float) -> float:
        return min(tolerance * self.noise, MOST_ERROR)

    def allows(self, plan: LinearPlan, tolerance: float) -> bool:
        return all(error <= self.limit(tolerance) for error in self.of(plan).values())

    def kind(self, plan: LinearPlan) -> LayerKind:
        return self.recorded.layer.kind(self.tokens, plan)


@dataclass(frozen=True, eq=False)
class _Decision:
    """A layer's plan and its neighbors; `slow` says why an allowed plan was not taken: no time, or a slower one."""

    layer: _Layer
    plan: LinearPlan
    narrower: LinearPlan | None
    wider: LinearPlan | None
    slow: str | None = None


def fit_layers(
    records: LayerRecords, gradient_noise: Mapping[str, float], *, formats: Sequence[str], tolerance: float,
    timed: bool = False,
) -> tuple[LayerChoice, ...]:  # fmt: skip
    """Choose a plan for each linear layer of a model.

    Args:
        records: of the model's layers, from some micro-batches.
        gradient_noise: by the name of the weight, the noise of a step's gradient over the gradient: the root of its
            variance between batches over the square of its mean. A layer without one stays in high precision.
        formats: to try; see `plans`. Of plans that cost the same, the one in the earlier format is taken.
        tolerance: how large errors may be, as a share of the gradient's noise; see the module.
        timed: whether to take eight bits only where they are faster than nn.Linear. Each format then has one
            candidate, its cheapest allowed plan, and the fastest candidate is taken. Times are those of the table
            that `swap_linears(tokens=...)` uses. Those that it lacks are measured under the current autocast, so
            call this under the autocast of the training.

    Returns:
        The choices. Each layer that `swap_linears` would find is in one of them. The patterns in `layers` fit the
        layers of their choice and no others, by `fnmatch`. The milliseconds are the sum over a choice's layers.

    Raises:
        ValueError: for formats that do not exist, and a `tolerance` that is not above zero.
    """
    order = plans(formats)
    check("tolerance", tolerance, Positive)
    check("timed", timed, Flag)
    ways: dict[Multiply, list[EightBit]] = {
        name: list(dict.fromkeys(how for plan in order if (how := getattr(plan, name)) is not None))
        for name in MULTIPLIES
    }
    without = dict(records.kept)
    layers: list[_Layer] = []
    for name, recorded in records.layers.items():
        noise = gradient_noise.get(recorded.parameter)
        if not recorded.records:
            without[name] = "not measured: no batch reached it and came back with a gradient"
        elif noise is None:
            without[name] = f"not measured: the gradient of {recorded.parameter} is not known"
        elif not (math.isfinite(noise) and noise >= 0):
            without[name] = f"not measured: the noise of the gradient of {recorded.parameter} is {noise}"
        else:
            rows = max(record.tokens for record in recorded.records)
            layers.append(_Layer(name, recorded, rows, noise, layer_errors(recorded, ways)))
    table: dict[LayerKind, Timed] = {}
    if timed:
        table = times([layer.kind(plan) for layer in layers for plan in _firsts(layer, order, tolerance)])
    decisions = [_decide(layer, order, tolerance, table, timed) for layer in layers]
    if timed:
        beside = [(one.layer, plan) for one in decisions for plan in (one.narrower, one.wider)]
        table |= times([layer.kind(plan) for layer, plan in beside if plan not in (None, HIGH_PRECISION)])
    return _grouped(decisions, without, tolerance, table)


def _firsts(layer: _Layer, order: Sequence[LinearPlan], tolerance: float) -> list[LinearPlan]:
    """The cheapest allowed plan in each format."""
    firsts: dict[Any, LinearPlan] = {}
    for plan in order[:-1]:
        if layer.allows(plan, tolerance):
            firsts.setdefault(plan.formats, plan)
    return list(firsts.values())


def _decide(
    layer: _Layer, order: Sequence[LinearPlan], tolerance: float, table: Mapping[LayerKind, Timed], timed: bool
) -> _Decision:
    """The cheapest allowed plan; if `timed`, the fastest of `_firsts` if it is faster than nn.Linear."""
    allowed = _firsts(layer, order, tolerance)
    measured = {plan: table[kind] for plan in allowed if (kind := layer.kind(plan)) in table}
    if not allowed or not timed:
        plan = allowed[0] if allowed else HIGH_PRECISION
    elif not measured:
        why = f"not measured: out of memory at {layer.tokens} tokens"
        return _Decision(layer, HIGH_PRECISION, allowed[0], None, why)
    else:
        plan = max(measured, key=lambda plan: measured[plan].speedup)
        if (speedup := measured[plan].speedup) < 1:
            why = f"{_title(plan)} measured {in_times(speedup)} nn.Linear at {layer.tokens} tokens"
            return _Decision(layer, HIGH_PRECISION, plan, None, why)
    levels = [list(level) for _, level in itertools.groupby(order, key=cost)]
    here = next(i for i, level in enumerate(levels) if plan in level)
    refused = ([one for one in level if not layer.allows(one, tolerance)] for level in reversed(levels[:here]))
    narrower = next(filter(None, refused), [])
    wider = levels[here + 1] if here + 1 < len(levels) else []
    return _Decision(
        layer, plan, min(narrower, key=layer.share, default=None), min(wider, key=layer.share, default=None)
    )


def _grouped(
    decisions: Iterable[_Decision], without: Mapping[str, str], tolerance: float, table: Mapping[LayerKind, Timed]
) -> tuple[LayerChoice, ...]:
    groups: dict[Any, list[_Decision]] = {}
    for one in decisions:
        groups.setdefault((_alike(one.layer.name), one.plan, one.slow), []).append(one)
    unmeasured: dict[str, list[str]] = {}
    for name, reason in without.items():
        unmeasured.setdefault(reason, []).append(name)
    names = [*without, *(one.layer.name for group in groups.values() for one in group)]
    choices = [_choice(group, names, tolerance, table) for group in groups.values()]
    plain = Computed(HIGH_PRECISION, {}, 0.0)
    for reason, group in unmeasured.items():
        choices.append(LayerChoice(exact_patterns(group, names), len(group), plain, None, None, reason))
    return tuple(choices)


def _alike(name: str) -> tuple[str, ...]:
    """The parts of a name, with ``*`` for numbers."""
    return tuple("*" if part.isdecimal() else part for part in name.split("."))


def _choice(
    group: Sequence[_Decision], names: Sequence[str], tolerance: float, table: Mapping[LayerKind, Timed]
) -> LayerChoice:
    # In high precision all shares are 0. Then the share of the next narrower plan decides.
    worst = max(group, key=lambda one: [one.layer.share(plan) for plan in (one.plan, one.narrower) if plan])
    layers = [one.layer for one in group]

    def computed(plan: LinearPlan | None) -> Computed | None:
        if plan is None:
            return None
        worst = max(layers, key=lambda layer: layer.share(plan))
        return Computed(plan, worst.of(plan), worst.share(plan), _ms(group, plan, table))

    chosen = computed(worst.plan)
    assert chosen is not None
    return LayerChoice(
        exact_patterns([layer.name for layer in layers], names), len(layers), chosen, computed(worst.narrower),
        computed(worst.wider), _reason(worst, tolerance),
    )  # fmt: skip


def _ms(group: Sequence[_Decision], plan: LinearPlan, table: Mapping[LayerKind, Timed]) -> float | None:
    """Milliseconds of all layers of a group together; None if one was not timed."""
    total = 0.0
    for one in group:
        if plan == HIGH_PRECISION:  # nn.Linear was measured beside each plan
            tried = [each for each in (one.plan, one.narrower, one.wider) if each not in (None, HIGH_PRECISION)]
            found = [table[kind].plain_ms for each in tried if each and (kind := one.layer.kind(each)) in table]
            ms = found[0] if found else None
        else:
            timed = table.get(one.layer.kind(plan))
            ms = None if timed is None else timed.ms
        if ms is None:
            return None
        total += ms
    return total


def _reason(one: _Decision, tolerance: float) -> str:
    if one.slow is not None:
        return f"high precision: {one.slow}"
    layer, plan = one.layer, one.plan
    limit = f"allowed is {_percent(layer.limit(tolerance))}"
    if layer.limit(tolerance) < MOST_ERROR:
        limit += f", {_percent(tolerance)} of the gradient's noise of {_percent(layer.noise)}"
    if plan != HIGH_PRECISION:
        return f"{_title(plan)}: errors of {_errors(layer, plan)}; {limit}"
    assert one.narrower is not None  # all plans were refused
    return f"high precision: in {_title(one.narrower)} an error of {_errors(layer, one.narrower)}; {limit}"


def _errors(layer: _Layer, plan: LinearPlan) -> str:
    found = []
    for name in MULTIPLIES:
        if operands := plan.operands(name):
            scaled = ", ".join(f"{str(operand)[0]} by {operand.scaling}" for operand in operands)
            found.append(f"{name} {_percent(layer.of(plan)[name])} ({scaled})")
    return listed(found)


def _title(plan: LinearPlan) -> str:
    return "/".join(dict.fromkeys(_formats(plan)))


def _percent(share: float) -> str:
    value = 100 * share
    return f"{value:,.0f} %" if value >= 100 else f"{value:.2g} %"
