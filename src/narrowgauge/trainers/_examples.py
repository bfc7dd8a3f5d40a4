"""Examples: tensors by name whose first dimension counts them; dividing and moving them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Examples = Mapping[str, Tensor]
"""Tensors by name whose first dimension counts the examples."""


def count(examples: Examples) -> int:
    """The number of examples."""
    return len(next(iter(examples.values())))


def divided(examples: Examples, parts: int) -> list[Examples]:
    """Examples in equal parts, except the last; in fewer parts where there are not enough."""
    chunks = zip(*(tensor.chunk(parts) for tensor in examples.values()), strict=True)
    return [dict(zip(examples, rows, strict=True)) for rows in chunks]


def pinned(examples: Examples, device: torch.device) -> Examples:
    """Examples in pinned memory, from which a GPU copies without a wait."""
    return {name: t.pin_memory() for name, t in examples.items()} if device.type == "cuda" else examples


def to_device(examples: Examples, device: torch.device) -> Examples:
    """Examples on a device, without a wait."""
    return {name: t.to(device, non_blocking=True) for name, t in pinned(examples, device).items()}
