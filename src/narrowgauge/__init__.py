"""Train neural networks on narrow numbers, and gauge what they cost you."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from narrowgauge import formats, linear, nn, optim, recipes, rules, scaling, storage
from narrowgauge._version import __version__

if TYPE_CHECKING:
    from narrowgauge import gauges

__all__ = ["__version__", "formats", "gauges", "linear", "nn", "optim", "recipes", "rules", "scaling", "storage"]


def __getattr__(name: str) -> Any:
    """Gauges are imported when somebody asks for them: a training without does not wait for it."""
    if name == "gauges":
        return import_module("narrowgauge.gauges")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
