"""Kernels run on the GPU where there is one and in triton's interpreter elsewhere, which takes CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from narrowgauge.optim import _engine
from narrowgauge.optim._engine import Engine


@pytest.fixture(scope="session")
def device() -> str:
    """Where a kernel's tensors live."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers step by eager torch: for tests of other things than steps, which need compile nothing."""
    monkeypatch.setattr(Engine, "backends", ())


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, device: str) -> Iterator[None]:
    """Optimizers step by kernels on any device; the interpreter's numpy warns where floats do what they do."""
    if device == "cpu":
        monkeypatch.setattr(_engine, "unavailable", lambda device: None)
    with np.errstate(all="ignore"):
        yield
