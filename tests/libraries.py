"""timm, open_clip and peft for the tests that need them, and what open_clip's script leaves behind.

`make test` puts timm, open_clip and torchvision into the folder `hub` of the virtual environment. It is not on the
path of modules: see the Makefile.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch


def library(name: str) -> ModuleType:
    """A library, without the warnings of its import; the test is skipped where it is not installed."""
    with _hub(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module("torchvision")
        except RuntimeError as error:
            # The compiled part of PyPI's torchvision wants CUDA, so on a torch without CUDA it does not load, and
            # the rest describes two operators that do not exist. Models do not call them: defining them is enough.
            if "torchvision::" not in str(error):
                raise
            for operator in ("nms", "qnms"):
                schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"torchvision::{operator}", schema)
        except ImportError:
            pass  # what needs it says so
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"needs {name}: {error}", allow_module_level=True)


@contextmanager
def _hub() -> Iterator[None]:
    """The folder on the path while something is imported: other processes of tests' must not find torchvision."""
    hub = os.path.join(sys.prefix, "hub")
    sys.path.append(hub)
    try:
        yield
    finally:
        sys.path.remove(hub)


@contextmanager
def open_clip_cleaned_up() -> Iterator[None]:
    """Undo what open_clip's script and `install()` do to the process.

    The script sets the level of every logger and adds handlers to the root, one with an open file. It is forgotten
    first: Python warns of a program that was imported before it runs.
    """
    handlers, levels = list(logging.root.handlers), {name: logging.getLogger(name).level for name in _loggers()}
    for name in list(sys.modules):
        if name == "open_clip_train.main" or name.partition(".")[0] == "bitsandbytes":
            del sys.modules[name]
    try:
        yield
    finally:
        for name in _loggers():
            logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))
        for handler in set(logging.root.handlers) - set(handlers):
            logging.root.removeHandler(handler)
            handler.close()
        for name in list(sys.modules):
            if name.partition(".")[0] == "bitsandbytes":
                del sys.modules[name]


def _loggers() -> list[str | None]:
    """The names of all loggers; None is the root."""
    found = logging.root.manager.loggerDict.items()
    return [None, *(name for name, logger in found if isinstance(logger, logging.Logger))]
