"""Collage's precision strategies, and those beside them: what `collage_training.py` trains.

Rows come in tiers. `PAPER` are the rows of the paper's tables; `BESIDE` are other ways to keep low words, and
8-bit states with and without them; `EXTRA` are trained at the first beta2 alone: the paper's own arithmetic, in
which every operation is rounded, and everything in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from narrowgauge import recipes
from narrowgauge.optim import NarrowOptimizer
from narrowgauge.recipes import Recipe

PAPER, BESIDE, EXTRA = range(3)
REFERENCE = "D"


@dataclass(frozen=True)
class Row:
    """A precision strategy.

    Attributes:
        name: in results, tables and pictures; the paper's letters where it has some.
        recipe: format, weights and states.
        tier: see the module.
        close: whether it is so near to D that one seed does not tell them apart.
        arithmetic: ``"fp32"`` rounds what is stored, ``"strict"`` every operation, as Collage's Algorithm 2 has it.
    """

    name: str
    recipe: Recipe
    tier: int
    close: bool = False
    arithmetic: str = "fp32"

    @property
    def title(self) -> str:
        """What is kept, in a line."""
        return self.recipe.title + (", every operation rounded" if self.arithmetic == "strict" else "")

    def optimizer(self, model: nn.Module, options: dict[str, Any]) -> NarrowOptimizer:
        """Cast the model, and make its optimizer."""
        return self.recipe.apply(model, decay_all=True, arithmetic=self.arithmetic, **self.recipe.known(options))


def _named(name: str, tier: int, close: bool = False) -> Row:
    recipe = recipes.get(name)
    return Row(recipe.letters or recipe.name, recipe, tier, close)


def _eight_bit(weights: str, title: str, close: bool = False) -> Row:
    name = f"{weights} + 8 bits"
    recipe = Recipe(name, title, torch.bfloat16, weights, "log8")
    return Row(name, recipe, BESIDE, close)


def _strict(letter: str) -> Row:
    recipe = recipes.get(letter)
    return Row(f"{recipe.letters or recipe.name} strict", recipe, EXTRA, arithmetic="strict")


ROWS = (
    _named("D", PAPER, True),
    _named("A", PAPER),
    _named("B", PAPER, True),
    _named("C", PAPER, True),
    _named("D-MW", PAPER),
    _named("kahan", BESIDE),
    _named("stochastic", BESIDE, True),
    _named("split", BESIDE, True),
    _named("split8", BESIDE, True),
    _eight_bit("plain", "bf16 weights alone, 8-bit states"),
    _eight_bit("stochastic", "bf16, weights rounded stochastically, 8-bit states", True),
    _named("adamw8bit-expansion", BESIDE),
    _named("adamw8bit-split8", BESIDE, True),
    _named("adamw8bit-dynamic-split8", BESIDE),
    *map(_strict, ("A", "B", "C", "kahan")),
    _named("fp32", EXTRA),
)


def row(name: str) -> Row:
    """A row by its name."""
    return next(found for found in ROWS if found.name == name)
