"""The way out: a float32 model and torch's optimizer, which continue a training of this library's optimizer."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn

from narrowgauge._arguments import shown
from narrowgauge._module_names import computed, unwrap_optimizer
from narrowgauge._text import warn
from narrowgauge.linear._hold import release
from narrowgauge.linear._module import PlannedModule
from narrowgauge.linear._swap import restore
from narrowgauge.optim import NarrowOptimizer
from narrowgauge.optim._checkpoint_foreign import export_to_torch, namesake_of
from narrowgauge.optim._sharding import is_shared

Model = TypeVar("Model", bound=nn.Module)


@torch.no_grad()
def to_torch(model: Model, optimizer: torch.optim.Optimizer) -> tuple[Model, torch.optim.Optimizer]:
    """Convert a model and its optimizer to a float32 model and torch's optimizer of the same name.

    Low words and master copies are added to the weights, so nothing is rounded. Linear layers with a plan have the
    class again that they had before, and activations are saved as they are. The new optimizer has the same groups,
    hyperparameters and moments, in float32. The given model and optimizer do not change.

    Args:
        model: the model that the optimizer trains, unsharded.
        optimizer: one of narrowgauge's, or a wrapper that has it as ``optimizer``. Its rule is one that torch has
            too, such as Adam, AdamW, SGD, Adagrad or Muon.

    Returns:
        (model, optimizer): a float32 copy of the model, and an optimizer of `torch.optim` with its parameters. A
        UserWarning names options that torch's optimizer does not have, such as update clipping.

    Raises:
        TypeError: for another model or optimizer, as where the two are swapped.
        ValueError: if the model is sharded, if torch has no optimizer of this name, if groups have different rules
            (as from `Muon.for_model`), if a parameter of the optimizer is not in the model, or if a layer's class
            derives from one with a plan and has a forward of its own.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {shown(model)}")
    optimizer = unwrap_optimizer(optimizer)
    if not isinstance(optimizer, NarrowOptimizer):
        raise TypeError(f"optimizer must be one of narrowgauge.optim, got {shown(optimizer)}")
    if any(map(is_shared, [*model.parameters(), *dict(optimizer.plans())])):
        raise ValueError(
            "model must not be sharded: save with save_checkpoint, load in one process, then call to_torch"
        )
    exported, notes = export_to_torch(
        type(optimizer), optimizer.defaults, optimizer.plans(), optimizer.param_groups, optimizer.state, True
    )
    copied: dict[int, Any] = {id(x): x.clone() for x in computed(model)}
    wide = copy.deepcopy(model, copied).float()
    wide.zero_grad()
    release(wide.modules())
    for name, layer in wide.named_modules():
        if isinstance(layer, PlannedModule) and not restore(layer):
            raise ValueError(
                f"model must have layers with a plan that torch has a class for; {name!r} is a "
                f"{type(layer).__name__}, which has a forward of its own"
            )
    weights = optimizer.full_weights()
    if strangers := [optimizer.plan_of(p).name for p in weights if id(p) not in copied]:
        raise ValueError(f"model must be the one that the optimizer trains; {strangers[0]} is not in it")
    own = {p: copied[id(p)] for p in weights}
    for p, weight in weights.items():
        own[p].copy_(weight)
    groups = []
    for group in optimizer.param_groups:
        params = [own[p] for p in group["params"]]
        names = group.get("param_names")
        groups.append({"params": list(zip(names, params, strict=True)) if names else params})
    namesake: Any = namesake_of(type(optimizer))
    made = namesake(groups, lr=float(optimizer.param_groups[0]["lr"]))
    made.load_state_dict(exported)
    if notes:
        warn(f"to_torch: {notes}")
    return wide, made
