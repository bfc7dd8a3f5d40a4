"""The linear layers' kernels, compiled for an H100 or H200 without a GPU: registers, spills, shared memory, wgmma.

A kernel fails here that spills, takes more shared memory than a multiprocessor has, or, if it is a multiply, does
not run on Hopper's tensor core instructions for eight bits. Quantizers are counted in machine instructions an
element, once through from beginning to end: at the speed of a copy an H200 has some 22 to spend on 3 bytes.

    python benchmarks/compile_linear.py [--only multiplies | quantizers]
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Iterator
from typing import Any

from _machine_code import compile_kernel, registers, sass

from narrowgauge.kernels._linear import _blocks, _configs, _multiply, _rows, _tiles
from narrowgauge.kernels._linear._configs import MatmulConfig, MatmulShape
from narrowgauge.kernels._linear._encode import LARGEST

_SHARED = 227 * 1024
# Left and right operand, accumulation; with scales of blocks how many columns share one.
_OPERANDS = (("i8", "i8", "full", 0), ("fp8e4nv", "fp8e4nv", "fast", 0), ("fp8e5", "fp8e4nv", "fast", 0),
             ("fp8e4nv", "fp8e4nv", "full", 0), ("fp8e4nv", "fp8e4nv", "blocks", 128),
             ("fp8e4nv", "fp8e4nv", "blocks", 1), ("i8", "i8", "blocks", 128))  # fmt: skip
_COLUMNS = (768, 1280, 5120, 4096, 8192, 16384)


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any) -> Any:
    """A kernel as it is launched."""
    aligned = [name for name, kind in types.items() if not kind.startswith("tensordesc") and name != "tiles"]
    return compile_kernel(kernel, types, constants, aligned, enable_fp_fusion=False, **options)


def multiply_of(config: MatmulConfig, left: str, right: str, accumulation: str, shared: int, even: bool) -> Any:
    """The kernel of a config, bf16 out, with bias: a scale a row times one for the tensor, or blocks by blocks or
    tiles.
    """
    blocks = accumulation == "blocks"
    kernel = _multiply._by_pointers
    if config.kernel == "descriptors":
        kernel = _multiply._blocks_by_descriptors if blocks else _multiply._by_descriptors
    types = {"left": f"*{left}", "right": f"*{right}", "result": "*i16"}
    if config.kernel == "descriptors":
        part = config.columns // (2 if config.halves else 1)
        types = {
            "left": f"tensordesc<{left}[{config.rows},{config.inner}]>",
            "right": f"tensordesc<{right}[{part if blocks else config.columns},{config.inner}]>",
            "result": f"tensordesc<i16[{config.rows},{part}]>",
        }
    types |= {"left_scale": "*fp32", "right_scale": "*fp32", "bias": "*bf16"}
    # Between scales along rows, or of tiles along K, there is a step of 1.
    steps = ["left_along", "right_along" if shared == 1 else "right_step"] if blocks else []
    types |= dict.fromkeys(("rows", "columns", "inner", *steps), "i32")
    constants: dict[str, Any] = dict.fromkeys(("left_step", "left_along", "right_step", "right_along"), 1)
    constants |= {
        "KIND": "bf16", "INTEGER": left == "i8", "LEFT": 1 if blocks else True,
        "RIGHT": shared if blocks else False, "BIAS": True, "BLOCKS": blocks, "ROWS": config.rows,
        "COLUMNS": config.columns, "INNER": config.inner, "GROUP": config.group,
        "IMPRECISE": config.inner if accumulation == "full" else None, "TALL": even, "WIDE": even, "DEEP": even,
        "HALVES": config.halves, "PROGRAMS": 132 * config.resident,
    }  # fmt: skip
    types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
    options = {"num_warps": config.warps, "num_stages": config.stages}
    if kernel is _multiply._blocks_by_descriptors:
        options["maxnreg"] = config.registers
    return compiled(kernel, types, constants, **options)


def multiplies() -> Iterator[tuple[str, Any, MatmulConfig]]:
    """Every shipped config of every pair of formats that it fits."""
    configs = dict.fromkeys([*_configs.CANDIDATES, _configs._ELSEWHERE])
    for config in configs:
        if config.kernel == "cublas":
            continue
        for left, right, accumulation, shared in _OPERANDS:
            form = "int8" if left == "i8" else "float8"
            kind = MatmulShape(form, "vector", "tensor", "bfloat16", accumulation, 1, 1, 1)
            if not _configs.fits(config, kind, False, True):
                continue
            for even in (True, False):
                how = f"{accumulation}{f' of {shared}' if shared else ''}{'' if even else ', ends within tiles'}"
                made = multiply_of(config, left, right, accumulation, shared, even)
                yield f"{config} {left} x {right} {how}", made, config


def quantizers() -> Iterator[tuple[str, Any, float]]:
    """Every quantizer of bf16 for rows of usual lengths, and the elements a thread has of a tile."""
    numbers = dict.fromkeys(("rows", "columns", "tiles", "count"), "i32")
    for form in LARGEST:
        byte = "*i8" if form == "int8" else "*u8"
        pointers = {"x": "*bf16", "codes": byte, "transposed": byte, "scale": "*fp32", "sums": "*fp32",
                    "turned_scale": "*fp32", "maxima": "*i32", "tensor": "*i32", "column": "*i32",
                    "own": "*fp32"}  # fmt: skip
        common = {"FORMAT": form, "LARGEST": LARGEST[form], "TALL": True, "WIDE": True}

        def quantizer(kernel: Any, constants: dict[str, Any], warps: int, of: Any = (common, pointers)) -> Any:
            types = {name: kind for name, kind in (of[1] | numbers).items() if name in kernel.arg_names}
            return compiled(kernel, types, of[0] | constants, num_warps=warps)

        for columns, sums in itertools.product(_COLUMNS, (False, True)):
            height, first, second, warps = _rows.layout(2**15, columns, sums)
            constants = {"HEIGHT": height, "FIRST": first, "SECOND": second, "SUMS": sums, "STAGES": _rows._STAGES}
            made = quantizer(_rows._quantize_rows, constants, warps)
            yield (
                f"rows of {columns} {form}{' + sums' if sums else ''}",
                made,
                height * (first + second) / (32 * warps),
            )
        constants = {"HEIGHT": _tiles._DOWN, "WIDTH": _tiles._ACROSS, "TENSOR": True, "COLUMN": False}
        for sums in (False, True):
            made = quantizer(_tiles._look, constants | {"SUMS": sums, "STAGES": _tiles._STAGES}, 4)
            yield f"absmax {form}{' + sums' if sums else ''}", made, _tiles._DOWN * _tiles._ACROSS / 128
        constants = {
            "SIDE": _tiles.SIDE,
            "COUNT": 512,
            "AVERAGE": False,
            "STRAIGHT": True,
            "TURNED": True,
            "LONG": False,
        }
        for tensor in (True, False):
            made = quantizer(_tiles._quantize_tiles, constants | {"TENSOR": tensor}, _tiles._WARPS)
            yield f"{'tensor' if tensor else 'columns'} {form}, both", made, _tiles.SIDE**2 / (32 * _tiles._WARPS)
        for tiles, sums in ((False, False), (False, True), (True, False)):
            constants = {
                "SIDE": _tiles.SIDE, "EVEN": True, "LONG": False, "ROW": not tiles, "COLUMN": not tiles,
                "STRAIGHT_TILE": tiles, "TURNED_TILE": tiles, "SUMS": sums,
            }  # fmt: skip
            made = quantizer(_blocks._quantize_blocks, constants, _blocks._WARPS)
            name = f"{'tiles' if tiles else 'blocks'} {form}, both{' + sums' if sums else ''}"
            yield name, made, _tiles.SIDE**2 / (32 * _blocks._WARPS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("multiplies", "quantizers"))
    args = parser.parse_args()
    bad = 0
    if args.only != "quantizers":
        for name, made, config in multiplies():
            used, spilled = registers(made)
            shared = made.metadata.shared
            tensor_core = set(re.findall(r"wgmma\.mma_async\.\S*\.(m64n\d+k32\.\S+)", made.asm["ptx"]))
            right = bool(tensor_core) and not spilled and shared * config.resident <= _SHARED + 1024
            bad += not right
            units = ", ".join(sorted(tensor_core)) or "no wgmma"
            shown = f"{used} registers, {spilled} spilled, {shared} shared, {units}"
            print(f"{'compiled' if right else 'BAD'} {name}: {shown}", flush=True)
    if args.only != "multiplies":
        for name, made, each in quantizers():
            used, spilled = registers(made)
            count = len([line for _, line in sass(made) if not line.startswith(("NOP", "BRA"))])
            bad += spilled > 0
            shown = f"{used} registers, {spilled} spilled, {count / each:.1f} instructions an element"
            print(f"{'BAD' if spilled else 'compiled'} {name}: {shown}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
