"""Calling the functions behind the operators of `_ops` directly, where nothing observes operators.

An operator of torch serves a compiler, a tensor subclass (sharded, fake, batched), or a mode that observes or
changes every operation. Eager training has none of these, and the dispatcher takes longer to call a Python function
than most of ours run. So plain tensors on a CPU or a CUDA device, with no mode active, go to the functions
themselves. The numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge._torch_private import operators_observed
from narrowgauge.linear import _ops


class Operations(NamedTuple):
    """One implementation of the operations: quantizers, dequantization, and the product of contiguous codes.

    Quantizers take a matrix, their settings, whether to sum columns, and the dtype of the sums.
    """

    quantize_rows: Callable[..., _ops.Vectors]
    quantize_columns: Callable[..., _ops.Vectors]
    quantize_tensor: Callable[..., _ops.Tensors]
    dequantize: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    product: Callable[..., Tensor]


def _quantizer(operator: Callable[..., Any]) -> Callable[..., Any]:
    """A quantizer by its operator, whose sums are always float32."""

    def run(x: Tensor, *settings: Any) -> tuple[Tensor | None, ...]:
        *others, sums, dtype = settings
        *results, total = operator(x, *others, sums)
        return *results, total.to(dtype) if sums else None

    return run


def _product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, bias: Tensor | None,
    dtype: torch.dtype, accumulation: str,
) -> Tensor:  # fmt: skip
    """`multiply_codes` by the operator, which takes right codes transposed, scales as a column and a row."""
    one, other = left_scale.reshape(-1, 1), right_scale.reshape(1, -1)
    product: Tensor = _ops.multiply_codes(left, right.t(), one, other, bias, dtype, accumulation)
    return product


OPERATORS = Operations(
    _quantizer(_ops.quantize_rows), _quantizer(_ops.quantize_columns), _quantizer(_ops.quantize_tensor),
    _ops.dequantize, _product,
)  # fmt: skip
EAGER = Operations(
    _ops._eager_rows, _ops._eager_columns, _ops._eager_tensor, _ops._eager_dequantize, _ops.eager_product
)  # fmt: skip
CUDA = Operations(_ops._cuda_rows, _ops._cuda_columns, _ops._cuda_tensor, _ops._cuda_dequantize, _ops.cuda_product)
_DIRECT = {"cpu": EAGER, "cuda": CUDA}
_PLAIN = (Tensor, torch.nn.Parameter)


def operations(*tensors: Tensor) -> Operations:
    """The implementation for tensors of one device."""
    # First, so that a compiler traces no further.
    if torch.compiler.is_compiling() or operators_observed():
        return OPERATORS
    for tensor in tensors:
        # A lazy negation is a flag on the tensor, which the dispatcher resolves.
        if type(tensor) not in _PLAIN or tensor.is_neg():
            return OPERATORS
    if tensors[0].is_cuda:
        return _DIRECT["cuda"]
    return _DIRECT["cpu"] if tensors[0].is_cpu else OPERATORS
