"""How long a step takes: the device, the host, and the first time.

On a CPU a step is timed by itself. On a GPU that would not be what a training loop pays: there the host runs
ahead, and a step is launched while the kernels of the backward pass are still running. So steps are timed in
runs of many in a row, by the device's clock, from the end of one step that is not counted to the end of the
last. While the device is at that one the host launches the next; from then on the device waits only if the host
is the slower of the two, and then that is what a step costs. The host's own part is that of a run's first step,
which finds the queue of launches empty: later ones may wait there for room.

In a training loop the host has the whole backward pass to run ahead. What a step costs there is the device's part
alone: a few steps launched while the device is kept busy with nothing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_LEAST, _MOST = 5, 200  # steps that are timed on a CPU; on a GPU that many runs at least
_RUN_SECONDS = 0.05
_RUN_LEAST, _RUN_MOST = 3, 1000  # steps of a run
_BEHIND = 5e-3  # seconds of the host's work that the device is made to wait for
_BEHIND_MOST = 10  # steps, of which there is room for the launches in the queue
_CYCLES = 2e9  # of a device, a second: about, and rather too many
_CPU_COPY, _CUDA_COPY = 1 << 28, 1 << 32  # bytes
_COPIES = 10  # in a row


@dataclass(frozen=True)
class Times:
    """What was timed.

    Attributes:
        seconds: of a step, the median.
        steps: how many were timed.
        host_seconds: how long a step keeps the host, the median; None on a CPU, where it is all there is.
        device_seconds: of a step that has been launched before the device comes to it, the median; None on a CPU,
            and where a step's launches do not fit into the queue.
    """

    seconds: float
    steps: int
    host_seconds: float | None = None
    device_seconds: float | None = None


def copy_speed(device: torch.device) -> float:
    """Bytes a second, read and written ones together, of the fastest of a few copies of a large tensor."""
    source = torch.zeros(_CUDA_COPY if device.type == "cuda" else _CPU_COPY, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    copy()
    if device.type == "cuda":
        fastest = min(timed_run(copy, _COPIES, device)[0] for _ in range(_LEAST))
    else:
        fastest = min(timed(copy, device) for _ in range(_LEAST))
    return 2 * source.nbytes / fastest


def time_steps(step: Callable[[], Any], device: torch.device, seconds: float) -> Times:
    """Time a step again and again.

    Args:
        step: takes one; has taken a few, so that nothing is left to be compiled.
        device: where.
        seconds: how long to go on; at least five steps, on a GPU five runs.
    """
    if device.type == "cuda":
        return _time_runs(step, device, seconds)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < _LEAST or (time.perf_counter() < end and len(times) < _MOST):
        times.append(timed(step, device))
    return Times(statistics.median(times), len(times))


def _time_runs(step: Callable[[], Any], device: torch.device, seconds: float) -> Times:
    about, _ = timed_run(step, _RUN_LEAST, device)
    count = min(max(math.ceil(_RUN_SECONDS / max(about, 1e-9)), _RUN_LEAST), _RUN_MOST)
    runs: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(runs) < _LEAST or time.perf_counter() < end:
        runs.append(timed_run(step, count, device))
    in_a_row, of_host = zip(*runs, strict=True)
    host = statistics.median(of_host)
    behind = [timed_behind(step, host, device) for _ in range(_LEAST)]
    known = [found for found in behind if found is not None]
    return Times(statistics.median(in_a_row), count * len(runs), host, statistics.median(known) if known else None)


def timed_run(step: Callable[[], Any], count: int, device: torch.device) -> tuple[float, float]:
    """Seconds a step on the device, of `count` in a row, and the host's seconds for the one before them."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream(device)
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    step()
    host = time.perf_counter() - begun
    begin.record(stream)
    for _ in range(count):
        step()
    end.record(stream)
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3 / count, host


def timed_behind(step: Callable[[], Any], host: float, device: torch.device) -> float | None:
    """Seconds a step on the device, of a few that wait for it; None if it would not wait long enough.

    Args:
        step: takes one.
        host: seconds that a step keeps the host, about.
        device: where.
    """
    count = min(max(int(_BEHIND / max(host, 1e-9)), 1), _BEHIND_MOST)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream(device)
    for longer in (2, 8):
        torch.cuda.synchronize(device)
        torch.cuda._sleep(int(longer * (count * host + 1e-3) * _CYCLES))  # type: ignore[no-untyped-call]
        begin.record(stream)
        for _ in range(count):
            step()
        end.record(stream)
        late = begin.query()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        if not late:
            return float(begin.elapsed_time(end)) / 1e3 / count
    return None


def timed(run: Callable[[], Any], device: torch.device) -> float:
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
