"""A training step of CLIP with the linear layers of its blocks by a plan, beside `nn.Linear` (Wortsman et al. 2023,
Figures 7, right, and 8).

The models are transformers', with open_clip's sizes and random weights; images and tokens are random. Half of the
patches are dropped, each block is checkpointed, parameters, activations and gradients are bf16. There is one model
and one optimizer: the layers of its blocks are swapped in place, so that every side steps the same tensors, and the
sides take turns, round by round. With `--compile` each block is compiled by itself: blocks of a tower share what
was compiled for the first; with `--whole` the model is compiled as one graph. With `--graph` a step of each side is
captured as a CUDA graph as well, and replays are timed: the device's work alone, where the host launches more
slowly than the device works. With `--filter` a plan is for the layers that `swap_linears` measures as faster
launched, and in a graph for those that are faster by the device's work.

    python benchmarks/bench_clip.py --compile [--graph] [--models vit-h-14] [--plans SWITCHBACK:int8] [--json FILE]
    python benchmarks/bench_clip.py --check        # a tiny model, in seconds, on a CPU too
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from _clip import (
    MODELS,
    as_if_capturing,
    blocks,
    captured,
    chosen,
    clip_batch,
    clip_model,
    clip_rows,
    swapped,
)
from _resume import resumed
from _script import MODES, parser_for, save
from _sides import compiled_graphs
from torch import nn

from narrowgauge import optim
from narrowgauge.cli._bench._linear import Layer, baseline, peer_versions, peers, plan_layer
from narrowgauge.cli._bench._timing import timed, why
from narrowgauge.cli._environment import find_device
from narrowgauge.cli._options import parts
from narrowgauge.linear import SwapReport
from narrowgauge.trainers._environment import describe_environment

PEER = "torchao"
PLANS = "SWITCHBACK:int8,SWITCHBACK:e4m3,TENSORWISE_FP8:e4m3"
_MULTIPLIES = {"aten::mm", "aten::addmm", "aten::mkldnn_linear", "aten::_addmm_activation"}
_GRAPHS = 64  # compiled variants of a block that may live side by side: towers, sides, with and without gradients


def linear_share(step: Callable[[], Any], device: torch.device) -> float:
    """Share of a step's device time in matrix multiplies of linear layers (on a CPU, of its operators' time)."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profiler:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return share_of_multiplies(profiler.events(), device)


def share_of_multiplies(events: Iterable[Any], device: torch.device) -> float:
    """The same of a profile: on a GPU an operator's own time is that of the kernels which it launched itself."""
    found = list(events)
    multiplies = [event for event in found if event.name in _MULTIPLIES]
    if device.type != "cuda":
        return sum(e.self_cpu_time_total for e in multiplies) / sum(e.self_cpu_time_total for e in found)
    # Annotations, of compiled regions and of the optimizer, stand beside the kernels in them.
    kernels = [e for e in found if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation]
    return sum(e.self_device_time_total for e in multiplies) / sum(e.self_device_time_total for e in kernels)


def ceiling(layer: Layer, share: float, checkpointed: bool) -> float:
    """How many times as fast a step can be if multiplies in eight bits take half of their time, and nothing else.

    Of the three multiplies the output's is done twice under checkpointing.
    """
    plan = layer.plan
    if plan is not None:
        narrow = (plan.output is not None, plan.grad_input is not None, plan.grad_weight is not None)
    else:
        narrow = (layer.eight_bits > 0, layer.eight_bits > 0, layer.eight_bits > 2)
    times = (2 if checkpointed else 1, 1, 1)
    left = sum(count * (0.5 if eight else 1.0) for count, eight in zip(times, narrow, strict=True)) / sum(times)
    return 1 / (1 - share + share * left)


def bench(
    model_name: str, layers: Sequence[Layer], args: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """All sides of a model: settings, the share of linear layers, and a row a side."""
    of = MODELS[model_name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = clip_model(of, args.patch_dropout, args.checkpointing).to(device, torch.bfloat16)
    optimizer = _optimizer(args.optimizer, model, device)
    batch = clip_batch(of, args.batch, device)
    if args.compile:
        torch._dynamo.config.recompile_limit = _GRAPHS
        for module in [model] if args.whole else blocks(model):
            module.compile(backend=args.compile, dynamic=False, **MODES[args.mode])

    def step(capturing: bool = False) -> None:
        if args.mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad(set_to_none=True)
        with as_if_capturing() if capturing else nullcontext():
            loss = model(**batch, return_loss=True).loss
        loss.backward()
        optimizer.step()

    counts = clip_rows(of, args.batch, args.patch_dropout) if args.filter else None
    asked = {name: getattr(args, name) for name in ("batch", "filter", "graph", "mode", "whole")}
    shown = dataclasses.asdict(of) | asked
    found: dict[str, Any] = {"settings": shown, "rows": {}}
    rows, ready, reports = found["rows"], [], {}
    for layer in layers:
        try:
            rows[layer.name], reports[layer.name] = _warmed(model, layer, step, device, args.warm_up, counts)
            ready.append(layer)
        except Exception as error:  # whatever a peer raises is its result
            rows[layer.name] = _failed(error)
    before = compiled_graphs()
    times = _rounds(model, ready, step, device, args, reports)
    found["recompiled"] = compiled_graphs() - before  # none, or a swap would be compiled again in each turn
    replayed: dict[str, list[float]] = {}
    if args.graph:
        # Blocks are compiled anew for a capture (`as_if_capturing`). Guards of both kinds would cost launched steps
        # time, so these have been timed before.
        torch._dynamo.reset()
        replays: dict[str, Callable[[], None]] = {}
        for layer in ready:
            try:
                report = chosen(model, layer, counts)
                with swapped(model, layer, report) as rows[layer.name]["graph_swapped"]:
                    for _ in range(args.warm_up):
                        timed(functools.partial(step, True), device)
                    replays[layer.name] = captured(step)
            except Exception as error:
                rows[layer.name]["graph_failed"] = _failed(error)["failed"]
        captures = [layer for layer in ready if layer.name in replays]
        replayed = _rounds(model, captures, step, device, args, replays=replays)
    if args.mode == "default":  # a replayed graph does not say which operator launched a kernel
        # After everything that is timed: a profiler leaves traces in the driver.
        found["linear_share"] = linear_share(functools.partial(step, args.graph), device)
    for layer in ready:
        row = rows[layer.name]
        row["steps"] = len(times[layer.name])
        for kind, of in (("", times), ("graph_", replayed)):
            if layer.name in of and layers[0].name in of:
                row |= _speed(kind, of[layer.name], of[layers[0].name])
        if "linear_share" in found:
            row["ceiling"] = ceiling(layer, found["linear_share"], args.checkpointing)
    return found


def _failed(error: Exception) -> dict[str, Any]:
    gc.collect()
    return {"failed": why(error)}


def _speed(kind: str, own: Sequence[float], over: Sequence[float]) -> dict[str, float]:
    """Milliseconds, and how many times as fast as the baseline, step by step."""
    pairs = [other / mine for other, mine in zip(over, own, strict=True)]
    return {f"{kind}ms": 1e3 * statistics.median(own), f"{kind}speedup": statistics.median(pairs)}


def _optimizer(name: str, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    if name == "ours":
        return optim.AdamW(model.parameters(), lr=1e-4)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=device.type == "cuda")


def _warmed(
    model: nn.Module, layer: Layer, step: Callable[[], None], device: torch.device, steps: int,
    counts: Sequence[int] | None,
) -> tuple[dict[str, Any], SwapReport | None]:  # fmt: skip
    """The first steps of a side: what compiling costs, and the filter, and then the memory of one more."""
    before, begun = compiled_graphs(), time.perf_counter()
    report = chosen(model, layer, counts, launched=True)
    with swapped(model, layer, report) as count:
        for _ in range(steps):
            timed(step, device)
        row = {"swapped": count, "warm_up_seconds": time.perf_counter() - begun}
        row["compiled_graphs"] = compiled_graphs() - before
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            timed(step, device)
            row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return row, report


def _rounds(
    model: nn.Module,
    layers: Sequence[Layer],
    step: Callable[[], None],
    device: torch.device,
    args: argparse.Namespace,
    reports: Mapping[str, SwapReport | None] | None = None,
    replays: Mapping[str, Callable[[], None]] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each step, the sides in turns; of a turn the first step, after a swap, is not counted."""
    times: dict[str, list[float]] = {layer.name: [] for layer in layers}
    for _ in range(args.rounds):
        for layer in layers:
            run = step if replays is None else replays[layer.name]
            report = None if reports is None else reports[layer.name]
            with swapped(model, layer, report) if replays is None else nullcontext():
                run()
                times[layer.name] += [timed(run, device) for _ in range(args.steps)]
    return times


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = parser_for(__doc__)
    shown = ", ".join(name for name in MODELS if name != "tiny")
    parser.add_argument("--models", help=f"comma-separated: {shown} (all of them; without a GPU --check)")
    parser.add_argument("--plans", default=PLANS, help="comma-separated, as `narrowgauge bench linear` takes them")
    parser.add_argument(
        "--filter", action="store_true",
        help="leave layers that measured slower than nn.Linear: launched, and for --graph by the device's work",
    )  # fmt: skip
    parser.add_argument("--peers", action="store_true", help="torchao's float8 layers too, where installed")
    parser.add_argument(
        "--compile", nargs="?", const="inductor", metavar="BACKEND", help="compile every block (inductor)"
    )
    parser.add_argument("--whole", action="store_true", help="compile the model instead of every block")
    parser.add_argument(
        "--mode", choices=MODES, default="default",
        help="of inductor: reduce-overhead replays each block as a CUDA graph, cpp-wrapper launches from C++",
    )  # fmt: skip
    parser.add_argument("--graph", action="store_true", help="time replays of a CUDA graph of a step, too")
    parser.add_argument("--batch", type=int, default=256, help="images and texts a step")
    parser.add_argument("--patch-dropout", type=float, default=0.5, help="share of patches that are dropped")
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false")
    parser.add_argument("--optimizer", choices=("torch", "ours"), default="torch", help="of all sides")
    parser.add_argument("--warm-up", type=int, default=3, help="steps of each side before any is counted")
    parser.add_argument("--steps", type=int, default=3, help="steps of a side in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto", help="'cpu', 'cuda', or 'auto': a GPU if there is one")
    parser.add_argument("--resume", action="store_true", help="keep the models that the results file has")
    parser.add_argument("--check", action="store_true", help="a tiny model and a few steps")
    args = parser.parse_args(words)
    try:
        device, layers = find_device(args.device), [baseline(), *map(plan_layer, parts(args.plans))]
    except ValueError as error:
        parser.error(str(error))
    if args.check or (args.models is None and device.type == "cpu"):
        parser.set_defaults(models="tiny", batch=4, rounds=2, steps=1, warm_up=1)  # unless asked for otherwise
        args = parser.parse_args(words)
    args.device, args.layers = device, layers
    for name, least in (("batch", 2), ("warm_up", 1), ("steps", 1), ("rounds", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if not 0 <= args.patch_dropout < 1:
        parser.error(f"--patch-dropout must be from 0 to below 1, got {args.patch_dropout}")
    args.models = parts(shown if args.models is None else args.models)
    if unknown := [name for name in args.models if name not in MODELS]:
        parser.error(f"--models must be among {shown}, got {unknown[0]!r}")
    if args.mode != "default" and (args.compile != "inductor" or args.graph):
        parser.error(
            f"--mode must be default but with --compile alone (no --graph, no other backend), got {args.mode!r}"
        )
    if args.whole and (not args.compile or args.graph):
        parser.error("--whole must be given with --compile, and without --graph")
    if args.graph and device.type != "cuda":
        parser.error(f"--graph must be given with a CUDA device, got {device.type!r}")
    if args.resume and args.json is None:
        parser.error("--resume must be given with --json, the results file to go on with")
    if args.peers:
        if PEER not in peer_versions():
            parser.error(f"--peers: none is installed of {PEER}")
        args.layers += [peer for peer in peers() if peer.family == PEER and peer.recipe != "int8"]
    return args


def run(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measure all models, print rows, and write the results as they come."""
    results: dict[str, Any] = {
        "command": command,
        "environment": describe_environment(args.device) | ({PEER: peer_versions()[PEER]} if args.peers else {}),
        "dtype": "bf16",
        "layers": {layer.name: layer.what for layer in args.layers},
        "models": {},
    }
    if args.resume:
        results = resumed(args.json, results)
    for name in args.models:
        if name in results["models"]:
            continue
        # Not on the default stream, on which nothing can be captured.
        with torch.cuda.stream(torch.cuda.Stream()) if args.graph else nullcontext():
            found = results["models"][name] = bench(name, args.layers, args, args.device)
        share = f"linear layers {100 * found['linear_share']:.0f} % of a step" if "linear_share" in found else ""
        print(f"{name}: {share}")
        for side, row in found["rows"].items():
            print(f"  {side}: {_line(row)}", flush=True)
        save(args.json, results)
        gc.collect()
        if args.device.type == "cuda":
            torch.cuda.empty_cache()
    return results


def _line(row: Mapping[str, Any]) -> str:
    if "failed" in row:
        return str(row["failed"])
    line = f"{row['ms']:.1f} ms, {row['speedup']:.3f} x, {row['swapped']} layers"
    if "graph_ms" in row:
        line += (
            f"; from a graph {row['graph_ms']:.1f} ms, {row['graph_speedup']:.3f} x, {row['graph_swapped']} layers"
        )
    if "ceiling" in row:
        line += f" (ceiling {row['ceiling']:.2f})"
    line += f", warm-up {row['warm_up_seconds']:.0f} s, {row['compiled_graphs']} graphs"
    return f"{line}, peak {row.get('peak_bytes', 0) / 1e9:.1f} GB"


def main() -> int:
    results = run(arguments(), " ".join(["python", "benchmarks/bench_clip.py", *sys.argv[1:]]))
    return int(any("failed" in row for of in results["models"].values() for row in of["rows"].values()))


if __name__ == "__main__":
    sys.exit(main())
