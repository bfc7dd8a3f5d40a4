"""Fitted recipes: each group of like parameters has storages of its own, and each linear layer a plan of its own.

`narrowgauge.recipes.fit` measures a model and makes one. Its choices are values that a person can read: what was
chosen and why, and what the next narrower and the next wider choice would have cost. `FittedRecipe.save` writes
them to a TOML file, from which `load` makes the same recipe again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import nn

from narrowgauge._arguments import Size, check
from narrowgauge._files import write_whole
from narrowgauge._text import warn
from narrowgauge.linear import LinearPlan
from narrowgauge.linear._swap import swap_named
from narrowgauge.optim._changes import KEPT
from narrowgauge.optim._groups import named
from narrowgauge.optim._plan import REASON, slot_storages
from narrowgauge.recipes._bill import Bill
from narrowgauge.recipes._choices import Choice, Computed, Kept, LayerChoice
from narrowgauge.recipes._file import read, text_of
from narrowgauge.recipes._recipe import Recipe
from narrowgauge.storage import weight_storage

__all__ = ["Choice", "Computed", "FittedRecipe", "Kept", "LayerChoice", "load"]


@dataclass(frozen=True)
class FittedRecipe(Recipe):
    """A recipe with choices for groups of parameters and layers.

    `weights` and `states` are those of the choice with the most elements. Parameters that are added to the
    optimizer later have these.

    Attributes:
        choices: of parameters; each parameter of the model is in one. If several name it, the first counts.
        layers: of linear layers; those that no choice names compute in the recipe's dtype.
        facts: what it was fitted for, as plain values: ``parameters``, ``lr``, ``steps``, ``schedule``,
            ``final_lr``, ``limit`` (such as ``"at most 6.5 bytes a parameter"``), ``noise``, ``bytes``,
            ``tolerance``, ...

    Raises:
        ValueError: without choices, and for a storage that does not exist or does not go with dtype or optimizer.
    """

    choices: tuple[Choice, ...] = ()
    layers: tuple[LayerChoice, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.choices:
            raise ValueError("choices must be one or more, got none")
        if self.linear is not None:
            raise ValueError(f"linear must be None beside choices, which have layers, got {self.linear!r}")
        for number, choice in enumerate(self.choices):
            for name in ("tensors", "elements"):
                check(f"choices[{number}].{name}", getattr(choice, name), Size)
            for name in ("chosen", "narrower", "wider"):
                self._check(f"choices[{number}].{name}", getattr(choice, name))
        most = max(self.choices, key=lambda choice: choice.elements).chosen
        object.__setattr__(self, "weights", most.weights)
        object.__setattr__(self, "states", _states(most))
        super().__post_init__()

    def __repr__(self) -> str:
        size, count = self.bill().bytes, len(self.choices)
        return f"FittedRecipe({self.name!r}, {self.title!r}, {size:.2f} bytes a parameter, choices: {count})"

    def _check(self, where: str, kept: Kept | None) -> None:
        """Refuse storages that the recipe's dtype or optimizer does not have."""
        if kept is None:
            return
        try:
            dtypes = weight_storage(kept.weights).dtypes
            slot_storages(self.optimizer.rule, {"states": kept.states})
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if self.dtype not in dtypes:
            raise ValueError(f"{where}: weights must be a storage for {self.dtype}, got {kept.weights!r}")

    def ways(self) -> list[tuple[str, str | Mapping[str, str], float]]:
        elements = sum(choice.elements for choice in self.choices)
        return [
            (choice.chosen.weights, _states(choice.chosen), choice.elements / elements) for choice in self.choices
        ]

    @property
    def layer_plans(self) -> tuple[LinearPlan, ...]:
        return tuple(layer.chosen.plan for layer in self.layers)

    def _plan_of(self, name: str) -> LinearPlan | None:
        chosen = (layer.chosen.plan for layer in self.layers if any(fnmatchcase(name, p) for p in layer.layers))
        return next(chosen, None)

    def _give_plans(self, model: nn.Module) -> None:
        try:
            swap_named(model, [(layer.layers, layer.chosen.plan) for layer in self.layers])
        except ValueError as error:
            raise ValueError(f"{error}; {self._fitted_for()}") from None

    def _grouped(self, model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same groups, because a step with more groups is slower; each parameter has its choice's storages."""
        chosen: dict[int, dict[str, str]] = {}  # by the id of a parameter, its own storages
        try:
            for choice in self.choices:
                own = self._own(choice)
                chosen = dict.fromkeys(named("choices", model, choice.parameters), own) | chosen
        except ValueError as error:
            raise ValueError(f"{error}; {self._fitted_for()}") from None
        trained = [each for group in groups for each in group["params"]]
        for name, p in trained:
            if id(p) not in chosen and p.numel():
                raise ValueError(
                    f"model must have parameters that some choice of the recipe names, got {name!r}; "
                    f"{self._fitted_for()}"
                )
        count = sum(p.numel() for _, p in trained)
        if count != self.facts.get("parameters", count):
            warn(f"model has {count} parameters, and {self._fitted_for()}")
        return [
            {**group, KEPT: {name: chosen[id(p)] for name, p in group["params"] if id(p) in chosen}}
            for group in groups
        ]

    def _own(self, choice: Choice) -> dict[str, str]:
        """The storages of a choice's parameters where they differ from the recipe's, and the reason."""
        kept = choice.chosen
        if (kept.weights, _states(kept)) == (self.weights, self.states):
            return {REASON: choice.reason}
        return {"weights": kept.weights, **kept.states, REASON: choice.reason}

    def _fitted_for(self) -> str:
        """What the recipe was fitted for and what to do, as the end of an error or a warning."""
        model, count = self.facts.get("model", "a model"), self.facts.get("parameters")
        of = model if count is None else f"{model} of {count} parameters"
        return f"recipe {self.name!r} was fitted for {of}: fit again for this model"

    def bill(self) -> Bill:
        """What each choice and its neighbors cost, and bytes in all beside uniform recipes; prints as tables."""
        return Bill(self, self.choices, self.layers, self.facts)

    def text(self) -> str:
        """The recipe as TOML, from which `load` makes the same one."""
        return text_of(self, self.choices, self.layers, self.facts)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the recipe to a file; one that exists is replaced in one step.

        Args:
            path: of the file. It ends in ".toml", by which commands tell a file from a name. Its folder is made.

        Returns:
            The path.

        Raises:
            ValueError: for another ending, an optimizer that is not of `narrowgauge.optim`, and for settings and
                facts that are not plain values.
        """
        path = Path(path)
        if path.suffix != ".toml":
            raise ValueError(f"path must end in .toml, got {str(path)!r}")
        written = self.text().encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, written)
        return path


def load(path: str | os.PathLike[str]) -> FittedRecipe:
    """A fitted recipe from the file that `FittedRecipe.save` wrote.

    Raises:
        ValueError: for a file that cannot be read, and for one with a missing, unknown or wrong key, by its name.
    """
    values = read(Path(path))
    try:
        return FittedRecipe(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _states(kept: Kept) -> str | dict[str, str]:
    """The storages of moments; one name if all have the same, because a step compares that in less time."""
    names = set(kept.states.values())
    # As one name "expansion" means another storage for some moments.
    return names.pop() if len(names) == 1 and "expansion" not in names else dict(kept.states)
