"""Parameter groups: what should not decay, and embeddings if they are to have other states."""

from __future__ import annotations

from typing import Any

from torch import nn

from narrowgauge.storage import state_storage

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def split_decay(model: nn.Module, weight_decay: float, *, embeddings: str | None = None) -> list[dict[str, Any]]:
    """Parameter groups of a model: no decay on norms and biases, and other states for embeddings if asked for.

    Matrices and embeddings decay. What has fewer than two dimensions does not (biases, the gains of norms, scales),
    nor does anything that a module whose name ends in "norm" owns, nor anything with the word bias in its name (as
    ``bias_k`` of an attention).

    Embeddings have the optimizer's states, here as in `Recipe.apply`: in `log8` they train as in fp32
    (docs/studies/bytes_and_loss.md). With `8bit` states they do not, and the paper keeps them in 32 bits: that is
    ``embeddings="fp32"``.

    Args:
        model: the model; parameters that do not require gradients are left out.
        weight_decay: for the groups that decay.
        embeddings: the state storage of embedding tables; a table that is tied to an output layer is one. None for
            the optimizer's.

    Returns:
        Up to three groups of named parameters, for any optimizer of this library:
        ``AdamW8bit(split_decay(model, 0.1))``.

    Raises:
        ValueError: for an unknown storage.
    """
    return parted(model, {"weight_decay": weight_decay}, embeddings)


def parted(model: nn.Module, decayed: dict[str, Any], embeddings: str | None = None) -> list[dict[str, Any]]:
    """The groups of `split_decay` and of recipes, with these options for what decays."""
    apart = {"states": state_storage(embeddings).name} if embeddings is not None else {}
    tables = {id(p) for m in model.modules() if isinstance(m, _EMBEDDINGS) for p in m.parameters(recurse=False)}
    bare = undecayed(model)
    groups: list[dict[str, Any]] = [
        {"params": [], **decayed},
        {"params": [], "weight_decay": 0.0},
        {"params": [], **decayed, **apart},
    ]
    for name, p in model.named_parameters():
        if p.requires_grad:
            groups[1 if id(p) in bare else 2 if apart and id(p) in tables else 0]["params"].append((name, p))
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
