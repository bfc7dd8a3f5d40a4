"""Milliseconds of an optimizer step, ours beside torch's, in one run.

The parameters are one large tensor, or the list of GPT-2 small's tensors. What is timed is the eager path: the
specification, which reads and writes memory many times for each parameter. Ratios to torch's fused AdamW are of
this run; absolute times are of this device.

    python benchmarks/bench_optimizer_step.py [--device cuda] [--json benchmarks/results/optimizer_step_cpu.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from narrowgauge import recipes
from narrowgauge.cli._environment import describe_environment
from narrowgauge.trainers import configuration


def sizes(name: str) -> list[tuple[int, ...]]:
    """Shapes of the parameters."""
    if name == "one tensor of 2^22":
        return [(2048, 2048)]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration(name, vocabulary=50257, sequence=1024))
    return [tuple(p.shape) for p in model.parameters()]


def optimizers() -> dict[str, tuple[torch.dtype, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]]]:
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
    return found


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
    lists = ["one tensor of 2^22"] + (["gpt2"] if arguments.device.startswith("cuda") else [])
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
            for label, (dtype, make) in optimizers().items()
        }
        results["lists"][name] = rows
        fused = rows["torch fused, fp32"]
        print(f"{name}, {sum(torch.Size(s).numel() for s in shapes):,} parameters, {arguments.device}")
        for label, value in rows.items():
            print(f"  {label:<22} {value:9.2f} ms  {value / fused:6.1f} x torch fused fp32")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
