"""A row's figures: times of its step, and the bytes that it keeps and moves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.cli._bench._lists import ParameterList
from narrowgauge.cli._bench._rows import Row
from narrowgauge.cli._bench._times import time_steps, timed

_WARM = 2  # steps after the first that are not counted


def measure(row: Row, of: ParameterList, device: torch.device, speed: float, seconds: float) -> dict[str, Any]:
    """A row's figures on a list of tensors.

    Args:
        row, of, device: what, on what, where.
        speed: `copy_speed`.
        seconds: how long to go on, at least five steps, on a GPU five runs of three and more.

    Returns:
        `ms` (median of steps, on a GPU of runs), `steps` (how many were timed), `ms_per_1e9` (for as many
        parameters), `state_bytes` a parameter, `moved_bytes` a parameter that a step has to read and write,
        `limit_ms`: the time of a copy of those, `share`: that over `ms`, `first_step_seconds`; on a GPU also
        `host_ms`: how long a step keeps the host, `device_ms`: how long a step takes that was launched before the
        device came to it (None if it could not be), and `peak_extra_bytes` a parameter: memory that a step takes
        and gives back. Or `failed`: why there are none.
    """
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
    first = timed(optimizer.step, device)
    for _ in range(_WARM):
        optimizer.step()
    count = sum(p.numel() for p in parameters)
    extra = _peak_extra_bytes(optimizer, device) / count if device.type == "cuda" else 0.0
    times = time_steps(optimizer.step, device, seconds)
    moved = _moved_bytes(row, optimizer, count)
    limit = moved * count / speed
    figures: dict[str, Any] = {
        "ms": 1e3 * times.seconds,
        "steps": times.steps,
        "ms_per_1e9": 1e12 * times.seconds / count,
        "state_bytes": _state_bytes(optimizer) / count,
        "moved_bytes": moved,
        "limit_ms": 1e3 * limit,
        "share": limit / times.seconds,
        "first_step_seconds": first,
    }
    if times.host_seconds is not None:
        behind = times.device_seconds
        figures |= {"host_ms": 1e3 * times.host_seconds, "device_ms": 1e3 * behind if behind is not None else None}
        figures["peak_extra_bytes"] = extra
    return figures


def _moved_bytes(row: Row, optimizer: torch.optim.Optimizer, count: int) -> float:
    """Bytes a parameter that a step has to read and write, however it is written.

    That is parameter and state, read and written, and the gradient, read, and once more what has to be known
    before anything may be written.
    """
    word = row.dtype.itemsize
    words = {"grad": float(word), "weight": float(word)}
    again = sum(words[name] if name in words else _state_bytes(optimizer, name) / count for name in row.before)
    return 3 * word + 2 * _state_bytes(optimizer) / count + again


def _state_bytes(optimizer: torch.optim.Optimizer, moment: str = "state") -> int:
    """Bytes of the tensors that a step reads and writes, or of one moment's; each piece of memory once."""
    kept: Any = dict(optimizer.state)
    if moment != "state":
        kept = [[state[key] for key in state if key.partition(".")[0] == moment] for state in kept.values()]
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(kept)}
    return sum(found.values())


def _peak_extra_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Memory that a step takes and gives back."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    optimizer.step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


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
