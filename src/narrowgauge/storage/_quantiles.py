"""SRAM-Quantiles: the quantiles of a large tensor from many small sorts.

Sorting a tensor moves it through memory many times. Appendix G of the paper sorts subsets of about 4096
elements, small enough for on-chip memory, reads each subset's quantiles off its sorted values and averages over
the subsets: memory is read once. The mean takes the noise out; what is left is the bias of a quantile read from
few values, and of subsets that are not alike. Three choices, each measured, keep that small.

**How a quantile is read.** From m sorted values at place m p + 1/2, counted from 1, between neighbors in
proportion (Hazen's rule). For 256 quantiles of 4096 values that is the mean of the 8th and 9th of each run of
16. In a tail that falls exponentially, as a normal's nearly does, a value is linear in the logarithm of the
tail beyond it, and for the k-th of m values that is log((k - 1/2) / m) on average, to third order: hence the
1/2. The places m p of the paper and (m - 1) p + 1 of `torch.quantile` put a normal's outermost quantile off by
ten times as much.

**Which elements make a subset.** The paper takes neighbors. Where a tensor drifts, its rows or channels of
different scale say, subsets of neighbors have different quantiles, and a mean of quantiles is not a quantile
of the whole: of sorted data all 256 come out as the mean. Here a tensor of n elements is cut into pieces of 16
(full sectors of GPU memory) and these into 256 stripes of S = ceil(n / 4096) pieces; each of S subsets takes a
piece of each stripe. Which one is shifted from stripe to stripe at random, always alike, so that no period of
the tensor, a row's length say, lines up with it: subset s takes from stripe j the piece

    j S + (s + shift_j) mod S        shift_j = floor(S murmur3_finalizer(j) / 2^32)

No element is taken twice; at the tensor's end pieces are cut off or missing, so that subsets differ by up to 16
elements in size. It costs nothing. Sorted data come out right; with rows of scales over six decades ranks are
off by 0.0024 on average, with neighbors by 0.088. What remains there is that 16 neighbors still go together.

**In which order the mean is taken.** Row r of at most 2112 adds up subsets r, r + 2112, ... in turn, in
float64; the rows are then added by halves. Nothing depends on timing, so results are the same in every run, bit
for bit, and as products with the whole-number weights are exact, the same on the CPU and the GPU.

On data without drift the ranks of 256 quantiles of 2^20 elements are off by 1e-4 on average, where quantiles
lie 0.0039 apart. The bias in rank is (1/2 - p) / 4097 if the data are uniform and less for a normal.

Source: 8-bit Optimizers via Block-wise Quantization, Appendix G (and F.2, what the quantiles are for).
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from narrowgauge._arguments import is_integer
from narrowgauge.kernels._triton import unavailable

_PIECE = 16
_STRIPES = 256
_SUBSET = _PIECE * _STRIPES
# Two waves of the eight programs that each of an H200's 132 multiprocessors holds; half as many: the same time, 1%.
_ROWS = 2112
# Subsets that the CPU sorts at a time: 4 MiB of float32.
_CHUNK = 264
_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def estimate_quantiles(x: Tensor, count: int = 256) -> Tensor:
    """Quantiles of a tensor's values at probabilities (i + 1/2) / count, estimated from subsets of 4096.

    For 256: 1/512, 3/512, ..., 511/512. Exact, by Hazen's rule (`numpy.quantile(..., method="hazen")`), for up to
    4096 elements; see the module's page for what is averaged beyond, and how far off it is.

    Scaling x by a power of two scales the result, negating x negates and reverses it, and the result never
    descends, all exactly. It is the same from run to run and from CPU to GPU, bit for bit.

    Args:
        x: float tensor of any shape and at least one element; its values are rounded to float32. Elements are
            taken in row-major order, so a tensor that is not contiguous is copied.
        count: how many quantiles, from 1 to 4096.

    Returns:
        Ascending float32 tensor (count,) on x's device. All NaN if x holds a NaN, as from `torch.quantile`, without
        waiting for the device; infinities are ordinary outermost values, and a quantile is infinite (NaN, if of
        both signs) if one is met where it is read.

    Raises:
        ValueError: for an empty x, one that is not of a float dtype, or a count out of range.
    """
    if not x.is_floating_point() or x.numel() == 0:
        got = f"{x.dtype} of shape {tuple(x.shape)}"
        raise ValueError(f"x must be a tensor of floats with at least one element, got {got}")
    if not is_integer(count) or not 1 <= count <= _SUBSET:
        raise ValueError(f"count must be an integer from 1 to {_SUBSET}, got {count!r}")
    flat = x.detach().reshape(-1)
    if flat.dtype not in _KERNEL_DTYPES:
        flat = flat.to(torch.float32)
    subsets = math.ceil(flat.numel() / _SUBSET)
    rows = min(subsets, _ROWS)
    if unavailable(flat.device) is None:
        # Here and not above: `import narrowgauge` brings no triton.
        from narrowgauge.kernels._quantiles import mean_subset_quantiles

        return mean_subset_quantiles(flat, count, subsets=subsets, rows=rows)
    return _mean_subset_quantiles(flat, count, subsets=subsets, rows=rows)


def _mean_subset_quantiles(flat: Tensor, count: int, *, subsets: int, rows: int) -> Tensor:
    """The specification of `narrowgauge.kernels._quantiles`, on any device."""
    sums = torch.zeros(rows, count, dtype=torch.float64, device=flat.device)
    first = 0
    while first < subsets:
        row = first % rows
        chunk = torch.arange(first, min(first + _CHUNK, first - row + rows, subsets), device=flat.device)
        values, sizes = _gather(flat, chunk, subsets)
        sums[row : row + len(chunk)] += _read(_sort(values), sizes, count)
        first += len(chunk)
    while len(sums) > 1:
        half = 1 << (len(sums) - 1).bit_length() - 1
        sums[: len(sums) - half] += sums[half:]
        sums = sums[:half]
    return (sums[0] / (2 * count * subsets)).to(torch.float32) + 0.0  # a zero without a sign


def _gather(flat: Tensor, chunk: Tensor, subsets: int) -> tuple[Tensor, Tensor]:
    """The chunk's float32 values (len(chunk), 4096), +inf where there is none; and how many each subset has."""
    stripes = torch.arange(_STRIPES, device=flat.device)
    pieces = stripes * subsets + (chunk[:, None] + _shift(stripes, subsets)) % subsets
    whole, left = divmod(flat.numel(), _PIECE)
    table = flat[: whole * _PIECE].view(whole, _PIECE)
    # Later stripes hold later pieces: where the last stripe's are whole, all are.
    if whole and int(pieces[:, -1].max()) < whole:
        values = table.index_select(0, pieces.view(-1)).to(torch.float32)
    else:
        values = torch.full((*pieces.shape, _PIECE), torch.inf, dtype=torch.float32, device=flat.device)
        present = pieces < whole
        values[present] = table[pieces[present]].to(torch.float32)
        values[..., :left][pieces == whole] = flat[whole * _PIECE :].to(torch.float32)
    sizes = (flat.numel() - pieces * _PIECE).clamp(0, _PIECE).sum(dim=1)
    return values.view(-1, _SUBSET), sizes


def _shift(stripes: Tensor, subsets: int) -> Tensor:
    """By how many places the subsets are rotated within each stripe, in [0, subsets)."""
    bits = stripes ^ stripes >> 16
    bits = bits * 0x85EBCA6B & 0xFFFFFFFF
    bits = bits ^ bits >> 13
    bits = bits * 0xC2B2AE35 & 0xFFFFFFFF
    bits = bits ^ bits >> 16
    return bits * subsets >> 32


def _sort(values: Tensor) -> Tensor:
    """Each row in ascending order, NaN last; in place on the CPU."""
    if values.device.type != "cpu":
        return torch.sort(values, dim=1).values
    # torch sorts indices too: 30 ns an element on two cores, to numpy's 6 (AVX-512).
    parts = np.array_split(values.numpy(), torch.get_num_threads())
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(lambda part: part.sort(axis=1), parts))
    return values


def _read(ordered: Tensor, sizes: Tensor, count: int) -> Tensor:
    """2 * count times the quantiles (subsets, count) of the first `size` of each row, in float64."""
    places = (2 * torch.arange(count, device=ordered.device) + 1) * sizes[:, None] + count
    rank = places // (2 * count)
    weight = places % (2 * count)
    # A weight of zero would turn an infinite neighbor into NaN.
    below, above = rank, torch.where(weight == 0, rank, rank + 1)
    weight = torch.where(weight == 0, count, weight)
    lower, upper = (
        ordered.gather(1, k.clamp(min=1).minimum(sizes[:, None]) - 1).to(torch.float64) for k in (below, above)
    )
    quantiles = lower * (2 * count - weight) + upper * weight
    return quantiles.masked_fill(ordered[:, -1:].isnan(), torch.nan)
