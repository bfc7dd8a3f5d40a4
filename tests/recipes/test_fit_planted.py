"""Planted cases: `fit` sees a property of the gradients, and chooses for it; without it, it chooses otherwise."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))

from studies.fit import planted

pytestmark = pytest.mark.usefixtures("one_thread")

# The first shows what a measure of moments sees. What one of weights sees takes longer.
CASES = [pytest.param(make, marks=() if make in planted.CASES[:1] else pytest.mark.slow) for make in planted.CASES]


@pytest.mark.parametrize("make", CASES, ids=[make.__name__ for make in planted.CASES])
def test_a_planted_property_is_seen(make: planted.Maker) -> None:
    case = make()
    assert case.seen, case
    assert any(planted > without for planted, without in case.figures.values())
