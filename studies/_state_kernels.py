"""What a pair of codecs costs a kernel: machine instructions an element, in code compiled for an H100 or H200.

One Triton kernel takes AdamW's step: moments are read and decoded, averaged, encoded and written, the weight moves.
It is compiled, without a GPU, with fp32 moments and with each pair, for 8 and for 16 elements a thread; the
difference of the two lengths over 8 is the cost of an element, free of what is paid once. Every instruction counts
one, whatever its speed; gathers (loads from a table, at an address that depends on the element) are counted again
on their own.

Division by the scale is a multiplication by its reciprocal, a block's scales are two numbers, and codes are bytes
(4-bit codes are not packed here; what packing costs comes on top). The gather encodes by a packed table: an entry a
key of the leading bits, holding the code at its start and the one cut inside. What is handed over, and a unit made
of a second moment, are of what was written, decoded again in registers.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import _state_kernel_codecs as codecs
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

_TARGET = GPUTarget("cuda", 90, 32)


@triton.jit
def _moment(state, at, a, b, table, DECODE: tl.constexpr, SIGNED: tl.constexpr, P: tl.constexpr):
    if DECODE is None:
        return tl.load(state + at)
    else:
        return DECODE(tl.load(state + at), a, b, table, SIGNED, P)


@triton.jit
def _keep(
    x, state, at, scales, table, DECODE: tl.constexpr, ENCODE: tl.constexpr, SIGNED: tl.constexpr, P: tl.constexpr,
    RANGE: tl.constexpr,
):  # fmt: skip
    """Write a moment, and give what was written."""
    if DECODE is None:
        tl.store(state + at, x)
        return x
    else:
        magnitude = tl.abs(x)
        largest = tl.max(magnitude, axis=0)
        if RANGE:
            foot = tl.min(tl.where(magnitude == 0, 1e30, magnitude), axis=0)
            code = ENCODE(x, foot, largest, table, SIGNED, P)
        else:
            foot = largest * (1.0 / 127.0)
            code = ENCODE(x, 127.0 / largest, largest, table, SIGNED, P)
        tl.store(scales, foot)
        tl.store(scales + 1, largest)
        tl.store(state + at, code)
        return DECODE(code, foot, largest, table, SIGNED, P)


@triton.jit
def _shift(v, sign: tl.constexpr):
    """The unit of an element of v, a power of two: itself (1) or 1 over it (-1)."""
    half = ((v.to(tl.int32, bitcast=True) >> 23) + 127) >> 1
    return ((half if sign > 0 else 254 - half) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _step(
    weight, grad, m, v, scales, table, lr, beta1, beta2, eps, later, N: tl.constexpr, HAND: tl.constexpr,
    UNIT: tl.constexpr, M_DECODE: tl.constexpr, M_ENCODE: tl.constexpr, M_P: tl.constexpr, M_RANGE: tl.constexpr,
    V_DECODE: tl.constexpr, V_ENCODE: tl.constexpr, V_P: tl.constexpr, V_RANGE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    at = block * N + tl.arange(0, N)
    scales += 4 * block
    g = tl.load(grad + at)
    first = _moment(m, at, tl.load(scales), tl.load(scales + 1), table, M_DECODE, True, M_P)
    second = _moment(v, at, tl.load(scales + 2), tl.load(scales + 3), table, V_DECODE, False, V_P)
    if UNIT == "shift":
        first *= _shift(second, 1)
    elif UNIT == "root":
        first *= tl.sqrt_rn(second)
    first = beta1 * first + (1.0 - beta1) * g
    second = beta2 * second + (1.0 - beta2) * g * g
    kept = _keep(second, v, at, scales + 2, table, V_DECODE, V_ENCODE, False, V_P, V_RANGE)
    if UNIT == "shift":
        unit, over = _shift(kept, 1), _shift(kept, -1)
        kept = _keep(first * over, m, at, scales, table, M_DECODE, M_ENCODE, True, M_P, M_RANGE) * unit
    elif UNIT == "root":
        root = tl.sqrt_rn(kept)
        over = tl.where(root > 0, 1.0 / root, 0.0)
        kept = _keep(first * over, m, at, scales, table, M_DECODE, M_ENCODE, True, M_P, M_RANGE) * root
    else:
        kept = _keep(first, m, at, scales, table, M_DECODE, M_ENCODE, True, M_P, M_RANGE)
    move = first + later * (first - kept) if HAND else first
    tl.store(weight + at, tl.load(weight + at) - lr * move / (tl.sqrt_rn(second) + eps))


@triton.jit
def _random(out, seed, step, N: tl.constexpr):
    # One counter gives 128 bits, for eight elements.
    at = tl.program_id(0) * (N // 8) + tl.arange(0, N // 8)
    a, b, c, d = tl.philox(seed, at, step, 0, 0)
    tl.store(out + at, a ^ b ^ c ^ d)


# Decode and encode, the power or form, whether the smallest element is looked for.
KERNELS: dict[str | None, tuple[Any, Any, int, bool]] = {
    None: (None, None, 1, False),
    "dynamic": (codecs.table_decode, codecs.table_encode, 1, False),
    "dynamic root": (codecs.table_decode, codecs.table_encode, 2, False),
    "power 1": (codecs.power_decode, codecs.power_encode, 1, False),
    "power 1.5": (codecs.power_decode, codecs.power_encode, 15, False),
    "power 2": (codecs.power_decode, codecs.power_encode, 2, False),
    "power 4": (codecs.power_decode, codecs.power_encode, 4, False),
    "softsign": (codecs.softsign_decode, codecs.softsign_encode, 1, False),
    "e4m3": (codecs.e4m3_decode, codecs.e4m3_encode, 1, False),
    "e4m3 expanded": (codecs.e4m3_decode, codecs.e4m3_encode, 0, True),
    "log2": (codecs.log2_decode, codecs.log2_encode, 1, True),
    "log8": (codecs.log_decode, codecs.log_encode, 8, True),
    "log4": (codecs.log_decode, codecs.log_encode, 4, True),
    "relative": (codecs.relative_decode, codecs.relative_encode, 1, False),
    "e2m1": (codecs.e2m1_decode, codecs.e2m1_encode, 1, False),
}
How = tuple[str | None, str | None, str, bool, bool]
# The parts of log8, one after the other: kernels of m and v, unit, hand-over, random bits.
STEPS: dict[str, How] = {
    "v as log8, to nearest; m fp32": (None, "log8", "", False, False),
    "v as log8, stochastic; m fp32": (None, "log8", "", False, True),
    "and m in linear codes": ("relative", "log8", "", False, True),
    "and in its unit: log8 without hand-over": ("relative", "log8", "shift", False, True),
    "and handed over: log8": ("relative", "log8", "shift", True, True),
}


def measure(pairs: Mapping[str, How]) -> dict[str, dict[str, float]]:
    """By pair: instructions an element over those of fp32 moments, and gathers among them; "fp32" itself."""
    plain = _per_element((None, None, "", False, False))
    random = _slope(lambda n: _compiled(_random, {"out": "*i32", "seed": "i32", "step": "i32"}, {"N": n}))
    found = {"fp32": plain, "random bits": random}
    for name, how in pairs.items():
        counts = _per_element(how)
        found[name] = {key: counts[key] - plain[key] + random[key] * how[-1] for key in counts}
    return found


def _per_element(how: How) -> dict[str, float]:
    m, v, unit, hand_over, _ = how
    types = {"weight": "*fp32", "grad": "*fp32", "scales": "*fp32", "table": "*fp32"}
    types |= {name: "*fp32" if kernel is None else "*u8" for name, kernel in (("m", m), ("v", v))}
    types |= dict.fromkeys(("lr", "beta1", "beta2", "eps", "later"), "fp32")
    constants: dict[str, Any] = {"HAND": hand_over, "UNIT": unit}
    for moment, kernel in (("M", m), ("V", v)):
        parts = zip(("DECODE", "ENCODE", "P", "RANGE"), KERNELS[kernel], strict=True)
        constants |= {f"{moment}_{key}": value for key, value in parts}
    return _slope(lambda n: _compiled(_step, types, constants | {"N": n}))


def _slope(compiled: Any) -> dict[str, float]:
    """A thread has N / 32 elements: 8 and 16."""
    short, long = (_count(compiled(n)) for n in (256, 512))
    return {key: (long[key] - short[key]) / 8 for key in short}


def _compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> bytes:
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types.get(name, "").startswith("*")
    }
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=_TARGET, options={"num_warps": 1, "enable_fp_fusion": True}).asm["cubin"]


def _count(cubin: bytes) -> dict[str, float]:
    """Machine instructions, and one-element loads, of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    code = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", text, re.MULTILINE)
    code = [re.sub(r"^@!?U?P\d+ ", "", line) for line in code]
    code = [line for line in code if not line.startswith(("NOP", "BRA", "EXIT"))]
    gathers = [line for line in code if re.match(r"LDG\.E(\.CONSTANT)? ", line)]
    return {"instructions": len(code), "gathers": len(gathers)}
