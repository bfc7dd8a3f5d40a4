"""The named recipes, those of files among them.

The letters A to D are the options of Collage's Table 2; `D-MW` keeps fp32 states but no master weights.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from typing import Any

import torch

from narrowgauge._arguments import check_instance
from narrowgauge.optim import Lion, StableAdamW
from narrowgauge.recipes._fitted import load
from narrowgauge.recipes._recipe import Recipe

_FILE = ".toml"  # how the path of a fitted recipe ends
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
    Recipe("adamw8bit-split4", "bf16 + 4-bit words, 8-bit states", _BF16, "split4", "log8"),
    Recipe("adamw6bit-split8", "bf16 + int8 words, m in 4 bits, v in 8", _BF16, "split8", _MIXED),
    Recipe("adamw6bit-split4", "bf16 + 4-bit words, m in 4 bits, v in 8", _BF16, "split4", _MIXED),
    Recipe("adamw6bit-stochastic", "bf16 rounded stochastically, m in 4 bits, v in 8", _BF16, "stochastic", _MIXED),
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
    """A recipe by its name or the paper's letters, or a fitted one by the path of its file, which ends in ".toml".

    Raises:
        ValueError: for an unknown name; the message lists those that exist, and the nearest. For a file that
            `load` refuses.
    """
    for recipe in _all():
        if name in (recipe.name, recipe.letters):
            return recipe
    if str(name).endswith(_FILE):
        return load(name)
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
    """A recipe by its name or file, with settings after an ``@``: ``lion8bit@lr=3e-5,weight_decay=0``.

    Values are numbers, ``true`` and ``false``, words, and tuples of numbers with slashes: ``betas=0.9/0.99``.

    Raises:
        ValueError: for an unknown name, and settings that cannot be read or that the optimizer does not have.
    """
    path, in_file, rest = text.rpartition(f"{_FILE}@")  # an @ before it is the path's
    name, at = path + _FILE, in_file
    if not in_file:
        name, at, rest = (text, "", "") if text.strip().endswith(_FILE) else text.partition("@")
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
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    parts = [_read(part) for part in text.split("/")] if "/" in text else [text]
    return text if any(isinstance(part, str) for part in parts) else tuple(parts)
