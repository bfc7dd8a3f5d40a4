"""What every optimizer's state_dict has in common, whoever wrote it: looked at before anything is read of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def check_form(given: Any) -> None:
    """Refuse what is no state_dict of any optimizer.

    Raises:
        ValueError: saying where it is none.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"state_dict: got {type(given).__name__}, takes a dict")
    if not {"state", "param_groups"} <= given.keys():
        raise ValueError(f"state_dict: got {sorted(map(str, given))}, takes 'state' and 'param_groups'")
    states, groups = given["state"], given["param_groups"]
    if not isinstance(states, Mapping):
        raise ValueError(f"state_dict: 'state' is a {type(states).__name__}, takes a dict")
    for identity, entry in states.items():
        if not isinstance(entry, Mapping):
            raise ValueError(f"state_dict: the state of {identity!r} is a {type(entry).__name__}, takes a dict")
    if not isinstance(groups, list | tuple):
        raise ValueError(f"state_dict: 'param_groups' is a {type(groups).__name__}, takes a list")
    members: list[Any] = []
    for number, group in enumerate(groups):
        _check_group(number, group)
        members += group["params"]
    for identity in members:
        if identity in states:
            _check_entry(f"the state of {identity!r}", states[identity])


def check_members(groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse groups that do not say of each parameter once which it is.

    Raises:
        ValueError: naming the group, or the parameter.
    """
    for number, group in enumerate(groups):
        named, count = group.get("param_names"), len(group["params"])
        if named is None:
            continue
        names = isinstance(named, list | tuple) and all(isinstance(name, str) for name in named)
        if not names or len(named) != count:
            raise ValueError(f"state_dict: group {number} has param_names={named!r:.200}, takes {count} names")
    counts = Counter(identity for group in groups for identity in group["params"])
    if twice := [identity for identity, count in counts.items() if count > 1]:
        raise ValueError(f"state_dict: 'params' has {twice[0]!r} twice, takes each parameter once")


def _check_group(number: int, group: Any) -> None:
    if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
        raise ValueError(f"state_dict: group {number} is {group!r:.200}, takes a dict with a list of 'params'")
    if odd := [key for key in group if not isinstance(key, str)]:
        raise ValueError(f"state_dict: group {number} has the option {odd[0]!r}, takes names")
    for identity in group["params"]:
        if not isinstance(identity, int | str):
            raise ValueError(
                f"state_dict: group {number} calls a parameter {identity!r:.100}, takes numbers or names"
            )


def _check_entry(what: str, entry: Mapping[Any, Any]) -> None:
    for key, value in entry.items():
        if not isinstance(key, str):
            raise ValueError(f"state_dict: {what} has the key {key!r}, takes names")
        if isinstance(value, Mapping):
            _check_entry(f"{key!r} in {what}", value)
        if isinstance(value, Tensor) and (value.is_meta or value.layout is not torch.strided or value.is_complex()):
            raise ValueError(
                f"state_dict: {key!r} in {what} is of {value.dtype} ({value.layout}, on {value.device}), takes "
                "dense real numbers"
            )
