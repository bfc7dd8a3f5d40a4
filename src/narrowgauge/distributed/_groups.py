"""Which shards FSDP2 gathers together: those of a parameter group, in the order in which it asks them.

FSDP2 tells nobody. What is read here is torch's own, of 2.13, and of those before it, which have one group in the
place of a list; where it is not as expected, a shard has no mates, and is gathered alone.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import nn


class Asked(NamedTuple):
    """A shard, and what FSDP2 says of it when it asks what to gather.

    Attributes:
        shard: a part of a layer's weight, of a class that FSDP2 asks.
        size: of the whole weight.
        module: the layer.
        policy: the `MixedPrecisionPolicy`.
        others: modules that have the same weight, as far as the group is known.
    """

    shard: Any
    size: torch.Size
    module: Any
    policy: Any
    others: tuple[Any, ...] = ()


# Of each layer the group of its weight, where there is one.
_known: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any] | None] = weakref.WeakKeyDictionary()


def mates_of(first: Asked) -> list[Asked]:
    """The shards of a kind that are asked in one gather, if that which is asked is the first; else it alone.

    All are on the devices where they are kept: one that was copied to be gathered (`CPUOffloadPolicy`, on a GPU) is
    not among them, and so alone.

    Raises:
        ValueError: for a group that is to keep a part of what it has gathered, which torch does with weights only.
    """
    kind = type(first.shard)
    if first.module not in _known:
        _known[first.module] = None
        _find_groups(kind)
    of = _known[first.module]
    group = None if of is None else of()
    if getattr(group, "_use_post_forward_mesh", False):
        raise ValueError(
            "reshard_after_forward: got a number of ranks, takes True or False where gather_codes was called: "
            "torch can keep a part of weights between the passes, not of codes"
        )
    mates = [] if group is None else _asked(group, kind)
    return mates if mates and mates[0].shard is first.shard else [first]


def _find_groups(kind: type) -> None:
    """Look all groups of this process through."""
    try:
        from torch.distributed._composable_state import _module_state_mapping

        for kept in list(_module_state_mapping.values()):
            state: Any = kept()
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            for group in groups:
                if group is not None:
                    of = weakref.ref(group)
                    _known.update((asked.module, of) for asked in _asked(group, kind))
    except (ImportError, AttributeError):
        return


def _asked(group: Any, kind: type) -> list[Asked]:
    return [
        Asked(shard, param._orig_size, info.module, param.mp_policy, tuple(info.shared_modules))
        for param in group.fsdp_params
        for info in [param._module_info]
        if isinstance(shard := param._sharded_local_tensor, kind)
    ]
