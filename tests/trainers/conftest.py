"""What trainings share: the tests' cache, and several processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from parallel_runs import Trainings


@pytest.fixture(scope="session")
def trainings(cache: Path) -> Trainings:
    return Trainings(cache)
