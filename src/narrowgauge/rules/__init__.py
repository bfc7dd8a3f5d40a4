"""Update equations. A rule knows neither storages nor devices; each stands in a file of its own."""

from narrowgauge.rules._adagrad import ADAGRAD
from narrowgauge.rules._adam import ADAM, ADAMW
from narrowgauge.rules._clip_updates import ClipUpdates, HasSecondMoment, clipped, squared_ratio
from narrowgauge.rules._lamb import LAMB
from narrowgauge.rules._lars import LARS
from narrowgauge.rules._lion import LION
from narrowgauge.rules._muon import Muon
from narrowgauge.rules._rule import Arithmetic, Rule, Scalar, Slot, has_terms
from narrowgauge.rules._sgd import SGD_RULE as SGD

__all__ = [
    "ADAGRAD",
    "ADAM",
    "ADAMW",
    "LAMB",
    "LARS",
    "LION",
    "SGD",
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
