"""Train neural networks on narrow numbers, and gauge what they cost you."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from narrowgauge import formats, optim, rules, storage
from narrowgauge._version import __version__

if TYPE_CHECKING:
    from narrowgauge import distributed, gauges, linear, nn, recipes, scaling
    from narrowgauge.recipes import to_torch
    from narrowgauge.trainers._compare import compare

__all__ = [
    "__version__",
    "compare",
    "distributed",
    "formats",
    "gauges",
    "linear",
    "nn",
    "optim",
    "recipes",
    "rules",
    "scaling",
    "storage",
    "to_torch",
]
_WHEN_ASKED = ("distributed", "gauges", "linear", "nn", "recipes", "scaling")


def __getattr__(name: str) -> Any:
    """Import a package on first use: torch's distributed packages alone take a second."""
    if name == "compare":
        from narrowgauge.trainers._compare import compare

        return compare
    if name == "to_torch":
        from narrowgauge.recipes import to_torch

        return to_torch
    if name in _WHEN_ASKED:
        return import_module(f"narrowgauge.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
