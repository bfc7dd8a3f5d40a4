"""Update equations. A rule knows neither storages nor devices; each stands in a file of its own."""

from narrowgauge.rules._adamw import ADAMW
from narrowgauge.rules._rule import Arithmetic, Rule, Scalar, Slot

__all__ = ["ADAMW", "Arithmetic", "Rule", "Scalar", "Slot"]
