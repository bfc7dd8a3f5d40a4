"""Unscaling and clipping in the passes of a step, beside passes of their own: milliseconds of a GPU and a host.

GPT-2 medium's tensors (355M parameters), bf16, AdamW. Each line is one way to take a step: the bare step, torch's
functions before it, and what the step does by itself. Whether a norm is clipped or not takes the same time.

    python benchmarks/bench_gradient_factor.py [--json FILE] [--repeats 20]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_fused_step import GPT2M, gpu_ms, made

from narrowgauge.scaling import DynamicLossScaler, TensorLossScaler

VARIANTS = [("split8", "log8"), ("plain", "8bit"), ("plain", "fp32")]


def ways(weights: str, states: str) -> dict[str, Callable[[], Any]]:
    """Steps by name."""
    options = {"weights": weights, "states": states, "lr": 1e-6}
    plain, clipping = (made("AdamW", GPT2M, {**options, **more}) for more in ({}, {"max_grad_norm": 1.0}))
    ps = plain.param_groups[0]["params"]
    found: dict[str, Callable[[], Any]] = {"step": plain.step}

    def by_torch() -> None:
        torch.nn.utils.clip_grad_norm_(ps, 1.0)
        plain.step()

    found["clip_grad_norm_, step"] = by_torch
    found["step with max_grad_norm"] = clipping.step
    for kind in (DynamicLossScaler, TensorLossScaler):
        for name, optimizer in (("step", plain), ("step with max_grad_norm", clipping)):
            for explicit in (True, False):
                # A scale of 1: gradients that are unscaled in place many times stay what they are.
                scaler: Any = kind(init_scale=1.0)
                scaler.scale(torch.ones((), device="cuda"))

                def call(scaler: Any = scaler, optimizer: Any = optimizer, explicit: bool = explicit) -> None:
                    if explicit:
                        scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()

                found[f"{kind.__name__}, {'unscale_, ' if explicit else ''}{name}"] = call
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for weights, states in VARIANTS:
        for name, call in ways(weights, states).items():
            gpu, host = gpu_ms(call, args.repeats)
            results[f"{weights} {states}, {name}"] = {"gpu ms": gpu, "host ms": host}
            print(f"{weights} {states:5} {name:55} GPU {gpu:7.3f} ms, host {host:7.3f} ms", flush=True)
        torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
