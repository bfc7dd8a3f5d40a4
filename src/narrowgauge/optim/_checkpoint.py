"""Checkpoints: a state that was written under other storages, by another library, or on another device.

`state_dict` is torch's: the words of each parameter as they are, and the parameter groups. The groups say what the
words mean: `states`, `weights` and `block_size` name the formats, `rule` the averages, `state_version` the edition
of all this. What a single parameter really has (fp32 beside 8-bit neighbours because it is small, or marked) its
words tell themselves: no two state storages use the same names, dtypes and shapes for their words. So nothing else
has to be written, and the state remains what every tool that moves torch's optimizer states understands: tensors,
and groups of plain values.

Reading takes three steps, none of which touches the optimizer; a checkpoint that cannot be taken over changes
nothing.

1. **The layout**: who wrote it. Checkpoints of torch.optim and of the public 8-bit optimizers are put into our
   words first (`_checkpoint_layouts`).
2. **The groups**: hyperparameters come from the checkpoint, as torch has it; how numbers are kept and computed
   stays as this optimizer was made.
3. **The words**: where storage and block size are the same, they are copied bit for bit, so that a resumed run is
   the run that never stopped. Where not, the moment is decoded to float32 and encoded anew: each conversion costs
   one rounding of the new storage, and none if that is wider.

A low word means something beside its parameter only. Its weight is what its own storage reads from both; the new
low word is what the new storage would keep of that weight, given the parameter as it is. So the model is loaded
first. What has no place in this optimizer is dropped, and a warning says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.optim._checkpoint_form import check_form, check_members
from narrowgauge.optim._checkpoint_layouts import VERSION_KEY, layout_of
from narrowgauge.optim._checkpoint_words import Notes, WordReader
from narrowgauge.optim._options import LIMIT, check_limits
from narrowgauge.optim._plan import ParameterPlan, plan_parameter, slot_storages
from narrowgauge.optim._shard_words import unwrapped
from narrowgauge.optim._shards import Shard, local
from narrowgauge.storage import StateStorage

if TYPE_CHECKING:
    from narrowgauge.optim._optimizer import NarrowOptimizer

# What stays as the optimizer was made: how numbers are kept and computed, and the version of what it would write.
_STAYS = (
    "weights", "states", "block_size", "min_quantized_size", "arithmetic",
    "foreach", "fused", "capturable", "differentiable", "rule", VERSION_KEY,
)  # fmt: skip
# Options that limit steps: what the checkpoint says holds, as for every hyperparameter, but not in silence.
_LIMITS = ("clip_updates", LIMIT, "percentile_clipping")
# Rules whose moments are the same averages.
_ALIKE = {"adam", "adamw", "lamb"}


@dataclass
class Checkpoint:
    """A checkpoint in the words of the optimizer that asked for it.

    Attributes:
        groups: the parameter groups, with the checkpoint's identities for parameters.
        states: the new state of each parameter that has one.
        others: entries of the saved state that belong to no parameter.
        notes: what was not taken over as it is.
    """

    groups: list[dict[str, Any]]
    others: dict[Any, Any]
    states: dict[Tensor, dict[str, Tensor]] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)


def load_checkpoint(
    optimizer: NarrowOptimizer, names: Iterator[str], load: Callable[[dict[str, Any]], None], given: Any
) -> Notes:
    """Load a checkpoint by way of torch.

    Args:
        optimizer: who loads it.
        names: its parameters' names, in the order of its groups.
        load: torch's `load_state_dict`.
        given: the state_dict, as the user gave it.

    Returns:
        What was not taken over as it is.

    Raises:
        ValueError: for what this optimizer cannot take over; nothing is changed then.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"state_dict: got {type(given).__name__}, takes a dict")
    # torch casts every float state to the parameter's dtype, which would round fp32 moments to bf16, and it offers
    # no way around but hooks: one that sees what is loaded after all other hooks have had their say, and leaves the
    # states out, and one that puts them in before any other hook sees the result.
    read: list[Checkpoint] = []

    def before(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        checkpoint = read_checkpoint(optimizer, names, state_dict)
        if checkpoint is None:
            return None
        read.append(checkpoint)
        return {**state_dict, "state": checkpoint.others, "param_groups": checkpoint.groups}

    def after(_: torch.optim.Optimizer) -> None:
        optimizer.state.update(read[0].states)

    handles = (
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after, prepend=True),
    )
    try:
        load(dict(given))
    finally:
        for handle in handles:
            handle.remove()
    return read[0].notes


@torch.no_grad()
def read_checkpoint(
    optimizer: NarrowOptimizer, names: Iterator[str], given: Mapping[str, Any]
) -> Checkpoint | None:
    """Put a checkpoint into an optimizer's words, without changing the optimizer.

    Args:
        optimizer: who loads it.
        names: its parameters' names, in the order of its groups.
        given: the state_dict.

    Returns:
        None where groups do not match in number or size: torch says that in its own words.

    Raises:
        ValueError: for what is no checkpoint, or none that this optimizer can take over.
    """
    name = type(optimizer).__name__
    check_form(given)
    live, saved = optimizer.param_groups, given["param_groups"]
    if [len(group["params"]) for group in live] != [len(group["params"]) for group in saved]:
        return None
    check_members(saved)
    layout = layout_of(given)
    translated = [layout.group(name, number, *pair) for number, pair in enumerate(zip(live, saved, strict=True))]
    stays = (*_STAYS, *optimizer.identity)
    groups = [_merge(*pair, stays) for pair in zip(live, translated, strict=True)]
    try:
        check_limits(groups)
    except ValueError as error:
        raise ValueError(f"state_dict: {error}") from error
    checkpoint = Checkpoint(groups, dict(given["state"]))
    for number, (group, old) in enumerate(zip(groups, translated, strict=True)):
        members = live[number]["params"]
        if group["rule"] != old["rule"] and not {group["rule"], old["rule"]} <= _ALIKE:
            what = f"took moments of {old['rule']!r} for those of {group['rule']!r}, which may be other averages"
            checkpoint.notes.add(what, f"group {number}")
        try:
            optimizer.check({**group, "params": members})
            rule = optimizer.rule_for(group)
            kept = slot_storages(rule, {**group, "states": old["states"]})
        except ValueError as error:
            raise ValueError(f"state_dict: group {number}: {error}") from error
        for option in _LIMITS:
            if group[option] != live[number][option]:
                what = f"took {option}={group[option]!r} from the checkpoint, for {live[number][option]!r}"
                checkpoint.notes.add(what, f"group {number}")
        for p, identity in zip(members, group["params"], strict=True):
            plan = plan_parameter(rule, group, p, next(names), 0)
            entry = checkpoint.others.pop(identity, None)
            if entry == {} and plan.slots:
                checkpoint.notes.add("found an empty state, which starts anew", plan.name)
            if entry:
                entry = _here(name, plan, p, entry, kept, old["block_size"], checkpoint.notes)
            entry = layout.state(plan, entry) if entry else None
            if entry:
                # A momentum that is switched off now may be switched on again.
                plan = plan.holding(entry)
                here = local(p)
                reader = WordReader(name, plan, here, entry, kept, old["block_size"], checkpoint.notes)
                checkpoint.states[p] = reader.read(plan.init(here, group))
    return checkpoint


def _here(
    name: str,
    plan: ParameterPlan,
    p: Tensor,
    entry: Mapping[str, Any],
    kept: Mapping[str, StateStorage],
    block_size: int,
    notes: Notes,
) -> dict[str, Any]:
    """What of a saved state lies in this process; args as of `WordReader`."""

    def read(box: Shard, words: Mapping[str, Tensor]) -> dict[str, Tensor]:
        part = torch.empty(box.sizes, dtype=p.dtype, device=local(p).device)
        return WordReader(name, plan.holding(words), part, words, kept, block_size, notes).moments()

    found, decoded = unwrapped(p, plan, entry, block_size, read)
    if decoded:
        notes.add("encoded moments anew, whose blocks were those of other shards", plan.name)
    return found


def _merge(live: Mapping[str, Any], saved: Mapping[str, Any], stays: Iterable[str]) -> dict[str, Any]:
    kept = {option: live[option] for option in stays if option in live}
    return {**{option: value for option, value in live.items() if option != "params"}, **saved, **kept}
