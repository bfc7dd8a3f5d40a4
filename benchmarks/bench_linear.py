"""The operations of linear layers on a GPU: results against float64, quantizers in GB/s, multiplies in TOP/s.

Layers as a whole are timed by `narrowgauge bench linear`; this is for who works on their kernels. `check` sets
every plan against an oracle. `quantizers` come beside a copy. `multiplies` times every way of every multiply that
SWITCHBACK and TENSORWISE_FP8 have at the shapes of `bench linear`, and keeps the fastest in the user's cache.

    python benchmarks/bench_linear.py [--sections check quantizers multiplies] [--shapes 8192x8192x8192] [--json F]
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgauge.cli._bench._linear import Shape, chosen_shapes, default_plans, plan_layer
from narrowgauge.cli._bench._shared import write_json
from narrowgauge.cli._bench._timing import take_turns
from narrowgauge.cli._environment import describe_environment
from narrowgauge.kernels._linear import _autotune, _configs, _rows, _tiles
from narrowgauge.linear import LinearPlan, linear, quantize

CHECKED = (
    ((512, 256, 384), torch.bfloat16),
    ((333, 200, 119), torch.float16),
    ((70, 48, 33), torch.float32),
)
SECTIONS = ("check", "quantizers", "multiplies")
_SECONDS = 0.06


def milliseconds(run: Callable[[], Any]) -> float:
    """Of one run."""
    run()
    return take_turns({"": run}, torch.device("cuda"), _SECONDS).ms("")


def attempt(name: str, run: Callable[[], dict[str, Any]], into: dict[str, Any]) -> None:
    """Keep what a measurement gives, or what it failed with; nothing hides the rest."""
    try:
        into[name] = run()
    except Exception as error:
        into[name] = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print(f"FAILED {name}: {traceback.format_exc(limit=-3)}", flush=True)
    torch.cuda.empty_cache()


def check_plan(plan: LinearPlan, shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Any]:
    """Distance from the exact product of the codes, as a share of the bound; int8 must keep to its own rounding.

    The oracle quantizes in eager torch on the CPU, multiplies codes in float64, undoes scales in float64.
    """
    b, n, m = shape
    random = torch.Generator().manual_seed(b + n + m)
    x, w, g = (torch.randn(s, generator=random).to(dtype) for s in ((b, n), (m, n), (b, m)))
    bias = torch.randn(m, generator=random).to(dtype)
    x[b // 2] = 0
    got: list[Tensor | None] = []
    leaves = [t.cuda().requires_grad_() for t in (x, w, bias)]
    y = linear(leaves[0], leaves[1], leaves[2], plan)
    y.backward(g.cuda())
    got = [y.detach(), *(leaf.grad for leaf in leaves)]
    wanted: list[tuple[Tensor, Tensor, bool]] = []
    for name, (left, right), transposes in (
        ("output", (x, w), (False, True)), ("grad_input", (g, w), (False, False)),
        ("grad_weight", (g, x), (True, False)),
    ):  # fmt: skip
        operands = plan.operands(name)  # type: ignore[arg-type]
        sides, magnitudes = [], []
        for matrix, operand, turn in zip((left, right), operands or (None, None), transposes, strict=True):
            if operand is None:
                value = matrix.double()
                if name == "grad_weight" and matrix is x and plan.saved == "codes" and plan.operands("output"):
                    kept = plan.operands("output")[0]  # type: ignore[index]
                    value = quantize(x, kept.scaling, kept.format).dequantize(dtype).double()
            else:
                codes, scale = quantize(matrix, operand.scaling, operand.format)
                value = codes.double() * scale.double()
            sides.append(value.t() if turn else value)
            magnitudes.append(sides[-1].abs())
        value, size = sides[0] @ sides[1], magnitudes[0] @ magnitudes[1]
        if name == "output":
            value, size = value + bias.double(), size + bias.double().abs()
        wanted.append((value, size, operands is not None and "int8" in plan.formats))
    wanted.append((g.double().sum(0), g.double().abs().sum(0), False))
    found = {}
    for name, value, (exact, size, integer) in zip(
        ("output", "grad_input", "grad_weight", "grad_bias"), got, wanted, strict=True
    ):
        # Int8: the products are exact, four roundings to float32 remain. Float8: 13 bits of the largest addend.
        unit = 2.0**-22 if integer else 2.0**-20 if name == "grad_bias" else 2.0**-12
        bound = size * unit + exact.abs() * torch.finfo(dtype).eps + 1e-30
        found[name] = float(((value.detach().cpu().double() - exact).abs() / bound).max())
    found["right"] = all(share <= 1 for share in found.values())
    return found


def check(results: dict[str, Any]) -> None:
    """Every plan at a shape that divides into tiles and one that does not."""
    for layer in (*default_plans(), plan_layer("TENSORWISE_FP8:e4m3/e5m2")):
        for shape, dtype in CHECKED:
            attempt(f"{layer.name} {shape} {dtype}", partial(check_plan, layer.plan, shape, dtype), results)
    bad = {name: found for name, found in results.items() if not found.get("right")}
    print(f"check: {len(results) - len(bad)} of {len(results)} right", flush=True)
    for name, found in bad.items():
        print("  WRONG", name, found, flush=True)


def quantizers(results: dict[str, Any], shapes: Sequence[Shape]) -> None:
    """Each quantizer alone, in GB/s of what it must read and write once."""
    sides = sorted({side for b, n, m in shapes for side in ((b, n), (b, m), (m, n))}, reverse=True)
    for rows, columns in sides:
        key = f"{rows}, {columns}"
        found = results.setdefault(key, {})
        x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        attempt("copy", partial(_speed, partial(torch.empty_like(x).copy_, x), 4 * x.numel()), found)
        for form in ("int8", "e4m3"):
            for name, (run, bytes_each) in _quantizers_of(x, form).items():
                attempt(f"{form} {name}", partial(_speed, run, bytes_each * x.numel()), found)
        shown = (f"{name} {of['gb_s']:.0f} ({of['us']:.0f} us)" for name, of in found.items() if "gb_s" in of)
        print(f"{key} GB/s: {'; '.join(shown)}", flush=True)


def _quantizers_of(x: Tensor, form: str) -> dict[str, tuple[Callable[[], Any], int]]:
    """Quantizers, and the bytes an element that they read and write."""
    codes = torch.empty(x.shape, dtype=torch.int8 if form == "int8" else torch.uint8, device=x.device)
    turned = torch.empty(x.t().shape, dtype=codes.dtype, device=x.device)
    maxima, _ = _tiles._looked(x, form, False, False)
    return {
        "rows": (partial(_rows.quantize_rows, x, form, codes, False), 3),
        "rows + sums": (partial(_rows.quantize_rows, x, form, codes, True), 3),
        "absmax": (partial(_tiles._looked, x, form, False, False), 2),
        "absmax + sums": (partial(_tiles._looked, x, form, False, True), 2),
        "tensor, given": (partial(_tiles._quantized, x, form, maxima, None, codes, None), 3),
        "tensor, given, both": (partial(_tiles._quantized, x, form, maxima, None, codes, turned), 4),
        "tensor, both": (partial(_tiles.quantize_tensor, x, form, None, codes, turned, False), 6),
        "columns": (partial(_tiles.quantize_columns, x, form, turned, False), 5),
    }


def _speed(run: Callable[[], Any], size: int) -> dict[str, Any]:
    ms = milliseconds(run)
    return {"us": 1000 * ms, "gb_s": size / ms / 1e6}


def multiplies(results: dict[str, Any], shapes: Sequence[Shape], budget: float) -> None:
    """Every way of every multiply that SWITCHBACK and TENSORWISE_FP8 have; the fastest are kept."""
    began = time.perf_counter()
    for b, n, m in shapes:
        jobs = {
            "output": (b, n, m, True), "grad_input": (b, m, n, False), "grad_weight": (m, b, n, False),
        }  # fmt: skip
        for name, (rows, inner, columns, biased) in jobs.items():
            for form, scaling in (("int8", "row"), ("e4m3", "row"), ("e4m3", "tensor")):
                if name == "grad_weight" and scaling == "row":
                    continue
                key = f"{name} {rows}, {inner}, {columns} {form} {scaling}"
                if time.perf_counter() - began > budget:
                    results[key] = {"failed": "no time left"}
                    continue
                attempt(key, partial(_ways_of, rows, inner, columns, biased, form, scaling), results)
                if "ways" in results[key]:
                    best = list(results[key]["ways"].items())[:4]
                    shown = "; ".join(f"{way} {of['tops']:.0f} ({1000 * of['ms']:.0f} us)" for way, of in best)
                    print(f"{key}: {shown} | default {results[key]['default']}", flush=True)
                    if results[key]["failures"]:
                        print("   failed:", results[key]["failures"], flush=True)


def _ways_of(rows: int, inner: int, columns: int, biased: bool, form: str, scaling: str) -> dict[str, Any]:
    left = quantize(torch.randn(rows, inner, device="cuda"), scaling, form)  # type: ignore[arg-type]
    right = quantize(torch.randn(columns, inner, device="cuda"), "tensor", form)  # type: ignore[arg-type]
    bias = torch.randn(columns, device="cuda", dtype=torch.bfloat16) if biased else None
    operands = (left.codes, right.codes, left.scale, right.scale, bias, torch.bfloat16, False)
    kind, times, failed = _autotune.tune(*operands)
    allowed = _autotune._allowed(left.codes, right.codes, bias, torch.bfloat16, kind)
    work = 2.0 * rows * inner * columns
    return {
        "ways": {str(way): {"ms": ms, "tops": work / ms / 1e9} for way, ms in times.items()},
        "failures": {str(way): why for way, why in failed.items()},
        "default": str(_configs.default(kind, *allowed, True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="*", choices=SECTIONS, default=["check", "quantizers"])
    parser.add_argument("--shapes", help="comma-separated, as `narrowgauge bench linear` takes them")
    parser.add_argument("--budget", type=float, default=120, help="seconds for timing ways")
    parser.add_argument("--json", type=Path, help="a file for the results")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_linear: no CUDA device")
    device = torch.device("cuda")
    try:
        shapes = chosen_shapes(args.shapes, device)
    except ValueError as error:
        parser.error(str(error))
    results: dict[str, Any] = {
        "environment": describe_environment(device),
        "command": " ".join(["python", "benchmarks/bench_linear.py", *sys.argv[1:]]),
    }
    print(results["environment"], flush=True)
    for name in args.sections:
        began = time.perf_counter()
        found = results.setdefault(name, {})
        match name:
            case "check":
                check(found)
            case "quantizers":
                quantizers(found, shapes)
            case "multiplies":
                multiplies(found, shapes, args.budget)
        print(f"[{name}: {time.perf_counter() - began:.0f} s]", flush=True)
        if args.json:
            write_json(args.json, results)


if __name__ == "__main__":
    main()
