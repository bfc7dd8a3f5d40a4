"""Products of bf16 matrices on CPUs without AVX-512.

torch leaves them to oneDNN, which needs AVX-512. Without it torch runs a loop that takes 36 times as long as a
product of float32 matrices (512x128 by 128x512, one thread, torch 2.13). Here such a product is computed in float32
and rounded once, as oneDNN does it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_aten = torch.ops.aten
# By operation, how many of its results have the operands' dtype.
_PRODUCTS = {
    _aten.mm.default: 1,
    _aten.addmm.default: 1,
    _aten.bmm.default: 1,
    _aten.baddbmm.default: 1,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 1,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 3,
}


def fast_products(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context that has `Float32Products` on a CPU without AVX-512, and does nothing elsewhere."""
    if device.type != "cpu" or (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return contextlib.nullcontext()
    return Float32Products()  # type: ignore[no-untyped-call]


class Float32Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes products of bf16 matrices on a CPU in float32, and rounds the results."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rounded = _PRODUCTS.get(func, 0)
        if not rounded or not args[0].is_cpu or args[0].dtype != torch.bfloat16:
            return func(*args, **kwargs)

        def widened(x: Any) -> Any:
            return x.float() if isinstance(x, Tensor) and x.dtype == torch.bfloat16 else x

        found = func(*tree_map(widened, args), **tree_map(widened, dict(kwargs)))
        if isinstance(found, Tensor):
            return found.bfloat16()
        return tuple(x.bfloat16() for x in found[:rounded]) + tuple(found[rounded:])
