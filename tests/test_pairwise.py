"""Pairwise combinations have every pair that is allowed, and few rows."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pairwise as covering
from pairwise import cases, pairwise


def pairs_of(rows: list[tuple[int, ...]]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.integers(0, 20), st.integers(2, 7))
def test_every_allowed_pair_occurs(sizes: list[int], residue: int, modulus: int) -> None:
    def allowed(*row: int) -> bool:
        return sum((place + 2) * value for place, value in enumerate(row)) % modulus != residue

    rows = pairwise(*map(range, sizes), allowed=allowed)
    every = [row for row in itertools.product(*map(range, sizes)) if allowed(*row)]
    assert pairs_of(rows) == pairs_of(every)
    assert rows == sorted(set(rows) & set(every))
    assert rows == pairwise(*map(range, sizes), allowed=allowed)


def test_few_rows_suffice() -> None:
    """No fewer than the product of the two largest axes; not many more."""
    assert len(pairwise(range(9), range(4))) == 36
    assert 36 <= len(pairwise(range(9), range(4), range(3), range(2))) <= 40
    assert 81 <= len(pairwise(*[range(9)] * 4)) <= 125


def test_values_need_no_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = [{"lr": 1}, {"lr": 2}], ["a", "b"], [True, False]
    assert len(cases(*axes)) == 4
    monkeypatch.setattr(covering, "EVERYTHING", True)
    every = cases(*axes)
    assert len(every) == 8
    assert sum(bool(row.marks) for row in every) == 4
