"""Update equations. A rule knows neither storages nor devices."""

from narrowgauge.rules._adafactor import ADAFACTOR
from narrowgauge.rules._adagrad import ADAGRAD
from narrowgauge.rules._adam import ADAM, ADAMW, LAMB
from narrowgauge.rules._clipping import ClipUpdates, HasSecondMoment, clipped, squared_ratio
from narrowgauge.rules._lion import LION
from narrowgauge.rules._muon import Muon
from narrowgauge.rules._rule import WEIGHT, Arithmetic, Rule, Scalar, Slot, has_terms
from narrowgauge.rules._schedule_free import SCHEDULE_FREE
from narrowgauge.rules._sgd import LARS, SGD

__all__ = [
    "ADAFACTOR",
    "ADAGRAD",
    "ADAM",
    "ADAMW",
    "LAMB",
    "LARS",
    "LION",
    "SCHEDULE_FREE",
    "SGD",
    "WEIGHT",
    "Arithmetic",
    "ClipUpdates",
    "HasSecondMoment",
    "Muon",
    "Rule",
    "Scalar",
    "Slot",
    "clipped",
    "has_terms",
    "squared_ratio",
]
