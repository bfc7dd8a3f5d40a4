"""Recipes: named precision strategies.

A recipe says in which format the model's weights and gradients are, which optimizer trains it (most often
AdamW) and how that keeps weights and states. Applying one takes two lines: get it, apply it to the model.

The letters A to D are the options of Collage's Table 2; `D-MW` keeps fp32 states but no master weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch import nn

from narrowgauge._arguments import FloatDtype, check
from narrowgauge.optim import AdamW, Lion, NarrowOptimizer, StableAdamW
from narrowgauge.optim._groups import parted
from narrowgauge.optim._plan import slot_storages
from narrowgauge.storage import weight_storage

Made = TypeVar("Made")


@dataclass(frozen=True)
class Recipe:
    """A precision strategy.

    Attributes:
        name: what users type.
        title: a description, in a line.
        dtype: format of the model's weights and gradients.
        weights, states: storages of the optimizer.
        letters: the paper's name for it, also accepted, or None.
        optimizer: the class of the optimizer.
    """

    name: str
    title: str
    dtype: torch.dtype
    weights: str = "plain"
    states: str | Mapping[str, str] = "fp32"
    letters: str | None = None
    optimizer: type[NarrowOptimizer] = AdamW

    def __post_init__(self) -> None:
        check("dtype", self.dtype, FloatDtype)
        if not issubclass(self.optimizer, NarrowOptimizer):
            raise TypeError(f"optimizer must be a class of narrowgauge.optim, got {self.optimizer.__name__}")
        weight_storage(self.weights)

    @property
    def has_strict_arithmetic(self) -> bool:
        """Whether `arithmetic="strict"` is possible: everything stored is words of a float format."""
        storages = slot_storages(self.optimizer.rule, {"states": self.states}).values()
        return weight_storage(self.weights).rounded and all(storage.rounded for storage in storages)

    def byte_breakdown(self, block_size: int = 256) -> dict[str, float]:
        """Bytes a parameter by what they hold: weights, gradients, and optimizer states with low words.

        Of a matrix with `block_size` rows and columns: only `factored` states depend on the shape.

        Source: Collage, Table 2.
        """
        added = weight_storage(self.weights).bytes_added(self.dtype)
        moments = slot_storages(self.optimizer.rule, {"states": self.states}).values()
        matrix = block_size, block_size
        return {
            "weights": float(self.dtype.itemsize),
            "gradients": float(self.dtype.itemsize),
            "states": added + sum(storage.nbytes(matrix, block_size) for storage in moments) / block_size**2,
        }

    def bytes_per_parameter(self, block_size: int = 256) -> float:
        """Bytes that training keeps for each parameter: weight, gradient, states, low word or master copy."""
        return sum(self.byte_breakdown(block_size).values())

    def known(self, hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
        """The hyperparameters, of those that recipes share, that this one's optimizer has: Lion has no eps."""
        taken = inspect.signature(self.optimizer).parameters
        return {name: value for name, value in hyperparameters.items() if name in taken}

    @overload
    def apply(
        self, model: nn.Module, lr: float | None = ..., *, decay_all: bool = ..., around: None = ...,
        **optimizer_arguments: Any,
    ) -> NarrowOptimizer: ...  # fmt: skip

    @overload
    def apply(
        self, model: nn.Module, lr: float | None = ..., *, decay_all: bool = ..., around: Callable[..., Made],
        **optimizer_arguments: Any,
    ) -> Made: ...  # fmt: skip

    def apply(
        self,
        model: nn.Module,
        lr: float | None = None,
        *,
        decay_all: bool = False,
        around: Callable[..., Any] | None = None,
        **optimizer_arguments: Any,
    ) -> Any:
        """Cast the model in place and make its optimizer.

        Parameters and the buffers that a checkpoint holds are cast; buffers that are not saved (tables of
        positions, say) and complex ones stay as they are.

        Args:
            model: the model, with its parameters where they will be trained.
            lr: learning rate; the optimizer's default if None.
            decay_all: whether norms and biases decay too. They are a group of their own otherwise, with
                ``weight_decay=0.0``; which they are, `narrowgauge.optim.split_decay` says. Embeddings decay, and
                have the recipe's states.
            around: what makes the optimizer, of its class, the groups and its arguments, in place of the class:
                `narrowgauge.distributed.CPUOffload`.
            **optimizer_arguments: what else it takes; `weights` and `states` follow from the recipe.

        Raises:
            ValueError: for `weights` or `states`, and whatever the optimizer refuses.
        """
        for name in ("weights", "states"):
            if name in optimizer_arguments:
                raise ValueError(
                    f"{name} must be left out: recipe {self.name!r} sets it, got {optimizer_arguments[name]!r}"
                )
        options = optimizer_arguments if lr is None else {"lr": lr, **optimizer_arguments}
        # The named classes take more than their base.
        make: Callable[..., Any] = self.optimizer if around is None else partial(around, self.optimizer)
        if around is None:  # refuse wrong options before the model is changed
            probe = nn.Parameter(torch.zeros(1, 1, dtype=self.dtype))
            make([probe], weights=self.weights, states=self.states, **options)
        cast(model, self.dtype)
        return make(decay_groups(model, decay_all), weights=self.weights, states=self.states, **options)


def decay_groups(model: nn.Module, decay_all: bool) -> list[Any]:
    """A model's named parameters for an optimizer: all alike, or in a group without decay what should not."""
    if decay_all:
        return [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return parted(model, {})


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast a model's float parameters and saved float buffers in place.

    `Module.to` would round the tables that models compute once in fp32 and do not save: a rotary embedding's
    frequencies in bf16 are wrong by a tenth of a radian a hundred positions on.
    """
    with torch.no_grad():
        for module in model.modules():
            for p in module.parameters(recurse=False):
                if p.is_floating_point() and p.dtype != dtype:  # sharded ones must be left as they are
                    grad, p.grad = p.grad, None
                    p.data = p.data.to(dtype)
                    p.grad = None if grad is None else grad.to(dtype)
            for name, buffer in module.named_buffers(recurse=False):
                if (
                    buffer.is_floating_point()
                    and buffer.dtype != dtype
                    and name not in module._non_persistent_buffers_set
                ):
                    setattr(module, name, buffer.to(dtype))


_BF16 = torch.bfloat16
_MIXED = {"m": "log4", "v": "log8"}
_RECIPES = (
    Recipe("fp32", "everything in fp32", torch.float32),
    Recipe("bf16", "bf16 weights and states, nothing else", _BF16, "plain", "bf16", "A"),
    Recipe("collage-light", "bf16, weights as expansions of two words", _BF16, "expansion", "bf16", "B"),
    Recipe("collage-plus", "bf16, weights and second moment as expansions", _BF16, "expansion", "expansion", "C"),
    Recipe("master", "bf16 with fp32 master weights and fp32 states", _BF16, "master", "fp32", "D"),
    Recipe("fp32-states", "bf16 weights, fp32 states, no master weights", _BF16, "plain", "fp32", "D-MW"),
    Recipe("kahan", "bf16 with Kahan-summed weights, bf16 states", _BF16, "kahan", "bf16"),
    Recipe("stochastic", "bf16, weights rounded stochastically, bf16 states", _BF16, "stochastic", "bf16"),
    Recipe("split", "bf16 + int16 words (exact fp32 weights), fp32 states", _BF16, "split", "fp32"),
    Recipe("split8", "bf16 + int8 words (24-bit weights), fp32 states", _BF16, "split8", "fp32"),
    Recipe("adamw8bit", "fp32 weights, 8-bit states", torch.float32, "plain", "log8"),
    Recipe("adamw8bit-expansion", "bf16 weights as expansions, 8-bit states", _BF16, "expansion", "log8"),
    Recipe("adamw8bit-split", "bf16 + int16 words (exact fp32 weights), 8-bit states", _BF16, "split", "log8"),
    Recipe("adamw8bit-split8", "bf16 + int8 words (24-bit weights), 8-bit states", _BF16, "split8", "log8"),
    Recipe("adamw6bit-split8", "bf16 + int8 words, m in 4 bits, v in 8", _BF16, "split8", _MIXED),
    Recipe("adamw4bit-split8", "bf16 + int8 words, 4-bit states", _BF16, "split8", "log4"),
    Recipe("adamw8bit-dynamic", "fp32 weights, the paper's 8-bit states", torch.float32, "plain", "8bit"),
    Recipe("adamw8bit-dynamic-split8", "bf16 + int8 words, the paper's 8-bit states", _BF16, "split8", "8bit"),
    Recipe("stable-adamw", "everything in fp32, update clipping", torch.float32, optimizer=StableAdamW),
    Recipe("lion8bit", "fp32 weights, Lion with 8-bit states", torch.float32, "plain", "8bit", optimizer=Lion),
)  # fmt: skip


def names() -> tuple[str, ...]:
    """The names of all recipes."""
    return tuple(recipe.name for recipe in _RECIPES)


def get(name: str) -> Recipe:
    """A recipe by its name or the paper's letters.

    Raises:
        ValueError: for an unknown name; the message lists those that exist.
    """
    for recipe in _RECIPES:
        if name in (recipe.name, recipe.letters):
            return recipe
    known = ", ".join(f"{r.name} ({r.letters})" if r.letters else r.name for r in _RECIPES)
    raise ValueError(f"recipe must be one of {known}, got {name!r}")
