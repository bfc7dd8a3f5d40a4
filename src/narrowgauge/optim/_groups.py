"""Parameter groups: what should not decay, and what should not be kept in 8 bits."""

from __future__ import annotations

from typing import Any

from torch import nn

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def split_decay(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups of a model: no decay on norms and biases, 32-bit states for embeddings.

    Matrices and embeddings decay. What has fewer than two dimensions does not (biases, the gains of norms, scales),
    nor does anything that a module whose name ends in "norm" owns, nor anything with the word bias in its name (as
    ``bias_k`` of an attention). Embedding tables get ``states="fp32"``, as the 8-bit paper has it; a table that is
    tied to an output layer is one.

    Args:
        model: the model; parameters that do not require gradients are left out.
        weight_decay: for the groups that decay.

    Returns:
        Up to three groups of named parameters, for any optimizer of this library:
        ``AdamW8bit(split_decay(model, 0.1))``.

    Raises:
        TypeError: if the model is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, takes a torch.nn.Module")
    embeddings = {id(p) for m in model.modules() if isinstance(m, _EMBEDDINGS) for p in m.parameters(recurse=False)}
    bare = undecayed(model)
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": weight_decay},
        {"params": [], "weight_decay": 0.0},
        {"params": [], "weight_decay": weight_decay, "states": "fp32"},
    ]
    for name, p in model.named_parameters():
        if p.requires_grad:
            groups[1 if id(p) in bare else 2 if id(p) in embeddings else 0]["params"].append((name, p))
    return [group for group in groups if group["params"]]


def undecayed(model: nn.Module) -> set[int]:
    """The ids of a model's parameters that weight decay would only disturb; see `split_decay`."""
    found: set[int] = set()
    for module in model.modules():
        norm = type(module).__name__.lower().rstrip("0123456789d").endswith("norm")
        for name, p in module.named_parameters(recurse=False):
            if norm or p.dim() < 2 or "bias" in name.split("_"):
                found.add(id(p))
    return found
