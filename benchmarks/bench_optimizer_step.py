"""Milliseconds of an optimizer step by recipe, ours beside torch's, in one run; on a CPU beside the eager step.

The parameters are one large tensor, or the list of GPT-2 small's tensors. On a CPU the step is one compiled pass
over memory, and the eager step, its specification, is timed beside it; on a GPU it is the Triton kernels' only.
Ratios to torch's fused AdamW are of this run; absolute times are of this device.

    python benchmarks/bench_optimizer_step.py [--device cuda] [--json benchmarks/results/optimizer_step_cpu.json]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from _script import command, median, parser_for, save

from narrowgauge import optim, recipes
from narrowgauge.cli._bench._rows import parameter_list
from narrowgauge.cli._bench._timing import timed
from narrowgauge.trainers._environment import describe_environment

# Weights and states of the bf16 steps on a CPU, and those of them whose eager step is timed too.
_STORAGES = (
    ("plain", "fp32"), ("plain", "8bit"), ("plain", "log8"),
    ("split8", "8bit"), ("split8", "log8"), ("split8", "log4"),
)  # fmt: skip
_EAGER = (("plain", "8bit"), ("plain", "log8"))
Make = Callable[[list[torch.nn.Parameter]], Any]


def optimizers(device: torch.device) -> dict[str, tuple[torch.dtype, Make]]:
    """Name: dtype of the parameters, and how to make the optimizer."""
    found: dict[str, tuple[torch.dtype, Make]] = {
        "torch fused, fp32": (torch.float32, lambda ps: torch.optim.AdamW(ps, fused=True)),
        "torch fused, bf16": (torch.bfloat16, lambda ps: torch.optim.AdamW(ps, fused=True)),
        "torch foreach, fp32": (torch.float32, lambda ps: torch.optim.AdamW(ps, foreach=True)),
    }
    for recipe in map(recipes.get, recipes.names()):
        storages = {"weights": recipe.weights, "states": recipe.states}
        found[recipe.name] = (recipe.dtype, lambda ps, o=storages: optim.AdamW(ps, **o))
    for weights, states in _STORAGES if device.type == "cpu" else ():
        storages = {"weights": weights, "states": states}
        found[f"{weights}, {states}"] = (torch.bfloat16, lambda ps, o=storages: optim.AdamW(ps, **o))
        if (weights, states) in _EAGER:
            found[f"{weights}, {states}, eager"] = (torch.bfloat16, lambda ps, o=storages: eager(ps, **o))
    return found


def eager(parameters: list[torch.nn.Parameter], **storages: Any) -> torch.optim.Optimizer:
    """AdamW without its kernels."""
    optimizer = optim.AdamW(parameters, **storages)
    optimizer._engine.backends = ()
    return optimizer


def first_step_seconds() -> float:
    """Seconds of a process's first step where nothing has been compiled before."""
    code = (
        "import time, torch; from narrowgauge import optim; p = torch.nn.Parameter(torch.ones(9999).bfloat16());"
        "p.grad = p.detach().clone(); optimizer = optim.AdamW([p], states='8bit'); start = time.perf_counter();"
        "optimizer.step(); print(time.perf_counter() - start)"
    )
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        words = [sys.executable, "-c", code]
        return float(subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout)


def median_ms(dtype: torch.dtype, make: Make, shapes: Any, device: torch.device, repeats: int) -> float:
    """Median milliseconds of a step after two that are not counted."""
    parameters = [torch.nn.Parameter(torch.randn(shape, device=device).mul_(0.02).to(dtype)) for shape in shapes]
    for p in parameters:
        p.grad = torch.randn_like(p).mul_(0.01)
    optimizer = make(parameters)
    return 1e3 * median([timed(optimizer.step, device) for _ in range(repeats + 2)][2:])


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    device = torch.device(args.device)
    results: dict[str, Any] = {
        "command": command(),
        "environment": describe_environment(device),
        "unit": "milliseconds a step, median",
        "lists": {},
    }
    second = ("gpt2", "gpt2") if device.type == "cuda" else ("one tensor of 2^24", "4096x4096")
    for name, shape in (("one tensor of 2^22", "2048x2048"), second):
        shapes = parameter_list(shape).shapes()
        print(f"{name}, {sum(torch.Size(s).numel() for s in shapes):,} parameters, {device}")
        results["lists"][name] = rows = {}
        for label, (dtype, make) in optimizers(device).items():
            rows[label] = median_ms(dtype, make, shapes, device, args.repeats)
            print(
                f"  {label:<22} {rows[label]:9.2f} ms  {rows[label] / rows['torch fused, fp32']:6.1f} x torch fused"
            )
    if device.type == "cpu":
        results["first_step_seconds"] = first_step_seconds()
        print(f"first step of a process, nothing compiled: {results['first_step_seconds']:.2f} s")
    save(args.json, results)


if __name__ == "__main__":
    main()
