"""A fitted recipe beside uniform ones: what is compared.

**Uniform** rows keep every parameter alike: the library's recipes, and combinations of its storages that have no
name. **Fitted** rows come from one call of `narrowgauge.recipes.fit`, whose measurement is used for every limit.
**Random** rows are choices without a measurement. For each group of like parameters a way to keep it is drawn from
the same frontier, such that the bytes of the model are those of a fitted row.

A fitted or random row is stored as the number of a way on each group's frontier; `recipe_of` makes the recipe.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from narrowgauge import recipes
from narrowgauge.recipes import Recipe
from narrowgauge.recipes._choices import Choice, Kept
from narrowgauge.recipes._fit._choose import Candidates
from narrowgauge.recipes._fitted import FittedRecipe

REFERENCE, CONTROL = "D", "split"  # fp32 master weights; the same numbers in other words
TOLERANCES = (0.002, 0.0005, 0.008)  # nats; the first is the default of `fit`
BYTES = (5.5, 6.0, 6.25, 6.5, 6.75, 7.03)
DRAWN = (6.0, 6.5)  # bytes that random choices are drawn for
WITHIN = 0.02  # bytes a parameter that a random choice may take more or less
_BF16 = torch.bfloat16
_MIXED = {"m": "log4", "v": "log8"}


def _made(weights: str, states: str | dict[str, str], title: str) -> Recipe:
    short = states if isinstance(states, str) else "/".join(states.values())
    return Recipe(f"{weights} + {short}", title, _BF16, weights, states)


def uniform() -> dict[str, Recipe]:
    """The uniform rows by name, the reference first, then the more informative ones first."""
    named = (
        "D", "split", "adamw8bit-split8", "adamw6bit-split8", "adamw4bit-split8", "split8", "adamw8bit-split",
        "adamw8bit-dynamic-split8", "kahan", "C", "stochastic", "A",
    )  # fmt: skip
    stochastic = "bf16 rounded stochastically, "
    found = {name: recipes.get(name) for name in named[:5]}
    found |= {
        recipe.name: recipe
        for recipe in (
            _made("stochastic", "log8", stochastic + "8-bit states"),
            _made("stochastic", _MIXED, stochastic + "m in 4 bits, v in 8"),
            _made("stochastic", "log4", stochastic + "4-bit states"),
            _made("split8", "4bit", "bf16 + int8 words, the paper's codes in 4 bits"),
        )
    }
    return found | {name: recipes.get(name) for name in named[5:]}


def by_tolerance(tolerance: float) -> str:
    """The name of the row that is fitted by a tolerance."""
    return f"fitted, tolerance {tolerance:g}"


def by_bytes(each: float) -> str:
    """The name of the row that is fitted to so many bytes a parameter."""
    return f"fitted, {each:g} bytes"


def drawn(each: float, number: int) -> str:
    """The name of a random choice of as many bytes as a fitted row has."""
    return f"random {number}, {each:g} bytes"


def fitted_names() -> list[str]:
    """The fitted rows."""
    return [*map(by_tolerance, TOLERANCES), *map(by_bytes, BYTES)]


def random_names(count: int) -> list[str]:
    """So many random rows for each of `DRAWN`."""
    return [drawn(each, number) for number in range(1, count + 1) for each in DRAWN]


def draw_choice(groups: Sequence[Candidates], each: float, seed: int) -> dict[str, int] | None:
    """A random way for each group, with so many bytes a parameter over all groups, within `WITHIN`.

    A way is drawn for every group. Then a way is drawn again for groups at random, and taken if it brings the bytes
    nearer. None if no choice was found.
    """
    generator = random.Random(seed)
    elements = sum(one.elements for one in groups)

    def off(chosen: Mapping[str, int]) -> float:
        taken = sum(one.elements * one.frontier[chosen[one.name]].bytes for one in groups)
        return abs(taken / elements - each)

    for _ in range(20):
        chosen = {one.name: generator.randrange(len(one.frontier)) for one in groups}
        for _ in range(2000):
            if off(chosen) <= WITHIN:
                return chosen
            one = generator.choice(groups)
            other = chosen | {one.name: generator.randrange(len(one.frontier))}
            chosen = other if off(other) < off(chosen) else chosen
    return None


def plain_groups(groups: Sequence[Candidates], patterns: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Groups and their frontiers, for a results file."""
    return [
        {
            "parameters": list(names), "tensors": len(one.names), "elements": one.elements,
            "ways": [[kept.weights, dict(kept.states), kept.bytes, kept.noise, kept.loss] for kept in one.frontier],
        }
        for one, names in zip(groups, patterns, strict=True)
    ]  # fmt: skip


def recipe_of(groups: Sequence[Mapping[str, Any]], chosen: Sequence[int], name: str) -> FittedRecipe:
    """The recipe of a choice among groups of a results file."""
    choices = tuple(
        Choice(
            tuple(one["parameters"]), one["tensors"], one["elements"], Kept(*one["ways"][place]), None, None, name
        )
        for one, place in zip(groups, chosen, strict=True)
    )
    most = max(choices, key=lambda choice: choice.elements).chosen
    return FittedRecipe("fitted", name, _BF16, most.weights, most.states, choices=choices)
