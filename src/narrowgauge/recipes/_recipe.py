"""Recipes: named precision strategies.

A recipe says in which format the model's weights and gradients are, which optimizer trains it (most often
AdamW) and how that keeps weights and states. Applying one takes two lines: get it, apply it to the model.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch import nn

from narrowgauge._arguments import FloatDtype, check
from narrowgauge._module_names import clean_name
from narrowgauge.linear import LinearPlan, named_plan, swap_linears, to_float8_weights
from narrowgauge.linear._float8_weights import to_plain_weights, weight_formats
from narrowgauge.linear._module import PlannedModule
from narrowgauge.linear._swap import ADAPTERS, KEEP, former_class, is_held, output_heads, restore
from narrowgauge.optim import AdamW, NarrowOptimizer
from narrowgauge.optim._changes import KEPT
from narrowgauge.optim._groups import parted
from narrowgauge.optim._plan import slot_storages
from narrowgauge.recipes._cast import cast, check_cast, compute_in_fp32, kept_layers, warn_of_statistics
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
        linear: the plan of the model's linear layers, or its name such as ``"TENSORWISE_FP8"``; None for none. With
            ``weights="fp8split8"`` it is one that multiplies weights in e4m3: their weights are kept so, and all
            other parameters as ``"auto"`` says.
    """

    name: str
    title: str
    dtype: torch.dtype
    weights: str = "plain"
    states: str | Mapping[str, str] = "fp32"
    letters: str | None = None
    optimizer: type[NarrowOptimizer] = AdamW
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    linear: LinearPlan | str | None = None

    def __post_init__(self) -> None:
        check("dtype", self.dtype, FloatDtype)
        if not issubclass(self.optimizer, NarrowOptimizer):
            raise TypeError(f"optimizer must be a class of narrowgauge.optim, got {self.optimizer.__name__}")
        if isinstance(self.linear, str):
            object.__setattr__(self, "linear", named_plan(self.linear))
        if weight_storage(self.weights).float8 and self.float8_plan is None:
            got = "None" if self.linear is None else repr(self.linear.title)
            raise ValueError(
                f"linear must be a plan that multiplies weights in e4m3 for weights={self.weights!r}, got {got}"
            )
        if self.dtype not in (dtypes := weight_storage(self.weights).dtypes):
            words = " or ".join(map(str, dtypes))
            raise ValueError(f"dtype must be {words} for weights={self.weights!r}, got {self.dtype}")
        for name in self.settings:
            if not self.takes(name):
                taken = [each for each in inspect.signature(self.optimizer).parameters if self.takes(each)]
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
        return all(
            weight_storage(weights).rounded
            and all(one.rounded for one in slot_storages(self.optimizer.rule, {"states": states}).values())
            for weights, states, _ in self.ways()
        )

    def ways(self) -> list[tuple[str, str | Mapping[str, str], float]]:
        """How parameters are kept: weight storage, storages of the moments, and the share of all numbers."""
        return [(self.weights, self.states, 1.0)]

    @property
    def layer_plans(self) -> tuple[LinearPlan, ...]:
        """The plans of linear layers that the recipe has; if any, no other plan goes with it."""
        return (self.linear,) if isinstance(self.linear, LinearPlan) else ()

    @property
    def float8_plan(self) -> LinearPlan | None:
        """The plan of the layers whose weights are kept as float8 codes; None if none are."""
        plan = self.linear if isinstance(self.linear, LinearPlan) else None
        reads = plan is not None and weight_formats(plan) == ("e4m3",)
        return plan if reads and weight_storage(self.weights).float8 else None

    def swap_layers(self, model: nn.Module) -> None:
        """Let linear layers compute by the recipe's plans, in place; most recipes have none.

        Layers lose the plans that an earlier recipe gave them. Weights that this one keeps as float8 codes become
        such here.

        `apply` does that too. A model that is sharded by ``fully_shard`` must be swapped before it is sharded.

        Raises:
            ValueError: for a layer that the model does not have, that cannot have a plan (see `swap_linears`), or
                that cannot lose one; no plan is changed then.
        """
        planned = {name: layer for name, layer in model.named_modules() if isinstance(layer, PlannedModule)}
        gone: dict[PlannedModule, tuple[type[PlannedModule], LinearPlan]] = {}
        for name, layer in planned.items():
            if not layer.of_recipe or layer.plan == self._plan_of(clean_name(name)):
                continue
            if is_held(layer) or former_class(layer) is None:
                raise ValueError(
                    f"model must have layers that can lose the plan of the recipe before, got {name!r}: first undo "
                    "what was applied to it since, such as hold_activations or fully_shard"
                )
            gone[layer] = type(layer), layer.plan
        kept = set(planned.values()) - gone.keys()
        for layer in gone:
            restore(layer)
        try:
            self._give_plans(model)
            if self.float8_plan is None:
                to_plain_weights(model, self.dtype)
        except BaseException:
            for layer in _planned(model) - kept:
                restore(layer)
            for layer, (kind, plan) in gone.items():
                layer.__class__ = kind
                layer.set_plan(plan)
                layer.of_recipe = True
            raise
        for layer in _planned(model) - kept:
            layer.of_recipe = True

    def _plan_of(self, name: str) -> LinearPlan | None:
        """The plan that a layer of this name has, if it can have one."""
        return self.linear if isinstance(self.linear, LinearPlan) else None

    def _give_plans(self, model: nn.Module) -> None:
        """Give the recipe's plans to layers without one."""
        if isinstance(self.linear, LinearPlan):
            swap_linears(model, self.linear, keep=(*(output_heads(model) or KEEP), ADAPTERS))
            if not any(isinstance(module, PlannedModule) for module in model.modules()):
                raise ValueError(f"model must have linear layers for the plan {self.linear.title}, got none")
        if self.float8_plan is not None:
            to_float8_weights(model)

    @property
    def low_bytes(self) -> float:
        """Bytes a parameter of low words and master copies."""
        return sum(share * weight_storage(weights).bytes_added(self.dtype) for weights, _, share in self.ways())

    def byte_breakdown(self, block_size: int = 256) -> dict[str, float]:
        """Bytes a parameter by what they hold: weights, gradients, and optimizer states with low words.

        Of a matrix with `block_size` rows and columns: only `factored` states depend on the shape.

        Source: Collage, Table 2.
        """
        moments, matrix = 0.0, (block_size, block_size)
        for _, states, share in self.ways():
            storages = slot_storages(self.optimizer.rule, {"states": states}).values()
            moments += share * sum(storage.nbytes(matrix, block_size) for storage in storages) / block_size**2
        return {
            "weights": float(self.dtype.itemsize),
            "gradients": float(self.dtype.itemsize),
            "states": self.low_bytes + moments,
        }

    def bytes_per_parameter(self, block_size: int = 256) -> float:
        """Bytes that training keeps for each parameter: weight, gradient, states, low word or master copy."""
        return sum(self.byte_breakdown(block_size).values())

    def takes(self, name: str) -> bool:
        """Whether the optimizer has an argument of this name that the recipe does not need for itself."""
        return name in inspect.signature(self.optimizer).parameters and name not in ("params", "weights", "states")

    def known(self, hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
        """The hyperparameters, of those that recipes share, that this one's optimizer has.

        Lion has no eps. ``betas`` are left out if the rule takes another number of them.
        """
        taken = inspect.signature(self.optimizer).parameters
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
        parameters of batch norms beside their statistics. A warning names running statistics that are narrow
        already.

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
            ValueError: for what the recipe sets, a model that a fitted recipe does not fit, a name in `no_decay` or
                `keep_fp32` that no parameter has, a `keep_fp32` of part of a layer or of an embedding, and whatever
                the optimizer refuses.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        options = self._options(lr, optimizer_arguments)
        groups = self._grouped(model, decay_groups(model, decay_all, no_decay))
        kept = kept_layers(model, keep_fp32)
        if around is None:  # refuse wrong options before the model is changed
            self.check_arguments(lr, **optimizer_arguments)
        wide = [p for own in kept.values() for p in own]
        check_cast(model, self.dtype, wide, [each for group in groups for each in group["params"]])
        narrow = self.dtype.itemsize < torch.float32.itemsize  # a wide recipe widens statistics too
        if narrow:
            warn_of_statistics(model)
        self.swap_layers(model)
        cast(model, self.dtype, wide)
        compute_in_fp32(model, kept if narrow else ())
        return self._make(around, self._stored(groups), self.weights, self.states, options)

    def check_arguments(self, lr: float | None = None, **optimizer_arguments: Any) -> None:
        """Refuse what `apply` would refuse of the optimizer's arguments, without a model."""
        options = self._options(lr, optimizer_arguments)
        for weights, states, _ in self.ways():
            probe = nn.Parameter(torch.zeros(1, 1, dtype=self.dtype))
            self._make(None, [probe], weights, states, options)

    def _options(self, lr: float | None, given: Mapping[str, Any]) -> dict[str, Any]:
        """The optimizer's arguments: those that are given and the recipe's, which must not meet."""
        given = given if lr is None else {"lr": lr, **given}
        for name in ("weights", "states", *self.settings):
            if name in given:
                raise ValueError(f"{name} must be left out: recipe {self.name!r} sets it, got {given[name]!r}")
        return {**self.settings, **given}

    def _make(
        self, around: Callable[..., Any] | None, params: list[Any], weights: str,
        states: str | Mapping[str, str], options: Mapping[str, Any],
    ) -> Any:  # fmt: skip
        if weight_storage(weights).float8:  # for float8 weights; other parameters have their own
            weights = "auto"
        # The named classes take more than their base.
        make: Callable[..., Any] = self.optimizer if around is None else partial(around, self.optimizer)
        with warnings.catch_warnings():  # who takes a recipe with plain weights has chosen them by name
            warnings.filterwarnings("ignore", "weights='plain'", UserWarning)
            return make(params, weights=weights, states=states, **options)

    def _grouped(self, model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The groups by decay, with how single parameters are kept where the recipe has several ways."""
        return groups

    def _stored(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The groups, with fp32 parameters apart and plain where their weight storage does not take them."""
        found = []
        for group in groups:
            wide = torch.float32 not in weight_storage(group.get("weights", self.weights)).dtypes
            parts: dict[bool, list[Any]] = {False: [], True: []}
            for name, p in group["params"]:
                parts[wide and p.dtype == torch.float32].append((name, p))
            found += [{**group, "params": parts[False]}, {**group, "params": parts[True], "weights": "plain"}]
        found = [group for group in found if group["params"]]
        for group in found:
            if (own := group.get(KEPT)) is not None:
                group[KEPT] = {name: _kept(p.dtype, own[name]) for name, p in group["params"] if name in own}
        return found


def _planned(model: nn.Module) -> set[PlannedModule]:
    return {module for module in model.modules() if isinstance(module, PlannedModule)}


def _kept(dtype: torch.dtype, own: Mapping[str, str]) -> dict[str, str]:
    """How a parameter is kept: plain where its weight storage does not take its dtype, as fp32 beside bf16."""
    fits = dtype in weight_storage(own.get("weights", "plain")).dtypes
    return {**own} if fits else {**own, "weights": "plain"}


def decay_groups(model: nn.Module, decay_all: bool, no_decay: str | Iterable[str] = ()) -> list[dict[str, Any]]:
    """A model's named parameters for an optimizer: all alike, or in a group without decay what should not."""
    if decay_all:
        if no_decay:
            raise ValueError("no_decay must be left out with decay_all=True, by which all parameters decay")
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return [{"params": trained}] if trained else []
    return parted(model, {}, no_decay=no_decay)


def _written(value: Any) -> str:
    """A value as `parse` reads it."""
    if isinstance(value, tuple | list):
        return "/".join(map(_written, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
