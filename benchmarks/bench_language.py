"""A training step of a language model with the linear layers of its blocks by each plan, beside `nn.Linear` and
other libraries' layers.

A step is forward, backward, the optimizer's step and gradients freed; everything is bf16, attention is torch's
causal one. There is one model and one optimizer, the recipe adamw8bit-split8: the linear layers of its blocks are
swapped in place, all of them for each side, while embedding and head stay as they are. Sides take turns, round by
round; a speed-up is the median of the rounds' ratios. In the end two sides take turns with torch's fused AdamW.

    python benchmarks/bench_language.py [--models llama-1b,llama-8b] [--plans SWITCHBACK:e4m3] [--json FILE]
    python benchmarks/bench_language.py --curves 300 --models llama-1b --json FILE    # losses on a text, too
    python benchmarks/bench_language.py --check        # a tiny model, in seconds, on a CPU too

Noise is that of each side at the MLP's first layer, as `bench_layers.py` measures it. `--curves` trains a model of
the same sizes, but of a few blocks, once for each side, from the same weights and on the same windows of a text:
the Python sources that are installed. `--resume` keeps the models, curves and noise that a results file has.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from _language import (
    MODELS,
    EagerLayer,
    Sizes,
    blocks_of,
    kernels_of,
    language_model,
    loss_of,
    other_layers,
    windows_of,
)
from _layer_noise import INPUTS, noise
from _pages import ROOT  # noqa: F401  studies are found from there
from _resume import resumed
from _script import MODES, command, parser_for, save
from _sides import compiled_graphs, swapped
from torch import nn

from narrowgauge import recipes
from narrowgauge._schedule import schedule
from narrowgauge.cli._bench._linear import BASELINE, Layer, Shape, baseline, plan_layer
from narrowgauge.cli._bench._rows import installed_version
from narrowgauge.cli._bench._timing import timed, timed_run, why
from narrowgauge.cli._environment import find_device
from narrowgauge.cli._options import parts
from narrowgauge.trainers._environment import describe_environment
from narrowgauge.trainers._language import Batches
from studies.shared.language import curve, looks, set_rate, text_of

PLANS = (
    "SWITCHBACK:int8,SWITCHBACK:e4m3,SWITCHBACK_M:e4m3,SWITCHBACK_Q:e4m3,LLM_INT8:int8,TENSORWISE_FP8:e4m3,"
    "BLOCKWISE_FP8:e4m3"
)
OURS, TORCHS = "adamw8bit-split8", "torch AdamW fused"
_GRAPHS = 64  # compiled variants of a block that may live side by side
_KERNELS = 12  # the longest of a step, in the results
_RATE, _WARM_UP, _LAST = 6e-4, 30, 30  # of curves: the rate, steps up to it, steps of the end's mean


def optimizer_of(name: str, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": rate, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if name == OURS:
        return recipes.get(OURS).apply(model, **options)
    return torch.optim.AdamW(model.parameters(), fused=True, **options)


def bench(of: Sizes, args: argparse.Namespace, found: dict[str, Any], keep: Callable[[], None]) -> None:
    """Time all sides of a model.

    Args:
        of: the model.
        args: the options.
        found: of the model, so far; settings and a row a side are added. Optimizers in `timed` are left out.
        keep: called whenever there is more of it.
    """
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = _GRAPHS
    model = language_model(of, args.device)
    loss = loss_of(model, args.compile, args.backend, args.mode)
    windows = windows_of(of, args.tokens, args.device)
    found.setdefault(
        "settings", dataclasses.asdict(of) | {n: getattr(args, n) for n in ("tokens", "compile", "mode")}
    )
    found.setdefault("parameters", sum(p.numel() for p in model.parameters()))
    for name in args.optimizers:
        if name in found.setdefault("timed", []):
            continue
        sides = [each for each in args.layers if name == OURS or each.name in (BASELINE, args.fused)]
        optimizer = optimizer_of(name, model, 1e-5)

        def step(optimizer: torch.optim.Optimizer = optimizer) -> None:
            if args.mode == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            loss(windows).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        for rows in in_turns(model, sides, step, args):
            for side, row in rows.items():
                if "ms" in row:
                    row["tokens_per_second"] = args.tokens / row["ms"] * 1e3
                key = side if name == OURS else f"{side}, {name}"
                found.setdefault("rows", {})[key] = row | {"layer": side, "optimizer": name}
            keep()
        found["timed"].append(name)
        keep()
        del step, optimizer
        _freed(args.device)


@contextmanager
def placed(
    blocks: Sequence[nn.Module], layer: Layer, made: dict[nn.Module, nn.Module] | None = None
) -> Iterator[int]:
    """A side's layers in their places (`swapped`), and the step compiled if that can be."""
    with swapped(blocks, layer, made) as count:
        if isinstance(layer, EagerLayer):
            with torch.compiler.set_stance("force_eager"):
                yield count
        else:
            yield count


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """A TimeoutError after so many seconds, as of a peer that is compiled for minutes."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"the first steps must take at most {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def in_turns(
    model: nn.Module, layers: Sequence[Layer], step: Callable[[], None], args: argparse.Namespace
) -> Iterator[dict[str, dict[str, Any]]]:
    """A row for each side, again after each round and at the end; the first is what the others are set against."""
    device, blocks = args.device, list(blocks_of(model))
    rows: dict[str, dict[str, Any]] = {}
    made: dict[str, dict[nn.Module, nn.Module]] = {layer.name: {} for layer in layers}
    for layer in layers:
        try:
            with placed(blocks, layer, made[layer.name]) as count, at_most(args.patience):
                rows[layer.name] = {"swapped": count} | _warmed(step, args.warm_up, device)
        except Exception as error:  # whatever a peer raises is its result
            rows[layer.name] = {"failed": why(error)}
            made[layer.name].clear()
            model.zero_grad(set_to_none=True)
            _freed(device)
        print(f"  first steps, {layer.name}: {rows[layer.name]}", flush=True)
    ready = [layer for layer in layers if "failed" not in rows[layer.name]]
    before, times = compiled_graphs(), {layer.name: [] for layer in ready}
    for _ in range(args.rounds):
        for layer in ready:
            with placed(blocks, layer, made[layer.name]):
                if device.type == "cuda":
                    times[layer.name].append(timed_run(step, args.steps, device)[0])
                else:
                    step()
                    times[layer.name].append(timed(step, device))
        for layer in ready:
            rows[layer.name] |= _speed(times[layer.name], times.get(layers[0].name))
            rows[layer.name]["recompiled"] = compiled_graphs() - before  # none, or a swap would be compiled again
        yield rows
    # After everything that is timed: a profiler leaves traces in the driver.
    for layer in ready if device.type == "cuda" else ():
        with placed(blocks, layer, made[layer.name]):
            step()
            kernels = kernels_of(step, device)
        longest = {name[:80]: ms for name, ms in list(kernels.items())[:_KERNELS]}
        rows[layer.name] |= {"device_ms": sum(kernels.values()), "kernels": longest}
    yield rows


def _speed(own: Sequence[float], over: Sequence[float] | None) -> dict[str, Any]:
    """Milliseconds, and how many times as fast, round by round."""
    found: dict[str, Any] = {"ms": 1e3 * statistics.median(own), "rounds": len(own)}
    if over is None:
        return found
    ratios = [other / mine for other, mine in zip(over, own, strict=True)]
    return found | {"speedup": statistics.median(ratios), "speedup_range": [min(ratios), max(ratios)]}


def _warmed(step: Callable[[], None], steps: int, device: torch.device) -> dict[str, Any]:
    """The first steps, what compiling costs, and the memory of one more."""
    before, begun = compiled_graphs(), time.perf_counter()
    for _ in range(steps):
        timed(step, device)
    row: dict[str, Any] = {"warm_up_seconds": time.perf_counter() - begun}
    row["compiled_graphs"] = compiled_graphs() - before
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        timed(step, device)
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return row


def losses_of(of: Sizes, layer: Layer, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """The losses of a side that is trained on the text: a curve, and their mean over the last steps."""
    device, tokens = args.device, text_of(None, args.megabytes, args.vocabulary)[1]
    model = language_model(of, device, min(of.blocks, args.blocks), seed)
    loss = loss_of(model, args.compile, args.backend, args.mode)
    optimizer = optimizer_of(OURS, model, _RATE)
    batches = Batches(tokens.train, args.tokens // of.sequence, of.sequence, seed=0)

    def step(number: int) -> torch.Tensor:
        if args.mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        rate = schedule("cosine", number, steps=args.curves, warmup=min(_WARM_UP, args.curves // 4), final=0.1)
        set_rate(optimizer, _RATE * rate)
        found = loss(next(batches).to(device))
        found.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return found.detach().clone()  # a graph's next replay overwrites its results

    begun = time.perf_counter()
    with placed(list(blocks_of(model)), layer):
        losses = [value for values, _ in looks(args.curves, step) for value in values]
    return {
        "end": statistics.fmean(losses[-_LAST:]), "curve": curve(losses), "mean_of": _LAST, "steps": len(losses),
        "blocks": len(blocks_of(model)), "seconds": time.perf_counter() - begun,
    }  # fmt: skip


def _freed(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = parser_for(__doc__)
    shown = ", ".join(name for name in MODELS if name != "tiny")
    parser.add_argument("--models", help=f"comma-separated: {shown} (all of them; without a GPU --check)")
    parser.add_argument("--plans", default=PLANS, help="comma-separated, as `narrowgauge bench linear` takes them")
    parser.add_argument("--peers", default="all", help="comma-separated parts of other libraries' rows, or none")
    parser.add_argument("--fused", default="SWITCHBACK e4m3", help="the row also with torch's fused AdamW, or none")
    parser.add_argument("--compile", choices=("blocks", "model", "none"), default="blocks", help="what at a time")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument(
        "--mode", choices=MODES, default="default",
        help="of inductor: reduce-overhead replays what is compiled as CUDA graphs, cpp-wrapper launches from C++",
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, default=8192, help="of a step")
    parser.add_argument("--warm-up", type=int, default=3, help="steps of each side before any is counted")
    parser.add_argument("--patience", type=int, default=60, help="seconds that a side's first steps take at most")
    parser.add_argument("--steps", type=int, default=5, help="steps of a side in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--curves", type=int, default=0, metavar="STEPS", help="losses of so many steps, too")
    parser.add_argument("--blocks", type=int, default=4, help="of a model whose losses are taken, at most")
    parser.add_argument("--megabytes", type=int, default=24, help="of the text")
    parser.add_argument("--vocabulary", type=int, default=8192, help="of the text's tokens")
    parser.add_argument("--device", default="auto", help="'cpu', 'cuda', or 'auto': a GPU if there is one")
    parser.add_argument("--resume", action="store_true", help="keep what the results file has")
    parser.add_argument("--check", action="store_true", help="a tiny model and a few steps")
    args = parser.parse_args(words)
    try:
        args.device = find_device(args.device)
        args.layers = [baseline(), *map(plan_layer, parts(args.plans))]
    except ValueError as error:
        parser.error(str(error))
    if args.check or (args.models is None and args.device.type == "cpu"):
        small = {"models": "tiny", "tokens": 32, "rounds": 2, "steps": 1, "warm_up": 1, "compile": "none"}
        parser.set_defaults(**small, megabytes=1, vocabulary=512)  # unless asked for otherwise
        device, layers = args.device, args.layers
        args = parser.parse_args(words)
        args.device, args.layers = device, layers
    args.models = parts(shown if args.models is None else args.models)
    if unknown := [name for name in args.models if name not in MODELS]:
        parser.error(f"--models must be among {shown}, got {unknown[0]!r}")
    for name, least in (("warm_up", 1), ("patience", 1), ("steps", 1), ("rounds", 1), ("curves", 0), ("blocks", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if args.mode != "default" and (args.compile == "none" or args.backend != "inductor"):
        parser.error(f"--mode must be default without inductor, got {args.mode!r}")
    for name in args.models:
        if args.tokens < MODELS[name].sequence or args.tokens % MODELS[name].sequence:
            parser.error(f"--tokens must be a multiple of {MODELS[name].sequence} for {name}, got {args.tokens}")
    if args.resume and args.json is None:
        parser.error("--resume must be given with --json, the results file to go on with")
    wanted = parts(args.peers)
    args.optimizers = [OURS] + [TORCHS] * any(layer.name == args.fused for layer in args.layers[1:])
    args.layers += [p for p in other_layers() if "all" in wanted or any(part in p.name for part in wanted)]
    return args


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure what the results file lacks, print it, and write it as it comes."""
    libraries = {each.peer: installed_version(each.peer) for each in args.layers if each.peer is not None}
    results: dict[str, Any] = {
        "command": command(),
        "environment": describe_environment(args.device) | {n: v for n, v in libraries.items() if v is not None},
        "dtype": "bf16",
        "layers": {each.name: {"of": each.family, "what": each.what, "eight_bits": each.eight_bits}
                   for each in args.layers},
        "models": {}, "noise": {}, "curves": {},
    }  # fmt: skip
    if args.resume:
        results = resumed(args.json, results)
    for name in args.models:
        of = MODELS[name]
        found = results["models"].setdefault(name, {})
        if set(args.optimizers) - set(found.get("timed", ())):
            print(name, flush=True)
            bench(of, args, found, lambda: save(args.json, results))
            for side, row in found["rows"].items():
                print(f"  {side}: {_line(row)}", flush=True)
        curves = results["curves"].setdefault(name, {}) if args.curves else {}
        sides = [(layer.name, layer, 0) for layer in args.layers if args.curves]
        for key, layer, seed in [*sides, *[(f"{BASELINE}, other weights", args.layers[0], 1)] * bool(sides)]:
            # What could not be timed is not trained either.
            if key in curves or "failed" in results["models"][name]["rows"].get(key, {}):
                continue
            try:
                curves[key] = losses_of(of, layer, seed, args)
            except Exception as error:
                curves[key] = {"failed": why(error)}
            _freed(args.device)
            shown = {part: of for part, of in curves[key].items() if part != "curve"}
            print(f"  losses of {name}, {key}: {shown}", flush=True)
            save(args.json, results)
        if name not in results["noise"]:
            results["noise"][name] = _noise(of, args)
            save(args.json, results)
        _freed(args.device)
    return results


def _noise(of: Sizes, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Of each side at the first layer of the MLP, in decibels, by kind of inputs."""
    shape = Shape(min(args.tokens, 2048), of.width, of.hidden)
    found = {kind: noise(kind, shape, args.layers, torch.bfloat16, args.device, bias=False) for kind in INPUTS}
    _freed(args.device)
    return found


def _line(row: Mapping[str, Any]) -> str:
    if "failed" in row:
        return str(row["failed"])
    low, high = row.get("speedup_range", (0, 0))
    return (
        f"{row['ms']:.1f} ms, {row.get('speedup', 0):.3f} x ({low:.3f} to {high:.3f}), "
        f"device {row.get('device_ms', 0):.1f} ms, {row['tokens_per_second']:,.0f} tokens/s, "
        f"peak {row.get('peak_bytes', 0) / 1e9:.1f} GB, {row['swapped']} layers, "
        f"warm-up {row['warm_up_seconds']:.0f} s, {row['compiled_graphs']} graphs, {row['recompiled']} recompiled"
    )


def main() -> int:
    # Sides differ in the sizes that they allocate: pieces that fit none of the others' would fill the memory.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    results = run(arguments())
    ours = {name for name, of in results["layers"].items() if of["of"] in ("torch", "narrowgauge")}
    rows = [row for of in results["models"].values() for row in of["rows"].values()]
    return int(any("failed" in row and row["layer"] in ours for row in rows))


if __name__ == "__main__":
    sys.exit(main())
