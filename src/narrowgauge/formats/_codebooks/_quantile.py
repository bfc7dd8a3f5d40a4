"""The quantile map: codes that are all used equally often, a lossy minimum entropy encoding.

The values are midpoints between equally spaced quantiles of a distribution, so that each code gets the same share
of the data. The average error on that data is low; the largest values, rare and so given few codes, are hit hard.

The map of given data is for that data: divided by its largest magnitude, as one block is. For quantizing in blocks,
the data to make it from is the data of blocks that have been divided by theirs.

Equation 5 numbers 2^k values from i = 0, whose left quantile is minus infinity for a normal distribution: that one
is left out, which leaves 2^k - 1 values placed symmetrically. Those of a normal distribution, which has no largest
magnitude, are divided by the largest of them.

Source: 8-bit Optimizers via Block-wise Quantization, Appendix F.2, Equation 5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.formats._codebooks._map import CodebookMap


def _of_a_normal(signed: bool, bits: int) -> Tensor:
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


def _of_data(data: Tensor, signed: bool, bits: int) -> Tensor:
    """Of the data divided by its largest magnitude: its values, sorted, read at the probabilities.

    Quantiles that coincide are one value; 1 is added, and 0 too, in place of the value nearest to it if the codes
    are all taken.
    """
    x = data.detach().reshape(-1).to(torch.float32)
    x = x if signed else x.clamp_min(0.0)
    x = x[torch.isfinite(x)]
    largest = float(x.abs().max()) if x.numel() else 0.0
    if largest == 0:
        raise ValueError("data: got no finite value but zero, takes data to find quantiles of")
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


MAPS = (
    CodebookMap(
        "quantile",
        "every code used equally often, by a normal distribution or by given data",
        "8-bit Optimizers, Appendix F.2, Equation 5",
        _of_a_normal,
        build_from=_of_data,
    ),
)
