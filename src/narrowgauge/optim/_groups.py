"""Parameter groups: what should not decay, and embeddings if they are to have other states."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from narrowgauge._module_names import clean_name
from narrowgauge.storage import state_storage

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def split_decay(
    model: nn.Module,
    weight_decay: float,
    *,
    embeddings: str | None = None,
    no_decay: str | Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Parameter groups of a model: no decay on norms and biases, and other states for embeddings if asked for.

    Matrices and embeddings decay. What has fewer than two dimensions does not (biases, the gains of norms, scales),
    nor does anything that a module whose name ends in "norm" owns, nor anything with the word bias in its name (as
    ``bias_k`` of an attention), nor what a model names in ``no_weight_decay()``, as those of timm do.

    Embeddings have the optimizer's states, here as in `Recipe.apply`: in `log8` they train as in fp32
    (docs/studies/bytes_and_loss.md). With `8bit` states they do not, and the paper keeps them in 32 bits: that is
    ``embeddings="fp32"``.

    Args:
        model: the model; parameters that do not require gradients are left out.
        weight_decay: for the groups that decay.
        embeddings: the state storage of embedding tables; a table that is tied to an output layer is one. None for
            the optimizer's.
        no_decay: names of further parameters that do not decay, or patterns such as ``"*.gamma"``.

    Returns:
        Up to three groups of named parameters, for any optimizer of this library:
        ``AdamW8bit(split_decay(model, 0.1))``.

    Raises:
        ValueError: for an unknown storage, and for a name in `no_decay` that no parameter has.
    """
    return parted(model, {"weight_decay": weight_decay}, embeddings, no_decay)


def parted(
    model: nn.Module,
    decayed: dict[str, Any],
    embeddings: str | None = None,
    no_decay: str | Iterable[str] = (),
) -> list[dict[str, Any]]:
    """The groups of `split_decay` and of recipes, with these options for what decays."""
    apart = {"states": state_storage(embeddings).name} if embeddings is not None else {}
    tables = {id(p) for m in model.modules() if isinstance(m, _EMBEDDINGS) for p in m.parameters(recurse=False)}
    bare = undecayed(model) | named("no_decay", model, no_decay)
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
    for path, module in model.named_modules():
        bare = is_norm(module) or "bias" in path.rpartition(".")[2].split("_")  # a table of biases, as T5's
        for name, p in module.named_parameters(recurse=False):
            if is_lazy(p):
                name = f"{path}.{name}".lstrip(".")
                raise ValueError(f"model must have been called once: {name} of a lazy module has no shape yet")
            if bare or p.dim() < 2 or "bias" in name.split("_"):
                found.add(id(p))
        own = getattr(module, "no_weight_decay", None)
        if callable(own):  # timm's names are those below the module; some of them may not exist
            names = set(own())
            found |= {id(p) for name, p in module.named_parameters(remove_duplicate=False) if name in names}
    return found


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm: the name of its class ends in "norm", or in that and a number of dimensions."""
    return type(module).__name__.lower().rstrip("0123456789d").endswith("norm")


def named(argument: str, model: nn.Module, patterns: str | Iterable[str]) -> set[int]:
    """The ids of the parameters that names or patterns with ``*`` are of; a ValueError for one that fits none.

    Names are those with the wrappers' parts in them, or without.
    """
    named_parameters = model.named_parameters(remove_duplicate=False)
    every = [(name, p) for whole, p in named_parameters for name in {whole, clean_name(whole)}]
    found: set[int] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        fits = {id(p) for name, p in every if name == pattern or fnmatchcase(name, pattern)}
        if not fits:
            raise ValueError(f"{argument} must name parameters of the model, got {pattern!r}, which fits none")
        found |= fits
    return found
