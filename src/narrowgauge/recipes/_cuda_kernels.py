"""CUDA's choice of kernels, for operations on the meta device.

On the meta device torch computes `scaled_dot_product_attention` by its formula, with scores of batch x heads x
sequence x sequence in several copies. A CUDA device takes fused flash attention for 16-bit numbers without a mask,
the memory-efficient kernels for fp32 or with a mask, and the formula for the rest; so it is here. Its dropout
stores a mask of a byte an element, its RMS norm one number a row.

Some kernels take memory for themselves while they run; `WORKSPACES` has the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Within, operations on meta tensors take and store what they do on a CUDA device."""
    # Registered with the dispatcher, for meta tensors only: modules reach these functions in many ways, from within
    # a recomputed block too.
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
    library.impl("dropout", _dropout, "AutogradMeta")
    library.impl("rms_norm", _rms_norm, "AutogradMeta")
    try:
        yield
    finally:
        library._destroy()


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0:
        return input
    return cast(Tensor, _aten.native_dropout(input, p, train)[0])


def _rms_norm(input: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return cast(Tensor, _aten._fused_rms_norm(input, shape, weight, eps)[0])


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    width = query.shape[-1]
    grouped = query.dim() == 4 and query.shape[-3] != key.shape[-3]
    fused = query.dim() == 4 and width == value.shape[-1] and width <= 256
    if fused and attn_mask is None and query.dtype in _HALF:
        scale = width**-0.5 if scale is None else scale
        query, key, value = (_padded(x, 8) for x in (query, key, value))
        out = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
        return _cut(out[0], width)
    if fused and not grouped:
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        out = _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )
        return _cut(out[0], width)
    out = _aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return cast(Tensor, out[0])


def _padded(x: Tensor, multiple: int) -> Tensor:
    missing = -x.shape[-1] % multiple
    return F.pad(x, (0, missing)) if missing else x


def _cut(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else x[..., :width]


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as the kernels read it: numbers of the query's dtype, rows of a multiple of 8."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    columns = mask.shape[-1]
    if columns % 8:
        mask = F.pad(mask, (0, -columns % 8))[..., :columns]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


# Bytes that the backward kernels take for themselves.


def _of_flash_backward(grad: Tensor, query: Tensor, key: Tensor, *_: Any, **__: Any) -> int:
    """dq is summed in fp32, rows in tiles of 128, heads padded to a multiple of 32; and a number a row. With fewer
    heads of keys than of queries, dk and dv are first made for each head of queries.

    Source: torch's flash_api.cpp, mha_bwd.
    """
    batch, heads, rows, width = query.shape
    tiled = -(-rows // 128) * 128
    total = 4 * batch * heads * tiled * (-(-width // 32) * 32 + 1)
    if key.shape[1] != heads:
        total += 2 * batch * heads * key.shape[2] * width * key.element_size()
    return total


def _of_efficient_backward(grad: Tensor, query: Tensor, *_: Any, **__: Any) -> int:
    """A number a row (delta), and sums in fp32 of what is not fp32."""
    batch, heads, rows, width = query.shape
    delta = 4 * batch * heads * rows
    return delta if query.dtype == torch.float32 else delta + 4 * batch * heads * rows * width


def _of_embedding_backward(grad: Tensor, indices: Tensor, count: int, *_: Any, **__: Any) -> int:
    """Tokens are sorted, and rows of equal ones summed in pieces of 10, in fp32.

    Source: torch's EmbeddingBackwardKernel.cu. Up to 3072 tokens are added one by one.
    """
    tokens = indices.numel()
    if tokens <= 3072:
        return 0
    pieces = tokens // 10 + min(tokens, count)
    return 4 * pieces * grad.shape[-1] + 4 * 8 * tokens


WORKSPACES: Mapping[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_backward.default: _of_flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _of_efficient_backward,
    _aten.embedding_dense_backward.default: _of_embedding_backward,
}
