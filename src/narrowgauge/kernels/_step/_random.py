# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Random bits of a tile: `narrowgauge.formats.random_bits` and `random_halves`, bit for bit.

The ten rounds of Philox give 128 bits, which serve eight elements by halves or four by words. A thread has eight
neighbors, so a block of Philox never leaves it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.kernels._step._floats import ASSEMBLY

_M0 = tl.constexpr(0xD2511F53)
_M1 = tl.constexpr(0xCD9E8D57)
_W0 = tl.constexpr(0x9E3779B9)
_W1 = tl.constexpr(0xBB67AE85)


@triton.jit
def _wide(a, b: tl.constexpr):
    """Both halves of a product, by one instruction."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "{ .reg .b64 t; mul.wide.u32 t, $2, $3; mov.b64 {$1, $0}, t; }",
            "=r,=r,r,r", [a, tl.full([], b, tl.uint32)], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        both = a.to(tl.uint64) * tl.full([], b, tl.uint64)
        return (both >> 32).to(tl.uint32), both.to(tl.uint32)


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    for _ in tl.static_range(10):
        high0, low0 = _wide(c0, _M0)
        high1, low1 = _wide(c2, _M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += tl.full([], _W0, tl.uint32)
        k1 += tl.full([], _W1, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _words(first, number, seed, stream, PURPOSE: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """Four words of each of ROWS x COUNT blocks of Philox from block `first` on: (ROWS, 4 COUNT), in order."""
    block = tl.arange(0, ROWS)[:, None] * COUNT + tl.arange(0, COUNT)[None, :]
    # The upper half of the counter is the same in all of a tile that begins at a multiple of its size. Of a shared
    # parameter one tile may have element 2^34 (2^35 of halves) inside: what follows in it gets other bits.
    c0 = first.to(tl.uint32) + block.to(tl.uint32)
    c1 = (first >> 32).to(tl.uint32)
    c2 = number.to(tl.uint32)
    c3 = tl.full([], PURPOSE, tl.uint32)
    a, b, c, d = _philox(c0, c1, c2, c3, seed.to(tl.uint32), stream.to(tl.uint32))
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape([ROWS, 4 * COUNT])


@triton.jit
def random_words(start, number, seed, stream, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """32 random bits for each element of a tile that begins at element `start`, a multiple of its size."""
    return _words(start // 4, number, seed, stream, 0, ROWS, SIZE // 4)


@triton.jit
def random_halves(start, number, seed, stream, PURPOSE: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """16 random bits for each element of a tile, in the upper half of 32."""
    words = _words(start // 8, number, seed, stream, PURPOSE, ROWS, SIZE // 8)
    return tl.join(words << 16, words & 0xFFFF0000).reshape([ROWS, SIZE])
