"""The operations of a float format: computed as if exactly, then rounded once to nearest, ties to even.

The algorithms on expansions are built of nothing else, and their proofs assume nothing else. Where torch has an
operation it is the rounded one: it computes bf16 and fp16 in float32 and rounds the result, and rounding twice
gives what rounding once does when the wider format has at least 2p + 2 significant bits (Figueroa 1995), here
24 >= 2 * 11 + 2. What that argument leaves out, results among the subnormal numbers, is exact in float32 wherever
it does not round to zero. Float8 tensors have no arithmetic in torch; theirs goes the same way, 24 >= 2 * 4 + 2,
by `round_to`, which also says what becomes of an overflow: infinity, or the largest number where e4m3 has none.

A fused multiply-add sums a product of 2p bits and a number far from it, so that no fixed width is enough: it is
summed in float64 and rounded *to odd* there, which keeps the last bit as a record that something was cut off.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from narrowgauge.formats import FloatFormat, round_to

_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})

# Significant bits p, the hidden one counted.
PRECISION = {
    torch.bfloat16: 8,
    torch.float16: 11,
    torch.float32: 24,
    torch.float64: 53,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 3,
}

# A product of two numbers of the key is exact in the value, 2p <= p', down to where its rounded value is zero.
WIDE = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}


def add(a: Tensor, b: Tensor) -> Tensor:
    """rn(a + b)."""
    return _round(_wide(a) + _wide(b), a.dtype) if a.dtype in _FLOAT8 else a + b


def sub(a: Tensor, b: Tensor) -> Tensor:
    """rn(a - b)."""
    return _round(_wide(a) - _wide(b), a.dtype) if a.dtype in _FLOAT8 else a - b


def mul(a: Tensor, b: Tensor) -> Tensor:
    """rn(a b)."""
    return _round(_wide(a) * _wide(b), a.dtype) if a.dtype in _FLOAT8 else a * b


def scale(a: Tensor, factor: float) -> Tensor:
    """rn(factor a), the factor a number of the format."""
    return _round(_wide(a) * factor, a.dtype) if a.dtype in _FLOAT8 else a * factor


def product_error(a: Tensor, b: Tensor, product: Tensor) -> Tensor:
    """rn(a b - product), the fused multiply-add of a product and its rounded value: the wide sum is exact."""
    error = _wide(a) * _wide(b) - _wide(product)
    return _round(error, a.dtype) if a.dtype in _FLOAT8 else error.to(a.dtype)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """rn(a b + c), one rounding, for any c; of formats with 2p <= 53.

    Rounding to odd with two bits to spare leaves the rounding that follows as if it were the only one.

    Source: Boldo and Melquiond, Emulation of FMA and correctly rounded sums, IEEE Trans. Computers 57(4), 2008.
    """
    product = a.to(torch.float64) * b.to(torch.float64)
    term = c.to(torch.float64)
    total = product + term
    virtual = total - product
    error = (product - (total - virtual)) + (term - virtual)
    bits = total.view(torch.int64)
    step = torch.where((error > 0) == (total > 0), 1, -1)
    # An overflow has NaN for its error and stays as it is.
    inexact = (error < 0) | (error > 0)
    odd = torch.where(inexact & (bits & 1 == 0), bits + step, bits).view(torch.float64)
    return _round(odd, a.dtype)


def check(takes: Collection[torch.dtype], **operands: Tensor) -> None:
    """Refuse operands that are not tensors of one dtype among those taken.

    Args:
        takes: the dtypes.
        operands: the tensors by the name of the argument; the first sets the dtype.

    Raises:
        ValueError: naming the argument, what it got and what it takes.
    """
    names = {name: getattr(operand, "dtype", type(operand).__name__) for name, operand in operands.items()}
    first, dtype = next(iter(names.items()))
    if dtype not in takes:
        known = [str(known).removeprefix("torch.") for known in takes]
        raise ValueError(f"{first}: got {dtype}, takes tensors of {', '.join(known[:-1])} or {known[-1]}")
    for name, other in names.items():
        if other != dtype:
            raise ValueError(f"{name}: got {other}, takes {dtype}, the dtype of {first}")
    sides = operands[first]
    for name, operand in operands.items():
        if operand.device != sides.device or operand.layout != torch.strided:
            got = f"one on {operand.device} of layout {operand.layout}"
            raise ValueError(f"{name}: got {got}, takes a dense one on {sides.device}, where {first} is")
        if operand.shape != sides.shape and not _go_together(operand, sides):
            shapes = tuple(operand.shape), tuple(sides.shape)
            raise ValueError(
                f"{name}: got shape {shapes[0]}, takes one that goes with {shapes[1]}, that of {first}"
            )


def _go_together(a: Tensor, b: Tensor) -> bool:
    """Whether torch broadcasts two tensors: sides from the last on are equal, or one of them is 1."""
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a.shape), reversed(b.shape), strict=False))


def check_pair(name: str, pair: object) -> None:
    """Refuse what is not an expansion's two words.

    Raises:
        ValueError: naming the argument, what it got and what it takes.
    """
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(f"{name}: got {type(pair).__name__}, takes a pair of tensors, hi and lo")


def _wide(a: Tensor) -> Tensor:
    return a.to(WIDE[a.dtype])


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    return round_to(x, FloatFormat.of(dtype))
