"""Where Triton's kernels cannot run, and what is said of it."""

from __future__ import annotations

import importlib.util
import threading

import pytest
import torch

from narrowgauge.kernels import _triton

unavailable = _triton.unavailable.__wrapped__
CUDA = torch.device("cuda", 0)


def test_without_a_device_or_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unavailable(torch.device("cpu")) == "no kernels for cpu"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert unavailable(CUDA) == "triton is not installed"


def test_an_old_gpu_and_the_interpreter_which_cannot_read_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    assert unavailable(CUDA) == "Triton takes compute capability 7.0 and up"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert unavailable(CUDA) == "TRITON_INTERPRET is set"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_fails_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert str(unavailable(CUDA)).startswith("Triton does not start: ")


@pytest.mark.parametrize(
    ("capability", "limited"), [((9, 0), True), ((8, 0), False), ((8, 9), False), ((10, 0), False)]
)
def test_registers_are_limited_where_the_limits_were_measured(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], limited: bool
) -> None:
    monkeypatch.setattr(_triton, "instructions", lambda: (True, True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    limits = _triton.limits_registers.__wrapped__
    assert limits(CUDA) == limited
    assert limits(torch.device("cpu")), "compiled for elsewhere, which is an H100 or H200"
    monkeypatch.setattr(_triton, "instructions", lambda: (False, False))
    assert not limits(CUDA), "AMD's and Intel's compilers know no such option"


def test_what_compilers_wait_for_begins_once_and_its_errors_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    go, done = threading.Event(), []

    def driver() -> None:
        go.wait(20)
        done.append("driver")
        raise OSError("no compiler")

    monkeypatch.setattr(_triton, "_begun", [])
    monkeypatch.setattr(_triton, "_driver", driver)
    monkeypatch.setattr(_triton, "_hash", lambda: None)
    monkeypatch.setattr(_triton, "_assembler", lambda driver: (driver.exception(), done.append("assembler")))
    _triton.begin()
    _triton.begin()
    assert done == []
    go.set()
    _triton.wait()
    assert done == ["driver", "assembler"]
