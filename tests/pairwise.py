"""Combinations in which every pair of values occurs, in place of all combinations.

What a combination of storages, rules and dtypes breaks is nearly always broken by two of them. Five axes of ten
values have 100,000 combinations, and some 140 of these have every pair.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

EVERYTHING = False  # whether slow tests are asked for; conftest sets it before it collects


def pairwise(*axes: Iterable[Any], allowed: Callable[..., bool] | None = None) -> list[tuple[Any, ...]]:
    """Few rows of the product of some axes; every pair of values in any allowed row is in one of these.

    Greedy: the row with most new pairs is next, the first of the product among equals. The same at every run.

    Args:
        axes: two or more, of distinct values.
        allowed: called with a row's values; False leaves the row out. None allows all.

    Returns:
        Rows in the product's order.
    """
    values = [list(axis) for axis in axes]
    rows = [
        row
        for row in itertools.product(*(range(len(axis)) for axis in values))
        if allowed is None or allowed(*(axis[i] for axis, i in zip(values, row, strict=True)))
    ]
    pairs = [frozenset(itertools.combinations(enumerate(row), 2)) for row in rows]
    left = set().union(*pairs)
    # Gains only shrink: a row whose gain is still the largest when it is worked out again is the best.
    queue = [(-len(of), place) for place, of in enumerate(pairs)]
    heapq.heapify(queue)
    chosen = []
    while left:
        _, place = heapq.heappop(queue)
        gain = len(pairs[place] & left)
        if queue and (-gain, place) > queue[0]:
            heapq.heappush(queue, (-gain, place))
            continue
        chosen.append(place)
        left -= pairs[place]
    return [tuple(axis[i] for axis, i in zip(values, rows[place], strict=True)) for place in sorted(chosen)]


def cases(*axes: Iterable[Any], allowed: Callable[..., bool] | None = None) -> list[Any]:
    """Rows for `pytest.mark.parametrize`: the pairwise ones, and with `--slow` all others, marked slow."""
    values = [list(axis) for axis in axes]
    chosen = pairwise(*values, allowed=allowed)
    if not EVERYTHING:
        return [pytest.param(*row) for row in chosen]
    every = [row for row in itertools.product(*values) if allowed is None or allowed(*row)]
    return [pytest.param(*row, marks=() if row in chosen else pytest.mark.slow) for row in every]


def by_pairs(indirect: Sequence[str] = (), **axes: Iterable[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrize a test by `cases` of named arguments.

    Args:
        indirect: arguments whose values go to the fixture of that name.
        axes: the values of each argument, or values by the names that test ids show.
    """
    named = [
        dict(axis) if isinstance(axis, Mapping) else {str(value): value for value in axis} for axis in axes.values()
    ]
    rows = []
    for row in cases(*named):
        values = [axis[name] for axis, name in zip(named, row.values, strict=True)]
        rows.append(pytest.param(*values, id="-".join(row.values), marks=row.marks))
    return pytest.mark.parametrize(tuple(axes), rows, indirect=list(indirect))
