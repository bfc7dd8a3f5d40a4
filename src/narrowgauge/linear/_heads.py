"""The output layers of transformers models. They stay in high precision: their noise would be the loss's."""

from __future__ import annotations

from torch import nn

_HEADS = ("lm_head", "cls", "visual_projection", "text_projection", "classifier")


def output_heads(model: nn.Module) -> list[str]:
    """The names of a model's output layers, for `swap_linears` to keep."""
    return [name for name, _ in model.named_children() if name in _HEADS]
