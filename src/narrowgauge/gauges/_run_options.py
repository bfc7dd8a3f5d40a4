"""How a run was set up, as its header says: the optimizer's groups, what is frozen, what is multiplied in few bits.

Whoever gives advice should know that updates are clipped already, or that low words are kept, and not guess it from
the optimizer's name. Of narrowgauge's optimizers a group says rule, weights and states, and whether updates are
clipped; of all others it has what they were given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.gauges._history import History
from narrowgauge.gauges._modules import plain_name
from narrowgauge.gauges._records import Record

# Weight storages that keep nothing beside the weight.
_ALONE = ("plain", "stochastic")


def options_record(model: nn.Module, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> Record:
    """The part of a run's header that says how it was set up.

    Returns:
        "groups": of each its options and the names of its "parameters"; "frozen": names of those that take no
        gradient; "apart": of those that do and are not the optimizer's; "low_precision": formats by module.
    """
    groups, owned = [], set()
    for group in optimizer.param_groups:
        options = {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
        mine = [names[p] for p in group["params"] if p in names]
        owned |= set(mine)
        groups.append({**{k: v for k, v in options.items() if v is not NotImplemented}, "parameters": mine})
    return {
        "groups": groups,
        "frozen": [name for p, name in names.items() if not p.requires_grad],
        "apart": [name for p, name in names.items() if p.requires_grad and name not in owned],
        "low_precision": {plain_name(name): found for name, m in model.named_modules() if (found := _formats(m))},
    }


def _plain(value: Any) -> Any:
    """An option as JSON has it; NotImplemented for what it cannot have."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else NotImplemented
    if isinstance(value, list | tuple):
        parts = [_plain(part) for part in value]
        return NotImplemented if NotImplemented in parts else parts
    if isinstance(value, Mapping):
        return {str(key): part for key, item in value.items() if (part := _plain(item)) is not NotImplemented}
    return value if value is None or isinstance(value, bool | int | float | str) else NotImplemented


def _formats(module: nn.Module) -> list[str]:
    """The formats in which a layer multiplies, if they have eight bits: narrowgauge's layers, torchao's by name."""
    formats = getattr(getattr(module, "plan", None), "formats", None)
    if isinstance(formats, list | tuple | set | frozenset) and all(isinstance(each, str) for each in formats):
        return sorted(formats)
    return ["e4m3"] if type(module).__name__.startswith("Float8Linear") else []


def group_of(history: History, name: str) -> Mapping[str, Any]:
    """The options of a parameter's group; empty where the header does not say."""
    if "groups" not in history.memo:
        groups = history.header.get("groups")
        found: dict[str, Mapping[str, Any]] = {}
        for group in groups if isinstance(groups, list) else []:
            members = group.get("parameters") if isinstance(group, dict) else None
            if isinstance(members, list):
                found |= {member: group for member in members if isinstance(member, str)}
        history.memo["groups"] = found
    by_name: dict[str, Mapping[str, Any]] = history.memo["groups"]
    return by_name.get(name, {})


def listed_in(history: History, key: str) -> list[str]:
    """The names that the header lists under "frozen" or "apart", of its parameters."""
    names = history.header.get(key)
    known = history.parameters
    return [name for name in names if isinstance(name, str) and name in known] if isinstance(names, list) else []


def clips(history: History, name: str) -> bool:
    """Whether a parameter's updates are clipped."""
    group = group_of(history, name)
    if "clip_updates" in group:
        return group["clip_updates"] is True
    return not group and str(history.header.get("optimizer", "")).startswith("Stable")


def low_words(history: History, name: str) -> str | None:
    """The weight storage of a parameter if it keeps more than the weight; None if not or if it is not known."""
    weights = group_of(history, name).get("weights")
    return weights if isinstance(weights, str) and weights not in _ALONE else None


def uses_float8(history: History) -> bool:
    """Whether a layer multiplies in float8."""
    layers = history.header.get("low_precision")
    return isinstance(layers, dict) and any(
        isinstance(formats, list) and any(str(each).startswith(("e4m3", "e5m2")) for each in formats)
        for formats in layers.values()
    )
