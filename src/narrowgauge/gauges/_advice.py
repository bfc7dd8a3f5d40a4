"""Advice on a run: a table of rules, and one loop over it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from narrowgauge.gauges._history import History, Record
from narrowgauge.gauges._rules import RULES, Evidence, Urgency

URGENCIES: tuple[Urgency, ...] = ("change", "watch", "note")
MOST_EVIDENCE = 20  # pieces of evidence in one advice


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


def advise(records: Iterable[Record] | History) -> list[Advice]:
    """Advice on a run.

    Args:
        records: as `read_records` or a watch's `rows()` gives them.

    Returns:
        Advice, the most urgent first: "change" before "watch" before "note". Empty if no threshold is crossed.
        Equal records give equal advice.

    Raises:
        TypeError: for a watch or a path in place of its records.

    Source: each piece of advice names its own.
    """
    if not isinstance(records, History):
        if not isinstance(records, Iterable) or isinstance(records, str | bytes | Mapping):
            wanted = "a run's: advise(watch.rows()) or advise(read_records(path))"
            raise TypeError(f"records must be {wanted}, got {type(records).__name__}")
        records = History(records)
    advice = []
    for name, rule in RULES.items():
        found = rule(records)
        if found is not None:
            evidence = tuple(found.evidence[:MOST_EVIDENCE])
            advice.append(
                Advice(name, found.urgency, found.finding, found.action, found.source, evidence, found.weight)
            )
    return sorted(advice, key=lambda a: (URGENCIES.index(a.urgency), -a.weight, a.rule))
