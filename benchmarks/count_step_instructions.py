"""What a step kernel costs: machine instructions an element, registers and widths of loads, for an H100 or H200.

The kernels are compiled without a GPU. Counted is one turn of the loop over units, with all blocks ordinary;
`all` counts every line of the kernel. An H200 has about 69 instructions an element to spend where 10 bytes move,
and 83 where 12 do. Kernels without a loop, whose states have no blocks, are counted in full only.

    python benchmarks/count_step_instructions.py [--gauges] [--factor norm] [--sass FOLDER]
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from _machine_code import TARGET, compile_kernel, memory_operations, registers, sass, unpredicated, write_code
from triton.backends.compiler import GPUTarget

from narrowgauge import optim
from narrowgauge.kernels._step import _launch, _stats
from narrowgauge.kernels._step._layout import AT, WIDTH
from narrowgauge.optim._plan import ParamStep
from narrowgauge.optim._tracing import Hyperparameters
from narrowgauge.optim._triton_backend import kernels_of, launch_key
from narrowgauge.storage import Float8Weight

_TYPES = {
    "table": "*i64", "programs": "*i32", "uniforms": "*fp32", "steps": "*i32", "flags": "*i32", "partials": "*fp64",
    "hyper": "*fp64", "values0": "*fp32", "values1": "*fp32", "cells0": "*i32", "cells1": "*i32",
    "gauges": "*fp32", "sums": "*fp32", "ends": "*i32", "slices": "*fp64", "stats": "*fp64",
    "verdict": "*fp32", "squares": "*fp64", "totals": "*fp64",
}  # fmt: skip
# Weights, states, dtype, optimizer, options: every codec, every rule, sums, blocks of other sizes.
EVERY: list[tuple[str, str, torch.dtype, str, dict[str, Any]]] = [
    ("split", "8bit", torch.bfloat16, "AdamW", {"nonfinite": "skip"}),
    ("split8", "log8", torch.bfloat16, "LAMB", {"block_size": 64}),
    ("expansion", "fp8", torch.bfloat16, "AdamW", {"clip_updates": True}),
    ("kahan", "log4", torch.float16, "Adam", {"block_size": 2048}),
    ("master", "4bit", torch.bfloat16, "AdamW", {"beta2_schedule": 0.8}),
    ("stochastic", "expansion", torch.bfloat16, "AdamW", {"maximize": True}),
    ("stochastic", "bf16", torch.float16, "Lion", {}),
    ("plain", "fp32", torch.float32, "LARS", {"momentum": 0.9}),
    ("plain", "8bit", torch.float32, "SGD", {"momentum": 0.9, "nesterov": True, "block_size": 4096}),
    ("plain", "log8", torch.float32, "Adagrad", {}),
    ("fp8split8", "log8", torch.bfloat16, "AdamW", {"nonfinite": "skip"}),
]
VARIANTS = [(weights, states) for weights in ("plain", "split8") for states in ("fp32", "8bit", "log8", "fp8")]


def step_of(
    weights: str,
    states: str,
    dtype: torch.dtype = torch.bfloat16,
    name: str = "AdamW",
    gauges: bool = False,
    factor: Any = "",
    **options: Any,
) -> Any:
    """The kernels of an optimizer and its storages."""
    start = torch.ones(8, 1024, dtype=dtype)  # LARS does not scale vectors
    p = torch.nn.Parameter(Float8Weight.of(start) if weights == "fp8split8" else start)
    optimizer = getattr(optim, name)([p], weights=weights, states=states, **options)
    (group,) = optimizer.param_groups
    plan = optimizer.plan_of(p)
    step = ParamStep(0, plan, group, p, torch.zeros_like(start), plan.init(p, group))
    return kernels_of(launch_key(step, Hyperparameters.of(group), gauges, factor))


def compiled(kernel: Any, layout: Any, constants: dict[str, Any], target: GPUTarget = TARGET) -> Any:
    """A kernel as it is launched."""
    types = {name: kind for name, kind in _TYPES.items() if name in kernel.arg_names and name not in constants}
    # As `_triton.limits_registers` has it.
    more = {"maxnreg": layout.registers} if target.arch == 90 else {}
    return compile_kernel(
        kernel, types, constants, types, target, num_warps=layout.warps, enable_fp_fusion=False, **more
    )


def compile_every(step: Any, target: GPUTarget = TARGET) -> None:
    """All kernels of a step as they are launched: what the interpreter lets pass the compiler may refuse."""
    shared = ("totals", "numbers_summed") if step.terms else ()
    for name in ("step", "numbers", "sums", "numbers_before", "finite", "pass_before", *shared):
        for advance in (True, False) if name.startswith("numbers") and hasattr(step, name) else (True,):
            if hasattr(step, name):
                constants = {"ADVANCE": advance, "SKIP": advance and step.skip, "PEEK": not advance}
                compiled(getattr(step, name), step.layout, constants, target)
    if step.squares:
        constants = {"WIDTH": WIDTH, "FIRST": AT["pass_first"], "PASSES": AT["passes"]}
        compiled(_launch.add_squares, step.layout, constants, target)
    if step.layout.gauges:
        constants = {"WIDTH": WIDTH, "NUMEL": AT["numel"], "RATIO": step.ratio}
        compiled(_stats.add_slices, step.layout, constants, target)
        compiled(_stats.add_tensors, step.layout, constants, target)


def ordinary(lines: list[tuple[int, str]]) -> list[str]:
    """The instructions of one turn of the loop that stores, by the shortest way."""
    place = {address: i for i, (address, _) in enumerate(lines)}
    jumps = {}
    for i, (_, line) in enumerate(lines):
        if jump := re.search(r"BRA\b.* 0x([0-9a-f]+)\s*$", line):
            jumps[i] = place[int(jump.group(1), 16)]
    turns = []
    for end, start in jumps.items():
        if start < end and any("STG" in line for _, line in lines[start:end]):
            turns.append(_shortest(lines, jumps, start, end))
    # Where nothing is kept in blocks, a program has one unit and no turns: what loops there is what is done again.
    looped = [turn for turn in turns if any("STG" in line for line in turn)]
    return min((turn for turn in looped if any("LDG" in line for line in turn)), key=len, default=[])


def _shortest(lines: list[tuple[int, str]], jumps: dict[int, int], start: int, end: int) -> list[str]:
    """From start to end over forward jumps, past at least one store."""
    best: dict[int, tuple[int, ...]] = {end: (end,)}
    for i in range(end - 1, start - 1, -1):
        ways = [best[i + 1]] if i + 1 in best and not (i in jumps and not lines[i][1].startswith("@")) else []
        if i in jumps and i < jumps[i] <= end and jumps[i] in best:
            ways.append(best[jumps[i]])
        stored = [way for way in ways if any("STG" in lines[j][1] for j in way)]
        if ways:
            best[i] = (i, *min(stored or ways, key=len))
    return [lines[i][1] for i in best.get(start, ())]


def measure(made: Any, layout: Any) -> dict[str, Any]:
    """What a compiled step kernel takes."""
    lines = sass(made)
    every = [line for _, line in lines if not re.match(r"(@\S+ )?(NOP|BRA)", line)]
    way = [line for line in ordinary(lines) if not line.startswith("NOP")]
    each = layout.unit // (32 * layout.warps)
    used, stack = registers(made)
    return {
        "way": len(way) / each,
        "all": len(every) / each,
        "registers": used,
        "stack": stack,
        "memory": memory_operations(way, "SHFL"),
        "ops": Counter(unpredicated(line).split()[0].split(".")[0] for line in way),
        "elements a thread": each,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sass", type=Path, help="a folder for the machine code")
    parser.add_argument("--only", nargs="*", help="variants, as weights:states")
    parser.add_argument("--every", action="store_true", help="compile kernels of all kinds, count nothing")
    parser.add_argument("--gauges", action="store_true", help="with the sums of the gauges")
    parser.add_argument(
        "--factor", choices=("", "given", "norm"), default="", help="what gradients are multiplied by"
    )
    args = parser.parse_args()
    if args.every:
        for weights, states, dtype, name, options in EVERY:
            compile_every(step_of(weights, states, dtype, name, args.gauges, args.factor, **options))
            print("compiled", name, weights, states, options, flush=True)
        return
    for weights, states in [tuple(v.split(":")) for v in args.only] if args.only else VARIANTS:
        step = step_of(weights, states, gauges=args.gauges, factor=args.factor)
        made = compiled(step.step, step.layout, {})
        found = measure(made, step.layout)
        ops = found.pop("ops")
        print(weights, states, {k: round(v, 1) if isinstance(v, float) else v for k, v in found.items()})
        print("    ", {k: round(v / found["elements a thread"], 2) for k, v in ops.most_common(30)}, flush=True)
        write_code(args.sass, f"{weights}_{states}", made)


if __name__ == "__main__":
    main()
