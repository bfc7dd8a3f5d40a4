"""Times: of a copy, and of an optimizer's step."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.cli._bench._lists import ParameterList
from narrowgauge.cli._bench._rows import Row

_WARM = 2  # steps after the first that are not counted
_LEAST, _MOST = 5, 200  # steps that are
_CPU_COPY, _CUDA_COPY = 1 << 28, 1 << 32  # bytes


def copy_speed(device: torch.device) -> float:
    """Bytes a second, read and written ones together, of the fastest of a few copies of a large tensor."""
    source = torch.zeros(_CUDA_COPY if device.type == "cuda" else _CPU_COPY, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / min(_timed(lambda: target.copy_(source), device) for _ in range(_LEAST))


def measure(row: Row, of: ParameterList, device: torch.device, speed: float, seconds: float) -> dict[str, Any]:
    """A row's figures on a list of tensors.

    Args:
        row, of, device: what, on what, where.
        speed: `copy_speed`.
        seconds: how long to go on, at least five steps.

    Returns:
        `ms` (median), `steps` (how many were timed), `ms_per_1e9` (for as many parameters), `state_bytes` a
        parameter, `moved_bytes` a parameter that a step has to read and write, `limit_ms`: the time of a copy of
        those, `share`: that over `ms`, `first_step_seconds`; or `failed`: why there are none.
    """
    if (refusal := row.refusal()) is not None:
        return {"failed": refusal}
    try:
        return _measure(row, of, device, speed, seconds)
    except Exception as error:  # whatever a peer raises is its result
        return {"failed": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"}
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(row: Row, of: ParameterList, device: torch.device, speed: float, seconds: float) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(0)
    parameters = []
    for shape in of.shapes():
        p = nn.Parameter(torch.randn(shape, device=device, generator=generator).mul_(0.02).to(row.dtype))
        p.grad = torch.randn(shape, device=device, generator=generator).mul_(0.01).to(row.dtype)
        parameters.append(p)
    optimizer = row.make(parameters)
    first = _timed(optimizer.step, device)
    for _ in range(_WARM):
        optimizer.step()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < _LEAST or (time.perf_counter() < end and len(times) < _MOST):
        times.append(_timed(optimizer.step, device))
    count = sum(p.numel() for p in parameters)
    state = _state_bytes(optimizer) / count
    moved = 2 * row.dtype.itemsize + row.gradient_passes * row.dtype.itemsize + 2 * state
    median, limit = statistics.median(times), moved * count / speed
    return {
        "ms": 1e3 * median,
        "steps": len(times),
        "ms_per_1e9": 1e12 * median / count,
        "state_bytes": state,
        "moved_bytes": moved,
        "limit_ms": 1e3 * limit,
        "share": limit / median,
        "first_step_seconds": first,
    }


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds from an idle device to an idle device."""
    if device.type != "cuda":
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors that a step reads and writes, each piece of memory once."""
    found = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(dict(optimizer.state))
    }
    return sum(found.values())


def tensors_in(kept: Any) -> Iterator[Tensor]:
    """The plain tensors inside: of subclasses made of others, of containers, of objects."""
    if isinstance(kept, Tensor):
        if hasattr(kept, "__tensor_flatten__"):
            for name in kept.__tensor_flatten__()[0]:
                yield from tensors_in(getattr(kept, name))
        else:
            yield kept
    elif isinstance(kept, dict):
        for value in kept.values():
            yield from tensors_in(value)
    elif isinstance(kept, list | tuple):
        for value in kept:
            yield from tensors_in(value)
    elif hasattr(kept, "__dict__") and not isinstance(kept, type) and not callable(kept):
        yield from tensors_in(vars(kept))
