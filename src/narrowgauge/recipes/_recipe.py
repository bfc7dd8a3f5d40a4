"""Recipes: named precision strategies.

A recipe says in which format the model's weights and gradients are, which optimizer trains it (most often
AdamW) and how that keeps weights and states. Applying one takes two lines: get it, apply it to the model.

The letters A to D are the options of Collage's Table 2; `D-MW` keeps fp32 states but no master weights.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch import nn

from narrowgauge._arguments import FloatDtype, check, check_instance
from narrowgauge.optim import AdamW, Lion, NarrowOptimizer, StableAdamW
from narrowgauge.optim._groups import parted
from narrowgauge.optim._plan import slot_storages
from narrowgauge.recipes._cast import cast, compute_in_fp32, kept_layers
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
        settings: arguments of the optimizer that the recipe sets, such as ``{"lr": 3e-5}``; see `with_settings`.
    """

    name: str
    title: str
    dtype: torch.dtype
    weights: str = "plain"
    states: str | Mapping[str, str] = "fp32"
    letters: str | None = None
    optimizer: type[NarrowOptimizer] = AdamW
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check("dtype", self.dtype, FloatDtype)
        if not issubclass(self.optimizer, NarrowOptimizer):
            raise TypeError(f"optimizer must be a class of narrowgauge.optim, got {self.optimizer.__name__}")
        weight_storage(self.weights)
        for name in self.settings:
            if not self.takes(name):
                taken = [each for each in _arguments(self.optimizer) if self.takes(each)]
                raise ValueError(f"settings of recipe {self.name!r} must be among {', '.join(taken)}, got {name!r}")

    @property
    def label(self) -> str:
        """The name with its settings, as `parse` reads them: ``lion8bit@lr=3e-05,weight_decay=0``."""
        settings = ",".join(f"{name}={_written(value)}" for name, value in self.settings.items())
        return f"{self.name}@{settings}" if settings else self.name

    def with_settings(self, **settings: Any) -> Recipe:
        """The same recipe with arguments of its optimizer set: ``get("lion8bit").with_settings(lr=3e-5)``.

        Args:
            **settings: arguments of the optimizer, beside those that the recipe sets already and in their place.

        Raises:
            ValueError: for an argument that the optimizer does not have.
        """
        return replace(self, settings={**self.settings, **settings})

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

    def takes(self, name: str) -> bool:
        """Whether the optimizer has an argument of this name that the recipe does not need for itself."""
        return name in _arguments(self.optimizer) and name not in ("params", "weights", "states")

    def known(self, hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
        """The hyperparameters, of those that recipes share, that this one's optimizer has.

        Lion has no eps. ``betas`` are left out if the rule takes another number of them.
        """
        taken = _arguments(self.optimizer)
        known = {name: value for name, value in hyperparameters.items() if name in taken}
        if "betas" in known and len(known["betas"]) != self.optimizer.rule.betas:
            del known["betas"]
        return known

    @overload
    def apply(
        self, model: nn.Module, lr: float | None = ..., *, decay_all: bool = ...,
        no_decay: str | Iterable[str] = ..., keep_fp32: str | Iterable[str] = ..., around: None = ...,
        **optimizer_arguments: Any,
    ) -> NarrowOptimizer: ...  # fmt: skip

    @overload
    def apply(
        self, model: nn.Module, lr: float | None = ..., *, decay_all: bool = ...,
        no_decay: str | Iterable[str] = ..., keep_fp32: str | Iterable[str] = ..., around: Callable[..., Made],
        **optimizer_arguments: Any,
    ) -> Made: ...  # fmt: skip

    def apply(
        self,
        model: nn.Module,
        lr: float | None = None,
        *,
        decay_all: bool = False,
        no_decay: str | Iterable[str] = (),
        keep_fp32: str | Iterable[str] = (),
        around: Callable[..., Any] | None = None,
        **optimizer_arguments: Any,
    ) -> Any:
        """Cast the model in place and make its optimizer.

        Parameters are cast. Buffers keep their precision (running statistics, tables of positions), and so do the
        parameters of batch norms beside their statistics.

        Args:
            model: the model, with its parameters where they will be trained.
            lr: learning rate; the optimizer's default if None.
            decay_all: whether norms and biases decay too. They are a group of their own otherwise, with
                ``weight_decay=0.0``; which they are, `narrowgauge.optim.split_decay` says. Embeddings decay, and
                have the recipe's states.
            no_decay: names of further parameters that do not decay, or patterns such as ``"*.gamma"``.
            keep_fp32: parameters that stay in fp32, as names or patterns; ``"norms"`` is those of all norms. Their
                layers compute in fp32 and return the dtype that came in. The optimizer has them in groups of their
                own with ``weights="plain"``.
            around: what makes the optimizer, of its class, the groups and its arguments, in place of the class:
                `narrowgauge.distributed.CPUOffload`.
            **optimizer_arguments: what else it takes; `weights`, `states` and the recipe's `settings` follow from
                the recipe.

        Raises:
            ValueError: for what the recipe sets, a name in `no_decay` or `keep_fp32` that no parameter has, a
                `keep_fp32` of part of a layer or of an embedding, and whatever the optimizer refuses.
        """
        given = optimizer_arguments if lr is None else {"lr": lr, **optimizer_arguments}
        for name in ("weights", "states", *self.settings):
            if name in given:
                raise ValueError(f"{name} must be left out: recipe {self.name!r} sets it, got {given[name]!r}")
        groups, kept = decay_groups(model, decay_all, no_decay), kept_layers(model, keep_fp32)
        options = {**self.settings, **given}
        # The named classes take more than their base.
        make: Callable[..., Any] = self.optimizer if around is None else partial(around, self.optimizer)
        with warnings.catch_warnings():  # who takes a recipe with plain weights has chosen them by name
            warnings.filterwarnings("ignore", "weights='plain'", UserWarning)
            if around is None:  # refuse wrong options before the model is changed
                probe = nn.Parameter(torch.zeros(1, 1, dtype=self.dtype))
                make([probe], weights=self.weights, states=self.states, **options)
            cast(model, self.dtype, [p for own in kept.values() for p in own])
            if self.dtype.itemsize < torch.float32.itemsize:
                compute_in_fp32(kept)
            return make(self._stored(groups), weights=self.weights, states=self.states, **options)

    def _stored(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The groups, with fp32 parameters apart and plain where the recipe's weight storage does not take them."""
        wide = torch.float32 not in weight_storage(self.weights).dtypes
        found = []
        for group in groups:
            parts: dict[bool, list[Any]] = {False: [], True: []}
            for name, p in group["params"]:
                parts[wide and p.dtype == torch.float32].append((name, p))
            found += [{**group, "params": parts[False]}, {**group, "params": parts[True], "weights": "plain"}]
        return [group for group in found if group["params"]]


def decay_groups(model: nn.Module, decay_all: bool, no_decay: str | Iterable[str] = ()) -> list[dict[str, Any]]:
    """A model's named parameters for an optimizer: all alike, or in a group without decay what should not."""
    if decay_all:
        if no_decay:
            raise ValueError("no_decay must be left out with decay_all=True, by which all parameters decay")
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return [{"params": trained}] if trained else []
    return parted(model, {}, no_decay=no_decay)


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


# Those of `register`, by name.
_REGISTERED: dict[str, Recipe] = {}


def _all() -> Iterator[Recipe]:
    yield from _RECIPES
    yield from _REGISTERED.values()


def names() -> tuple[str, ...]:
    """The names of all recipes, those of `register` last."""
    return tuple(recipe.name for recipe in _all())


def get(name: str) -> Recipe:
    """A recipe by its name or the paper's letters.

    Raises:
        ValueError: for an unknown name; the message lists those that exist, and the nearest.
    """
    for recipe in _all():
        if name in (recipe.name, recipe.letters):
            return recipe
    known = ", ".join(f"{r.name} ({r.letters})" if r.letters else r.name for r in _all())
    near = difflib.get_close_matches(str(name), names(), 1)
    hint = f"; the nearest is {near[0]!r}" if near else ""
    raise ValueError(f"recipe must be one of {known}, got {name!r}{hint}")


def register(recipe: Recipe) -> None:
    """Make a recipe known by its name in this process, to `get` and to whatever takes names of recipes.

    Raises:
        ValueError: for a name that another recipe has, or that `parse` could not read.
    """
    check_instance("recipe", recipe, Recipe)
    if not recipe.name or set(recipe.name) & set("@,= "):
        raise ValueError(f"name of a recipe must be a word without '@', ',' and '=', got {recipe.name!r}")
    taken = {word: known for known in _all() for word in (known.name, known.letters) if word}
    for word in (recipe.name, recipe.letters):
        if word in taken and taken[word] != recipe:
            raise ValueError(f"name of a recipe must be new, got {word!r}, which another recipe has")
    if recipe.name not in taken:
        _REGISTERED[recipe.name] = recipe


def parse(text: str) -> Recipe:
    """A recipe by its name, with settings after an ``@``: ``lion8bit@lr=3e-5,weight_decay=0``.

    Values are numbers, ``true`` and ``false``, words, and tuples of numbers with slashes: ``betas=0.9/0.99``.

    Raises:
        ValueError: for an unknown name, and settings that cannot be read or that the optimizer does not have.
    """
    name, at, rest = text.partition("@")
    recipe = get(name.strip())
    settings = {}
    for part in rest.split(",") if at else ():
        key, _, value = (word.strip() for word in part.partition("="))
        if not key or not value:
            raise ValueError(f"a recipe with settings must be NAME@KEY=VALUE,KEY=VALUE, got {text!r}")
        settings[key] = _read(value)
    return recipe.with_settings(**settings)


def _read(text: str) -> Any:
    """A value of a setting."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    parts = [_read(part) for part in text.split("/")]
    return tuple(parts) if len(parts) > 1 and not any(isinstance(part, str) for part in parts) else text


def _written(value: Any) -> str:
    """A value as `_read` reads it."""
    if isinstance(value, tuple | list):
        return "/".join(map(_written, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _arguments(optimizer: type) -> list[str]:
    """The names of an optimizer's arguments; those of its bases too where it passes the rest on to them."""
    found: dict[str, None] = {}
    for kind in optimizer.__mro__:
        if "__init__" not in vars(kind):
            continue
        parameters = inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        found |= dict.fromkeys(p.name for p in named if p.name != "self")
        if not any(p.kind == p.VAR_KEYWORD for p in parameters):
            break
    return list(found)
