"""`nn.MultiheadAttention` by a plan.

`nn.MultiheadAttention` has the projections of queries, keys and values as one parameter, `in_proj_weight` (3E, E),
and passes that and the weight of its `out_proj` to a function. So the whole module is replaced: the projections are
multiplied by the plan, in one multiply where queries, keys and values are the same tensor, and `out_proj` is called
as a layer. Between them `scaled_dot_product_attention` runs in high precision. A tensor-wise scale of W covers all
three projections.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from narrowgauge.linear._module import PlannedModule


class LowPrecisionMultiheadAttention(PlannedModule, nn.MultiheadAttention):
    """`nn.MultiheadAttention` whose projections follow a plan.

    `swap_linears` makes it from an `nn.MultiheadAttention`; attributes, parameters, arguments and results are the
    same. Attention itself is computed in high precision; of nested tensors torch computes all, on its fast path.
    Moving averages are a buffer (3, 3) that is not saved: a row for each projection, or the first row if one
    multiply does all three.

    Raises:
        ValueError: for masks of other shapes, or neither bool nor floats.
        RuntimeError: for `is_causal` without an `attn_mask`, as torch's does.
        AssertionError: for nested tensors where torch's has no fast path for them.

    Source: Wortsman et al. 2023, Section 2.2.1 (query, key, value and out projection).
    """

    WEIGHT = "in_proj_weight"
    AVERAGES = (3, 3)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested or key.is_nested or value.is_nested:  # torch's fast path, or torch's error
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "is_causal must be False without an attn_mask, got True: it is a hint about the mask"
            )
        batched, dim = query.dim() == 3, query.shape[-1]
        q, k, v = (self._heads(x, batched) for x in self._projections(query, key, value))
        mask = self._mask(attn_mask, key_padding_mask, q, k)
        rate = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            # Queries first: in float16 products of both may be infinite before they are scaled.
            logits = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
            weights = dropout((logits if mask is None else logits + mask).softmax(-1), rate)
            out = weights.to(v.dtype) @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            out = scaled_dot_product_attention(q, k, v, mask, rate)
        out = out.transpose(1, 2).reshape(out.shape[0], -1, dim)  # (batch, tokens, dim)
        out = out.squeeze(0) if not batched else out if self.batch_first else out.transpose(0, 1)
        return self.out_proj(out), weights

    def _projections(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, with one multiply for each run of equal tensors."""
        dim, bias = self.embed_dim, self.in_proj_bias
        if query is key and key is value:
            spans = [(query, 0, 3)]
        elif key is value:
            spans = [(query, 0, 1), (key, 1, 3)]
        else:
            spans = [(query, 0, 1), (key, 1, 2), (value, 2, 3)]
        averages = self.averages
        made: list[Tensor] = []
        for x, start, end in spans:
            rows = slice(start * dim, end * dim)
            own = None if averages is None else averages[start]
            packed = (self.in_proj_weight, bias) if end - start == 3 else (
                self.in_proj_weight[rows], None if bias is None else bias[rows]
            )  # fmt: skip
            made.extend(self._linear(x, *packed, own).chunk(end - start, -1))
        return made[0], made[1], made[2]

    def _heads(self, x: Tensor, batched: bool) -> Tensor:
        """(batch, heads, tokens, head_dim), from any of the three layouts."""
        x = x.unsqueeze(0) if not batched else x if self.batch_first else x.transpose(0, 1)
        heads: Tensor = x.unflatten(-1, (self.num_heads, self.head_dim))  # type: ignore[no-untyped-call]
        return heads.transpose(1, 2)

    def _mask(self, attention: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """Both masks as one that is added to the logits, broadcast to (batch, heads, tokens, keys)."""
        (batch, heads, tokens, _), keys = q.shape, k.shape[2]
        total = None
        if attention is not None:
            total = _added("attn_mask", attention, q.dtype, (tokens, keys), (batch * heads, tokens, keys))
            if total.dim() == 3:
                total = total.unflatten(0, (batch, heads))  # type: ignore[no-untyped-call]
        if padding is not None:
            of_one = ((keys,),) if batch == 1 else ()
            padded = _added("key_padding_mask", padding, q.dtype, (batch, keys), *of_one).reshape(batch, 1, 1, keys)
            total = padded if total is None else total + padded
        return total


def _added(name: str, mask: Tensor, dtype: torch.dtype, *shapes: tuple[int, ...]) -> Tensor:
    """A mask that is added to logits; true in a boolean mask excludes the key."""
    if tuple(mask.shape) not in shapes or not (mask.dtype == torch.bool or mask.is_floating_point()):
        allowed = " or ".join(map(str, shapes))
        raise ValueError(
            f"{name} must be bool or float of shape {allowed}, got {mask.dtype} of shape {tuple(mask.shape)}"
        )
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)
    return mask.to(dtype)
