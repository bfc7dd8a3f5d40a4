"""Milliseconds of an optimizer step, ours beside torch's, in one run.

The parameters are one large tensor, or the list of GPT-2 small's tensors. On a CPU the step is one compiled pass
over memory, and the eager step, its specification, is timed beside it; on a GPU it is the Triton kernels' only.
Ratios to torch's fused AdamW are of this run; absolute times are of this device.

    python benchmarks/bench_optimizer_step.py [--device cuda] [--json benchmarks/results/optimizer_step_cpu.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from narrowgauge import optim, recipes
from narrowgauge.cli._environment import describe_environment
from narrowgauge.trainers import configuration

_SIDES = {"one tensor of 2^22": 2048, "one tensor of 2^24": 4096}
# Weights and states of the bf16 steps on a CPU, and those of them whose eager step is timed too.
_STORAGES = [
    ("plain", "fp32"), ("plain", "8bit"), ("plain", "log8"),
    ("split8", "8bit"), ("split8", "log8"), ("split8", "log4"),
]  # fmt: skip
_EAGER = [("plain", "8bit"), ("plain", "log8")]


def sizes(name: str) -> list[tuple[int, ...]]:
    """Shapes of the parameters."""
    if name in _SIDES:
        return [(_SIDES[name], _SIDES[name])]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration(name, vocabulary=50257, sequence=1024))
    return [tuple(p.shape) for p in model.parameters()]


def optimizers(device: str) -> dict[str, tuple[torch.dtype, Callable[[list[torch.nn.Parameter]], Any]]]:
    """Name: dtype of the parameters, and how to make the optimizer."""
    found: dict[str, Any] = {
        "torch fused, fp32": (torch.float32, lambda ps: torch.optim.AdamW(ps, fused=True)),
        "torch fused, bf16": (torch.bfloat16, lambda ps: torch.optim.AdamW(ps, fused=True)),
        "torch foreach, fp32": (torch.float32, lambda ps: torch.optim.AdamW(ps, foreach=True)),
    }
    for name in recipes.names():
        recipe = recipes.get(name)
        options = {"weights": recipe.weights, "states": recipe.states}
        found[name] = (recipe.dtype, lambda ps, o=options: recipes.AdamW(ps, **o))
    if device == "cpu":
        for weights, states in _STORAGES:
            options = {"weights": weights, "states": states}
            found[f"{weights}, {states}"] = (torch.bfloat16, lambda ps, o=options: optim.AdamW(ps, **o))
            if (weights, states) in _EAGER:
                found[f"{weights}, {states}, eager"] = (torch.bfloat16, lambda ps, o=options: eager(ps, **o))
    return found


def eager(parameters: list[torch.nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """AdamW without its kernels."""
    optimizer = optim.AdamW(parameters, **options)
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
        said = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
    return float(said.stdout)


def median_ms(dtype: torch.dtype, make: Any, shapes: list[tuple[int, ...]], device: str, repeats: int) -> float:
    """Median milliseconds of a step after two that are not counted."""
    parameters = [torch.nn.Parameter(torch.randn(shape, device=device).mul_(0.02).to(dtype)) for shape in shapes]
    for p in parameters:
        p.grad = torch.randn_like(p).mul_(0.01)
    optimizer = make(parameters)
    seconds = []
    for _ in range(repeats + 2):
        synchronize(device)
        start = time.perf_counter()
        optimizer.step()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds[2:])


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    lists = ["one tensor of 2^22", "gpt2" if arguments.device.startswith("cuda") else "one tensor of 2^24"]
    results: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "environment": describe_environment(torch.device(arguments.device)),
        "unit": "milliseconds a step, median",
        "lists": {},
    }
    for name in lists:
        shapes = sizes(name)
        rows = {
            label: median_ms(dtype, make, shapes, arguments.device, arguments.repeats)
            for label, (dtype, make) in optimizers(arguments.device).items()
        }
        results["lists"][name] = rows
        fused = rows["torch fused, fp32"]
        print(f"{name}, {sum(torch.Size(s).numel() for s in shapes):,} parameters, {arguments.device}")
        for label, value in rows.items():
            print(f"  {label:<22} {value:9.2f} ms  {value / fused:6.1f} x torch fused fp32")
    if arguments.device == "cpu":
        results["first_step_seconds"] = first_step_seconds()
        print(f"first step of a process, nothing compiled: {results['first_step_seconds']:.2f} s")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
