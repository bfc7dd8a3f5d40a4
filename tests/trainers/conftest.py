"""What trainings share: a text, the tests' cache, and several processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from fitted import small_settings
from parallel_runs import Trainings

from narrowgauge.trainers import TrainSettings


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> TrainSettings:
    return small_settings(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="session")
def trainings(cache: Path) -> Trainings:
    return Trainings(cache)
