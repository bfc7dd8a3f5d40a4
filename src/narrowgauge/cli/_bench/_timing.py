"""How long a step or a pass takes: the device, the host, and the first time.

On a CPU a step is timed by itself. On a GPU a training loop launches a step while the kernels of the backward
pass still run, so steps are timed in runs of many, by the device's clock, from the end of an uncounted step to
the end of the last. If the host is the slower of the two, its time is what a step costs. The host's own time is
that of a run's first step, which finds the launch queue empty. The device's own time is that of a few steps
launched while the device is kept busy.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from narrowgauge.linear import _tune

_LEAST, _MOST = 5, 200  # steps timed on a CPU; at least that many runs on a GPU
_STEP_SECONDS, _PASS_SECONDS = 0.05, 0.15  # length of a run; layers need longer ones for the clock to settle
_RUN_LEAST, _RUN_MOST = 3, 2000  # steps of a run
_QUEUED, _QUEUED_MOST = 5e-3, 10  # seconds of host work that the device waits for, and steps in it
_CYCLES = 2e9  # of a device, a second: about, and rather too many
_CPU_COPY, _CUDA_COPY, _COPIES = 1 << 28, 1 << 32, 10  # bytes, and copies in a row

Run = Callable[[], Any]


@dataclass(frozen=True)
class Times:
    """Medians, in seconds.

    Attributes:
        seconds: of a step.
        steps: how many were timed.
        host_seconds: how long a step keeps the host; None on a CPU.
        device_seconds: of a step launched before the device comes to it; None on a CPU, and where the launches of a
            step do not fit into the queue.
    """

    seconds: float
    steps: int
    host_seconds: float | None = None
    device_seconds: float | None = None


def copy_speed(device: torch.device) -> float:
    """Bytes a second, reads and writes counted, of the fastest of a few copies of a large tensor."""
    source = torch.zeros(_CUDA_COPY if device.type == "cuda" else _CPU_COPY, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = partial(target.copy_, source)
    copy()
    if device.type == "cuda":
        fastest = min(timed_run(copy, _COPIES, device)[0] for _ in range(_LEAST))
    else:
        fastest = min(timed(copy, device) for _ in range(_LEAST))
    return 2 * source.nbytes / fastest


def time_steps(step: Run, device: torch.device, seconds: float) -> Times:
    """Time a warmed-up step for some seconds: at least five steps, on a GPU five runs."""
    if device.type != "cuda":
        times: list[float] = []
        end = time.perf_counter() + seconds
        while len(times) < _LEAST or (time.perf_counter() < end and len(times) < _MOST):
            times.append(timed(step, device))
        return Times(statistics.median(times), len(times))
    count = _steps_of_a_run(step, _STEP_SECONDS, device)
    end = time.perf_counter() + seconds
    runs: list[tuple[float, float]] = []
    while len(runs) < _LEAST or time.perf_counter() < end:
        runs.append(timed_run(step, count, device))
    in_a_row, of_host = zip(*runs, strict=True)
    host = statistics.median(of_host)
    queued = [found for _ in range(_LEAST) if (found := timed_queued(step, host, device)) is not None]
    return Times(
        statistics.median(in_a_row), count * len(runs), host, statistics.median(queued) if queued else None
    )


def _steps_of_a_run(step: Run, seconds: float, device: torch.device) -> int:
    about, _ = timed_run(step, _RUN_LEAST, device)
    return min(max(math.ceil(seconds / max(about, 1e-9)), _RUN_LEAST), _RUN_MOST)


def timed(run: Run, device: torch.device) -> float:
    """Seconds from an idle device to an idle device."""
    return _tune.seconds(run, 1, device)


def timed_run(step: Run, count: int, device: torch.device) -> tuple[float, float]:
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


def timed_queued(step: Run, host: float, device: torch.device) -> float | None:
    """Seconds a step on the device, of a few that wait for it; None if the device would not wait long enough.

    Args:
        step: to time.
        host: seconds that a step keeps the host, about.
        device: a GPU.
    """
    count = min(max(int(_QUEUED / max(host, 1e-9)), 1), _QUEUED_MOST)
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


@dataclass(frozen=True)
class Turns:
    """What `take_turns` measured, by name, a value a round.

    Attributes:
        seconds: of a pass.
        host: how long a pass keeps the host; empty on a CPU.
    """

    seconds: Mapping[Any, list[float]]
    host: Mapping[Any, list[float]]

    def ms(self, name: Any) -> float:
        """Milliseconds of a pass, the median."""
        return 1e3 * statistics.median(self.seconds[name])

    def host_ms(self, name: Any) -> float:
        """Milliseconds that a pass keeps the host, the median."""
        return 1e3 * statistics.median(self.host[name])

    def speedup(self, name: Any, over: Any) -> float:
        """How many times as fast as another: the median of the rounds' ratios."""
        pairs = zip(self.seconds[over], self.seconds[name], strict=True)
        return statistics.median(other / own for other, own in pairs)


def take_turns(
    passes: Mapping[Any, Run], device: torch.device, seconds: float, run_seconds: float = _PASS_SECONDS
) -> Turns:
    """Time warmed-up passes in rounds of all of them: a device that slows down slows all.

    Args:
        passes: what to time.
        device: where.
        seconds: how long to go on for each; at least five rounds.
        run_seconds: the least length of a run of one pass, on a GPU.
    """
    found: dict[Any, list[float]] = {name: [] for name in passes}
    host: dict[Any, list[float]] = {name: [] for name in passes}
    wanted = max(seconds / (2 * _LEAST), run_seconds)
    on_gpu = device.type == "cuda"
    counts = {name: _steps_of_a_run(run, wanted, device) for name, run in passes.items()} if on_gpu else {}
    end = time.perf_counter() + seconds * len(passes)
    for rounds in range(_MOST):
        if rounds >= _LEAST and time.perf_counter() >= end:
            break
        for name, run in passes.items():
            if on_gpu:
                of_device, of_host = timed_run(run, counts[name], device)
                found[name].append(of_device)
                host[name].append(of_host)
            else:
                found[name].append(timed(run, device))
    return Turns(found, host if on_gpu else {})


def why(error: Exception) -> str:
    """An error in one line, as a result."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
