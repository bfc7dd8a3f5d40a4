"""The maps: which numbers of [-1, 1] the codes of a codebook mean.

linear
    Evenly spaced, as an int8 with a scale. Its absolute error is the same everywhere, so its relative error grows
    without bound towards zero.
dynamic
    Decades of linear codes, as the public 8-bit optimizers train with. The bits after the sign are zeros that count
    decades, an indicator bit, and a fraction; the fewer zeros, the more bits are left for the fraction. So each
    decade up from the smallest is resolved twice as finely, and the values near 1, which move the weights most,
    best of all. Without a sign the freed bit goes to every fraction.
inverse_dynamic
    The same decades with their cells in reverse order: the smallest decade is resolved best.
dynamic_tree
    The paper's data type, bit by bit: a sign bit; z zeros, which scale by 10^-z; an indicator bit, the first that
    is one; and the bits left over, a fraction f of b bits that means f / (2^b - 1), so that the precision is 1/63
    where all six are left. A code without an indicator bit is 10^-7 itself, and so is one without a fraction 10^-z.
    A fraction of zeros is zero whatever its exponent: 256 codes mean 245 numbers. (`dynamic` spends those codes on
    midpoints.) Without negative numbers the sign bit becomes one more fraction bit for every exponent.
quantile
    Every code is used equally often, a lossy minimum entropy encoding. The values are midpoints between equally
    spaced quantiles of a distribution. The average error on that data is low; the largest values, rare and so given
    few codes, are hit hard. A map of given data is for that data divided by its largest magnitude, as one block is;
    for quantizing in blocks, make it from blocks that have been divided by theirs. Equation 5 numbers 2^k values
    from i = 0, whose left quantile is minus infinity for a normal distribution: that one is left out, which leaves
    2^k - 1 values placed symmetrically. Those of a normal distribution are divided by the largest of them.
fp8_e4m3, fp8_e5m2, fp6_e3m2, fp6_e2m3, fp4_e2m1
    The numbers of a small float format, divided by its largest: what a block-wise scaled float8 state means. The
    sign bit is a code bit only with a sign; minus zero is no value of its own.

Source: 8-bit Optimizers via Block-wise Quantization, Sections 1.3 and 2.2, Figure 2, Appendix F (Equation 5);
Dettmers 2016 (dynamic tree); OCP 8-bit Floating Point; OCP Microscaling Formats.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.formats._float import FP4_E2M1, FP6_E2M3, FP6_E3M2, FP8_E4M3, FP8_E5M2, FloatFormat


@dataclass(frozen=True)
class CodebookMap:
    """The definition of a codebook.

    Attributes:
        name: what users type.
        summary: a description, in a line.
        source: where it is defined.
        build: signed, bits -> ascending float32 tensor of at most 2^bits values in [-1, 1], with 0 and 1.
        signed_bits, unsigned_bits: the code widths it is defined for; empty if it is not.
        build_from: data, signed, bits -> such a tensor, for maps that are made from data.
    """

    name: str
    summary: str
    source: str
    build: Callable[[bool, int], Tensor]
    signed_bits: Sequence[int] = range(2, 9)
    unsigned_bits: Sequence[int] = range(2, 9)
    build_from: Callable[[Tensor, bool, int], Tensor] | None = None


def _linear(signed: bool, bits: int) -> Tensor:
    """Unsigned: 2^bits values from 0 to 1. Signed: k / (2^(bits-1) - 1), one value less, so that 0 is exact."""
    if not signed:
        return torch.linspace(0.0, 1.0, 1 << bits, dtype=torch.float32, device="cpu")
    largest = (1 << bits - 1) - 1
    return torch.arange(-largest, largest + 1, dtype=torch.float32, device="cpu") / largest


def _dynamic(signed: bool, bits: int) -> Tensor:
    """Decade i = 0 .. bits - 2 in C_i = 2^i cells where a sign takes a bit, 2^(i+1) where none does."""
    return _decades([1 << (decade if signed else decade + 1) for decade in range(bits - 1)], signed)


def _inverse_dynamic(signed: bool, bits: int) -> Tensor:
    """The base is the smallest decade, zeros lead upwards."""
    return _decades([1 << (decade if signed else decade + 1) for decade in reversed(range(bits - 1))], signed)


def _decades(cells: list[int], signed: bool) -> Tensor:
    """The midpoints of equal cells of [0.1, 1], scaled into each decade, with 0 and 1; the signed map has no -1.

    All in float32, the order of operations included: codes written by others must decode to the same numbers.
    """
    positive = []
    for decade, count in enumerate(cells):
        # torch's float32 linspace, not numpy's: they differ in the last bit and the checksum is of torch's.
        edges = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float32, device="cpu")
        middles = (edges[:-1] + edges[1:]) / 2.0
        positive.append(10.0 ** (decade - len(cells) + 1) * middles)
    half = torch.cat(positive)
    values = torch.cat([half, -half] if signed else [half])
    return torch.cat([values, torch.tensor([0.0, 1.0], dtype=torch.float32, device="cpu")]).sort().values


def _dynamic_tree(signed: bool, bits: int) -> Tensor:
    """All numbers that some code means, each once."""
    tree = bits - 1
    positive = set()
    for zeros in range(tree + 1):
        width = max(tree - 1 - zeros, 0) + (0 if signed else 1)
        largest = (1 << width) - 1
        fractions = [f / largest for f in range(largest + 1)] if width else [1.0]
        positive |= {10.0**-zeros * fraction for fraction in fractions}
    values = positive | {-value for value in positive} if signed else positive
    return torch.tensor(sorted(values), dtype=torch.float64, device="cpu").to(torch.float32)


def _normal_quantiles(signed: bool, bits: int) -> Tensor:
    """Of the standard normal distribution; without sign, of its magnitude."""
    p = _probabilities(bits)
    # float64 quantiles; those of |X| are at (1 + p) / 2. Symmetry makes the middle value of the signed map 0.
    quantiles: Tensor = torch.special.ndtri(p if signed else (1 + p) / 2)
    middles = (quantiles[:-1] + quantiles[1:]) / 2
    if signed:
        middles = (middles - middles.flip(0)) / 2
    else:
        middles = torch.cat([middles.new_zeros(1), middles])
    return (middles / middles[-1]).to(torch.float32)


def _data_quantiles(data: Tensor, signed: bool, bits: int) -> Tensor:
    """Of the data divided by its largest magnitude: its values, sorted, read at the probabilities.

    Quantiles that coincide are one value. 1 is added, and 0 too; if all codes are taken, 0 replaces the value
    nearest to it.
    """
    x = data.detach().reshape(-1).to(torch.float32)
    x = x if signed else x.clamp_min(0.0)
    x = x[torch.isfinite(x)]
    largest = float(x.abs().max()) if x.numel() else 0.0
    if largest == 0:
        raise ValueError("data must have finite values other than zero")
    ordered = (x.to(torch.float64) / largest).sort().values
    position = _probabilities(bits).to(x.device) * (x.numel() - 1)
    low = position.floor().to(torch.int64)
    high = (low + 1).clamp_max(x.numel() - 1)
    quantiles = torch.lerp(ordered[low], ordered[high], position - low)
    middles = ((quantiles[:-1] + quantiles[1:]) / 2).to(torch.float32)
    distinct = torch.cat([middles.new_ones(1, dtype=torch.bool), middles.diff() > 0])
    values = middles[distinct]
    if values[-1] < 1:
        values = torch.cat([values, values.new_ones(1)])
    if bool((values == 0).any()):
        return values
    if len(values) < 1 << bits:
        return torch.cat([values, values.new_zeros(1)]).sort().values
    values[values[:-1].abs().argmin()] = 0.0
    return values


def _probabilities(bits: int) -> Tensor:
    """i / (2^bits + 1), i = 1 .. 2^bits, in float64."""
    count = 1 << bits
    return torch.arange(1, count + 1, dtype=torch.float64, device="cpu") / (count + 1)


def _float_map(fmt: FloatFormat, signed: bool, bits: int) -> Tensor:
    """The finite numbers of the format over its largest, in float32."""
    positive = fmt.decode(torch.arange(fmt.max_code + 1, device="cpu")) / fmt.max
    return torch.cat([-positive.flip(0)[:-1], positive]) if signed else positive


_PAPER = "8-bit Optimizers"

MAPS = (
    CodebookMap("linear", "evenly spaced, as an int8 with a scale", f"{_PAPER}, Appendix F", _linear),
    CodebookMap(
        "dynamic", "decades, the largest resolved best; what the public 8-bit optimizers train with",
        f"{_PAPER}, Sections 1.3 and 2.2", _dynamic,
    ),
    CodebookMap(
        "inverse_dynamic", "decades, the smallest resolved best", f"{_PAPER}, Appendix F.1", _inverse_dynamic
    ),
    CodebookMap(
        "dynamic_tree", "the paper's bit-level data type: sign, zeros as a decimal exponent, indicator, fraction",
        f"{_PAPER}, Section 1.3, Figure 2", _dynamic_tree,
        signed_bits=range(3, 9),  # two bits are a sign and an indicator: no code is left to mean zero
    ),
    CodebookMap(
        "quantile", "every code used equally often, by a normal distribution or by given data",
        f"{_PAPER}, Appendix F.2, Equation 5", _normal_quantiles, build_from=_data_quantiles,
    ),
    *(
        CodebookMap(
            fmt.name, f"the numbers of {fmt.name} over its largest, {fmt.max:g}",
            "OCP 8-bit Floating Point; OCP Microscaling Formats", functools.partial(_float_map, fmt),
            signed_bits=(fmt.bits,), unsigned_bits=(fmt.bits,),
        )
        for fmt in (FP8_E4M3, FP8_E5M2, FP6_E3M2, FP6_E2M3, FP4_E2M1)
    ),
)  # fmt: skip
