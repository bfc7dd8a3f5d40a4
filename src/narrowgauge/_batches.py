"""Batches of any form: tensors, also in lists, tuples and dictionaries, and what moves itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def moved(batch: Any, device: torch.device) -> Any:
    """A batch on a device: one that moves itself, or tensors in lists, tuples and dictionaries."""
    if hasattr(batch, "to"):
        return batch.to(device)
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def tensors(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order."""
    # What moves itself is a tensor, or holds its tensors in `data`, as what transformers' tokenizers return.
    found = getattr(batch, "data", batch) if hasattr(batch, "to") else batch
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


def examples(batch: Any) -> int:
    """How many examples a batch has: the length of its first tensor."""
    sizes = [len(tensor) for tensor in tensors(batch) if tensor.dim()]
    return sizes[0] if sizes else 1
