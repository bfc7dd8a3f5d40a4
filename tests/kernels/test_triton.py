"""Where Triton's kernels cannot run, and what is said of it."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from narrowgauge.kernels import _triton

unavailable = _triton.unavailable.__wrapped__
CUDA = torch.device("cuda", 0)


def test_other_devices() -> None:
    assert unavailable(torch.device("cpu")) == "no kernels for cpu"
    assert unavailable(torch.device("meta")) == "no kernels for meta"


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert unavailable(CUDA) == "triton is not installed"


def test_an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    assert unavailable(CUDA) == "Triton takes compute capability 7.0 and up"


def test_the_interpreter_cannot_read_a_gpus_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert unavailable(CUDA) == "TRITON_INTERPRET is set"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_fails_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert str(unavailable(CUDA)).startswith("Triton does not start: ")
