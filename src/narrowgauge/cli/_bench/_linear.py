"""`narrowgauge bench linear`: forward and backward of a layer by each plan, beside `nn.Linear` and the peers.

Layers take turns, so that a device that slows down slows all, and a speed-up is the median of the ratios of a
round. On a GPU a layer is timed twice: launched one by one, as in eager training, and replayed from a CUDA
graph, which is the device's work alone.

Peers are named, not imported: the library knows none. torchao's layers are compiled, as its users compile them:
without, each step of a quantization is a pass over memory of its own. bitsandbytes' have kernels of their own,
those of LLM.int8(), and run as they are.
"""

from __future__ import annotations

import importlib
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from narrowgauge.cli._bench._rows import installed_version
from narrowgauge.cli._bench._shared import Output
from narrowgauge.cli._bench._timing import Run, Turns, take_turns, timed, why
from narrowgauge.cli._environment import find_device
from narrowgauge.cli._files import UsageError
from narrowgauge.cli._options import LinearOptions, parts, plan_of
from narrowgauge.linear import LinearPlan, LowPrecisionLinear, tune
from narrowgauge.linear._tune import replayed
from narrowgauge.trainers._environment import describe_environment

Rows = dict[str, dict[str, Any]]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CUBLAS = "cublas"  # the way to multiply that is torch's own
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


BASELINE = "nn.Linear"
_DEFAULT = (
    "SWITCHBACK:int8", "SWITCHBACK:e4m3", "SWITCHBACK_M:int8", "SWITCHBACK_M:e4m3", "SWITCHBACK_Q:int8",
    "SWITCHBACK_Q:e4m3", "LLM_INT8:int8", "TENSORWISE_FP8:e4m3", "BLOCKWISE_FP8:e4m3", "HIGH_PRECISION",
)  # fmt: skip
# torchao's float8 recipes, and its int8 training, by what of a layer is in eight bits.
_TORCHAO, _RECIPES = "torchao", {
    "tensorwise": ("float8, all three multiplies", 3),
    "rowwise": ("float8 by row and column, all three", 3),
    "rowwise_with_gw_hp": ("float8 but for the weight gradient", 2),
    "int8": ("int8 by row and column, all three", 3),
}  # fmt: skip
_BITSANDBYTES, _LAYER = "bitsandbytes", "Linear8bitLt"


@dataclass(frozen=True)
class Layer:
    """A way to compute a linear layer.

    Attributes:
        name: of the row.
        what: what is in eight bits, in a line.
        eight_bits: how many of the three multiplies are.
        plan: ours, or None.
        peer: the other library that it is of, or None.
        recipe: of torchao, the layer of bitsandbytes.
    """

    name: str
    what: str
    eight_bits: int
    plan: LinearPlan | None = None
    peer: str | None = None
    recipe: str = ""

    @property
    def family(self) -> str:
        """The package."""
        return self.peer or ("torch" if self.plan is None else "narrowgauge")

    def converted(self, linear: nn.Linear) -> nn.Module:
        """A layer that computes this way with the parameters of another: the same memory, not copies."""
        if self.plan is not None:
            return LowPrecisionLinear.from_linear(linear, self.plan)
        if self.peer is None:
            return linear
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        if self.peer == _BITSANDBYTES:
            module = _module(_BITSANDBYTES, "nn")
            logging.getLogger(_BITSANDBYTES).setLevel(logging.ERROR)  # else a line a call, of a cast to fp16
            layer: nn.Module = getattr(module, self.recipe)(*sizes, has_fp16_weights=True, device="meta")
            layer.weight = module.Int8Params(linear.weight.detach(), requires_grad=True, has_fp16_weights=True)
            layer.bias = linear.bias
            return layer
        own = nn.Linear(*sizes, device="meta")
        own.weight, own.bias = linear.weight, linear.bias
        if self.recipe == "int8":
            config = _module(self.family, "prototype.quantized_training").Int8MixedPrecisionTrainingConfig
            _module(self.family, "quantization").quantize_(own, config(module_swap=True))
            return own
        float8 = _module(self.family, "float8")
        config = float8.Float8LinearConfig.from_recipe_name(self.recipe)
        return cast(nn.Module, float8.convert_to_float8_training(own, config=config))

    def made(self, linear: nn.Linear) -> nn.Module:
        """The same, as its users run it: torchao's compiled."""
        layer = self.converted(linear)
        return cast(nn.Module, torch.compile(layer, dynamic=False)) if self.peer == _TORCHAO else layer


def _module(package: str, name: str) -> Any:
    return importlib.import_module(f"{package}.{name}")


def baseline() -> Layer:
    """`nn.Linear`, which all others are set against."""
    return Layer(BASELINE, "nothing in eight bits", 0)


def peers() -> tuple[Layer, ...]:
    """The layers of other libraries, installed or not."""
    eight = "int8 by row and column, output and weight gradient"
    return (
        *(Layer(f"{_TORCHAO} {name}", *about, peer=_TORCHAO, recipe=name) for name, about in _RECIPES.items()),
        Layer(f"{_BITSANDBYTES} {_LAYER}", eight, 2, peer=_BITSANDBYTES, recipe=_LAYER),
    )


def peer_versions() -> dict[str, str]:
    """Versions of the libraries that are installed, by name."""
    names = dict.fromkeys(peer.family for peer in peers())
    return {name: version for name in names if (version := installed_version(name)) is not None}


def default_plans() -> tuple[Layer, ...]:
    """What is measured unless something else is asked for."""
    return tuple(map(plan_layer, _DEFAULT))


def plan_layer(text: str) -> Layer:
    """A plan by its name and format: ``SWITCHBACK``, ``switchback:e4m3``, ``TENSORWISE_FP8:e4m3/e5m2``."""
    plan = plan_of("--plans", text)
    count = sum(multiply is not None for multiply in (plan.output, plan.grad_input, plan.grad_weight))
    what = {0: "our autograd function alone", 2: "all but the weight gradient", 3: "all three multiplies"}[count]
    what += ", keeps codes" if plan.saved == "codes" else ""
    return Layer(" ".join((plan.name, "/".join(plan.formats))).strip(), what, count, plan)


def bench_linear(options: LinearOptions, command: str) -> int:
    """Measure, print, and write what was asked for.

    Returns:
        The exit status: 0, or 1 if any row failed.
    """
    device = find_device(options.device)
    shapes = chosen_shapes(options.shapes, device)
    dtype = chosen_dtype(options.dtype)
    layers = [baseline(), *chosen_plans(options.plans)]
    if options.tune:
        refuse_tuning(device, layers)
    versions = peer_versions() if options.peers else {}
    if options.peers and not versions:
        raise UsageError(f"--peers: none is installed of {', '.join(dict.fromkeys(p.family for p in peers()))}")
    layers += [peer for peer in peers() if peer.family in versions]
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
    note = "×: times as fast as nn.Linear, the median of the rounds' ratios, not the ratio of the ms"
    output.say(note + "; graph: the device's work alone" * (device.type == "cuda"))
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
    """The shapes of `--shapes`."""
    if text is None:
        return _GPU_SHAPES if device.type == "cuda" else _CPU_SHAPES
    shapes = []
    for part in parts(text) or [text]:
        match = _SHAPE.fullmatch(part)
        if match is None:
            wanted = "tokens, input and output features such as 32768x1280x5120"
            raise UsageError(f"--shapes must be {wanted}, got {part!r}")
        shapes.append(Shape(*map(int, match.groups())))
    return tuple(shapes)


def chosen_dtype(name: str) -> torch.dtype:
    """The dtype of `--dtype`."""
    if name not in DTYPES:
        raise UsageError(f"--dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def chosen_plans(text: str | None) -> tuple[Layer, ...]:
    """The plans of `--plans`, each once; all there are if None."""
    if text is None:
        return default_plans()
    return tuple({each.name: each for each in map(plan_layer, parts(text) or [text])}.values())


def refuse_tuning(device: torch.device, layers: Sequence[Layer]) -> None:
    """Raise a UsageError where there is nothing to choose from."""
    if device.type != "cuda":
        raise UsageError("--tune must be given with a CUDA device: elsewhere there is one way only")
    if not any(layer.plan is not None and layer.plan.formats for layer in layers):
        raise UsageError("--tune: got it without a plan in eight bits")


def tune_shape(shape: Shape, layers: Sequence[Layer], dtype: torch.dtype, device: torch.device) -> Rows:
    """Time every way to multiply, and keep the fastest for all later processes.

    Returns:
        By layer and multiply the way taken, its milliseconds, how many were tried, and the milliseconds of torch's
        own scaled multiply where that was one of them; or `failed`. Plans that differ only in what they keep
        multiply alike, and are tuned once.
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
            row: dict[str, Any] = {multiply: _tuned(times) for multiply, times in ways.items() if times}
            found[layer.name] = row | {"seconds": time.perf_counter() - begun}
        except Exception as error:
            found[layer.name] = {"failed": why(error)}
    return found


def _tuned(times: Mapping[str, float]) -> dict[str, Any]:
    way, ms = next(iter(times.items()))
    by_torch = {"torch_ms": times[CUBLAS]} if CUBLAS in times else {}
    return {"way": way, "ms": ms, "tried": len(times)} | by_torch


def _ways(found: Mapping[str, Any]) -> str:
    if "failed" in found:
        return f"tuning failed: {found['failed']}"
    said = []
    for name, of in found.items():
        if name != "seconds":
            beside = f", torch's {of['torch_ms']:.3f}" if "torch_ms" in of else ""
            said.append(f"{name} {of['way']} ({of['ms']:.3f} ms{beside})")
    return "; ".join(said)


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
