"""Calling the functions behind the operators of `_ops` directly, where nothing observes operators.

An operator of torch serves a compiler, a tensor subclass (sharded, fake, batched), or a mode that observes or
changes every operation. Eager training has none of these, and the dispatcher takes longer to call a Python function
than most of ours run. So plain tensors on a CPU or a CUDA device, with no mode active, go to the functions
themselves. The numbers are the same.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from narrowgauge.linear import _ops
from narrowgauge.linear._quantize import Format


class _Vectors(Protocol):
    def __call__(
        self, x: Tensor, format: Format, sums: bool, dtype: torch.dtype, /
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...


class _Tensors(Protocol):
    def __call__(
        self, x: Tensor, average: Tensor | None, format: Format, straight: bool, transposed: bool, sums: bool,
        dtype: torch.dtype, /,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]: ...  # fmt: skip


class _Products(Protocol):
    def __call__(
        self, left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, bias: Tensor | None,
        dtype: torch.dtype, accumulation: str, /,
    ) -> Tensor: ...  # fmt: skip


class _Values(Protocol):
    def __call__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype, /) -> Tensor: ...


class Operations(NamedTuple):
    """One implementation of the operations: quantizers as in `_ops`, with a dtype that sums are rounded to,
    dequantization, and the product of contiguous codes.
    """

    quantize_rows: _Vectors
    quantize_columns: _Vectors
    quantize_tensor: _Tensors
    dequantize: _Values
    product: _Products


def _rows(
    x: Tensor, format: Format, sums: bool, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`quantize_rows` by the operator, whose sums are float32."""
    *results, total = _ops.quantize_rows(x, format, sums)
    return *results, total.to(dtype) if sums else None


def _columns(
    x: Tensor, format: Format, sums: bool, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor | None]:
    *results, total = _ops.quantize_columns(x, format, sums)
    return *results, total.to(dtype) if sums else None


def _tensor(
    x: Tensor, average: Tensor | None, format: Format, straight: bool, transposed: bool, sums: bool,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    *results, total = _ops.quantize_tensor(x, average, format, straight, transposed, sums)
    return *results, total.to(dtype) if sums else None


def _product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, bias: Tensor | None,
    dtype: torch.dtype, accumulation: str,
) -> Tensor:  # fmt: skip
    """`multiply_codes` by the operator, which takes right codes transposed, scales as a column and a row."""
    one, other = left_scale.reshape(-1, 1), right_scale.reshape(1, -1)
    product: Tensor = _ops.multiply_codes(left, right.t(), one, other, bias, dtype, accumulation)
    return product


OPERATORS = Operations(_rows, _columns, _tensor, _ops.dequantize, _product)
EAGER = Operations(
    _ops._eager_rows, _ops._eager_columns, _ops._eager_tensor, _ops._eager_dequantize, _ops.eager_product
)  # fmt: skip
CUDA = Operations(_ops._cuda_rows, _ops._cuda_columns, _ops._cuda_tensor, _ops._cuda_dequantize, _ops.cuda_product)
_DIRECT = {"cpu": EAGER, "cuda": CUDA}


def operations(*tensors: Tensor) -> Operations:
    """The implementation for tensors of one device."""
    # First, so that a compiler traces no further.
    if torch.compiler.is_compiling() or _observed():
        return OPERATORS
    for tensor in tensors:
        # A lazy negation is a flag on the tensor, which the dispatcher resolves.
        if type(tensor) not in _PLAIN or tensor.is_neg():
            return OPERATORS
    if tensors[0].is_cuda:
        return _DIRECT["cuda"]
    return _DIRECT["cpu"] if tensors[0].is_cpu else OPERATORS


_PLAIN = (Tensor, torch.nn.Parameter)


def _observed() -> bool:
    """Whether something observes every operation: a mode, `torch.func`'s transforms, `torch.jit.trace`."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )
