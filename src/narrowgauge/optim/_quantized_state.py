"""What `QuantizedGradients` adds to the state of its optimizer, and takes out of it again.

A residual is a word of its parameter's state, as moments are, and the count of steps an entry of each group: in
that form whatever moves torch's optimizer states moves these too. A residual has an item for each element, so it
is the same on any number of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.optim._checkpoint_form import check_form, check_members
from narrowgauge.optim._options import is_whole
from narrowgauge.optim._shards import as_shared, is_shared, local, part_of, shard_of

RESIDUAL, STEPS = "gradient_residual", "gradients_quantized"


def saved(optimizer: torch.optim.Optimizer, residuals: Mapping[Tensor, Tensor], steps: int) -> dict[str, Any]:
    """The state of an optimizer, with residuals and the count of steps."""
    given = optimizer.state_dict()
    state = dict(given["state"])
    for p, identity in _members(optimizer, given["param_groups"]):
        if p in residuals:
            residual = as_shared(p, residuals[p]) if is_shared(p) else residuals[p]
            state[identity] = {**state.get(identity, {}), RESIDUAL: residual}
    groups = [{**group, STEPS: steps} for group in given["param_groups"]]
    return {**given, "state": state, "param_groups": groups}


def taken_apart(optimizer: torch.optim.Optimizer, given: Any) -> tuple[dict[str, Any], dict[Tensor, Tensor], int]:
    """What `saved` gave: the optimizer's own state, residuals as they lie here, and the count of steps.

    Raises:
        ValueError: for anything else.
    """
    check_form(given)
    groups, live = given["param_groups"], optimizer.param_groups
    sizes, wanted = ([len(group["params"]) for group in some] for some in (groups, live))
    if sizes != wanted:
        raise ValueError(f"state_dict: got groups of {sizes} parameters, takes {wanted}")
    check_members(groups)
    if any(STEPS not in group for group in groups):
        raise ValueError(f"state_dict: got groups without {STEPS!r}, takes one of QuantizedGradients")
    counts = [group[STEPS] for group in groups]
    if any(not is_whole(count) or not 0 <= count < 2**63 or count != counts[0] for count in counts):
        raise ValueError(f"state_dict: {STEPS!r} is {', '.join(map(repr, counts))}, takes one count of steps")
    state, residuals = dict(given["state"]), {}
    for number, (p, identity) in enumerate(_members(optimizer, groups)):
        entry = state.get(identity)
        if entry is not None and RESIDUAL in entry:
            residuals[p] = _here(p, entry[RESIDUAL], number)
            entry = copy.copy(entry)  # which may be more than a dict
            del entry[RESIDUAL]
            state[identity] = entry
            if not entry:
                del state[identity]  # of an optimizer that keeps nothing
    inner = [{key: value for key, value in group.items() if key != STEPS} for group in groups]
    return {**given, "state": state, "param_groups": inner}, residuals, counts[0] if counts else 0


def _members(optimizer: torch.optim.Optimizer, groups: Any) -> Iterator[tuple[Tensor, Any]]:
    """Parameters and what a state calls them."""
    for group, packed in zip(optimizer.param_groups, groups, strict=True):
        yield from zip(group["params"], packed["params"], strict=True)


def _here(p: Any, residual: Any, number: int) -> Tensor:
    """A copy of what lies here of a saved residual, beside its parameter."""
    which = f"state_dict: the residual of parameter {number}"
    if not isinstance(residual, Tensor):
        raise ValueError(f"{which} is a {type(residual).__name__}, takes a tensor")
    if residual.shape != p.shape or not residual.is_floating_point():
        raise ValueError(
            f"{which} is {residual.dtype} of shape {tuple(residual.shape)}, takes floats of shape {tuple(p.shape)}"
        )
    if is_shared(residual):
        if not is_shared(p):
            raise ValueError(f"{which} is a DTensor, the parameter is none; takes a full tensor")
        shared: Any = residual
        if shared.device_mesh != p.device_mesh:
            raise ValueError(f"{which} is on {shared.device_mesh}, takes one on {p.device_mesh}, or a full tensor")
        here = local(shared.redistribute(p.device_mesh, p.placements))
    else:
        here = part_of(shard_of(p), residual.detach())
    here = here.to(device=local(p).device, dtype=torch.float32, copy=True).contiguous()
    if not torch.isfinite(here).all():
        raise ValueError(f"{which} is not finite: it was damaged")
    return here
