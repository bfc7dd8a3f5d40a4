"""Collage's precision strategies, and those beside them: what `collage_training` trains.

Rows come in tiers. `PAPER` are the rows of the paper's tables, with every seed; `BESIDE` are other ways to keep
low words, and 8-bit states with and without them, a seed less; `EXTRA` are trained once, at the first beta2: the
paper's own arithmetic, in which every operation is rounded, and everything in fp32.
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
    """A precision strategy."""

    name: str  # in results, tables and pictures; the paper's letters where it has some
    recipe: Recipe  # format, weights and states
    tier: int  # see the module
    # ``"fp32"`` rounds what is stored, ``"strict"`` every operation, as Collage's Algorithm 2 has it
    arithmetic: str = "fp32"

    @property
    def title(self) -> str:
        """What is kept, in a line."""
        return self.recipe.title + (", every operation rounded" if self.arithmetic == "strict" else "")

    def optimizer(self, model: nn.Module, options: dict[str, Any]) -> NarrowOptimizer:
        """Cast the model, and make its optimizer."""
        return self.recipe.apply(model, decay_all=True, arithmetic=self.arithmetic, **self.recipe.known(options))


def _named(name: str, tier: int) -> Row:
    recipe = recipes.get(name)
    return Row(recipe.letters or recipe.name, recipe, tier)


def _eight_bit(weights: str, title: str) -> Row:
    name = f"{weights} + 8 bits"
    recipe = Recipe(name, title, torch.bfloat16, weights, "log8")
    return Row(name, recipe, BESIDE)


def _strict(letter: str) -> Row:
    recipe = recipes.get(letter)
    return Row(f"{recipe.letters or recipe.name} strict", recipe, EXTRA, arithmetic="strict")


ROWS = (
    _named("D", PAPER),
    _named("A", PAPER),
    _named("B", PAPER),
    _named("C", PAPER),
    _named("D-MW", PAPER),
    _named("kahan", BESIDE),
    _named("stochastic", BESIDE),
    _named("split", BESIDE),
    _named("split8", BESIDE),
    _eight_bit("plain", "bf16 weights alone, 8-bit states"),
    _eight_bit("stochastic", "bf16, weights rounded stochastically, 8-bit states"),
    _named("adamw8bit-expansion", BESIDE),
    _named("adamw8bit-split8", BESIDE),
    _named("adamw8bit-dynamic-split8", BESIDE),
    *map(_strict, ("A", "B", "C", "kahan")),
    _named("fp32", EXTRA),
)


def row(name: str) -> Row:
    """A row by its name."""
    return next(found for found in ROWS if found.name == name)
