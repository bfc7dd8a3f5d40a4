"""Planted cases: `fit` sees a property of the gradients, and chooses for it; without it, it chooses otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))

from studies.fit import planted


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("make", planted.CASES, ids=lambda make: make.__name__)
def test_a_planted_property_is_seen(make: planted.Maker) -> None:
    case = make()
    assert case.seen, case
    assert any(planted > without for planted, without in case.figures.values())
