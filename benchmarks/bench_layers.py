"""What linear layers hold, how noisy they are, and where their time goes.

Figures 6, 7 (left) and 10 of Wortsman et al. 2023 for this machine, in four sections:

    memory       bytes held of every token and of every weight
    noise        results against float64, in decibels
    operations   every operation of a layer alone, by dim
    grid         forward and backward by dim and tokens

A dim stands for the two linear layers of a transformer's MLP, from dim to 4 dim and back. With `--resume` the
figures are added to a results file of `narrowgauge bench linear`, or of an earlier run, which keeps its own:

    narrowgauge bench linear --device cuda --tune --json linear.json
    python benchmarks/bench_layers.py --device cuda --quick --resume --json linear.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from _layer_memory import MODELS, memory
from _layer_noise import INPUTS, noise
from _layer_operations import mlp, time_operations
from _resume import resumed
from _script import parser_for, save

from narrowgauge.cli._bench._linear import (
    BASELINE,
    DTYPES,
    Layer,
    Shape,
    baseline,
    chosen_dtype,
    chosen_plans,
    header,
    operands,
    pass_of,
    refuse_tuning,
    times_of,
    tune_shape,
)
from narrowgauge.cli._bench._timing import take_turns, why
from narrowgauge.cli._environment import find_device
from narrowgauge.cli._files import UsageError
from narrowgauge.cli._options import parts
from narrowgauge.linear._tune import replayed

SECTIONS = ("memory", "noise", "operations", "grid")
GRID_PLANS = "SWITCHBACK:int8,SWITCHBACK:e4m3,TENSORWISE_FP8:e4m3"
# Dims and tokens of the grid, tokens of the operations, tokens and dim of the memory, the layer of the noise.
SIZES = {
    "cuda": ((768, 1024, 1280, 1664, 2048, 4096, 8192), (4096, 8192, 16384, 32768, 65536), 32768, (8192, 1280),
             Shape(8192, 1280, 5120)),
    "cpu": ((128, 256, 512), (256, 1024), 1024, (256, 128), Shape(1024, 256, 1024)),
}  # fmt: skip
Rows = dict[str, dict[str, Any]]


def time_cell(
    dim: int, tokens: int, layers: Sequence[Layer], dtype: torch.dtype, device: torch.device, seconds: float
) -> Rows:
    """Both layers of an MLP as one: `ms` and `speedup`, of a graph on a GPU; or `failed`."""
    pairs = [operands(shape, dtype, device) for shape in mlp(tokens, dim)]
    rows: Rows = {}
    passes: dict[str, Any] = {}
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    for layer in layers:
        try:
            runs = [pass_of(layer.made(fed.linear), fed) for fed in pairs]
            run = partial(_each, runs)
            run(), run()
            passes[layer.name] = run if pool is None else replayed(run, device, pool)
        except Exception as error:
            rows[layer.name] = {"failed": why(error)}
    found = take_turns(passes, device, seconds)
    return {layer.name: rows.get(layer.name) or times_of(found, layer.name, BASELINE) for layer in layers}


def _each(runs: Sequence[Callable[[], Any]]) -> None:
    for run in runs:
        run()


def measurements(args: argparse.Namespace) -> list[tuple[str, str, tuple[Layer, ...], tuple[Shape, ...], Any]]:
    """Section, name, layers, the shapes to tune at, and what measures them, in order."""
    dims, tokens, count, (held, held_dim), judged = SIZES[args.device.type]
    if args.quick:
        dims, tokens = dims[:: len(dims) // 2], tokens[1::2]
    given = {"dtype": DTYPES[args.dtype], "device": args.device}
    timed = given | {"seconds": args.seconds}
    layers, of_grid = args.layers, args.grid_layers
    known = [
        *(("memory", of, layers, (), partial(memory, of, held_dim, held, **given)) for of in MODELS),
        *(("noise", of, layers, (), partial(noise, of, judged, **given)) for of in INPUTS),
        *(("operations", f"{count}x{dim}", layers, mlp(count, dim), partial(time_operations, dim, count, **timed))
          for dim in dims),
        *(("grid", f"{many}x{dim}", of_grid, mlp(many, dim), partial(time_cell, dim, many, **timed))
          for many in tokens for dim in dims),
    ]  # fmt: skip
    return [each for each in known if each[0] in args.sections]


def run(args: argparse.Namespace, command: str) -> int:
    """Measure what the results file lacks, and write it after each measurement; 1 if any row failed."""
    results = header(command, args.dtype, args.seconds, args.device, [*args.layers, *args.grid_layers])
    if args.resume:
        results = resumed(args.json, results)
    failed = False
    for section, name, layers, shapes, measured in measurements(args):
        if name in results.get(section, {}):
            continue
        for shape in shapes if args.tune else ():
            tuned = results.setdefault("tuned", {})
            if str(shape) not in tuned:
                tuned[str(shape)] = tune_shape(shape, layers, DTYPES[args.dtype], args.device)
        try:
            rows = measured(layers=layers)
        except Exception as error:  # such as too little memory for the operands
            rows = {layer.name: {"failed": why(error)} for layer in layers}
        failed |= any("failed" in row for row in rows.values())
        results.setdefault(section, {})[name] = rows
        print(f"\n{section}, {name}")
        for layer, row in rows.items():
            shown = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
            print(f"  {layer}: {', '.join(f'{key} {value}' for key, value in shown.items())}", flush=True)
        save(args.json, results)
        if args.device.type == "cuda":
            torch.cuda.empty_cache()
    return int(failed)


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The options, checked."""
    parser = parser_for(__doc__)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="comma-separated")
    parser.add_argument("--plans", help="comma-separated, as `narrowgauge bench linear` takes them")
    parser.add_argument("--dtype", default="bf16", help="of the layers")
    parser.add_argument("--quick", action="store_true", help="fewer dims and tokens")
    parser.add_argument("--tune", action="store_true", help="time all ways to multiply first")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=0.2, help="how long to time each row")
    parser.add_argument("--resume", action="store_true", help="keep what the results file has")
    args = parser.parse_args(words)
    args.sections = tuple(parts(args.sections))
    try:
        if not args.sections or set(args.sections) - set(SECTIONS):
            raise UsageError(f"--sections must be among {', '.join(SECTIONS)}, got {','.join(args.sections)!r}")
        args.device = find_device(args.device)
        chosen_dtype(args.dtype)
        args.layers = (baseline(), *chosen_plans(args.plans))
        args.grid_layers = (baseline(), *chosen_plans(args.plans or GRID_PLANS))
        if args.tune:
            refuse_tuning(args.device, args.layers)
        if args.resume and args.json is None:
            raise UsageError("--resume must be given with --json, the results file to go on with")
    except UsageError as error:
        parser.error(str(error))
    return args


if __name__ == "__main__":
    sys.exit(run(arguments(sys.argv[1:]), " ".join(["python", *sys.argv])))
