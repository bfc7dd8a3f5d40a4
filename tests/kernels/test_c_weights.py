"""The C weight storages alone, bit for bit what eager torch makes of the same words, whatever these are."""

from __future__ import annotations

import ctypes
import functools
import math

import pytest
import torch
from torch import Tensor

from narrowgauge.kernels._c_library import load
from narrowgauge.kernels._c_source import FLOATS, source
from narrowgauge.storage import weight_storage
from pairwise import cases

BLOCKS = (64, 16)  # of one part of 64 elements and of one of 16, for which compilers make other code
MANTISSAS = {torch.bfloat16: 7, torch.float16: 10}
CASES = [(torch.bfloat16, name) for name in ("plain", "kahan", "expansion", "split", "split8", "split4", "master")]
CASES += [(torch.float16, name) for name in ("plain", "kahan", "expansion", "master")]


@functools.cache
def functions(name: str, dtype: torch.dtype, block: int) -> ctypes.CDLL:
    c_type, suffix = FLOATS[dtype]
    low = {"plain": "u8", "split": "int16_t", "split8": "int8_t", "split4": "u8", "master": "float"}.get(
        name, c_type
    )
    random, low_step = ("", "BLOCK") if name != "split4" else (", (void *)random", "BLOCK / 2")
    text = [
        f"#define BLOCK {block}",
        f"#define WORD {c_type}",
        f"#define FROM from_{suffix}",
        f"#define TO to_{suffix}",
        f"#define WRITE {suffix}_encode",
        f"#define WORD_IS_{suffix.upper()}",
        f"#define LEAST_NORMAL {torch.finfo(dtype).smallest_normal!r}f",
        f"#define MANTISSA_BITS {MANTISSAS[dtype]}",
        source("words.h"),
        source("weights.h"),
        f"void step(long blocks, WORD *p, {low} *low, float *w, float *delta, const u16 *random) {{",
        "    for (long b = 0; b < blocks; b++, p += BLOCK, w += BLOCK, delta += BLOCK, random += BLOCK) {",
        f"        {name}_read(p, (void *)low, w);",
        f"        {name}_add(p, (void *)low, w, delta{random});",
        f"        low += {low_step};",
        "    }",
        "}",
    ]
    return load("\n".join(text))


def wild(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    """Random bits, so that all exponents are there, infinities and NaN among them."""
    bits = torch.randint(-(1 << 31), 1 << 31, (count,), generator=torch.Generator().manual_seed(seed))
    return bits.to({1: torch.int8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]).view(dtype)


def bits(x: Tensor) -> Tensor:
    """A tensor's bits, those of every NaN the same."""
    if x.is_floating_point():
        x = torch.where(x.isnan(), torch.full_like(x, torch.nan), x)
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


@pytest.mark.parametrize(("of", "lows", "block"), cases(CASES, ["fitting", "wild"], BLOCKS))
def test_words_are_eager_torchs(of: tuple[torch.dtype, str], lows: str, block: int) -> None:
    dtype, name = of
    storage = weight_storage(name)
    low_dtype = storage.low_dtype(dtype)
    p = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).repeat(4)
    count = len(p)
    low = None
    if low_dtype is not None:
        low = wild(low_dtype, math.prod(storage.low_shape(p)), 1)
        if lows == "fitting" and low_dtype.is_floating_point:
            low = p.to(torch.float32).mul(2.0 ** -MANTISSAS[dtype] / 2).to(low_dtype) * (low > 0)
    # Updates of all sizes beside the weight, and some of any size.
    delta = p.to(torch.float32) * 2.0 ** torch.linspace(-30, 4, count)
    delta = torch.where(torch.arange(count) % 5 == 0, wild(torch.float32, count, 2), delta)

    random = wild(torch.int16, count, 3)
    w = storage.read(p, low)
    expected_p, expected_low = storage.add(p, low, w, delta, lambda: random.to(torch.int32) & 0xFF)
    made, kept, read = p.clone(), low.clone() if low is not None else torch.zeros(count), torch.empty(count)
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (made, kept, read, delta, random)]
    functions(name, dtype, block).step(ctypes.c_long(count // block), *pointers)
    assert torch.equal(bits(read), bits(w))
    assert torch.equal(bits(made), bits(expected_p))
    if expected_low is not None:
        assert torch.equal(bits(kept), bits(expected_low))
