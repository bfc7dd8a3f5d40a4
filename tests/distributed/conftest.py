"""Checkpoints to damage, and what starts processes, once: importing torch is most of what they take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpointed import KIND, made, train
from saving_process import Processes

from narrowgauge.distributed import save_checkpoint


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    made.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with checkpoints of steps 2 and 4, the second after two more steps."""
    net, optimizer = made(KIND)
    for step in (2, 4):
        train(net, optimizer, range(step - 2, step))
        save_checkpoint(tmp_path / "run", model=net, optimizer=optimizer, step=step, extra={"at": step})
    return tmp_path / "run"
