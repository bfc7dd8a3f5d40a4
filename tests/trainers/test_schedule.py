"""Learning rates: where they begin and end, and that they never leave the way between."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.trainers._schedule import SCHEDULES, schedule


def test_the_ends_and_the_middle() -> None:
    at = {
        kind: [schedule(kind, n, steps=110, warmup=10, final=0.1) for n in (1, 5, 10, 60, 110)]
        for kind in SCHEDULES
    }
    assert at["constant"] == [0.1, 0.5, 1.0, 1.0, 1.0]
    assert at["linear"] == pytest.approx([0.1, 0.5, 1.0, 0.55, 0.1])
    assert at["cosine"] == pytest.approx([0.1, 0.5, 1.0, 0.55, 0.1])
    quarter = schedule("cosine", 35, steps=110, warmup=10, final=0.1)
    assert quarter == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)


@given(st.sampled_from(SCHEDULES), st.integers(1, 300), st.integers(0, 300), st.floats(0, 1))
def test_it_rises_then_falls_and_stays_between(kind: str, steps: int, warmup: int, final: float) -> None:
    factors = [schedule(kind, n, steps=steps, warmup=warmup, final=final) for n in range(1, steps + 1)]
    assert all(0 <= factor <= 1 for factor in factors)
    top = min(warmup, steps)
    assert factors[:top] == sorted(factors[:top])
    if top:
        assert factors[top:] == sorted(factors[top:], reverse=True)
    if kind != "constant" and steps > warmup:
        assert factors[-1] == pytest.approx(final)


def test_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind: got 'wave', takes one of constant, linear, cosine"):
        schedule("wave", 1, steps=1, warmup=0, final=0)
