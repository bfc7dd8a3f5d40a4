"""What a codec costs a kernel: machine instructions an element, counted in code compiled for an H100 or H200.

One small Triton kernel reads a moment, averages a gradient in, and writes it back. It is compiled, without a GPU,
with the moment in fp32 and with each codec, for 8 and for 16 elements a thread; the difference of the two lengths
over 8 is the cost of an element, free of what is paid once. Every instruction counts one, whatever its speed;
gathers (loads from a table, at an address that depends on the element) are counted again on their own.

Division by the scale is a multiplication by its reciprocal, a block's scales are two numbers, and codes are bytes
(4-bit codes are not packed here; what packing costs comes on top). The gather encodes by a packed table: an entry a
key of the leading bits, holding the code at its start and the one cut inside.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

_TARGET = GPUTarget("cuda", 90, 32)


@triton.jit
def _sign(magnitude, x):
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def table_decode(code, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    value = tl.load(table + code.to(tl.int32)) * a
    return value * value if P == 2 else value


@triton.jit
def table_encode(x, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    y = tl.sqrt_rn(x) * a if P == 2 else x * a
    bits = tl.abs(y).to(tl.int32, bitcast=True)
    entry = tl.load(table.to(tl.pointer_type(tl.int32)) + 256 + tl.maximum((bits >> 16) - 12416, 0))
    code = (entry >> 16) + ((bits & 0xFFFF) > (entry & 0xFFFF)).to(tl.int32)
    # Negative codes mirror the positive ones around that of zero.
    return (tl.where(x < 0, 254 - code, code) if SIGNED else code).to(tl.uint8)


@triton.jit
def power_decode(code, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    k = code.to(tl.int8, bitcast=True).to(tl.float32) if SIGNED else code.to(tl.float32)
    y = tl.abs(k)
    if P == 2:
        y = k * y if SIGNED else k * k
    elif P == 4:
        y = (k * k) * (k * y)
    elif P == 15:
        y = k * tl.sqrt(y)
    else:
        y = k
    return y * a


@triton.jit
def power_encode(x, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    y = tl.abs(x) * a
    if P == 2:
        y = tl.sqrt_rn(y)
    elif P == 4:
        y = tl.sqrt_rn(tl.sqrt_rn(y))
    elif P == 15:
        y = tl.exp2(tl.log2(y) * 0.6666667)
    k = (y * b + 0.5).to(tl.int32)
    return (_sign(k, x) if SIGNED else k).to(tl.uint8)


@triton.jit
def softsign_decode(code, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    y = code.to(tl.int8, bitcast=True).to(tl.float32) * 0.007874016
    return y / (2.0 - tl.abs(y)) * a


@triton.jit
def softsign_encode(x, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    y = x * a
    y = 2.0 * y / (1.0 + tl.abs(y)) * 127.0
    return (_sign(tl.abs(y) + 0.5, y)).to(tl.int32).to(tl.uint8)


@triton.jit
def e4m3_decode(code, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    y = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if P == 0:
        y = _sign(tl.exp2(tl.log2(tl.abs(y)) * b), y)
    return y * a


@triton.jit
def e4m3_encode(x, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    y = x * a
    if P == 0:
        y = _sign(tl.exp2(tl.log2(tl.abs(y)) * b), y)
    return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def log2_decode(code, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    k = code.to(tl.int8, bitcast=True).to(tl.float32) if SIGNED else code.to(tl.float32)
    value = tl.exp2((tl.abs(k) - 1.0) * b + a)
    return tl.where(code == 0, 0.0, _sign(value, k) if SIGNED else value)


@triton.jit
def log2_encode(x, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    k = tl.maximum((tl.log2(tl.abs(x)) - a) * b + 1.5, 1.0).to(tl.int32)
    k = tl.where(x == 0, 0, k)
    return (_sign(k, x) if SIGNED else k).to(tl.uint8)


@triton.jit
def log_decode(code, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    low, high, n = _ends(a, b, SIGNED, P)
    k = code.to(tl.int32)
    k = (k & n) if SIGNED else k - 1
    pattern = low + (k.to(tl.float32) * ((high - low).to(tl.float32) / n) + 0.5).to(tl.int32)
    value = pattern.to(tl.float32, bitcast=True)
    value = tl.where(k == n, b, value - a if SIGNED else value)
    if SIGNED:
        return tl.where(code > n, -value, value)
    return tl.where(code > 0, value, 0.0)


@triton.jit
def log_encode(x, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    low, high, n = _ends(a, b, SIGNED, P)
    magnitude = tl.abs(x)
    pattern = (magnitude + a if SIGNED else x).to(tl.int32, bitcast=True)
    fine = (tl.maximum(pattern - low, 0).to(tl.float32) * (65536.0 * n / (high - low).to(tl.float32))).to(tl.int32)
    # Half a code for the nearest; 16 random bits in its place to round stochastically.
    k = tl.where(magnitude == b, n, tl.minimum((fine + 32768) >> 16, n))
    k = tl.where((x < 0) & (k > 0), k + n + 1, k) if SIGNED else k + 1
    return tl.where(magnitude > 0, k, 0).to(tl.uint8)


@triton.jit
def _ends(a, b, SIGNED: tl.constexpr, P: tl.constexpr):
    """Patterns of the ends of a block's range, and steps between them."""
    high = (b + a if SIGNED else b).to(tl.int32, bitcast=True)
    return a.to(tl.int32, bitcast=True), high, (2 ** (P - 1) - 1) if SIGNED else 2**P - 2


@triton.jit
def _kernel(
    state, scales, grad, table, beta, N: tl.constexpr, SIGNED: tl.constexpr, P: tl.constexpr, RANGE: tl.constexpr,
    DECODE: tl.constexpr, ENCODE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    at = block * N + tl.arange(0, N)
    g = tl.load(grad + at)
    if not SIGNED:
        g = g * g
    if DECODE is None:
        x = tl.load(state + at)
        tl.store(state + at, beta * x + (1.0 - beta) * g)
    else:
        a = tl.load(scales + 4 * block)
        b = tl.load(scales + 4 * block + 1)
        x = beta * DECODE(tl.load(state + at), a, b, table, SIGNED, P) + (1.0 - beta) * g
        magnitude = tl.abs(x) if SIGNED else x
        largest = tl.max(magnitude, axis=0)
        second = tl.min(tl.where(magnitude == 0, 1e30, magnitude), axis=0) if RANGE else 127.0
        tl.store(scales + 4 * block, largest)
        tl.store(scales + 4 * block + 1, second)
        if RANGE:
            code = ENCODE(x, second, largest, table, SIGNED, P)
        else:
            code = ENCODE(x, 1.0 / largest, second, table, SIGNED, P)
        tl.store(state + at, code)


@triton.jit
def _random(out, seed, step, N: tl.constexpr):
    # One counter gives 128 bits, for eight elements.
    at = tl.program_id(0) * (N // 8) + tl.arange(0, N // 8)
    a, b, c, d = tl.philox(seed, at, step, 0, 0)
    tl.store(out + at, a ^ b ^ c ^ d)


# Decode and encode, whether signed, the power or form, whether the smallest element is looked for.
KERNELS: dict[str, tuple[Any, Any, bool, int, bool]] = {
    "dynamic m": (table_decode, table_encode, True, 1, False),
    "dynamic v": (table_decode, table_encode, False, 1, False),
    "dynamic root v": (table_decode, table_encode, False, 2, False),
    "4-bit dynamic m": (table_decode, table_encode, True, 1, False),
    "linear m": (power_decode, power_encode, True, 1, False),
    "power 1.5 m": (power_decode, power_encode, True, 15, False),
    "power 2 m": (power_decode, power_encode, True, 2, False),
    "power 4 m": (power_decode, power_encode, True, 4, False),
    "4-bit linear v": (power_decode, power_encode, False, 1, False),
    "linear root v": (power_decode, power_encode, False, 2, False),
    "softsign m": (softsign_decode, softsign_encode, True, 1, False),
    "e4m3 m": (e4m3_decode, e4m3_encode, True, 1, False),
    "e4m3 v": (e4m3_decode, e4m3_encode, False, 1, False),
    "e4m3 expanded m": (e4m3_decode, e4m3_encode, True, 0, True),
    "e4m3 expanded v": (e4m3_decode, e4m3_encode, False, 0, True),
    "log2 m": (log2_decode, log2_encode, True, 1, True),
    "log2 v": (log2_decode, log2_encode, False, 1, True),
    "log8 m": (log_decode, log_encode, True, 8, True),
    "log8 v": (log_decode, log_encode, False, 8, True),
    "log4 m": (log_decode, log_encode, True, 4, True),
    "log4 v": (log_decode, log_encode, False, 4, True),
}


def measure() -> dict[str, dict[str, float]]:
    """By kernel: instructions an element over an fp32 moment's, and gathers among them."""
    plain = {signed: _per_element(None, None, signed, 1, False) for signed in (True, False)}
    found = {}
    for name, how in KERNELS.items():
        counts = _per_element(*how)
        found[name] = {key: counts[key] - plain[how[2]][key] for key in counts}
    found["random bits"] = _slope(
        lambda n: _compiled(_random, {"out": "*i32", "seed": "i32", "step": "i32"}, {"N": n})
    )
    return found


def _per_element(decode: Any, encode: Any, signed: bool, power: int, range_: bool) -> dict[str, float]:
    state = "*fp32" if decode is None else "*u8"
    types = {"state": state, "scales": "*fp32", "grad": "*fp32", "table": "*fp32", "beta": "fp32"}
    constants = {"SIGNED": signed, "P": power, "RANGE": range_, "DECODE": decode, "ENCODE": encode}
    return _slope(lambda n: _compiled(_kernel, types, constants | {"N": n}))


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
