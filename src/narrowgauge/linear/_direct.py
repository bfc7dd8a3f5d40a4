"""Where the operators of `_ops` may be left out and what they call be called directly.

An operator of torch is there for those who look on: a compiler, a tensor that is more than its memory (sharded,
fake, batched), a mode that sees or changes every operation. In eager training nobody does, and the dispatcher's way
to a function written in Python is longer than what most of ours take. So tensors that are nothing but memory on a
CPU or a CUDA device, where no mode is active, go to the functions themselves. The numbers are the same.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from narrowgauge.linear import _ops
from narrowgauge.linear._quantize import Format


class _Vectors(Protocol):
    def __call__(self, x: Tensor, format: Format, sums: bool, /) -> tuple[Tensor, Tensor, Tensor | None]: ...


class _Tensors(Protocol):
    def __call__(
        self, x: Tensor, average: Tensor | None, format: Format, straight: bool, transposed: bool, sums: bool, /
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]: ...


class _Products(Protocol):
    def __call__(
        self, left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, bias: Tensor | None,
        dtype: torch.dtype, accumulation: str, /,
    ) -> Tensor: ...  # fmt: skip


class Operations(NamedTuple):
    """One way to the operations: quantizers as in `_ops`, and the product of codes as they lie in memory."""

    quantize_rows: _Vectors
    quantize_columns: _Vectors
    quantize_tensor: _Tensors
    product: _Products


OPERATORS = Operations(_ops.quantize_rows, _ops.quantize_columns, _ops.quantize_tensor, _ops.operator_product)
EAGER = Operations(_ops._eager_rows, _ops._eager_columns, _ops._eager_tensor, _ops.eager_product)
CUDA = Operations(_ops._cuda_rows, _ops._cuda_columns, _ops._cuda_tensor, _ops.cuda_product)
_DIRECT = {"cpu": EAGER, "cuda": CUDA}


def operations(*tensors: Tensor) -> Operations:
    """The way for operations on tensors of one device."""
    # First: a compiler that traces this function goes no further.
    if torch.compiler.is_compiling() or _watched():
        return OPERATORS
    device = "cuda" if tensors[0].is_cuda else "cpu"
    plain = _plain_keys(device)
    for tensor in tensors:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return OPERATORS
        if torch._C._dispatch_keys(tensor).raw_repr() not in plain:
            return OPERATORS
    return _DIRECT[device]


def _watched() -> bool:
    """Whether something sees or changes every operation: a mode, `torch.func`'s transforms, `torch.jit.trace`."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )


@functools.cache
def _plain_keys(device: str) -> frozenset[int]:
    """What the dispatcher asks of a tensor just made on a device, with autograd or, in inference mode, without.

    Whatever more there is to a tensor (a sign or a conjugation to be applied, another layout, batches) is a key more.
    """
    keys = []
    for inference in (False, True):
        with torch.inference_mode(inference):
            keys.append(torch._C._dispatch_keys(torch.empty(0, device=device)).raw_repr())
    return frozenset(keys)
