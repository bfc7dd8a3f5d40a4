"""Timing every way to multiply before layers are timed: `narrowgauge.linear.tune` at the shapes that come."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from narrowgauge.cli._bench_linear._layers import Layer
from narrowgauge.cli._bench_linear._passes import why
from narrowgauge.cli._bench_linear._sizes import Shape
from narrowgauge.linear import tune


def refuse_tuning(device: torch.device, layers: Sequence[Layer]) -> None:
    """Raise a ValueError where there is nothing to choose from."""
    if device.type != "cuda":
        raise ValueError("--tune: got it with the device cpu, takes a CUDA device: elsewhere there is one way only")
    if not any(layer.plan is not None and layer.plan.formats for layer in layers):
        raise ValueError("--tune: got it without a plan in eight bits")


class Tuner:
    """Tunes each kind of multiply at a shape once, and keeps what was found under `tuned` in the results."""

    def __init__(self, results: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self._results, self._dtype, self._device = results, dtype, device
        self._done: set[tuple[Any, ...]] = set()

    def tune(self, shape: Shape, layer: Layer) -> dict[str, Any] | None:
        """By multiply, the way that is taken from now on, its milliseconds, and how many were tried.

        None where there is nothing to tune, or it has been; `failed` where it could not be.
        """
        plan = layer.plan
        if plan is None or not plan.formats:
            return None
        # Plans that differ in what they keep multiply alike.
        kind = (shape, plan.output, plan.grad_input, plan.grad_weight, plan.accumulation)
        if kind in self._done:
            return None
        self._done.add(kind)
        begun = time.perf_counter()
        found: dict[str, Any] = {}
        try:
            ways = tune(*shape, plan, dtype=self._dtype, device=self._device)
            for multiply, times in ways.items():
                if times:
                    way, ms = next(iter(times.items()))
                    found[multiply] = {"way": way, "ms": ms, "tried": len(times)}
            found["seconds"] = time.perf_counter() - begun
        except Exception as error:
            found = {"failed": why(error)}
        self._results.setdefault("tuned", {}).setdefault(str(shape), {})[layer.name] = found
        return found
