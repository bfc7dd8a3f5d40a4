"""The lists of tensors that are stepped: a few large ones, many small ones, and those of real models."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Shapes = list[tuple[int, ...]]


@dataclass(frozen=True)
class ParameterList:
    """Tensors to step.

    Attributes:
        name: as asked for.
        title: what they are.
        shapes: makes their shapes.
    """

    name: str
    title: str
    shapes: Callable[[], Shapes]

    def counts(self) -> dict[str, int]:
        """How many tensors and parameters."""
        shapes = self.shapes()
        return {"tensors": len(shapes), "parameters": sum(map(math.prod, shapes))}


def _of_model(make: Callable[[], Any]) -> Shapes:
    with torch.device("meta"):
        return [tuple(p.shape) for p in make().parameters()]


def _gpt2(layers: int, width: int, heads: int) -> Shapes:
    from transformers import GPT2Config, GPT2LMHeadModel

    return _of_model(lambda: GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=width, n_head=heads)))


def _vit_huge() -> Shapes:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=1280, num_hidden_layers=32, num_attention_heads=16, intermediate_size=5120, patch_size=14
    )
    return _of_model(lambda: ViTModel(config, add_pooling_layer=False))


_LISTS = {
    of.name: of
    for of in (
        ParameterList("big", "16 tensors of 2^26", lambda: [(1 << 13, 1 << 13)] * 16),
        ParameterList("matrix", "one tensor of 4096 x 4096", lambda: [(4096, 4096)]),
        ParameterList("many-64", "300 tensors of 64", lambda: [(64,)] * 300),
        ParameterList("many-768", "148 tensors of 768", lambda: [(768,)] * 148),
        ParameterList("gpt2", "GPT-2 small", lambda: _gpt2(12, 768, 12)),
        ParameterList("gpt2-medium", "GPT-2 medium", lambda: _gpt2(24, 1024, 16)),
        ParameterList("vit-huge", "ViT-Huge/14", _vit_huge),
    )
}
_SHAPE = re.compile(r"0*[1-9]\d*(x0*[1-9]\d*)*")


def default_lists(device: torch.device) -> list[ParameterList]:
    """What is measured unless something else is asked for."""
    names = ("big", "gpt2-medium", "vit-huge") if device.type == "cuda" else ("matrix", "many-64", "many-768")
    return [_LISTS[name] for name in names]


def parameter_list(name: str) -> ParameterList:
    """A list by its name, or one tensor by its shape: 4096x4096.

    Raises:
        ValueError: for neither.
    """
    if name in _LISTS:
        return _LISTS[name]
    if _SHAPE.fullmatch(name):
        shape = tuple(map(int, name.split("x")))
        return ParameterList(name, f"one tensor of {name.replace('x', ' x ')}", lambda: [shape])
    raise ValueError(f"--lists: got {name!r}, takes {', '.join(_LISTS)}, or a shape such as 4096x4096")
