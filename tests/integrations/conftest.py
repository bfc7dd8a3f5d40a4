"""Models of a few hundred numbers: more than one thread would only wait for one another."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass
