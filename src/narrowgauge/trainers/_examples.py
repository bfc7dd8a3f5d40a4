"""Examples: tensors by name whose first dimension counts them, and dividing and moving them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Examples = Mapping[str, Tensor]
"""Tensors by name whose first dimension counts the examples."""


def count(examples: Examples) -> int:
    """How many there are."""
    return len(next(iter(examples.values())))


def divided(examples: Examples, parts: int) -> list[Examples]:
    """Examples in equal parts, but for the last; fewer where there are not enough."""
    chunks = zip(*(tensor.chunk(parts) for tensor in examples.values()), strict=True)
    return [dict(zip(examples, rows, strict=True)) for rows in chunks]


def pinned(examples: Examples, device: torch.device) -> Examples:
    """Examples in memory that a device reads by itself, so that a move waits for nothing."""
    return {name: t.pin_memory() for name, t in examples.items()} if device.type == "cuda" else examples


def moved(examples: Examples, device: torch.device) -> Examples:
    """Examples on a device; nothing is waited for."""
    return {name: t.to(device, non_blocking=True) for name, t in pinned(examples, device).items()}
