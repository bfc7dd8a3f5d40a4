"""Optimizers: any rule, any weight storage, any state storage, through one `torch.optim.Optimizer`."""

from narrowgauge.optim._describe import Description
from narrowgauge.optim._groups import split_decay
from narrowgauge.optim._named._adafactor import Adafactor
from narrowgauge.optim._named._adam import (
    LAMB,
    Adam,
    Adam8bit,
    AdamW,
    AdamW8bit,
    Adan,
    AdEMAMix,
    AdEMAMix8bit,
    CollageAdamW,
    LAMB8bit,
    NAdam,
    StableAdamW,
)
from narrowgauge.optim._named._muon import Muon
from narrowgauge.optim._named._schedule_free import ScheduleFreeAdamW
from narrowgauge.optim._named._sgd import (
    LARS,
    SGD,
    Adagrad,
    Adagrad8bit,
    LARS8bit,
    Lion,
    Lion8bit,
    RMSprop,
    RMSprop8bit,
    SGD8bit,
)
from narrowgauge.optim._optimizer import NarrowOptimizer
from narrowgauge.optim._options import Options
from narrowgauge.optim._quantized_gradients import QuantizedGradients
from narrowgauge.optim._stats import UpdateStats
from narrowgauge.optim._step_in_backward import step_in_backward

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "AdEMAMix",
    "AdEMAMix8bit",
    "Adafactor",
    "Adagrad",
    "Adagrad8bit",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "Adan",
    "CollageAdamW",
    "Description",
    "LAMB8bit",
    "LARS8bit",
    "Lion",
    "Lion8bit",
    "Muon",
    "NAdam",
    "NarrowOptimizer",
    "Options",
    "QuantizedGradients",
    "RMSprop",
    "RMSprop8bit",
    "SGD8bit",
    "ScheduleFreeAdamW",
    "StableAdamW",
    "UpdateStats",
    "split_decay",
    "step_in_backward",
]
