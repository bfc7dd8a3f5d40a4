"""What the passes of a compressed reduction take by themselves: times, bytes, and below what bandwidth they pay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from _script import median

from narrowgauge.cli._bench._timing import timed
from narrowgauge.distributed._compressed_passes import EagerPasses, Reduction, passes_of

RANKS = (2, 4, 8, 64)
_TOGETHER = 20  # launches between two events; a GPU is kept busy until all of them are queued
_BUSY = 40_000_000  # cycles
_EAGER_ON_CPU = 1 << 20  # elements; more take seconds


def task_of(hook: Any, bucket: Any, ranks: int) -> Reduction:
    """The bucket as the hook hands it to its passes."""
    buffer = bucket.buffer()
    plan = hook._plan(bucket.index(), bucket.parameters(), buffer.dtype, ranks)
    return Reduction(hook._codec, plan.layout, hook._feedback, buffer, 0, 1)


def codec_row(task: Reduction, copied: float, repeats: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of each pass, bytes it has to move a second, and that as a share of a copy's.

    Args:
        task: see `task_of`; it has been reduced before.
        copied: bytes a second that a copy moves, reads and writes.
        repeats: how many times each is taken.
        device: where.
    """
    row: dict[str, float] = {}
    for name, ms in passes_ms(task, passes_of, repeats, device).items():
        moved = moved_bytes(task, task.layout.ranks)[name]
        row |= {f"{name}_ms": ms, f"{name} GB/s": moved / ms / 1e6, f"{name} of limit": moved / ms * 1e3 / copied}
    row["codec_ms"] = sum(row[f"{name}_ms"] for name in ("encode", "add", "finish"))
    if device.type == "cuda" or task.buffer.numel() <= _EAGER_ON_CPU:
        row["eager codec_ms"] = sum(passes_ms(task, EagerPasses, 3, device).values())
    return row | {f"{ranks} ranks pay below GB/s": bandwidth(task, row, ranks) for ranks in RANKS}


def passes_ms(
    task: Reduction, make: Callable[[Reduction], Any], repeats: int, device: torch.device
) -> dict[str, float]:
    """The median milliseconds of encode, add and finish."""
    passes, ranks = make(task), task.layout.ranks
    sent = passes.encode()
    summed = passes.add(sent)
    received = summed.expand(ranks, -1).contiguous()
    passes.finish(received)
    calls = {"encode": passes.encode, "add": lambda: passes.add(sent), "finish": lambda: passes.finish(received)}
    return {name: median_ms(call, repeats, device) for name, call in calls.items()}


def median_ms(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    call()
    found = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_BUSY)
            start.record()
            for _ in range(_TOGETHER):
                call()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / _TOGETHER)
        else:
            found.append(1e3 * timed(call, device))
    return median(found)


def moved_bytes(task: Reduction, ranks: int) -> dict[str, float]:
    """Bytes that each pass reads and writes at least, on so many ranks."""
    elements, wire = float(sum(piece.numel for piece in task.layout.compressed)), task.codec
    message = wire.bits / 8 + 4 / wire.block_size
    grad = task.buffer.element_size()
    memory = 0 if task.feedback is None else task.feedback.dtype.itemsize
    total = 0 if task.feedback is None else 4 / ranks
    # With a memory the last pass reads again what the first one has encoded, and scales once more.
    again = 0 if task.feedback is None else grad + 2 * memory + message + total + 4 / wire.block_size
    return {
        "encode": elements * (grad + memory + message),
        "add": elements * (message + message / ranks + total),
        "finish": elements * (message + grad + again),
    }


def bandwidth(task: Reduction, row: dict[str, float], ranks: int) -> float:
    """GB/s of a rank's link, below which codes beat bf16 on so many ranks.

    The first and the last pass take what they take whatever the number of ranks; the one between moves other bytes.
    """
    here, there = (moved_bytes(task, count)["add"] for count in (task.layout.ranks, ranks))
    codec = row["encode_ms"] + row["finish_ms"] + row["add_ms"] * there / here
    elements = sum(piece.numel for piece in task.layout.compressed)
    saved = 2 * (ranks - 1) / ranks * elements * (2 - task.codec.bits / 8 - 4 / task.codec.block_size)
    return float(saved / codec / 1e6)
