"""Named precision strategies, and the memory that a training takes under one.

`get` gives a recipe by name; it casts a model and makes its optimizer in one call. `plan_memory` says what that
takes on a GPU before there is one: bytes by what they hold, the peak of a step, and what else would fit.
"""

from narrowgauge.recipes._plan import MemoryPlan, plan_memory
from narrowgauge.recipes._recipe import Recipe, cast, get, names
from narrowgauge.recipes._share import Parallel

__all__ = ["MemoryPlan", "Parallel", "Recipe", "cast", "get", "names", "plan_memory"]
