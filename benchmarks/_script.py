"""What the scripts share: their options, how a results file is written, and a clock that waits for the device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from narrowgauge.cli._bench._shared import write_json
from narrowgauge.cli._bench._timing import timed

# What torch.compile is given by `--mode`. Kernels are launched from Python, replayed as CUDA graphs, or launched
# from generated C++; torch 2.11 forgets for backward graphs what it sets itself for those of the forward pass.
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "cpp-wrapper": {
        "options": {"cpp_wrapper": True, "triton.store_cubin": True, "triton.autotune_at_compile_time": True}
    },
}


def parser_for(doc: str | None) -> argparse.ArgumentParser:
    """A parser with what a script's docstring says as its help, and `--json`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="a file for the results")
    return parser


def command() -> str:
    """The command line, for the record."""
    return " ".join(["python", *sys.argv])


def save(path: Path | None, results: Mapping[str, Any]) -> None:
    """Write the results, if there is a file for them."""
    if path is not None:
        write_json(path, results)


def slowest(run: Callable[[], Any], device: torch.device, repeats: int, warm: int = 3) -> float:
    """Milliseconds of a run, the median, of the slowest rank."""
    times = []
    for _ in range(warm + repeats):
        dist.barrier()
        times.append(1e3 * timed(run, device))
    found = torch.tensor(median(times[warm:]), device=device, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def wait(device: torch.device) -> None:
    """Until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median(values: list[float]) -> float:
    """The upper one of two."""
    return sorted(values)[len(values) // 2]
