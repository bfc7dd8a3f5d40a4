# mypy: disable-error-code="import-not-found,import-untyped"
"""Whether Triton's kernels run on a device, asked before anything depends on it."""

from __future__ import annotations

import functools
import importlib.util
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

_CAPABILITY = (7, 0)  # the oldest that Triton compiles for
# The oldest that have the instructions which kernels name: conversions to bf16, and to float8.
_NAMED, _FLOAT8 = (8, 0), (8, 9)
_TUNED = (9, 0)  # H100 and H200
_begun: list[Future[Any]] = []


@functools.lru_cache(maxsize=1)
def launches_directly() -> bool:
    """Whether launches go straight to the function in C that Triton's launcher calls.

    The order of its arguments is known of NVIDIA's in Triton 3.6. Elsewhere the launcher, which is Python, is
    called.
    """
    import triton

    return triton.__version__.startswith("3.6.") and torch.version.hip is None


def name() -> str:
    """The word "Triton", with its version where launches go through its own launcher."""
    if launches_directly():
        return "Triton"
    import triton

    return f"Triton {triton.__version__} by its own launcher"


@functools.lru_cache(maxsize=1)
def instructions() -> tuple[bool, bool]:
    """Whether kernels may name NVIDIA's instructions: at all, and those for float8.

    They may if all GPUs that torch sees have them, or if it sees none, and kernels are compiled for elsewhere.
    Without, as on AMD's and Intel's, the same is done in a few operations more.
    """
    if torch.version.hip is not None or getattr(torch.version, "xpu", None) is not None:
        return False, False
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    oldest = min((torch.cuda.get_device_capability(device) for device in devices), default=_FLOAT8)
    return oldest >= _NAMED, oldest >= _FLOAT8


@functools.lru_cache(maxsize=64)
def limits_registers(device: torch.device) -> bool:
    """Whether kernels on a device are compiled for at most so many registers a thread as their layout says.

    The limits were measured on GPUs of compute capability 9.0; elsewhere the compiler chooses. They hold, too,
    where no GPU is visible and kernels are compiled for one of that kind.
    """
    if not instructions()[0]:  # other compilers know no such option
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) == _TUNED


def begin() -> None:
    """Start in threads what a first step waits for: Triton's driver, hash and assembler, and what reads addresses.

    It takes half a second, and what the first step does before it has no use for it: to be called there. Threads
    that are over when the step is do not meet the forks of data loaders.
    """
    if _begun or importlib.util.find_spec("triton") is None:
        return
    from narrowgauge.kernels._c_addresses import reader

    pool = ThreadPoolExecutor(3)
    driver = pool.submit(_driver)
    _begun.extend([driver, pool.submit(_hash), pool.submit(reader), pool.submit(_assembler, driver)])
    pool.shutdown(wait=False)


def wait(count: int | None = None) -> None:
    """Until all that `begin` has started is over, or the first of it; what fails fails again where it is used."""
    for one in _begun[:count]:
        one.exception()


def _driver() -> None:
    import triton

    _ = triton.runtime.driver.active.utils


def _hash() -> None:
    """Of Triton's library of 400 MB, a part of the keys under which it keeps what it has compiled."""
    from triton.runtime import cache

    cache.triton_key()


def _assembler(driver: Future[Any]) -> None:
    import triton
    from triton.compiler.compiler import make_backend

    driver.exception()  # waits: it would be compiled twice
    make_backend(triton.runtime.driver.active.get_current_target()).hash()


@functools.lru_cache(maxsize=64)
def unavailable(device: torch.device) -> str | None:
    """Why kernels do not run on a device, or None if they do; looked into once."""
    if device.type != "cuda":
        return f"no kernels for {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < _CAPABILITY:
        return f"Triton takes compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]} and up"
    try:
        import triton

        if triton.knobs.runtime.interpret:
            return "TRITON_INTERPRET is set"
        # Its driver is C that is compiled on first use: without compiler or Python's headers this fails, as every
        # launch would.
        wait(1)
        _ = triton.runtime.driver.active.utils
    except Exception as error:
        return f"Triton does not start: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return None
