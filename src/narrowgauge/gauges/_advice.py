"""What a piece of advice is, and the few ways in which rules look at a history."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from narrowgauge.gauges._history import Floats, History, Series

Urgency = Literal["change", "watch", "note"]
URGENCIES: tuple[Urgency, ...] = ("change", "watch", "note")

# How many tensors a sentence names, and how many pieces of evidence are kept of a rule.
NAMED, KEPT = 3, 20

# A rule about a tensor's usual value wants so many measurements of it: fewer are no habit.
HABIT = 3


@dataclass(frozen=True)
class Evidence:
    """A number that led to advice.

    Attributes:
        quantity: what was measured, such as "RMS_t".
        name: the tensor's name; "" is the whole model or the run.
        step: the step of the value; of a median, the last step that went into it.
        value: the number.
        threshold: what it was compared with; None where being there is enough.
    """

    quantity: str
    name: str
    step: int
    value: float
    threshold: float | None

    def __str__(self) -> str:
        bound = "" if self.threshold is None else f", threshold {show(self.threshold)}"
        return f"{self.name or 'the run'}: {self.quantity} {show(self.value)} at step {self.step}{bound}"


@dataclass(frozen=True)
class Advice:
    """What a person should change, or need not.

    Attributes:
        rule: the rule's name, such as "second moment out of date".
        urgency: "change": something is being lost or has broken; "watch": a sign of trouble to come; "note":
            nothing is wrong with this run.
        finding: what was seen, with its numbers.
        action: what to do about it.
        source: paper and section of the finding that the rule rests on.
        evidence: the numbers, the worst first; at most 20.
        weight: orders advice of one urgency, the larger the earlier.
    """

    rule: str
    urgency: Urgency
    finding: str
    action: str
    source: str
    evidence: tuple[Evidence, ...]
    weight: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        return f"{self.finding} {self.action} ({self.source})"


Rule = Callable[[History], Iterator[Advice]]


def show(value: float) -> str:
    """A number as sentences have it: three digits that count."""
    if not math.isfinite(value):
        return {math.inf: "inf", -math.inf: "-inf"}.get(value, "NaN")
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.3g}"


def percent(share: float) -> str:
    """A share in per cent; no 0% and no 100% for what is not quite."""
    if 0 < share < 0.001:
        return "under 0.1%"
    if 0.999 < share < 1:
        return "over 99.9%"
    return f"{100 * share:.3g}%"


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    names = [name or "the whole model" for name in names]
    if len(names) <= NAMED + 1:
        return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)
    return ", ".join(names[:NAMED]) + f" and {len(names) - NAMED} more"


def count(number: int, what: str) -> str:
    """A number with its noun, one or more."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def late(series: Series) -> Series:
    """The later half of what was measured: what a run does by now."""
    return series.since(int(series.steps[len(series.steps) // 2])) if len(series.steps) else series


def median(series: Series) -> float:
    """Median of the finite values; NaN if there is none."""
    values: Floats = series.finite.values
    return float(np.median(values)) if len(values) else math.nan


def habits(history: History, kind: str, field: str, names: Sequence[str] | None = None) -> dict[str, Evidence]:
    """Each tensor's median over the later half of its measurements, where there are enough of them."""
    found = {}
    for name in history.names(kind) if names is None else names:
        series = late(history.series(kind, field, name)).finite
        if len(history.series(kind, field, name).steps) >= HABIT and len(series.steps):
            found[name] = Evidence(field, name, int(series.steps[-1]), median(series), None)
    return found


def worst(evidence: Sequence[Evidence]) -> tuple[Evidence, ...]:
    """The evidence that is kept: the first ones."""
    return tuple(evidence[:KEPT])
