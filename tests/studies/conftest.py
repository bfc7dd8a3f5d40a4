"""The studies are scripts beside one another: their folder is importable here. One tiny run serves all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

STUDIES = Path(__file__).resolve().parents[2] / "studies"
sys.path.append(str(STUDIES))


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Real text, little of it: this project's pages."""
    import _gather

    text = tmp_path_factory.mktemp("text") / "text.txt"
    pages = sorted((STUDIES.parent / "docs").glob("*.md"))
    text.write_text("\n".join(page.read_text() for page in pages))
    return _gather.Training(text, vocabulary=256, steps=8, batch=4, sequence=32, warmup=2)


@pytest.fixture(scope="session")
def trained(training: Any) -> Any:
    """After its run, with moments of two steps."""
    import _gather

    return _gather.run(training, (0.25, 1.0))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Such small products take longer on two cores that others use."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
