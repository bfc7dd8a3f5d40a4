"""A state as torch.optim would have saved it, so that training can go on there.

Each moment is decoded to float32 under torch's name for it (`Slot.torch_key`). torch casts it to the parameter's
dtype when it loads it, and it has no low words: from narrow weights it goes on with what the model computes with.
What it cannot continue is said.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.optim._checkpoint_words import Notes, says_more
from narrowgauge.optim._plan import ParameterPlan
from narrowgauge.optim._shards import local

if TYPE_CHECKING:
    from narrowgauge.optim._optimizer import NarrowOptimizer

# Options that change the equation and that torch may not have, at the value that changes nothing.
_OFF = {
    "clip_updates": False,
    "max_grad_norm": None,
    "percentile_clipping": 100,
    "beta2_schedule": None,
    "momentum": 0.0,
    "maximize": False,
}
# What torch's optimizers count no steps in.
_NO_STEP = (torch.optim.SGD, torch.optim.Muon)


@torch.no_grad()
def export_to_torch(
    optimizer: NarrowOptimizer, plans: Sequence[tuple[Tensor, ParameterPlan]]
) -> tuple[dict[str, Any], Notes]:
    """A state_dict for torch's namesake, and what it does not hold.

    Args:
        optimizer: whose state.
        plans: its parameters, in the order of its groups.

    Raises:
        ValueError: if torch has no optimizer of this name.
    """
    namesake = _namesake(type(optimizer))
    taken = inspect.signature(namesake).parameters
    notes = Notes()
    identities = {p: number for number, (p, _) in enumerate(plans)}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        known = {k: v for k, v in group.items() if k not in optimizer.defaults or k in taken}
        groups.append({**known, "params": [identities[p] for p in group["params"]]})
        for option, off in _OFF.items():
            if option in group and option not in taken and group[option] != off:
                notes.add(f"dropped {option}={group[option]!r}", f"group {number}")
    states: dict[int, dict[str, Tensor]] = {}
    for p, plan in plans:
        state = optimizer.state.get(p)
        # A buffer without a step is none: SGD's first step must find nothing.
        if not state or (issubclass(namesake, _NO_STEP) and not state["step"]):
            continue
        entry: dict[str, Tensor] = {}
        if not issubclass(namesake, _NO_STEP):
            entry["step"] = state["step"].to("cpu", copy=True)
        for slot in plan.slots:
            if slot.slot.torch_key is not None:
                moment = torch.empty_like(p, dtype=torch.float32)
                local(moment).copy_(slot.decode(state, local(p).shape))
                entry[slot.slot.torch_key] = moment
        if entry:
            states[identities[p]] = entry
        if plan.weight_key is not None and says_more(plan.weight, local(p), state[plan.weight_key]):
            notes.add(f"dropped {plan.weight_key!r} of weights={plan.weight.name!r}", plan.name)
    return {"state": states, "param_groups": groups}, notes


def _namesake(kind: type) -> type[torch.optim.Optimizer]:
    """The optimizer of torch.optim whose name the class, or the first of its bases that can, has."""
    for base in kind.__mro__:
        found = getattr(torch.optim, base.__name__, None)
        if (
            isinstance(found, type)
            and issubclass(found, torch.optim.Optimizer)
            and found is not torch.optim.Optimizer
        ):
            return found
    raise ValueError(
        f"torch_state_dict: torch.optim has no {kind.__name__}; Adam, AdamW, SGD, Adagrad, Muon go there"
    )
