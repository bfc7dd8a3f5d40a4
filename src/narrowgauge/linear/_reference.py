"""Multiplying codes in eager torch: the specification, and the fallback where there is no kernel.

`scaled_matmul` multiplies two matrices of codes, undoes their scales, adds a bias and rounds once:

    Y = round(scale_left · scale_right * (codes_left codes_right) + bias)

(Wortsman et al. 2023, Equations 2 and 4.) The product of codes is exact in int8 (sums in 32-bit integers); of
float8 values it is accumulated in float32. The product of the scales, its product with the sum, and the
addition of the bias are float32 operations in this order; the last step is the only rounding to the dtype of
the result. With scales of blocks it is the sum over the blocks of 128 along the summed dimension

    Y = round(Σ scale_left · scale_right * (codes_left codes_right) + bias)

which `blocked_matmul` adds in float32, from zero, first block first. Each block's product of codes is a float32
matrix multiply; in int8 it is exact. This is simulated on every device.

Int8 is real, on CPUs and CUDA devices, through `torch._int_mm`. Float8 is simulated: its values are multiplied in
float32, in which each product is exact. On CUDA devices `_ops.multiply_codes` has kernels for both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.linear._quantize import BLOCK, ScaledCodes, spread

# 127² times this is below 2^31: sums of more int8 products could overflow 32 bits.
LONGEST_INT32_SUM = 1 << 17
# Required by torch._int_mm on CUDA: more than 16 rows, the other sides multiples of 8.
_CUDA_ROWS, _CUDA_MULTIPLE = 32, 8


def scaled_matmul(
    left: ScaledCodes, right: ScaledCodes, bias: Tensor | None, dtype: torch.dtype, arithmetic: str
) -> Tensor:
    """The product (M, N) of two matrices in eight bits, as a dtype.

    Args:
        left: (M, K) with a scale a row or one in all.
        right: (K, N) with a scale a column or one in all.
        bias: (N,) or None.
        dtype: of the result.
        arithmetic: ``"real"`` or ``"simulated"``.
    """
    if arithmetic == "simulated" or not is_real(left.codes.dtype, left.codes.device.type):
        product = left.codes.to(torch.float32) @ right.codes.to(torch.float32)
    else:
        product = int8_product(left.codes, right.codes)
    return _rounded(product.to(torch.float32) * (left.scale * right.scale), bias, dtype)


def blocked_matmul(left: ScaledCodes, right: ScaledCodes, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The product (M, N) of two matrices in eight bits whose scales may change every 128 of what is summed.

    Args:
        left: (M, K) in any scaling but ``"column"`` and ``"column128"``.
        right: (K, N) in any scaling but ``"row"`` and ``"row128"``.
        bias: (N,) or None.
        dtype: of the result.
    """
    (rows, inner), columns = left.codes.shape, right.codes.shape[1]
    blocks = -(-inner // BLOCK)
    left_scale = spread(left.scale, (rows, left.scale.shape[1])).expand(rows, blocks)
    right_scale = spread(right.scale, (right.scale.shape[0], columns)).expand(blocks, columns)
    total = torch.zeros((rows, columns), dtype=torch.float32, device=left.codes.device)
    for i in range(blocks):
        part = slice(i * BLOCK, (i + 1) * BLOCK)
        product = left.codes[:, part].to(torch.float32) @ right.codes[part].to(torch.float32)
        total.add_(product * (left_scale[:, i, None] * right_scale[i]))
    return _rounded(total, bias, dtype)


def _rounded(total: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (total if bias is None else total + bias.to(torch.float32)).to(dtype)


def is_real(dtype: torch.dtype, device: str) -> bool:
    """Whether codes of a dtype are multiplied in eight bits on a type of device, without kernels."""
    return dtype == torch.int8 and device in ("cpu", "cuda")


def int8_product(left: Tensor, right: Tensor) -> Tensor:
    """The exact product of two int8 matrices: int32, or int64 where sums may leave 32 bits."""
    multiply = _padded_int_mm if left.is_cuda else torch._int_mm
    left, right = _with_own_strides(left), _with_own_strides(right)
    inner = left.shape[1]
    if inner <= LONGEST_INT32_SUM:
        return multiply(left, right)
    total = torch.zeros((left.shape[0], right.shape[1]), dtype=torch.int64, device=left.device)
    for start in range(0, inner, LONGEST_INT32_SUM):
        part = slice(start, start + LONGEST_INT32_SUM)
        total += multiply(_with_own_strides(left[:, part]), _with_own_strides(right[part]))
    return total


def _with_own_strides(x: Tensor) -> Tensor:
    """A single row or column as torch would lay it out.

    The stride of a side of length 1 may be anything, and torch._int_mm on a CPU (2.13) uses it: for a row that is
    the view of a column it reads past the end.
    """
    return x.reshape(-1).view(x.shape) if 1 in x.shape else x


def _padded_int_mm(left: Tensor, right: Tensor) -> Tensor:
    (rows, inner), columns = left.shape, right.shape[1]
    more_rows = max(_CUDA_ROWS - rows, 0)
    more_inner, more_columns = -inner % _CUDA_MULTIPLE, -columns % _CUDA_MULTIPLE
    if not rows or not inner or not columns:
        return torch.zeros((rows, columns), dtype=torch.int32, device=left.device)
    if more_rows or more_inner:
        left = torch.nn.functional.pad(left, (0, more_inner, 0, more_rows))
    # The second operand is read along the inner dimension: its transpose should be contiguous.
    transposed = right.t()
    if more_inner or more_columns:
        transposed = torch.nn.functional.pad(transposed, (0, more_inner, 0, more_columns))
    return torch._int_mm(left.contiguous(), transposed.contiguous().t())[:rows, :columns]
