"""What trainings share: compiled steps, one thread, and what starts several processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from parallel_runs import Trainings


@pytest.fixture(scope="session")
def trainings(cache: Path) -> Iterator[Trainings]:
    made = Trainings(cache)
    yield made
    made.close()
