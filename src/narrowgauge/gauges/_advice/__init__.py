"""Advice on a run: a table of rules, and one loop over it.

A rule compares one measured number with a threshold, says what it found in one sentence and what to do in another,
and names the finding of a paper that it rests on.
"""

from __future__ import annotations

from collections.abc import Iterable

from narrowgauge.gauges._advice._rule import URGENCIES, Advice, Evidence, Rule
from narrowgauge.gauges._advice._rules_ranges import RULES as RANGE_RULES
from narrowgauge.gauges._advice._rules_updates import RULES as UPDATE_RULES
from narrowgauge.gauges._history import History, Record

__all__ = ["RULES", "Advice", "Evidence", "advise"]

RULES: tuple[Rule, ...] = (*RANGE_RULES, *UPDATE_RULES)


def advise(records: Iterable[Record] | History) -> list[Advice]:
    """Advice on a run.

    Args:
        records: as `read_records` or a watch's `rows()` gives them.

    Returns:
        Advice, the most urgent first: "change" before "watch" before "note". Empty if no threshold is crossed.
        Equal records give equal advice.

    Source: each piece of advice names its own.
    """
    history = records if isinstance(records, History) else History(records)
    found = [advice for rule in RULES if (advice := rule.advice(history)) is not None]
    return sorted(found, key=lambda a: (URGENCIES.index(a.urgency), -a.weight, a.rule))
