"""Training: text and images to examples, models from configurations, `compare` for comparisons, `fit` for real."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from narrowgauge.trainers._compare import CompareProgress, Comparison, compare
from narrowgauge.trainers._compare_run import Run, Settings, evaluate, make_optimizer, train
from narrowgauge.trainers._export import load_model
from narrowgauge.trainers._language import Batches, LanguageTask, validation_windows
from narrowgauge.trainers._models import (
    ModelError,
    build_model,
    configuration,
    next_token_loss,
    parameter_count,
    presets,
)
from narrowgauge.trainers._settings import SettingsError, TrainSettings, config_values
from narrowgauge.trainers._task import HeldOut, Step, Task
from narrowgauge.trainers._text import Corpus, DataError, load_corpus
from narrowgauge.trainers._tokens import (
    DEFAULT_VOCABULARY,
    DamagedShardError,
    TokenizedCorpus,
    prepare_tokens,
    tokenize,
)

if TYPE_CHECKING:
    from narrowgauge.trainers._fit import Outcome as Outcome
    from narrowgauge.trainers._fit import Progress as Progress
    from narrowgauge.trainers._fit import fit as fit

__all__ = [
    "DEFAULT_VOCABULARY",
    "Batches",
    "CompareProgress",
    "Comparison",
    "Corpus",
    "DamagedShardError",
    "DataError",
    "HeldOut",
    "LanguageTask",
    "ModelError",
    "Outcome",
    "Progress",
    "Run",
    "Settings",
    "SettingsError",
    "Step",
    "Task",
    "TokenizedCorpus",
    "TrainSettings",
    "build_model",
    "compare",
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

# These import checkpoints, processes and gauges: only on first use, so that a command that does not train starts
# fast.
_FIT = ("Outcome", "Progress", "fit")


def __getattr__(name: str) -> Any:
    if name not in _FIT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("narrowgauge.trainers._fit"), name)
