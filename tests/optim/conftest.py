"""Kernels run on the GPU where there is one and in triton's interpreter elsewhere, which takes CPU tensors."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    """Where a kernel's tensors live."""
    return "cuda" if torch.cuda.is_available() else "cpu"
