"""Layer norms on queries and keys, and putting them into a transformer's attention.

Attention logits are dot products of queries with keys. Where both grow, the logits grow with the product of their
lengths until a softmax is all one token, and training diverges. A layer norm over the features of each head, on
queries and on keys, bounds a logit by √head_dim as long as the gains are one:

    softmax(LN(q) LN(k)ᵀ / √head_dim)

The field calls it QK-norm; Wortsman et al. 2023 call it KQ layernorm and try it in Figure 2 beside layer scale from
zero. Theirs did not keep tensor-wise float8 from diverging (layer scale did); it bounds logits, not the features of
the residual stream.

Some attentions have places for it (timm, open_clip's own): identities, which are replaced. In others
(transformers') the norms act on what the layers that make queries and keys give. Either way a norm sees a head
before rotary positions turn it, as models that are built with these norms have it.

Sources: Henry et al. 2020; Dehghani et al. 2023 (ViT-22B), Section 2; Wortsman et al. 2023, Figure 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge._arguments import Positive, check


class HeadLayerNorm(nn.LayerNorm):
    """A layer norm over the features of each head; all heads share its gain and bias.

    Args:
        head_dim: features of a head.
        eps, device, dtype: as `nn.LayerNorm` takes them.

    Shapes: (..., heads * head_dim), or (..., head_dim), to the same. The output has the dtype of the input, under
    autocast as well, so that queries and keys keep that of the values.

    Source: Dehghani et al. 2023, Section 2.
    """

    def __init__(self, head_dim: int, eps: float = 1e-6, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__(head_dim, eps, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        heads = input.unflatten(-1, (-1, *self.normalized_shape))  # type: ignore[no-untyped-call]
        return super().forward(heads).flatten(-2).to(input.dtype)


# What the output of a layer is made of, in equal parts: queries, keys, or what stays as it is.
_Parts = tuple[str, ...]
_Q: _Parts = ("q_norm",)
_K: _Parts = ("k_norm",)

# Attentions of transformers by class: the layers that make queries and keys. Those that a class lacks are skipped.
_LAYERS: dict[str, dict[str, _Parts]] = {
    "LlamaAttention": {"q_proj": _Q, "k_proj": _K},
    "CLIPAttention": {"q_proj": _Q, "k_proj": _K},
    "ViTAttention": {"q_proj": _Q, "k_proj": _K},
    "ViTSelfAttention": {"query": _Q, "key": _K},
    "BertSelfAttention": {"query": _Q, "key": _K},
    "BertCrossAttention": {"query": _Q, "key": _K},
    "RobertaSelfAttention": {"query": _Q, "key": _K},
    "RobertaCrossAttention": {"query": _Q, "key": _K},
}
_GPT2: dict[str, _Parts] = {"c_attn": ("q_norm", "k_norm", "")}
_GPT2_CROSS: dict[str, _Parts] = {"q_attn": _Q, "c_attn": ("k_norm", "")}

# Attentions with places for the norms, of timm and of open_clip.
_PLACES = {
    "Attention": (("q_norm", "k_norm"), ("ln_q", "ln_k")),
    "AttentionRope": (("q_norm", "k_norm"),),
    "EvaAttention": (("q_norm", "k_norm"),),
}


@dataclass(frozen=True, eq=False)
class AddedQKNorms:
    """What `add_qk_norm` did.

    Attributes:
        norms: the norms, by the names that they have in the model.
        left: why each other attention has none, by name.
    """

    norms: dict[str, HeadLayerNorm]
    left: dict[str, str]
    _undo: list[Callable[[], Any]] = field(default_factory=list, repr=False)

    def remove(self) -> None:
        """Take them out of the model, with what they have learned."""
        while self._undo:
            self._undo.pop()()

    def __str__(self) -> str:
        lines = [f"QK-norm: {len(self.norms)}", *(f"  {name}" for name in self.norms)]
        width = max(map(len, self.left), default=0)
        lines.append(f"left: {len(self.left)}")
        lines.extend(f"  {name.ljust(width)}  {reason}" for name, reason in self.left.items())
        return "\n".join(lines)


def add_qk_norm(model: nn.Module, eps: float = 1e-6) -> AddedQKNorms:
    """Normalize the queries and keys of each attention of a transformer, head by head.

    The norms start with gains of one and biases of zero, which changes what the model computes: add them before
    training. They are named ``q_norm`` and ``k_norm`` (open_clip: ``ln_q``, ``ln_k``), in the attention where it
    has places for them, else in the layers that make queries and keys; checkpoints gain these names and lose none.
    Make the optimizer afterwards. Linear layers may be swapped before or after.

    Args:
        model: a model with attentions of GPT-2, LLaMA, CLIP, ViT, BERT or RoBERTa of transformers, of timm's ViT
            and EVA, or of open_clip's blocks with options. `nn.MultiheadAttention` has no such place and is left.
        eps: of the norms.

    Returns:
        The norms by name, and what was left, with reasons; `remove()` takes them out.

    Raises:
        ValueError: for a model without such attentions or whose queries and keys have norms already, or an `eps`
            not above 0.

    Source: Wortsman et al. 2023, Figure 2; Dehghani et al. 2023, Section 2.
    """
    check("eps", eps, Positive)
    attentions = [(f"{name}.".lstrip("."), module) for name, module in model.named_modules()]
    found = [(name, module, _layers(module), _place(module)) for name, module in attentions]
    for name, module, layers, place in found:
        here = [*(place or ()), *(f"{layer}.{part}" for layer, parts in layers.items() for part in parts if part)]
        for path in here:
            if not isinstance(_part(module, path), nn.Identity | None):
                raise ValueError(f"model must not have QK-norms already, got one at {name}{path}")
    added = AddedQKNorms({}, {})
    for name, module, layers, place in found:
        if place is not None:
            _fill(added, name, module, place, eps)
        for layer, parts in layers.items():
            _follow(added, f"{name}{layer}.", module.get_submodule(layer), parts, _head_dim(module), eps)
        if isinstance(module, nn.MultiheadAttention):
            added.left[name.rstrip(".")] = "nn.MultiheadAttention shows neither queries nor keys"
        elif place is None and not layers and hasattr(module, "q_norm") and hasattr(module, "k_norm"):
            added.left[name.rstrip(".")] = f"is a {type(module).__name__}, no attention of a block"
    if not added.norms:
        known = "GPT2Attention, " + ", ".join([*_LAYERS, "timm's and open_clip's Attention"])
        raise ValueError(f"model must have attentions of {known}, got {type(model).__name__}")
    return added


def _layers(module: Any) -> dict[str, _Parts]:
    """The layers that make queries and keys, for attentions of transformers."""
    kind = type(module).__name__
    if kind == "GPT2Attention":
        return _GPT2_CROSS if module.is_cross_attention else _GPT2
    return {path: parts for path, parts in _LAYERS.get(kind, {}).items() if hasattr(module, path)}


def _place(module: nn.Module) -> tuple[str, str] | None:
    """Where an attention has places for norms of queries and keys."""
    for place in _PLACES.get(type(module).__name__, ()):
        if all(isinstance(_part(module, name), nn.Module) for name in place) and hasattr(module, "head_dim"):
            return place
    return None


def _fill(added: AddedQKNorms, name: str, module: Any, place: tuple[str, str], eps: float) -> None:
    for part in place:
        identity = getattr(module, part)
        norm = _norm(module, module.head_dim, eps)
        setattr(module, part, norm)
        added.norms[f"{name}{part}"] = norm
        added._undo.append(partial(setattr, module, part, identity))


def _follow(added: AddedQKNorms, name: str, layer: nn.Module, parts: _Parts, head_dim: int, eps: float) -> None:
    for part in filter(None, parts):
        norm = _norm(layer, head_dim, eps)
        layer.add_module(part, norm)
        added.norms[f"{name}{part}"] = norm
        added._undo.append(partial(layer._modules.pop, part, None))
    # A partial of a function of the module: hooks are copied and pickled with it.
    added._undo.append(layer.register_forward_hook(partial(_normalize, parts)).remove)


def _norm(owner: nn.Module, head_dim: int, eps: float) -> HeadLayerNorm:
    like = next(owner.parameters())
    return HeadLayerNorm(head_dim, eps, device=like.device, dtype=like.dtype).train(owner.training)


def _normalize(parts: _Parts, layer: Any, arguments: Any, output: Tensor) -> Tensor:
    """The output of a layer, its queries and keys normalized."""
    if len(parts) == 1:
        return getattr(layer, parts[0])(output)  # type: ignore[no-any-return]
    pieces = output.chunk(len(parts), -1)
    normed = [getattr(layer, part)(piece) if part else piece for part, piece in zip(parts, pieces, strict=True)]
    return torch.cat(normed, -1)


def _head_dim(module: Any) -> int:
    return int(module.head_dim if hasattr(module, "head_dim") else module.attention_head_size)


def _part(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part, None)
    return module
