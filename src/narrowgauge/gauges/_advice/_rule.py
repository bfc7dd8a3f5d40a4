"""What a piece of advice is, what a rule is, and the helpers that rules share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from narrowgauge.gauges._history import History, Series

Urgency = Literal["change", "watch", "note"]
URGENCIES: tuple[Urgency, ...] = ("change", "watch", "note")

MOST_EVIDENCE = 20  # pieces of evidence in one advice
MIN_MEASUREMENTS = 3  # a median of fewer measurements is not compared with a threshold


@dataclass(frozen=True)
class Evidence:
    """A number that led to advice.

    Attributes:
        quantity: what was measured, such as "RMS_t".
        name: the tensor's name; "" is the whole model or the run.
        step: the step of the value; of a median, its last step.
        value: the number.
        threshold: what it was compared with; None where the value itself is the finding.
    """

    quantity: str
    name: str
    step: int
    value: float
    threshold: float | None = None

    def __str__(self) -> str:
        bound = "" if self.threshold is None else f", threshold {show(self.threshold)}"
        return f"{self.name or 'the run'}: {self.quantity} {show(self.value)} at step {self.step}{bound}"


@dataclass(frozen=True)
class Advice:
    """What to change in a run, or a note that nothing needs to change.

    Attributes:
        rule: the rule's name, such as "second moment out of date".
        urgency: "change": something is being lost or has broken; "watch": a sign of trouble to come; "note":
            nothing is wrong with this run.
        finding: what was measured.
        action: what to do about it.
        source: paper and section that the rule rests on.
        evidence: the numbers, the worst first; at most 20.
        weight: orders advice of one urgency, the largest first.
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


@dataclass(frozen=True)
class Finding:
    """What a rule found in a history.

    Attributes:
        evidence: the numbers, the worst first.
        values: what the rule's sentences have in braces.
        case: which of the rule's sentences applies, if it has several.
        mild: whether the rule's milder urgency applies.
    """

    evidence: Sequence[Evidence]
    values: Mapping[str, Any]
    case: str = ""
    mild: bool = False


Sentences = str | Mapping[str, str]  # one for all cases, or one a case


@dataclass(frozen=True)
class Rule:
    """One row of the table of advice.

    Attributes:
        name: the rule's name, as advice has it.
        metrics: what is measured, with its threshold.
        find: looks for it in a history; None if nothing crosses the threshold.
        finding: the sentence that reports it, a format string of the finding's values.
        action: the sentence that says what to do, the same.
        source: paper and section.
        urgency, weight: as in `Advice`.
        mild: both for a finding that is mild.
    """

    name: str
    metrics: str
    find: Callable[[History], Finding | None]
    finding: Sentences
    action: Sentences
    source: Sentences
    urgency: Urgency = "change"
    weight: float = 0.0
    mild: tuple[Urgency, float] = ("watch", 0.0)

    def advice(self, history: History) -> Advice | None:
        """The rule applied to a history."""
        found = self.find(history)
        if found is None:
            return None
        urgency, weight = self.mild if found.mild else (self.urgency, self.weight)
        texts = [text if isinstance(text, str) else text[found.case] for text in (self.finding, self.action)]
        finding, action = (text.format_map(found.values) for text in texts)
        source = self.source if isinstance(self.source, str) else self.source[found.case]
        return Advice(self.name, urgency, finding, action, source, tuple(found.evidence[:MOST_EVIDENCE]), weight)


def show(value: float) -> str:
    """A number with three significant digits."""
    if not math.isfinite(value):
        return {math.inf: "inf", -math.inf: "-inf"}.get(value, "NaN")
    return str(int(value)) if value == int(value) and abs(value) < 1e6 else f"{value:.3g}"


def percent(share: float) -> str:
    """A share in per cent; 0% and 100% only if it is exactly that."""
    if 0 < share < 0.001:
        return "under 0.1%"
    return "over 99.9%" if 0.999 < share < 1 else f"{100 * share:.3g}%"


def count(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def later_half(series: Series) -> Series:
    """The later half of the measurements."""
    return series.since(int(series.steps[len(series.steps) // 2])) if len(series.steps) else series


def median(series: Series) -> float:
    """Median of the finite values; NaN if there is none."""
    values = series.finite.values
    return float(np.median(values)) if len(values) else math.nan


def medians(history: History, kind: str, field: str, names: Sequence[str] | None = None) -> dict[str, Evidence]:
    """By tensor the median over the later half of its measurements; without those measured fewer than 3 times."""
    found = {}
    for name in history.names(kind) if names is None else names:
        series = history.series(kind, field, name)
        late = later_half(series).finite
        if len(series.steps) >= MIN_MEASUREMENTS and len(late.steps):
            found[name] = Evidence(field, name, int(late.steps[-1]), median(late))
    return found
