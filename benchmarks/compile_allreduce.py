"""Kernels of compressed gradients, compiled for an H100 or H200 without a GPU: registers, stack, spills, widths of
loads, instructions an element.

    python benchmarks/compile_allreduce.py [--every] [--sass FOLDER]
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton
from count_step_instructions import sass, usage
from triton.backends.compiler import GPUTarget

from narrowgauge import formats
from narrowgauge.formats import Coder
from narrowgauge.kernels import _allreduce
from narrowgauge.kernels._allreduce_key import AllreduceKey

TARGET = GPUTarget("cuda", 90, 32)
_POINTERS = {
    "places": "*i64", "owners": "*i32", "values": "*fp32", "total": "*fp32", "flags": "*i32", "halves": "*i16",
    "halves_in": "*i16", "halves_sent": "*i16",
}  # fmt: skip
_SIZES = ("pitch", "codes_at", "ranks", "rank", "step", "seed", "above")
CLUSTERED = torch.tensor([-1.0, -0.5, -0.4999999, 0.0, 0.3, 0.3001, 1.0])
BOOKS = {
    "8 bits": (formats.codebook("dynamic"), 8),
    "4 bits": (formats.codebook("dynamic", bits=4), 4),
    "linear": (formats.codebook("linear"), 8),
    "searched": (CLUSTERED, 4),
}


def compiled(kind: AllreduceKey, name: str, aligned: bool = True, target: GPUTarget = TARGET) -> Any:
    """A kernel of a kind, compiled as it is launched."""
    kernel = getattr(_allreduce, name)
    made = _allreduce.TritonAllreduce(kind)
    constants = {**made.tile, **made.coding, "GRAD": made.grad, "RESIDUAL": made.residual, "ALIGNED": aligned}
    constants |= {"TOTAL": kind.residual is not None, "MANY": _allreduce._SCALES}
    if kind.residual is None:
        constants |= {"total": None, "flags": None}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    words = "*i32" if kind.bits == 8 else "*i16"
    types = _POINTERS | dict.fromkeys(("codes", "codes_in", "codes_sent"), words)
    types["grads"] = "*fp32" if kind.dtype == torch.float32 else "*i16"
    types["table"] = "*fp32" if kind.table is None else "*i32"
    types |= dict.fromkeys(_SIZES, "i32")
    signature = {key: "constexpr" if key in constants else types[key] for key in kernel.arg_names}
    aligned_at = [
        i for i, key in enumerate(kernel.arg_names)
        if key not in constants and (types[key].startswith("*") or (aligned and key in ("pitch", "codes_at")))
    ]  # fmt: skip
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned_at}
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=made.options)


def kinds(every: bool) -> dict[str, AllreduceKey]:
    """Kinds by what they are: the usual ones, or all that differ in code."""
    found = {}
    blocks = (256, 64, 100, 4, 2048, 4096) if every else (256,)
    dtypes = (torch.bfloat16, torch.float32, torch.float16) if every else (torch.bfloat16,)
    memories = (torch.float32, torch.bfloat16, None) if every else (torch.float32, None)
    for number, (book, block, dtype, memory, chance) in enumerate(
        itertools.product(BOOKS, blocks, dtypes, memories, (False, True))
    ):
        # Of all combinations every seventh: each pair of two choices is among them.
        if not every or number % 7 == 0:
            name = f"{book}, block {block}, {dtype}, memory {memory}, {'stochastic' if chance else 'nearest'}"
            values, bits = BOOKS[book]
            found[name.replace("torch.", "")] = AllreduceKey(Coder.of(values), block, bits, chance, dtype, memory)
    return found


def measured(kernel: Any, elements: int) -> dict[str, Any]:
    """What a compiled kernel takes; `elements` a thread."""
    cubin = kernel.asm["cubin"]
    lines = [re.sub(r"^@!?U?P\w+ ", "", line) for _, line in sass(cubin)]
    memory = Counter(
        op for line in lines if (op := line.split()[0]).startswith(("LDG", "STG", "LDL", "STL", "LDS", "STS"))
    )
    info = re.search(r"REG:(\d+) STACK:(\d+)", usage(cubin))
    registers, stack = map(int, info.groups()) if info else (0, 0)
    counted = [line for line in lines if not line.startswith(("NOP", "BRA"))]
    spilled = any(op.startswith(("LDL", "STL")) for op in memory)
    return {
        "registers": registers, "stack": stack, "spills": spilled, "all": round(len(counted) / elements, 1),
        "memory": dict(sorted(memory.items())),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", action="store_true", help="all kinds of code, not the usual ones alone")
    parser.add_argument("--only", default="", help="kinds whose name has this in it")
    parser.add_argument("--sass", type=Path, help="a folder for the machine code")
    args = parser.parse_args()
    spilled = []
    for name, kind in kinds(args.every).items():
        if args.only and args.only not in name:
            continue
        for kernel in ("encode", "add", "find_nonfinite", "finish"):
            if kernel == "find_nonfinite" and kind.residual is None:
                continue
            made = compiled(kind, kernel, aligned=not args.every or hash(name) % 2 == 0)
            made_for = _allreduce.TritonAllreduce(kind)
            tile = made_for.tile["SIZE"] * made_for.tile["ROWS"]
            found = measured(made, max(1, tile // (32 * made_for.options["num_warps"])))
            print("compiled", name, kernel, found, flush=True)
            if found["spills"]:
                spilled.append(f"{name} {kernel}")
            if args.sass:
                args.sass.mkdir(parents=True, exist_ok=True)
                text = "\n".join(f"{address:05x} {line}" for address, line in sass(made.asm["cubin"]))
                (args.sass / f"{kernel}_{name.replace(', ', '_').replace(' ', '')}.sass").write_text(text)
                (args.sass / f"{kernel}_{name.replace(', ', '_').replace(' ', '')}.ttgir").write_text(
                    made.asm["ttgir"]
                )
    if spilled:
        raise SystemExit(f"registers are spilled: {spilled}")


if __name__ == "__main__":
    sys.exit(main())
