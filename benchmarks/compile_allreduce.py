"""Kernels of compressed gradients, compiled for an H100 or H200 without a GPU: registers, stack, spills, widths of
loads, instructions an element.

    python benchmarks/compile_allreduce.py [--every] [--sass FOLDER]
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
from _machine_code import compile_kernel, memory_operations, registers, sass, unpredicated, write_code

from narrowgauge import formats
from narrowgauge.formats import Coder
from narrowgauge.kernels import _allreduce
from narrowgauge.kernels._allreduce_key import AllreduceKey

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


def compiled(kind: AllreduceKey, name: str, aligned: bool = True) -> Any:
    """A kernel of a kind, compiled as it is launched."""
    kernel = getattr(_allreduce, name)
    made = _allreduce.TritonAllreduce(kind)
    constants = {**made.tile, **made.coding, "GRAD": made.grad, "RESIDUAL": made.residual, "ALIGNED": aligned}
    constants |= {"TOTAL": kind.residual is not None, "MANY": _allreduce._SCALES}
    if kind.residual is None:
        constants |= {"total": None, "flags": None}
    words = "*i32" if kind.bits == 8 else "*i16"
    types = _POINTERS | dict.fromkeys(("codes", "codes_in", "codes_sent"), words) | dict.fromkeys(_SIZES, "i32")
    types["grads"] = "*fp32" if kind.dtype == torch.float32 else "*i16"
    types["table"] = "*fp32" if kind.table is None else "*i32"
    types = {name: types[name] for name in kernel.arg_names if name not in constants}
    at = [name for name, of in types.items() if of.startswith("*") or (aligned and name in ("pitch", "codes_at"))]
    return compile_kernel(kernel, types, constants, at, **made.options)


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
    lines = [unpredicated(line) for _, line in sass(kernel)]
    used, stack = registers(kernel)
    memory = memory_operations(lines)
    counted = [line for line in lines if not line.startswith(("NOP", "BRA"))]
    return {
        "registers": used, "stack": stack, "spills": any(op.startswith(("LDL", "STL")) for op in memory),
        "all": round(len(counted) / elements, 1), "memory": memory,
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
            write_code(args.sass, f"{kernel}_{name.replace(', ', '_').replace(' ', '')}", made)
    if spilled:
        raise SystemExit(f"registers are spilled: {spilled}")


if __name__ == "__main__":
    main()
