"""Named precision strategies, and the memory that a training takes under one.

`get` gives a recipe by name; it casts a model and makes its optimizer in one call. `load` gives a fitted recipe,
which keeps each group of parameters in its own way, from its file; `fit` measures a model and makes one. `Adapt`
widens a storage in the running optimizer where it loses too much. `plan_memory` says what training takes on a GPU
before there is one: bytes by what they hold, the peak of a step, and what else would fit.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from narrowgauge.recipes._book import get, names, parse, register
from narrowgauge.recipes._cast import cast
from narrowgauge.recipes._fitted import FittedRecipe, load
from narrowgauge.recipes._recipe import Recipe
from narrowgauge.recipes._to_torch import to_torch

if TYPE_CHECKING:
    from narrowgauge.recipes._adapt import Adapt, Change
    from narrowgauge.recipes._fit import fit
    from narrowgauge.recipes._plan import MemoryPlan, plan_memory

__all__ = [
    "Adapt", "Change", "FittedRecipe", "MemoryPlan", "Recipe", "cast", "fit", "get", "load", "names", "parse",
    "plan_memory", "register", "to_torch",
]  # fmt: skip
_LAZY = {"MemoryPlan": "_plan", "plan_memory": "_plan", "Adapt": "_adapt", "Change": "_adapt", "fit": "_fit"}


def __getattr__(name: str) -> Any:
    """Import on first use what takes a tenth of a second, and what most trainings do without."""
    if name in _LAZY:
        return getattr(import_module(f"narrowgauge.recipes.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
