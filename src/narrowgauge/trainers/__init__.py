"""Reference training: text to tokens, small models from configurations, and a loop that measures."""

from narrowgauge.trainers._batches import Batches, validation_windows
from narrowgauge.trainers._corpus import Corpus, DataError, load_corpus
from narrowgauge.trainers._models import (
    ModelError,
    build_model,
    configuration,
    next_token_loss,
    parameter_count,
    presets,
)
from narrowgauge.trainers._tokens import TokenizedCorpus, tokenize
from narrowgauge.trainers._train import Run, Settings, evaluate, make_optimizer, train

__all__ = [
    "Batches",
    "Corpus",
    "DataError",
    "ModelError",
    "Run",
    "Settings",
    "TokenizedCorpus",
    "build_model",
    "configuration",
    "evaluate",
    "load_corpus",
    "make_optimizer",
    "next_token_loss",
    "parameter_count",
    "presets",
    "tokenize",
    "train",
    "validation_windows",
]
