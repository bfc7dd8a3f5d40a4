"""Training: text and images to examples, models from configurations, a loop that measures, one that trains."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from narrowgauge.trainers._batches import Batches, validation_windows
from narrowgauge.trainers._config import values_of as config_values
from narrowgauge.trainers._corpus import Corpus, DataError, load_corpus
from narrowgauge.trainers._export import load_model
from narrowgauge.trainers._language import LanguageTask, Task
from narrowgauge.trainers._models import (
    ModelError,
    build_model,
    configuration,
    next_token_loss,
    parameter_count,
    presets,
)
from narrowgauge.trainers._prepare import prepare_tokens
from narrowgauge.trainers._settings import SettingsError, TrainSettings
from narrowgauge.trainers._shards import DamagedShardError
from narrowgauge.trainers._sources import DEFAULT_VOCABULARY
from narrowgauge.trainers._tokens import TokenizedCorpus, tokenize
from narrowgauge.trainers._train import Run, Settings, evaluate, make_optimizer, train

if TYPE_CHECKING:
    from narrowgauge.trainers._fit import Outcome as Outcome
    from narrowgauge.trainers._fit import fit as fit
    from narrowgauge.trainers._gradients import Step as Step
    from narrowgauge.trainers._held_out import HeldOut as HeldOut
    from narrowgauge.trainers._observer import Observer as Observer

__all__ = [
    "DEFAULT_VOCABULARY",
    "Batches",
    "Corpus",
    "DamagedShardError",
    "DataError",
    "HeldOut",
    "LanguageTask",
    "ModelError",
    "Observer",
    "Outcome",
    "Run",
    "Settings",
    "SettingsError",
    "Step",
    "Task",
    "TokenizedCorpus",
    "TrainSettings",
    "build_model",
    "config_values",
    "configuration",
    "evaluate",
    "fit",
    "load_corpus",
    "load_model",
    "make_optimizer",
    "next_token_loss",
    "parameter_count",
    "prepare_tokens",
    "presets",
    "tokenize",
    "train",
    "validation_windows",
]

# What brings checkpoints over processes and gauges with it: imported when it is asked for, so that a command that
# trains nothing answers at once.
_FIT = ("HeldOut", "Observer", "Outcome", "Step", "fit")


def __getattr__(name: str) -> Any:
    if name not in _FIT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("narrowgauge.trainers._fit"), name)
