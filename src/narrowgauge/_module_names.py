"""Models and optimizers without their wrappers, and parameter names without what wrappers add to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# What torch.compile and activation checkpointing put into qualified names.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside `DistributedDataParallel` and `torch.compile`."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, _WRAPPERS[0], None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer inside wrappers (accelerate's, Lightning's): its hooks are those that run."""
    for attribute in ("optimizer", "_optimizer"):
        inner = getattr(optimizer, attribute, None)
        if isinstance(inner, torch.optim.Optimizer):
            return unwrap_optimizer(inner)
    return optimizer


def clean_name(name: str) -> str:
    """The qualified name of a module, parameter or buffer as it is without wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
