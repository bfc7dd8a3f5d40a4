"""Modules that are added to a transformers model for training, and folded into its weights when it is exported.

A stable embedding is a table followed by a layer norm, and a layer scale a vector after a linear layer. Neither has
a place in transformers' classes; but once trained, both can be folded into what comes before them:

    norm(E)[token] = norm(E[token])        the table's rows, normalized
    g * (W x + b)  = (g * W) x + g * b     the layer's rows, scaled

So the folded model has the plain class and computes the same, but for one rounding of these weights. An output
layer that shared the table keeps the table as it was, and is no longer tied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.nn import (
    HeadLayerNorm,
    LayerScale,
    PatchNorm,
    StableEmbedding,
    add_layer_scale,
    add_patch_dropout,
    add_patch_norm,
    add_qk_norm,
)


@dataclass(frozen=True)
class Extras:
    """Modules to add before training; each field is a flag of that name, and off by default."""

    stable_embedding: bool = False
    layer_scale: float | None = None
    kq_norm: bool = False
    patch_norm: str = "none"
    patch_dropout: float = 0.0

    def add(self, model: Any, seed: int) -> None:
        """Add it all to a transformers model, in fp32, on the CPU or without memory.

        Raises:
            ValueError: naming the flag of a module that the model has no place for.
        """
        where: Any = self.patch_norm
        add: dict[str, Callable[[], Any]] = {
            "stable_embedding": lambda: add_stable_embedding(getattr(model, "text_model", model), seed),
            "layer_scale": lambda: add_layer_scale(model, self.layer_scale or 0.0),
            "kq_norm": lambda: add_qk_norm(model),
            "patch_norm": lambda: add_patch_norm(model, where),
            "patch_dropout": lambda: add_patch_dropout(model, self.patch_dropout),
        }
        for name in self.given:
            try:
                add[name]()
            except ValueError as error:
                raise ValueError(f"--{name.replace('_', '-')}: {error}") from None

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are not off, in order."""
        off = Extras()
        return {name: value for name, value in vars(self).items() if value != getattr(off, name)}


def add_stable_embedding(model: Any, seed: int) -> None:
    """Give a transformers model in fp32 a `StableEmbedding` of the size of its token embedding, in place.

    The table is drawn from the seed; the global random state is neither read nor changed.
    """
    old = model.get_input_embeddings()
    if not isinstance(old, nn.Embedding):
        raise ValueError(f"model must have an embedding of tokens, got a {type(model).__name__}")
    with torch.random.fork_rng(devices=[]), old.weight.device:
        torch.default_generator.manual_seed(seed)
        table = StableEmbedding(old.num_embeddings, old.embedding_dim, padding_idx=old.padding_idx)
    model.set_input_embeddings(table)
    if getattr(model.config, "tie_word_embeddings", False):
        model.tie_weights()


@torch.no_grad()
def folded_state(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model as its plain class has it, extras folded; other tensors are not copied."""
    state: dict[str, Tensor] = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, StableEmbedding):
            state[f"{name}.weight"] = module.norm(module.weight).to(module.weight.dtype)
            _drop(state, f"{name}.norm.")
        scale = getattr(module, "layer_scale", None)
        if isinstance(scale, LayerScale):
            gamma, weight = scale.gamma.double(), state[f"{name}.weight"]
            # A Conv1D of transformers has its output features last.
            rows = gamma[:, None] if isinstance(module, nn.Linear) else gamma
            state[f"{name}.weight"] = (weight.double() * rows).to(weight.dtype)
            bias = state.get(f"{name}.bias")
            if bias is not None:
                state[f"{name}.bias"] = (bias.double() * gamma).to(bias.dtype)
            _drop(state, f"{name}.layer_scale.")
    return state


def unfolded(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Norms that cannot be folded: names of their tensors, and their options with values."""
    names: list[str] = []
    kinds: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, HeadLayerNorm | PatchNorm):
            names += [f"{name}.{part}" for part in module.state_dict()]
            kinds |= {"patch_norm": module.where} if isinstance(module, PatchNorm) else {"kq_norm": "true"}
    return names, kinds


def add_unfolded(model: nn.Module, kinds: Mapping[str, str]) -> None:
    """Add the norms that `unfolded` found in another model."""
    if "kq_norm" in kinds:
        add_qk_norm(model)
    if "patch_norm" in kinds:
        add_patch_norm(model, "before" if kinds["patch_norm"] == "before" else "after")


def unties(model: nn.Module) -> bool:
    """Whether folding gives the output layer a table of its own."""
    return any(isinstance(module, StableEmbedding) for module in model.modules())


def _drop(state: dict[str, Tensor], prefix: str) -> None:
    for name in [name for name in state if name.startswith(prefix)]:
        del state[name]
