"""What a pair of codecs costs a kernel: machine instructions an element, in code compiled for an H100 or H200.

One Triton kernel takes AdamW's step: moments are read and decoded, averaged, encoded and written, the weight moves.
It is compiled, without a GPU, with fp32 moments and with each pair, for 8 and for 16 elements a thread; the
difference of the two lengths over 8 is the cost of an element, free of what is paid once. Every instruction counts
one, whatever its speed; gathers (loads from a table, at an address that depends on the element) are counted again
on their own.

Division by the scale is a multiplication by its reciprocal, a block's scales are one number or two, and codes are
bytes (4-bit codes are not packed here; what packing costs comes on top). The gather encodes by a packed table: an
entry a key of the leading bits, holding the code at its start and the one cut inside. What is handed over, and a
unit made of a second moment, are of what was written. Elements are loaded by fours. Random bits cost what a
generator takes to make them and what a codec does with 16 of them, which the kernel loads: both are counted.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from studies.state_codecs import kernel_codecs as codecs

_TARGET = GPUTarget("cuda", 90, 32)
_VECTOR = 4  # elements a load


@triton.jit
def _moment(state, at, a, b, table, DECODE: tl.constexpr, SIGNED: tl.constexpr, P: tl.constexpr):
    if DECODE is None:
        return tl.load(state + at)
    else:
        return DECODE(tl.load(state + at), a, b, table, SIGNED, P)


@triton.jit
def _keep(
    x, state, at, scales, bits, table, DECODE: tl.constexpr, ENCODE: tl.constexpr, SIGNED: tl.constexpr,
    P: tl.constexpr, RANGE: tl.constexpr,
):  # fmt: skip
    """Write a moment, and give what was written."""
    if DECODE is None:
        tl.store(state + at, x)
        return x
    elif RANGE == "own":
        code, value, number = ENCODE(x, bits, P)
        tl.store(scales, number)
        tl.store(state + at, code)
        return value
    elif RANGE == "own two":
        code, value, base, step = ENCODE(x, bits, P)
        tl.store(scales, base)
        tl.store(scales + 1, step)
        tl.store(state + at, code)
        return value
    else:
        magnitude = tl.abs(x)
        largest = tl.max(magnitude, axis=0)
        if RANGE == "least":
            foot = tl.min(tl.where(magnitude == 0, 1e30, magnitude), axis=0)
            code = ENCODE(x, foot, largest, bits, table, SIGNED, P)
        else:
            foot = largest * (1.0 / 127.0)
            code = ENCODE(x, 127.0 / largest, largest, bits, table, SIGNED, P)
        tl.store(scales, foot)
        tl.store(scales + 1, largest)
        tl.store(state + at, code)
        return DECODE(code, foot, largest, table, SIGNED, P)


@triton.jit
def _unit(v):
    """The unit of an element of v, a power of two, and one over it."""
    unit = ((v.to(tl.int32, bitcast=True) >> 1) + (127 << 22)) & (255 << 23)
    return unit.to(tl.float32, bitcast=True), ((254 << 23) - unit).to(tl.float32, bitcast=True)


@triton.jit
def _step(
    weight, grad, m, v, scales, random, table, lr, beta1, beta2, eps, later, N: tl.constexpr, HAND: tl.constexpr,
    UNIT: tl.constexpr, RANDOM: tl.constexpr, M_DECODE: tl.constexpr, M_ENCODE: tl.constexpr, M_P: tl.constexpr,
    M_RANGE: tl.constexpr, V_DECODE: tl.constexpr, V_ENCODE: tl.constexpr, V_P: tl.constexpr,
    V_RANGE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    at = block * N + tl.arange(0, N)
    scales += 4 * block
    g = tl.load(grad + at)
    bits = tl.load(random + at) if RANDOM else None
    first = _moment(m, at, tl.load(scales), tl.load(scales + 1), table, M_DECODE, True, M_P)
    second = _moment(v, at, tl.load(scales + 2), tl.load(scales + 3), table, V_DECODE, False, V_P)
    if UNIT == "shift":
        unit, over = _unit(second)
        first *= unit
    elif UNIT == "root":
        first *= tl.sqrt_rn(second)
    first = beta1 * first + (1.0 - beta1) * g
    second = beta2 * second + (1.0 - beta2) * g * g
    kept = _keep(second, v, at, scales + 2, bits, table, V_DECODE, V_ENCODE, False, V_P, V_RANGE)
    if UNIT == "shift":
        unit, over = _unit(kept)
        kept = _keep(first * over, m, at, scales, None, table, M_DECODE, M_ENCODE, True, M_P, M_RANGE) * unit
    elif UNIT == "root":
        root = tl.sqrt_rn(kept)
        over = tl.where(root > 0, 1.0 / root, 0.0)
        kept = _keep(first * over, m, at, scales, None, table, M_DECODE, M_ENCODE, True, M_P, M_RANGE) * root
    else:
        kept = _keep(first, m, at, scales, None, table, M_DECODE, M_ENCODE, True, M_P, M_RANGE)
    move = first + later * (first - kept) if HAND else first
    tl.store(weight + at, tl.load(weight + at) - lr * move / (tl.sqrt_rn(second) + eps))


@triton.jit
def _random(out, seed, step, N: tl.constexpr):
    # One counter gives 128 bits, for eight elements.
    at = tl.program_id(0) * (N // 8) + tl.arange(0, N // 8)
    a, b, c, d = tl.philox(seed, at, step, 0, 0)
    tl.store(out + at, a ^ b ^ c ^ d)


# Decode and encode, the power or bits, and how a block's numbers are found: by its largest element, by its
# least as well, or by the codec itself, which keeps one or two.
KERNELS: dict[str | None, tuple[Any, Any, int, str]] = {
    None: (None, None, 1, ""),
    "dynamic": (codecs.table_decode, codecs.table_encode, 1, ""),
    "dynamic root": (codecs.table_decode, codecs.table_encode, 2, ""),
    "power 1": (codecs.power_decode, codecs.power_encode, 1, ""),
    "power 1.5": (codecs.power_decode, codecs.power_encode, 15, ""),
    "power 2": (codecs.power_decode, codecs.power_encode, 2, ""),
    "power 4": (codecs.power_decode, codecs.power_encode, 4, ""),
    "softsign": (codecs.softsign_decode, codecs.softsign_encode, 1, ""),
    "e4m3": (codecs.e4m3_decode, codecs.e4m3_encode, 1, ""),
    "e4m3 expanded": (codecs.e4m3_decode, codecs.e4m3_encode, 0, "least"),
    "log2": (codecs.log2_decode, codecs.log2_encode, 1, "least"),
    "exact ends": (codecs.log_decode, codecs.log_encode, 8, "least"),
    "log8": (codecs.pattern_decode, codecs.pattern_encode, 8, "own"),
    "log4": (codecs.whole_decode, codecs.whole_encode, 4, "own two"),
    "4-bit powers of two": (codecs.pattern_decode, codecs.pattern_encode, 4, "own"),
    "relative": (codecs.relative_decode, codecs.relative_encode, 8, "own"),
    "e2m1": (codecs.e2m1_decode, codecs.e2m1_encode, 4, "own"),
}
How = tuple[str | None, str | None, str, bool, bool]
# The parts of log8, one after the other: kernels of m and v, unit, hand-over, random bits.
STEPS: dict[str, How] = {
    "v between exact ends, stochastic; m fp32": (None, "exact ends", "", False, True),
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


def constants_of(how: How) -> dict[str, Any]:
    """What `_step` is compiled with, but for the elements of a block."""
    m, v, unit, hand_over, random = how
    constants: dict[str, Any] = {"HAND": hand_over, "UNIT": unit, "RANDOM": random}
    for moment, kernel in (("M", m), ("V", v)):
        parts = zip(("DECODE", "ENCODE", "P", "RANGE"), KERNELS[kernel], strict=True)
        constants |= {f"{moment}_{key}": value for key, value in parts}
    return constants


def _per_element(how: How) -> dict[str, float]:
    types = dict.fromkeys(("weight", "grad", "scales", "table"), "*fp32") | {"random": "*u16"}
    types |= {name: "*fp32" if kernel is None else "*u8" for name, kernel in zip("mv", how[:2], strict=True)}
    types |= dict.fromkeys(("lr", "beta1", "beta2", "eps", "later"), "fp32")
    counts = _slope(lambda n: _compiled(_step, types, constants_of(how) | {"N": n}))
    counts["gathers"] -= sum(kernel is not None for kernel in how[:2]) / _VECTOR  # which are loads of codes
    return counts


def _slope(compiled: Any) -> dict[str, float]:
    """A thread has N / 32 elements: 8 and 16."""
    short, long = (_count(compiled(n)) for n in (256, 512))
    return {key: (long[key] - short[key]) / 8 for key in short}


def _compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> bytes:
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    # As many elements a load of each kind: with one layout for all, nothing is moved between threads.
    bytes_of = {"*u8": 1, "*u16": 2, "*fp32": 4, "*i32": 4}
    aligned = {
        (i,): [["tt.divisibility", _VECTOR * bytes_of[types[name]]]]
        for i, name in enumerate(names)
        if types.get(name) in bytes_of
    }
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=_TARGET, options={"num_warps": 1, "enable_fp_fusion": True}).asm["cubin"]


def _count(cubin: bytes) -> dict[str, float]:
    """Machine instructions, and loads of four bytes, of a compiled kernel."""
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
