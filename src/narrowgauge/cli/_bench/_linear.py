"""`narrowgauge bench linear`: forward and backward of a layer by each plan, beside `nn.Linear` and the peers.

Layers take turns, so that a device that slows down slows all, and a speed-up is the median of the ratios of a
round. On a GPU a layer is timed twice: launched one by one, as in eager training, and replayed from a CUDA
graph, which is the device's work alone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from narrowgauge.cli._bench import _layers
from narrowgauge.cli._bench._layers import Layer
from narrowgauge.cli._bench._shared import Output, parts
from narrowgauge.cli._bench._timing import Run, Turns, replayed, take_turns, timed, why
from narrowgauge.cli._environment import describe_environment, find_device
from narrowgauge.cli._errors import UsageError
from narrowgauge.linear import LowPrecisionLinear, tune

Rows = dict[str, dict[str, Any]]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_WARM = 2  # passes after the first that are not counted
_SHAPE = re.compile(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)")


class Shape(NamedTuple):
    """Tokens, input features and output features of a layer."""

    tokens: int
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return "x".join(map(str, self))


_GPU_SHAPES = (
    Shape(32768, 1280, 5120), Shape(65536, 1280, 5120), Shape(32768, 1280, 1280), Shape(16384, 2048, 8192),
    Shape(16384, 4096, 16384), Shape(8192, 8192, 8192),
)  # fmt: skip
_CPU_SHAPES = (Shape(1024, 256, 1024), Shape(1024, 512, 512), Shape(512, 768, 3072))


@dataclass(frozen=True)
class LinearOptions:
    """The command's arguments under their names on the command line."""

    shapes: str | None = None
    plans: str | None = None
    dtype: str = "bf16"
    peers: bool = False
    tune: bool = False
    device: str = "auto"
    seconds: float = 0.2
    json: Path | None = None
    figure: Path | None = None


def bench_linear(options: LinearOptions, command: str) -> int:
    """Measure, print, and write what was asked for.

    Returns:
        The exit status: 0, or 1 if any row failed.

    Raises:
        UsageError: naming the argument.
    """
    device = find_device(options.device)
    shapes = chosen_shapes(options.shapes, device)
    dtype = chosen_dtype(options.dtype)
    layers = [_layers.baseline(), *chosen_plans(options.plans)]
    if options.tune:
        refuse_tuning(device, layers)
    versions = _layers.peer_versions() if options.peers else {}
    if options.peers and not versions:
        raise UsageError(
            f"--peers: none is installed of {', '.join(dict.fromkeys(p.family for p in _layers.peers()))}"
        )
    layers += [peer for peer in _layers.peers() if peer.family in versions]
    output = Output(options.seconds, options.json, options.figure)
    results = header(command, options.dtype, options.seconds, device, layers) | {"shapes": {}}
    results["environment"] |= versions
    output.begin(results)
    for shape in shapes:
        if options.tune:
            results.setdefault("tuned", {})[str(shape)] = tuned = tune_shape(shape, layers, dtype, device)
            output.failed |= any("failed" in found for found in tuned.values())
            for name, found in tuned.items():
                output.say(f"{shape} {name}: {_ways(found)}")
        try:
            rows = time_shape(shape, layers, dtype, device, options.seconds)
        except Exception as error:  # such as too little memory for the operands
            rows = {layer.name: {"failed": why(error)} for layer in layers}
        results["shapes"][str(shape)] = rows
        with output.table(f"{shape}, {options.dtype}, forward and backward", "layer", _columns(device)) as add:
            for name, row in rows.items():
                add(name, row)
        output.write(results)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    panels = {
        shape.replace("x", " × "): {name: row.get("ms") for name, row in rows.items()}
        for shape, rows in results["shapes"].items()
    }
    output.picture(panels, "milliseconds, forward and backward")
    output.say("×: times as fast as nn.Linear" + "; graph: the device's work alone" * (device.type == "cuda"))
    return int(output.failed)


def header(
    command: str, dtype: str, seconds: float, device: torch.device, layers: Sequence[Layer]
) -> dict[str, Any]:
    """What a results file says of its run."""
    environment = describe_environment(device)
    if device.type == "cpu":
        environment["threads"] = str(torch.get_num_threads())
    about = {each.name: {"of": each.family, "what": each.what, "eight_bits": each.eight_bits} for each in layers}
    return {"command": command, "environment": environment, "dtype": dtype, "seconds": seconds, "layers": about}


def chosen_shapes(text: str | None, device: torch.device) -> tuple[Shape, ...]:
    """The shapes of `--shapes`.

    Raises:
        UsageError: for text that is not a shape.
    """
    if text is None:
        return _GPU_SHAPES if device.type == "cuda" else _CPU_SHAPES
    shapes = []
    for part in parts(text) or [text]:
        match = _SHAPE.fullmatch(part)
        if match is None:
            takes = "takes tokens, input and output features such as 32768x1280x5120"
            raise UsageError(f"--shapes: got {part!r}, {takes}")
        shapes.append(Shape(*map(int, match.groups())))
    return tuple(shapes)


def chosen_dtype(name: str) -> torch.dtype:
    """The dtype of `--dtype`.

    Raises:
        UsageError: for another name.
    """
    if name not in DTYPES:
        raise UsageError(f"--dtype: got {name!r}, takes {', '.join(DTYPES)}")
    return DTYPES[name]


def chosen_plans(text: str | None) -> tuple[Layer, ...]:
    """The plans of `--plans`, each once; all there are if None."""
    if text is None:
        return _layers.default_plans()
    return tuple({each.name: each for each in map(_layers.plan_layer, parts(text) or [text])}.values())


def refuse_tuning(device: torch.device, layers: Sequence[Layer]) -> None:
    """Raise a UsageError where there is nothing to choose from."""
    if device.type != "cuda":
        raise UsageError("--tune: got it with the device cpu, takes a CUDA device: elsewhere there is one way only")
    if not any(layer.plan is not None and layer.plan.formats for layer in layers):
        raise UsageError("--tune: got it without a plan in eight bits")


def tune_shape(shape: Shape, layers: Sequence[Layer], dtype: torch.dtype, device: torch.device) -> Rows:
    """Time every way to multiply, and keep the fastest for all later processes.

    Returns:
        By layer and multiply the way taken, its milliseconds, and how many were tried; or `failed`. Plans that
        differ only in what they keep multiply alike, and are tuned once.
    """
    done, found = set(), {}
    for layer in layers:
        plan = layer.plan
        kind = None if plan is None else (plan.output, plan.grad_input, plan.grad_weight, plan.accumulation)
        if plan is None or not plan.formats or kind in done:
            continue
        done.add(kind)
        begun = time.perf_counter()
        try:
            ways = tune(*shape, plan, dtype=dtype, device=device)
            best = {multiply: (len(times), *next(iter(times.items()))) for multiply, times in ways.items() if times}
            row: dict[str, Any] = {
                n: {"way": way, "ms": ms, "tried": tried} for n, (tried, way, ms) in best.items()
            }
            found[layer.name] = row | {"seconds": time.perf_counter() - begun}
        except Exception as error:
            found[layer.name] = {"failed": why(error)}
    return found


def _ways(found: Mapping[str, Any]) -> str:
    if "failed" in found:
        return f"tuning failed: {found['failed']}"
    return "; ".join(f"{name} {of['way']} ({of['ms']:.3f} ms)" for name, of in found.items() if name != "seconds")


def _columns(device: torch.device) -> dict[str, tuple[str, str]]:
    columns = {"ms": ("ms", "{:.3f}"), "×": ("speedup", "{:.2f}")}
    if device.type == "cuda":
        columns |= {"host ms": ("host_ms", "{:.3f}"), "graph ms": ("graph_ms", "{:.3f}")}
        columns |= {"graph ×": ("graph_speedup", "{:.2f}")}
    return columns | {"first s": ("first_seconds", "{:.2f}")}


@dataclass(frozen=True)
class Operands:
    """What a layer of some shape reads.

    Attributes:
        x: (tokens, inputs), a leaf that wants its gradient.
        g: (tokens, outputs), the gradient of the loss with respect to the output.
        linear: an `nn.Linear` with bias.
    """

    x: Tensor
    g: Tensor
    linear: nn.Linear


def operands(shape: Shape, dtype: torch.dtype, device: torch.device) -> Operands:
    """Normal inputs and gradients, and `nn.Linear`'s own initial weights."""
    torch.manual_seed(0)
    x = torch.randn(shape.tokens, shape.inputs, device=device, dtype=dtype).requires_grad_()
    g = torch.randn(shape.tokens, shape.outputs, device=device, dtype=dtype)
    return Operands(x, g, nn.Linear(shape.inputs, shape.outputs, device=device, dtype=dtype))


def pass_of(layer: nn.Module, fed: Operands) -> Run:
    """Forward and backward with the gradients of input, weight and bias."""
    leaves = [fed.x, *layer.parameters()]
    return lambda: torch.autograd.grad(layer(fed.x), leaves, fed.g)


def time_shape(
    shape: Shape, layers: Sequence[Layer], dtype: torch.dtype, device: torch.device, seconds: float
) -> Rows:
    """Forward and backward of each layer at a shape.

    Args:
        shape, layers, dtype, device: what, where; the others are set against the first layer.
        seconds: how long to time each; at least five rounds.

    Returns:
        By layer: `ms`, `speedup` over the first one, `rounds`, `first_seconds` (the first pass, compilation
        included), `path` (what computes a plan); on a GPU also `host_ms`, and `graph_ms` and `graph_speedup` of the
        same replayed from a CUDA graph, or `graph_failed`. Or `failed`: why there are none.
    """
    torch._dynamo.reset()  # compiled layers share a limit of shapes
    fed = operands(shape, dtype, device)
    rows: Rows = {}
    passes: dict[str, Run] = {}
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
    found, over = take_turns(passes, device, seconds), layers[0].name
    for name in passes:
        rows[name] |= times_of(found, name, over)
        if device.type == "cuda":
            rows[name]["host_ms"] = found.host_ms(name)
    if device.type == "cuda":
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
    return rows


def times_of(found: Turns, name: str, over: str) -> dict[str, Any]:
    """`ms`, `rounds`, and `speedup` over another, where that was timed."""
    figures: dict[str, Any] = {"ms": found.ms(name), "rounds": len(found.seconds[name])}
    return figures | ({"speedup": found.speedup(name, over)} if over in found.seconds else {})
