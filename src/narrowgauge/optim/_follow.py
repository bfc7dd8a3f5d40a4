"""What happens when options change in `param_groups` after construction.

torch reads a group's hyperparameters at every step, and people write to them: schedulers do, and so do those who
switch update clipping on once a run has settled. What only the rule reads takes effect at once. An option that says
how numbers are kept needs other words: the plans are made anew and the words converted, as those of a checkpoint
are. What cannot be is refused by name, before anything has moved, and again at every step until it is put right.

What is looked at each step is a comparison a group, and one a parameter of its dtype and mark.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.optim._checkpoint_words import Notes, WordReader
from narrowgauge.optim._clip_gradients import HISTORY
from narrowgauge.optim._options import check_limits, option_values
from narrowgauge.optim._plan import ParameterPlan
from narrowgauge.optim._shards import local

if TYPE_CHECKING:
    from narrowgauge.optim._optimizer import NarrowOptimizer

Request = tuple[Any, ...]


def request(optimizer: NarrowOptimizer, group: Mapping[str, Any]) -> Request:
    """What a group asks for, in a form that is cheap to compare and that no later change of the group changes."""
    rule = optimizer.rule_for(group)
    return rule, rule.slots(group), *option_values(group)


@torch.no_grad()
def follow(optimizer: NarrowOptimizer, requests: list[Request]) -> None:
    """Plan all parameters anew, and convert the words of those that are kept otherwise now.

    A UserWarning says what was lost.

    Raises:
        ValueError: for what cannot be; nothing is changed then.
    """
    old, optimizer._plans = optimizer._plans, {}
    try:
        for number, group in enumerate(optimizer.param_groups):
            optimizer.check(group)
            optimizer._plan_group(number)
        check_limits(optimizer.param_groups)
    finally:
        new, optimizer._plans = optimizer._plans, old
    notes = Notes()
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p in old and optimizer.state.get(p):
                name, state = type(optimizer).__name__, optimizer.state[p]
                optimizer.state[p] = _converted(name, local(p), state, old[p], new[p], group, notes)
            # One by one, so that words and plans agree even if the memory for the next does not suffice.
            old[p] = new[p]
    optimizer._plans, optimizer._requests = new, requests
    if notes:
        warnings.warn(f"param_groups: {notes}", stacklevel=4)


def _converted(
    optimizer: str,
    p: Tensor,
    state: dict[str, Tensor],
    old: ParameterPlan,
    new: ParameterPlan,
    group: Mapping[str, Any],
    notes: Notes,
) -> dict[str, Tensor]:
    """A parameter's state under another plan: the same tensors where nothing is kept otherwise."""
    had = {slot.slot.name: slot for slot in (*old.slots, *old.dormant)}
    found = tuple(slot for slot in (*new.slots, *new.dormant) if slot.words(state))
    words_stay = (
        old.weight is new.weight
        and old.dtype == new.dtype
        and all(had.get(slot.slot.name, slot) == slot for slot in found)
    )
    history_stays = (HISTORY in state) == (group["percentile_clipping"] < 100)
    if words_stay and history_stays and set(new.slots) <= set(found):
        return state
    fresh = new.init(p, group)
    # A history that is not asked for any more would be old when it is asked for again.
    entry = {key: value for key, value in state.items() if key in fresh or key != HISTORY}
    if not words_stay:
        plan = replace(new, slots=found)
        declared = {slot.slot.name: had.get(slot.slot.name, slot).storage for slot in found}
        block_size = max((slot.block_size for slot in had.values()), default=1)
        entry = WordReader(optimizer, plan, p, entry, declared, block_size, notes).read(plan.init(p, group))
    return {**fresh, **entry}
