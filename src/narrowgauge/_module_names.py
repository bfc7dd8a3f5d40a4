"""Models and optimizers without their wrappers, names without what wrappers add to them, and what a copy lacks."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from narrowgauge._torch_private import averaged

# What torch.compile and activation checkpointing put into qualified names.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside `DistributedDataParallel` and `torch.compile`."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, _WRAPPERS[0], None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def in_ddp(ps: Iterable[Tensor]) -> bool:
    """Whether a `DistributedDataParallel` averages the gradients of some of these parameters, whatever holds it.

    It does so for parameters as they were when it was made, and nothing on them says so.
    """
    wanted = set(map(id, ps))
    if not wanted or not dist.is_available() or not dist.is_initialized():
        return False

    def found() -> bool:
        wrappers = (x for x in gc.get_objects() if DistributedDataParallel in type(x).__mro__)
        return any(id(p) in wanted for w in wrappers if "parameters_to_ignore" in vars(w) for p in averaged(w))

    if found():
        gc.collect()  # one that is no longer used may still be there
    return found()


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer inside wrappers (accelerate's, Lightning's): its hooks are those that run."""
    for attribute in ("optimizer", "_optimizer"):
        inner = getattr(optimizer, attribute, None)
        if isinstance(inner, torch.optim.Optimizer):
            return unwrap_optimizer(inner)
    return optimizer


def computed(model: nn.Module) -> Iterator[Tensor]:
    """The tensors with a graph that modules keep, as weight norms the weight of the last pass.

    `copy.deepcopy` refuses them: its memo must say what they become.
    """
    for module in model.modules():
        for value in vars(module).values():
            each = value if isinstance(value, list) else [value]  # a recurrent layer has a list of its weights
            yield from (x for x in each if isinstance(x, Tensor) and not x.is_leaf)


def clean_name(name: str) -> str:
    """The qualified name of a module, parameter or buffer as it is without wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
