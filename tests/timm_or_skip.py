"""timm, for tests that need it, beside a torch for CPUs too."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch


@functools.cache
def _operators() -> torch.library.Library:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def timm_or_skip() -> Any:
    """timm, or a skip of the calling test.

    timm imports torchvision, whose wheels on PyPI are built for CUDA. Beside a torch for CPUs their extension does
    not load, and the import ends at two operators that it would have defined. No model calls them.
    """
    if torch.version.cuda is None:
        _operators()
    return pytest.importorskip("timm")
