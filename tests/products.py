"""Products of test parameters: every pair of values by default, the full product with `--slow`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest


def by_pairs(indirect: Sequence[str] = (), **axes: Iterable[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrize by all combinations; those that add no new pair of values are marked slow.

    Args:
        indirect: arguments whose values go to the fixture of that name.
        axes: the values of each argument, or values by the names that test ids show.
    """
    values = [
        dict(axis) if isinstance(axis, Mapping) else {str(value): value for value in axis} for axis in axes.values()
    ]
    cases = list(itertools.product(*values))
    open_pairs = {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}
    chosen: set[tuple[str, ...]] = set()
    while open_pairs:
        best = max(cases, key=lambda case: len(open_pairs.intersection(itertools.combinations(enumerate(case), 2))))
        open_pairs -= set(itertools.combinations(enumerate(best), 2))
        chosen.add(best)
    return pytest.mark.parametrize(
        tuple(axes),
        [
            pytest.param(
                *(axis[name] for axis, name in zip(values, case, strict=True)),
                id="-".join(case),
                marks=() if case in chosen else pytest.mark.slow,
            )
            for case in cases
        ],
        indirect=list(indirect),
    )
