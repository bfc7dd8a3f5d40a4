"""timm, open_clip and peft for the tests that need them."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

import pytest
import torch


def library(name: str) -> ModuleType:
    """A library, without the warnings of its import; the test is skipped where it is not installed."""
    with warnings.catch_warnings():
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
