"""Train neural networks on narrow numbers, and gauge what they cost you."""

from narrowgauge import distributed, formats, gauges, linear, nn, optim, recipes, rules, scaling, storage
from narrowgauge._version import __version__

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
