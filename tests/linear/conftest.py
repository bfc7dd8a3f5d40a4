"""What tests of linear layers share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from narrowgauge.linear import _function, _ops


@pytest.fixture(autouse=True)
def nothing_recorded() -> None:
    """Each test goes the long way first."""
    _function.forget()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device where layers run on kernels: a GPU, or the interpreter in place of one."""
    pytest.importorskip("triton", reason="triton is not installed: there are no kernels")
    if torch.cuda.is_available():
        yield "cuda"
        return
    monkeypatch.setattr(_ops, "no_kernels", lambda device, dtype: None)
    monkeypatch.setitem(_ops._DIRECT, "cpu", _ops.CUDA)
    with np.errstate(all="ignore"):
        yield "cpu"
