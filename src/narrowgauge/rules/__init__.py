"""Update equations. A rule knows neither storages nor devices."""

from narrowgauge.rules._adafactor import ADAFACTOR
from narrowgauge.rules._adagrad import ADAGRAD
from narrowgauge.rules._adam import ADAM, ADAMW, LAMB
from narrowgauge.rules._adan import ADAN
from narrowgauge.rules._ademamix import ADEMAMIX
from narrowgauge.rules._cautious import Cautious, cautious
from narrowgauge.rules._clipping import ClipUpdates, HasSecondMoment, clipped, squared_ratio
from narrowgauge.rules._lion import LION
from narrowgauge.rules._muon import Muon
from narrowgauge.rules._nadam import NADAM, NADAMW
from narrowgauge.rules._rmsprop import RMSPROP
from narrowgauge.rules._rule import WEIGHT, Arithmetic, Rule, Scalar, Slot, bare, has_terms
from narrowgauge.rules._schedule_free import SCHEDULE_FREE
from narrowgauge.rules._sgd import LARS, SGD

__all__ = [
    "ADAFACTOR",
    "ADAGRAD",
    "ADAM",
    "ADAMW",
    "ADAN",
    "ADEMAMIX",
    "LAMB",
    "LARS",
    "LION",
    "NADAM",
    "NADAMW",
    "RMSPROP",
    "SCHEDULE_FREE",
    "SGD",
    "WEIGHT",
    "Arithmetic",
    "Cautious",
    "ClipUpdates",
    "HasSecondMoment",
    "Muon",
    "Rule",
    "Scalar",
    "Slot",
    "bare",
    "cautious",
    "clipped",
    "has_terms",
    "squared_ratio",
]
