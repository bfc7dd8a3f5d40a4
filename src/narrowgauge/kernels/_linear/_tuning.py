# mypy: disable-error-code="import-not-found,import-untyped"
"""What was measured on this GPU: the fastest way of each kind of multiply, kept in the user's cache folder.

Nothing is measured unasked: a first step takes the table's defaults. Whoever tunes times every candidate once per
kind, and the winners are found by all later processes, by GPU, Triton's version and kind (`kernels._cache`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from narrowgauge.kernels import _cache
from narrowgauge.kernels._linear._ways import Kind, Way


def measured(device: torch.device, kind: Kind) -> Way | None:
    """The fastest way that was measured for a kind on a device, if any."""
    return _kept(_name(device)).get(kind.key)


def keep(device: torch.device, found: dict[Kind, tuple[Way, float]]) -> Path | None:
    """Remember the ways of kinds and their times in ms, here and for later processes.

    Returns:
        The file, or None where nothing can be written: then they are remembered by this process only.
    """
    name = _name(device)
    _kept(name).update({kind.key: way for kind, (way, _) in found.items()})
    records = {kind.key: {**way.as_record(), "ms": ms} for kind, (way, ms) in found.items()}
    path = _path()
    return path if _cache.merge_records(path, name, records) else None


def fastest(
    ways: list[Way], run: Callable[[Way], Any], agrees: Callable[[Any], bool]
) -> tuple[dict[Way, float], dict[Way, str]]:
    """Times in ms of ways, the fastest first, and why each of the others has none.

    Args:
        ways: to be tried.
        run: runs a multiply by a way on the current CUDA device and returns its result.
        agrees: whether a result is right; a way that is not is no candidate.
    """
    times: dict[Way, float] = {}
    failed: dict[Way, str] = {}
    for way in ways:
        try:
            if not agrees(run(way)):
                failed[way] = "its result differs"
                continue
            times[way] = _time(functools.partial(run, way))
        except Exception as error:  # a tile that does not fit, a compiler that refuses
            failed[way] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return dict(sorted(times.items(), key=lambda item: item[1])), failed


def _time(run: Callable[[], Any], rounds: int = 3, budget_ms: float = 20.0) -> float:
    """Milliseconds a run, the best of some rounds of runs in a row.

    The runs are replayed from a CUDA graph: launched one by one, a small multiply would be timed as the host.
    """
    ms = _elapsed(run, 2)
    runs = max(3, min(100, int(budget_ms / max(ms / 2, 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(runs):
            run()
    graph.replay()
    return min(_elapsed(graph.replay, 1) for _ in range(rounds)) / runs


def _elapsed(run: Callable[[], Any], times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _path() -> Path:
    return _cache.folder() / "multiplies.json"


def _name(device: torch.device) -> str:
    # By the module: a distribution of it need not be called triton (pytorch-triton, triton-windows).
    return f"{torch.cuda.get_device_name(device)}, triton {triton.__version__}"


@functools.lru_cache(maxsize=16)
def _kept(name: str) -> dict[str, Way]:
    """Ways by kind, as the file had them when they were first asked for."""
    ways = {}
    for key, record in _cache.read_records(_path()).get(name, {}).items():
        with contextlib.suppress(TypeError, ValueError):
            ways[key] = _way(record)
    return ways


def _way(record: Any) -> Way:
    """A way as the file has it.

    Raises:
        TypeError, ValueError: if it is none.
    """
    if not isinstance(record, dict):
        raise ValueError(f"no way: {record}")
    way = Way(**{name: value for name, value in record.items() if name != "ms"})
    sides = (way.rows, way.columns, way.inner, way.warps, way.stages, way.group, way.resident)
    known = way.kernel in ("pointers", "descriptors", "cublas") and isinstance(way.halves, bool)
    if not known or not all(isinstance(side, int) and 0 < side <= 1024 for side in sides):
        raise ValueError(f"no way: {record}")
    return way
