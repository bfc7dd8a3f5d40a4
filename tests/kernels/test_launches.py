"""Launches found again: compiled kernels are told apart by all that code depends on, and by nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: kernels cannot run, not even interpreted")

import triton
import triton.language as tl

from narrowgauge.kernels import _launches
from narrowgauge.kernels._launches import Launch, Launches


class Kernel:
    """What Triton's kernels do as far as launches know: compile at the first launch of a kind, run from then on."""

    __name__ = "kernel"
    arg_names = ("x", "y", "n", "SIZE", "FLAG")

    def __init__(self) -> None:
        self.arg_names = list(Kernel.arg_names)
        self.compiled: list[dict[str, Any]] = []
        self.runs: list[tuple[Any, ...]] = []
        self.by_triton: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **rest: Any) -> Any:
            self.compiled.append({"grid": grid, "arguments": arguments, **rest})
            return Compiled(self)

        return launch


class Compiled:
    """As Triton's: `run` is the launcher, taking what it is to launch, and an index takes the usual way to it."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def run(self, one: int, two: int, three: int, stream: int, function: Any, packed: Any, *rest: Any) -> None:
        assert (stream, function, packed, rest[:3]) == (7, "function", "metadata", (None, None, None))
        self.kernel.runs.append(((one, two, three), rest[3:]))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.kernel.by_triton.append((grid, arguments))


class Driver:
    """Of a machine whose current stream is 7."""

    def get_current_stream(self, device: int) -> int:
        return 7


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    made = Launches(Kernel())
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    made.interpreted = False
    monkeypatch.setattr(_launches, "_current_device", lambda: 0)
    return made


X, Y = torch.zeros(64), torch.zeros(64, dtype=torch.int32)
CONSTANTS, OPTIONS = {"SIZE": 64, "FLAG": True}, {"num_warps": 4}


def test_the_second_launch_is_found(launches: Launches) -> None:
    for _ in range(3):
        launches((5,), (X, None, 48), CONSTANTS, OPTIONS)
    assert len(launches.kernel.compiled) == 1
    assert launches.kernel.compiled[0] == {
        "grid": (5,), "arguments": (X, None, 48), "SIZE": 64, "FLAG": True, "num_warps": 4,
    }  # fmt: skip
    assert launches.kernel.runs == 2 * [((5, 1, 1), (X.data_ptr(), None, 48, 64, True))]
    launches((2, 3), (X, None, 96), CONSTANTS, OPTIONS)
    assert launches.kernel.runs[-1] == ((2, 3, 1), (X.data_ptr(), None, 96, 64, True))
    assert len(launches.kernel.compiled) == 1


@pytest.mark.parametrize(
    ("arguments", "constants", "options"),
    [
        ((Y, None, 48), CONSTANTS, OPTIONS),
        ((X[1:], None, 48), CONSTANTS, OPTIONS),
        ((X, Y, 48), CONSTANTS, OPTIONS),
        ((X, None, 47), CONSTANTS, OPTIONS),
        ((X, None, 1), CONSTANTS, OPTIONS),
        ((X, None, 2**31), CONSTANTS, OPTIONS),
        ((X, None, 48), CONSTANTS | {"SIZE": 128}, OPTIONS),
        ((X, None, 48), CONSTANTS | {"FLAG": None}, OPTIONS),
        ((X, None, 48), CONSTANTS, {"num_warps": 8}),
    ],
)
def test_whatever_code_depends_on_is_compiled_for(
    launches: Launches, arguments: tuple[Any, ...], constants: dict[str, Any], options: dict[str, Any]
) -> None:
    launches((1,), (X, None, 48), CONSTANTS, OPTIONS)
    launches((1,), arguments, constants, options)
    assert len(launches.kernel.compiled) == 2
    assert not launches.kernel.runs


def test_another_device_has_its_own(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    launches((1,), (X, None, 48), CONSTANTS, OPTIONS)
    monkeypatch.setattr(_launches, "_current_device", lambda: 1)
    launches((1,), (X, None, 48), CONSTANTS, OPTIONS)
    assert len(launches.kernel.compiled) == 2


def test_constants_have_the_kernels_order(launches: Launches) -> None:
    with pytest.raises(TypeError, match=r"kernel: got constants \['FLAG', 'SIZE'\], takes \['SIZE', 'FLAG'\]"):
        launches((1,), (X, None, 48), {"FLAG": True, "SIZE": 64}, OPTIONS)


@triton.jit
def _add(x, n, BY: tl.constexpr):
    place = tl.arange(0, 16)
    tl.store(x + place, tl.load(x + place) + BY + n)


def test_a_kernel_runs(device: str) -> None:
    run, x = Launches(_add), torch.zeros(16, device=device)
    for n in (1, 2, 2, 32, 1):
        run((1,), (x, n), {"BY": 0.5}, {"num_warps": 1})
    assert (x == 38 + 5 * 0.5).all()
