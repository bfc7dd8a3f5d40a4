"""Times of layers: at single shapes beside the peers, and over a grid of dims and tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from narrowgauge.cli._bench._times import timed
from narrowgauge.cli._bench_linear._layers import BASELINE, Layer
from narrowgauge.cli._bench_linear._passes import Pass, Timed, operands, pass_of, replayed, take_turns, why
from narrowgauge.cli._bench_linear._sizes import Shape, mlp
from narrowgauge.linear import LowPrecisionLinear

Rows = dict[str, dict[str, Any]]
_WARM = 2  # passes after the first that are not counted


def time_shape(
    shape: Shape, layers: Sequence[Layer], dtype: torch.dtype, device: torch.device, seconds: float
) -> Rows:
    """Forward and backward of each layer at a shape.

    Args:
        shape, layers, dtype, device: what, where; the first layer is what the others are set against.
        seconds: how long to time each; at least five rounds.

    Returns:
        By layer: `ms`, `speedup` over the first one, `rounds`, `first_seconds` (the first pass, compilation
        included), `path` (what computes a plan); on a GPU also `host_ms`, and `graph_ms` and `graph_speedup` of the
        same replayed from a CUDA graph, or `graph_failed`. Or `failed`: why there are none.
    """
    torch._dynamo.reset()  # compiled layers share a limit of shapes
    fed = operands(shape, dtype, device)
    rows: Rows = {}
    passes: dict[str, Pass] = {}
    for layer in layers:
        try:
            module = layer.made(fed.linear)
            run = pass_of(module, fed)
            rows[layer.name] = {"first_seconds": timed(run, device)}
            for _ in range(_WARM):
                run()
            passes[layer.name] = run
            if layer.plan is not None:
                rows[layer.name]["path"] = cast(LowPrecisionLinear, module).path
        except Exception as error:  # whatever a peer raises is its result
            rows[layer.name] = {"failed": why(error)}
    found = take_turns(passes, device, seconds)
    for name in passes:
        rows[name] |= _figures(found, name, layers[0].name)
        if device.type == "cuda":
            rows[name]["host_ms"] = found.host_ms(name)
    if device.type == "cuda":
        _time_graphs(passes, rows, layers[0].name, device, seconds)
    return rows


def _figures(found: Timed, name: str, over: str) -> dict[str, Any]:
    figures: dict[str, Any] = {"ms": found.ms(name), "rounds": len(found.seconds[name])}
    return figures | ({"speedup": found.speedup(name, over)} if over in found.seconds else {})


def _time_graphs(passes: Mapping[str, Pass], rows: Rows, over: str, device: torch.device, seconds: float) -> None:
    pool, graphs = torch.cuda.graph_pool_handle(), {}
    for name, run in passes.items():
        try:
            graphs[name] = replayed(run, device, pool)
        except Exception as error:
            rows[name]["graph_failed"] = why(error)
    found = take_turns(graphs, device, seconds)
    for name in graphs:
        rows[name]["graph_ms"] = found.ms(name)
        if over in graphs:
            rows[name]["graph_speedup"] = found.speedup(name, over)


def time_cell(
    dim: int, tokens: int, layers: Sequence[Layer], dtype: torch.dtype, device: torch.device, seconds: float
) -> Rows:
    """Both layers of an MLP, dim to 4 dim and back, as one; as `time_shape` has it, graphs' times on a GPU.

    Returns:
        By layer `ms` and `speedup`, of the device's work alone; or `failed`.
    """
    pairs = [operands(shape, dtype, device) for shape in mlp(tokens, dim)]
    rows: Rows = {}
    passes: dict[str, Pass] = {}
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    for layer in layers:
        try:
            run = _both([pass_of(layer.made(fed.linear), fed) for fed in pairs])
            for _ in range(_WARM):
                run()
            passes[layer.name] = run if pool is None else replayed(run, device, pool)
        except Exception as error:
            rows[layer.name] = {"failed": why(error)}
    found = take_turns(passes, device, seconds)
    return {
        layer.name: rows[layer.name] if layer.name in rows else _figures(found, layer.name, BASELINE)
        for layer in layers
    }


def _both(passes: Sequence[Pass]) -> Pass:
    def run() -> None:
        for each in passes:
            each()

    return run
