"""Train neural networks on narrow numbers, and gauge what they cost you."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from narrowgauge import formats, gauges, linear, nn, optim, recipes, rules, scaling, storage
from narrowgauge._version import __version__

if TYPE_CHECKING:
    from narrowgauge import distributed

__all__ = [
    "__version__",
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
]


def __getattr__(name: str) -> Any:
    """Distributed is imported when somebody asks for it: torch's own packages of that kind take half a second."""
    if name == "distributed":
        return import_module("narrowgauge.distributed")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
