"""Where the operators of `_ops` may be left out and what they call be called directly.

An operator of torch is there for those who look on: a compiler, a tensor that is more than its memory (sharded,
fake, batched), a mode that sees or changes every operation. In eager training nobody does, and the dispatcher's way
to a function written in Python is longer than what most of ours take. So tensors that are nothing but memory on a
CPU or a CUDA device, where no mode is active, go to the functions themselves. The numbers are the same.
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
    """One way to the operations: quantizers as in `_ops`, with a dtype that sums are rounded to, what codes stand
    for, and the product of codes as they lie in memory.
    """

    quantize_rows: _Vectors
    quantize_columns: _Vectors
    quantize_tensor: _Tensors
    dequantize: _Values
    product: _Products


def _rows(
    x: Tensor, format: Format, sums: bool, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows by the operator, whose sums are float32; so the two that follow."""
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
    """By the operator, which takes the right codes turned, and scales as a column and a row."""
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
    """The way for operations on tensors of one device."""
    # First: a compiler that traces this function goes no further.
    if torch.compiler.is_compiling() or _watched():
        return OPERATORS
    for tensor in tensors:
        # A sign that is to be applied is only a flag on the tensor; the dispatcher applies it.
        if type(tensor) not in _PLAIN or tensor.is_neg():
            return OPERATORS
    if tensors[0].is_cuda:
        return _DIRECT["cuda"]
    return _DIRECT["cpu"] if tensors[0].is_cpu else OPERATORS


_PLAIN = (Tensor, torch.nn.Parameter)


def _watched() -> bool:
    """Whether something sees or changes every operation: a mode, `torch.func`'s transforms, `torch.jit.trace`."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )
