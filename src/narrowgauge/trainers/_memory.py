"""The peak memory of one step.

On a GPU the allocator records it. On the CPU the resident set depends more on imports and on the allocator than on
the training; so one step runs under torch's profiler, which records every allocation, and the running sum has a
maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

T = TypeVar("T")


def peak_memory(step: Callable[[], T], held: int, device: torch.device) -> tuple[T, int]:
    """Run a step; returns its result and the peak of bytes in tensors while it ran.

    `held`: bytes of the tensors that exist before and after it, parameters and optimizer states.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        result = step()
        return result, torch.cuda.max_memory_allocated(device)
    # The classic profiler: the newer one takes seconds to start and writes to the terminal.
    profiler = cast(Any, torch.autograd)
    options = (False, True, False, False, False, torch._C._profiler._ExperimentalConfig())
    profiler._enable_profiler_legacy(profiler.ProfilerConfig(profiler.ProfilerState.CPU, *options))
    try:
        result = step()
    finally:
        records = profiler._disable_profiler_legacy()
    current = peak = 0
    for record in (record for thread in records for record in thread):
        if record.kind() == "memory_alloc":
            current += record.cpu_memory_usage()
            peak = max(peak, current)
    return result, held + peak
