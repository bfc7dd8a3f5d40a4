"""Launches found again: compiled kernels are told apart by all that code depends on, and by nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: kernels cannot run, not even interpreted")

import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from narrowgauge.kernels import _launches
from narrowgauge.kernels._launches import BoundLaunch, CachedKernel, Describer, FixedLaunch
from narrowgauge.kernels._step._compile import compile_together


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
def launches(monkeypatch: pytest.MonkeyPatch) -> CachedKernel:
    made = CachedKernel(Kernel())
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    made.interpreted = False
    monkeypatch.setattr(_launches, "current_device", lambda: 0)
    return made


X, Y = torch.zeros(64), torch.zeros(64, dtype=torch.int32)
CONSTANTS, OPTIONS = {"SIZE": 64, "FLAG": True}, {"num_warps": 4}


def test_the_second_launch_is_found(launches: CachedKernel, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(_launches, "current_device", lambda: 1)
    launches((5,), (X, None, 48), CONSTANTS, OPTIONS)
    assert len(launches.kernel.compiled) == 2


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
    launches: CachedKernel, arguments: tuple[Any, ...], constants: dict[str, Any], options: dict[str, Any]
) -> None:
    launches((1,), (X, None, 48), CONSTANTS, OPTIONS)
    launches((1,), arguments, constants, options)
    assert len(launches.kernel.compiled) == 2
    assert not launches.kernel.runs


def test_constants_have_the_kernels_order(launches: CachedKernel) -> None:
    with pytest.raises(TypeError, match=r"constants of kernel must be \['SIZE', 'FLAG'\] after 3 arguments, got"):
        launches((1,), (X, None, 48), {"FLAG": True, "SIZE": 64}, OPTIONS)


@pytest.fixture
def profiler() -> Iterator[list[str]]:
    """Hooks as a profiler sets them."""
    heard: list[str] = []
    hook = heard.append
    triton.knobs.runtime.launch_enter_hook.add(hook)
    yield heard
    triton.knobs.runtime.launch_enter_hook.remove(hook)


def test_with_hooks_triton_launches_itself(launches: CachedKernel, profiler: list[str]) -> None:
    for _ in range(2):
        launches((1,), (X, None, 48), CONSTANTS, OPTIONS)
    assert not launches.kernel.runs
    assert launches.kernel.by_triton == [((1, 1, 1), (X.data_ptr(), None, 48, 64, True))]


@pytest.mark.parametrize(("hook", "hooked"), [(None, False), (print, True)])
def test_a_hook_may_be_none_or_one(hook: Any, hooked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", hook)
    assert _launches.hooked() == hooked


class CudaLauncher:
    """What calls the function in C, as Triton 3.6 does it."""

    launch_cooperative_grid, launch_pdl, profile_scratch_size = False, True, 0

    def __init__(self, scratch: int) -> None:
        self.global_scratch_size = scratch
        self.launched: list[tuple[Any, ...]] = []
        self.launch = lambda *given: self.launched.append(given)

    def __call__(self, one: int, two: int, three: int, stream: int, function: Any, *rest: Any) -> None:
        memory = "memory" if self.global_scratch_size else None
        self.launch(
            one, two, three, stream, function, self.launch_cooperative_grid, self.launch_pdl, memory, None, *rest
        )


@pytest.mark.parametrize("scratch", [0, 128])
def test_the_function_in_c_is_given_what_the_launcher_gives_it(
    scratch: int, launches: CachedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    for directly in (False, True):
        monkeypatch.setattr(_launches, "launches_directly", lambda: directly)  # noqa: B023
        made = Compiled(Kernel())
        made.run = CudaLauncher(scratch)  # type: ignore[method-assign]
        ready = _launches.CompiledKernel(made)
        assert (ready.run is made.run.launch) == (directly and not scratch)
        ready(0, (2, 3, 4), (X.data_ptr(), 48))
        given.append(made.run.launched)
    assert given[0] == given[1]
    assert given[0][0][:5] == (2, 3, 4, 7, "function")
    assert given[0][0][-2:] == (X.data_ptr(), 48)


# Descriptors of the copy engine


def _encode(descriptor: Any, told: dict[str, Any]) -> list[Any]:
    """What the function in C takes for a descriptor, as Triton 3.6 has it made."""
    encoded = triton.runtime.driver.active.utils.fill_tma_descriptor(descriptor.base.data_ptr(), told["block_size"])
    return [encoded, *descriptor.shape, *descriptor.strides]


def _behind(launcher: Any, tensordesc_meta: list[Any]) -> Any:
    """A launcher that encodes descriptors, as Triton 3.6 puts it before the function in C."""

    def inner(*given: Any) -> None:
        ready: list[Any] = []
        for argument in given:
            encodes = isinstance(argument, TensorDescriptor)
            ready.extend(_encode(argument, tensordesc_meta[0]) if encodes else [argument])
        launcher(*ready)

    return inner


TOLD = {"swizzle": 3, "elem_size": 1, "elem_type": 1, "block_size": [16, 64], "fp4_padded": False}
MATRIX = torch.zeros(32, 64, dtype=torch.int8)


@pytest.fixture
def described(launches: CachedKernel, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A launch with a descriptor; what it encodes, and what the function in C is given after the first 13."""
    encoded: list[int] = []
    given: list[tuple[Any, ...]] = []

    def fill(address: int, *rest: Any) -> str:
        encoded.append(address)
        return f"map of {address}"

    monkeypatch.setattr(Driver, "utils", SimpleNamespace(fill_tma_descriptor=fill), raising=False)
    monkeypatch.setattr("triton.backends.nvidia.driver.make_tensordesc_arg", _encode)
    monkeypatch.setattr(_launches, "launches_directly", lambda: True)
    launcher = CudaLauncher(0)
    launcher.launch = _behind(lambda *arguments: given.append(arguments[13:]), [TOLD])
    monkeypatch.setattr(Compiled, "run", launcher)
    describer = Describer(MATRIX, [16, 64])
    launches.kernel.arg_names = ["matrix", "y", "n", "SIZE", "FLAG"]
    return SimpleNamespace(
        launch=BoundLaunch(launches, (5,), (48,), CONSTANTS, OPTIONS, (describer,)), encoded=encoded, given=given,
        describer=describer,
    )  # fmt: skip


def _launched(described: SimpleNamespace, matrix: torch.Tensor) -> None:
    described.launch(0, (X.data_ptr(),), lambda: (described.describer(matrix), X), (matrix,))


def test_a_descriptor_is_encoded_once_an_address(
    described: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = MATRIX.clone()
    for matrix in (MATRIX, MATRIX, other, MATRIX, other):
        _launched(described, matrix)
    assert described.encoded == [MATRIX.data_ptr(), other.data_ptr()]  # the first launch is Triton's own
    at = [f"map of {matrix.data_ptr()}" for matrix in (MATRIX, other, MATRIX, other)]
    assert described.given == [(map_, 32, 64, 64, 1, X.data_ptr(), 48, 64, True) for map_ in at]
    # A launch of another grid finds the same compiled kernel, and Triton encodes what is among its arguments.
    described.launch.launches((7,), (described.describer(MATRIX), X, 48), CONSTANTS, OPTIONS)
    assert len(described.launch.launches.kernel.compiled) == 1
    assert described.given[-1] == described.given[0]
    monkeypatch.setattr(Describer, "_MOST", 2)
    for matrix in [MATRIX.clone() for _ in range(5)]:
        _launched(described, matrix)
    assert len(described.describer._encoded) <= 2  # few are kept


def test_with_hooks_triton_gets_descriptors(described: SimpleNamespace, profiler: list[str]) -> None:
    for _ in range(2):
        _launched(described, MATRIX)
    ((_, (one, *rest)),) = described.launch.launches.kernel.by_triton
    assert one.base is MATRIX
    assert rest == [X.data_ptr(), 48, 64, True]
    assert not described.given


# Launches that know most of it beforehand


@pytest.fixture
def launch(launches: CachedKernel) -> BoundLaunch:
    return BoundLaunch(launches, (5,), (48,), CONSTANTS, OPTIONS)


def test_a_launch_asks_for_tensors_once_and_where_addresses_are_off_16_bytes(launch: BoundLaunch) -> None:
    kernel, asked = launch.launches.kernel, []
    for x in (X[1:], X, X[2:], X, X[4:]):
        launch(0, (x.data_ptr(), 0), lambda x=x: asked.append(x) or (x, None))
    assert [x.data_ptr() for x in asked] == [x.data_ptr() for x in (X[1:], X, X[2:])]
    assert [bool(call["arguments"][0].data_ptr() % 16) for call in kernel.compiled] == [True, False]
    assert [given[0] for _, given in kernel.runs] == [X[2:].data_ptr(), X.data_ptr(), X[4:].data_ptr()]


def test_numbers_that_change_come_after_the_sizes(launches: CachedKernel) -> None:
    """And change no kernel, though of other numbers it matters whether they are 1 or multiples of 16."""
    kernel = launches.kernel
    kernel.arg_names = ["x", "y", "n", "step", "SIZE", "FLAG"]
    launch = BoundLaunch(launches, (5,), (48,), CONSTANTS, OPTIONS)
    for step in (3, 1, 16, -7):
        launch(0, (X.data_ptr(), 0), lambda: (X, None), (), (step,))
    launch(0, (X[1:].data_ptr(), 0), lambda: (X[1:], None), (), (5,))
    assert [call["arguments"][2:] for call in kernel.compiled] == [(48, 3), (48, 5)]
    assert [given for _, given in kernel.runs] == [(X.data_ptr(), 0, 48, step, 64, True) for step in (1, 16, -7)]


def test_a_launch_is_on_the_tensors_device(launch: BoundLaunch, monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextmanager
    def entered(device: int) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(_launches, "current_device", lambda: current[-1])
    seen: list[int] = []
    monkeypatch.setattr(Driver, "get_current_stream", lambda self, device: seen.append(device) or 7)
    for device in (0, 1, 1, 0, 1):
        launch(device, (X.data_ptr(), 0), lambda: (X, None))
    assert len(launch.launches.kernel.compiled) == 2
    assert seen == [1, 0, 1]
    assert current == [0]


def test_a_fixed_launch_asks_its_tensors_once(launches: CachedKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = FixedLaunch(launches, (5,), (X, None, 48), CONSTANTS, OPTIONS)
    for _ in range(3):
        fixed()
    assert len(launches.kernel.compiled) == 1
    assert launches.kernel.runs == [((5, 1, 1), (X.data_ptr(), None, 48, 64, True))] * 2
    # Another device has another kernel, and what one found is not the other's.
    monkeypatch.setattr(_launches, "current_device", lambda: 1)
    fixed()
    assert len(launches.kernel.compiled) == 2
    assert len(launches.kernel.runs) == 2
    assert fixed.is_of(launches, (5,), (X, None, 48))
    for other in (((6,), (X, None, 48)), ((5,), (X.clone(), None, 48)), ((5,), (X, None))):
        assert not fixed.is_of(launches, *other)
    assert not fixed.is_of(CachedKernel(Kernel()), (5,), (X, None, 48))


def test_in_the_interpreter_a_fixed_launch_asks_for_no_device(
    launches: CachedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch is built for CUDA and there is no driver, asking is an error."""

    def ask() -> int:
        raise RuntimeError("Found no NVIDIA driver on your system")

    monkeypatch.setattr(_launches, "current_device", ask)
    launches.interpreted = True
    fixed = FixedLaunch(launches, (5,), (X, None, 48), CONSTANTS, OPTIONS)
    for _ in range(2):
        fixed()
    assert len(launches.kernel.compiled) == 2


# Kernels that are compiled side by side


def test_kernels_are_compiled_side_by_side_on_the_current_device(
    launches: CachedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    devices: list[int] = []
    both = threading.Barrier(2)  # one after another they would wait for ever
    monkeypatch.setattr(_launches, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(devices.append(device)))

    def warmup(*arguments: Any, **rest: Any) -> None:
        both.wait(timeout=20)
        seen.append((threading.get_ident(), arguments, rest))
        if not arguments:
            raise ValueError("no such instruction")

    one, other = (CachedKernel(SimpleNamespace(warmup=warmup)) for _ in range(2))
    one.interpreted = other.interpreted = False
    compile_together([(one, (3,), (X, 1), {"SIZE": 2}, {"num_warps": 4}), (other, (5,), (Y,), {}, {})])
    assert len({thread for thread, *_ in seen}) == 2
    assert {len(arguments): rest for _, arguments, rest in seen} == {
        2: {"grid": (3,), "SIZE": 2, "num_warps": 4}, 1: {"grid": (5,)},
    }  # fmt: skip
    assert devices == [1, 1]
    with pytest.raises(ValueError, match="no such instruction"):
        compile_together([(of, (1,), (), {}, {}) for of in (one, other)])
