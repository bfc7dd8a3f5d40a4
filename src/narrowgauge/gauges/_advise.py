"""What a person should change, from what a run recorded.

Each rule is a function from a history to advice; it yields nothing where nothing is wrong. A rule rests on a
finding of a paper, says which, and hands over the numbers that it saw. Rules and their thresholds are in
`_advice_updates` and `_advice_ranges`.
"""

from __future__ import annotations

from collections.abc import Iterable

from narrowgauge.gauges import _advice_ranges, _advice_updates
from narrowgauge.gauges._advice import URGENCIES, Advice, Rule
from narrowgauge.gauges._history import History, Record

RULES: tuple[Rule, ...] = (
    _advice_ranges.not_finite,
    _advice_ranges.broken_gradients,
    _advice_ranges.falling_scale,
    _advice_updates.out_of_date,
    _advice_updates.lost,
    _advice_updates.frozen_moment,
    _advice_ranges.coarse_states,
    _advice_updates.unexplained,
    _advice_ranges.no_gradient,
    _advice_ranges.not_trained,
    _advice_updates.visible_only,
    _advice_ranges.growing_features,
    _advice_ranges.narrow_formats,
)


def advise(records: Iterable[Record] | History) -> list[Advice]:
    """Advice on a run.

    Args:
        records: what `read_records` or a watch's `rows()` gave.

    Returns:
        Advice, the most urgent first: "change" before "watch" before "note". Empty if there is nothing to say. The
        same records give the same advice.

    Source: each piece of advice names its own.
    """
    history = records if isinstance(records, History) else History(records)
    found = [advice for rule in RULES for advice in rule(history)]
    return sorted(found, key=lambda a: (URGENCIES.index(a.urgency), -a.weight, a.rule))
