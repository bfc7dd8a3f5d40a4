"""Load checkpoints: of the same storages or others, of another library, from another device.

`state_dict` is torch's: the tensors of each parameter's state as they are, and the parameter groups. The groups say
what the tensors mean: `states`, `weights` and `block_size` name the formats, `rule` the averages, `state_version`
the version of this layout. `kept` and `storages` have what single parameters have otherwise, by their names. A
small or marked parameter may have yet another storage. The reader finds it by the keys, dtypes and shapes of the
tensors; where those fit two storages, by the mark that the parameter has now. So nothing else is written, and every
tool that moves torch's optimizer states can move these.

Reading takes three steps. None of them touches the optimizer, so a refused checkpoint changes nothing.

1. **The layout**: which library wrote it. Checkpoints of torch.optim and of the public 8-bit optimizers are brought
   into our form first (`_checkpoint_foreign`).
2. **The groups**: hyperparameters come from the checkpoint, as in torch; the options of storage and arithmetic stay
   as this optimizer was made.
3. **The states** (`_checkpoint_convert`): tensors of the same storage and block size are copied bit for bit, so
   that a resumed run is the run that never stopped. Others are decoded to float32 and encoded anew.

A low word means something only beside its parameter, so load the model first. Unknown entries are dropped with a
warning.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from narrowgauge._arguments import is_number, shown
from narrowgauge._module_names import clean_name
from narrowgauge._text import listed
from narrowgauge._torch_private import local
from narrowgauge.optim._changes import KEPT, STORAGES
from narrowgauge.optim._checkpoint_convert import Notes, StateReader
from narrowgauge.optim._checkpoint_foreign import VERSION_KEY, layout_of, with_count
from narrowgauge.optim._options import LIMIT, check_limits
from narrowgauge.optim._plan import (
    REASON,
    ParamPlan,
    each_once,
    never_trains,
    own_storages,
    plan_param,
    slot_storages,
    unique_names,
)
from narrowgauge.optim._state_shapes import from_shapes
from narrowgauge.rules import Rule

# Options that keep the live optimizer's value: storage, arithmetic, and the version that it writes.
_STAYS = (
    "weights", "states", "block_size", "min_quantized_size", "arithmetic",
    "foreach", "fused", "capturable", "differentiable", "rule", VERSION_KEY,
)  # fmt: skip
# Options that change steps. The checkpoint decides, as for every hyperparameter, but with a warning.
_LIMITS = ("clip_updates", "cautious", LIMIT)
# Keys of an option that earlier versions had: in groups, and in states.
_FORMER_OPTION, _FORMER_ENTRY = "percentile_clipping", "grad_norms"
# Rules whose moments are the same averages.
_ALIKE = {"adam", "adamw", "nadam", "lamb"}

Group = Mapping[str, Any]


@dataclass
class Checkpoint:
    """A checkpoint in the form of the optimizer that reads it.

    Attributes:
        groups: the parameter groups; `params` has the checkpoint's identities.
        others: entries of the saved state that belong to no parameter.
        states: the new state of each parameter that has one.
        weights: of float32 parameters whose low words were loaded, the weights that both are together.
        converted: parameters whose low word, or weight, comes from the saved word and the parameter as it is.
        notes: what was changed or dropped.
    """

    groups: list[dict[str, Any]]
    others: dict[Any, Any]
    states: dict[Tensor, dict[str, Tensor]] = field(default_factory=dict)
    weights: dict[Tensor, Tensor] = field(default_factory=dict)
    converted: list[Tensor] = field(default_factory=list)
    notes: Notes = field(default_factory=Notes)


@torch.no_grad()
def read_checkpoint(
    optimizer: str,
    live: Sequence[Group],
    fixed: Callable[[Group], tuple[str, ...]],
    check: Callable[[Group], Rule],
    given: Mapping[str, Any],
) -> Checkpoint:
    """Bring a checkpoint into an optimizer's form, without changing the optimizer.

    Args:
        optimizer: its class name, for messages.
        live: its parameter groups.
        fixed: gives, of a group, the options that no checkpoint changes, because a class is named after them.
        check: validates a group and returns its rule.
        given: the state_dict.

    Returns:
        The checkpoint.

    Raises:
        ValueError: for a state_dict that is damaged, or that does not fit.
    """
    check_form(given)
    saved = [each_once(group) for group in given["param_groups"]]
    wanted, got = ([str(len(group["params"])) for group in groups] for groups in (live, saved))
    if wanted != got:
        one = "; recipe.apply(..., decay_all=True) makes one group" if len(got) == 1 < len(wanted) else ""
        if not one and sum(map(int, wanted)) == sum(map(int, got)):
            one = "; recipes in bf16 have fp32 parameters, such as those of batch norms, in groups of their own"
        raise ValueError(
            f"state_dict: this optimizer's groups have {listed(wanted, 7)} parameters, those that were saved "
            f"{listed(got, 7) or 'none'}: make the optimizer with the groups that were saved{one}"
        )
    check_members(saved)
    check_order(live, saved)
    to_group, to_state = layout_of(given)
    pairs = zip(live, saved, strict=True)
    translated = [to_group(optimizer, number, *pair) for number, pair in enumerate(pairs)]
    groups = [
        {**mine, **new, **{option: mine[option] for option in (*_STAYS, *fixed(mine)) if option in mine}}
        for mine, new in zip(live, translated, strict=True)
    ]
    try:
        check_limits(groups)
    except ValueError as error:
        raise ValueError(f"state_dict: {error}") from error
    checkpoint = Checkpoint(groups, dict(given["state"]))
    unsaved, converts = list[str](), False
    notes, names = checkpoint.notes, unique_names(groups)
    known = zip(unique_names(live), unique_names(translated), names, strict=True)
    for number, (before, theirs, after) in enumerate(known):
        own = _renamed(live[number], dict(zip(before, after, strict=True)), number)
        # A saved group may have other names than this one, or none.
        to = dict(zip(map(clean_name, (*before, *theirs)), (*after, *after), strict=True))
        translated[number] = _renamed(translated[number], to, number)
        _take_storages(own, translated[number], groups[number], number, notes)
    for number, (group, old) in enumerate(zip(groups, translated, strict=True)):
        members = live[number]["params"]
        former = group.pop(_FORMER_OPTION, 100)
        if not is_number(former) or former < 100:
            notes.add(f"dropped {_FORMER_OPTION}, which {optimizer} does not have", f"group {number}")
        if group["rule"] != old["rule"] and not {group["rule"], old["rule"]} <= _ALIKE:
            what = f"took moments of {old['rule']!r} for those of {group['rule']!r}, which may be other averages"
            notes.add(what, f"group {number}")
        try:
            rule = check({**group, "params": members})
            # What the saved group asks for each slot; a single parameter may differ (`StateReader`).
            asked = {**group, "states": old["states"]}
            declared = slot_storages(rule, asked)
        except ValueError as error:
            raise ValueError(f"state_dict: group {number}: {error}") from error
        for option in _LIMITS:
            if group[option] != live[number][option]:
                what = f"took {option}={group[option]!r} from the checkpoint, for {live[number][option]!r}"
                notes.add(what, f"group {number}")
        for p, identity, name in zip(members, group["params"], names[number], strict=True):
            if never_trains(p):
                continue
            try:
                plan = plan_param(rule, group, p, name, 0)
                likely = [declared]
                if single := {k: v for k, v in own_storages(old, name).items() if k not in ("weights", REASON)}:
                    likely.insert(0, slot_storages(rule, asked, single))
            except ValueError as error:
                raise ValueError(f"state_dict: group {number}: {error}") from error
            if plan.kind[1] is not None:
                likely.insert(
                    0, {slot.slot.name: slot.storage for slot in plan.all_slots}
                )  # if it was marked alike
            entry = checkpoint.others.pop(identity, None)
            if entry == {} and plan.slots:
                notes.add("found an empty state, which starts anew", plan.name)
            if entry and _FORMER_ENTRY in entry:
                entry = copy.copy(entry)
                del entry[_FORMER_ENTRY]
                notes.add(f"dropped {_FORMER_ENTRY!r}, which {optimizer} does not keep", plan.name)
            if not entry:
                continue
            entry, alone, own_converts = _as_written(entry, rule, {**group, KEPT: {}, STORAGES: {}, **old}, plan, p)
            converts |= own_converts
            reader = StateReader(optimizer, plan, local(p), entry, tuple(likely), old["block_size"], notes)
            found, decoded = from_shapes(p, plan, entry, old["block_size"], reader.moments_of)
            if decoded:
                notes.add("encoded moments anew, whose blocks were those of other shards", plan.name)
            counted, unknown = with_count(rule, group, saved[number], found)
            if found and (ours := to_state(plan, counted)):
                if unknown:
                    notes.add(
                        "found no count of steps and took 1, which corrects moments as at the start", plan.name
                    )
                plan = plan.with_inactive(ours)  # a momentum that is off now may be switched on again
                reader = replace(reader, plan=plan, entry=ours)
                fresh = plan.init(local(p), group)
                if alone and all(_is_same(ours.get(key), fresh[key]) for key in alone):
                    unsaved.append(f"{', '.join(map(repr, sorted(alone)))} of {plan.name}")
                checkpoint.states[p] = reader.read(fresh)
                if reader.wide is not None:
                    checkpoint.weights[p] = reader.wide
                if reader.converted:
                    checkpoint.converted.append(p)
    if unsaved and not converts:
        raise ValueError(
            f"state_dict: moments and low words must be those that were saved, got {unsaved[0]} as in a new "
            "optimizer; broadcast_from_rank0 does not move states into other storages"
        )
    return checkpoint


def _as_written(
    entry: Mapping[str, Any], rule: Rule, saved: Group, plan: ParamPlan, p: Tensor
) -> tuple[Mapping[str, Any], set[str], bool]:
    """What the saved optimizer wrote of a parameter's state.

    torch's `set_optimizer_state_dict` puts the tensors of this optimizer beside those that were saved. With
    ``broadcast_from_rank0`` other ranks have nothing else.

    Args:
        saved: the group, with the storages that were saved.

    Returns:
        The entry without such tensors; the keys of those that stand in place of what was saved; and whether some
        slot was saved in another storage than this optimizer's.
    """
    strays, alone, converts = set[str](), set[str](), False
    if not isinstance(saved["min_quantized_size"], int):  # damaged; nothing else reads it
        return entry, alone, converts
    try:
        written = plan_param(rule, saved, p, plan.name, 0)
    except ValueError:  # for a parameter of another kind
        return entry, alone, converts
    mine, theirs = _keys(plan), _keys(written)
    for name, keys in mine.items():
        was = theirs.get(name, set())
        if was and was <= entry.keys():
            strays |= keys - was
            converts |= keys != was
        elif was and keys <= entry.keys():
            alone |= keys
    if strays & entry.keys():
        entry = {key: value for key, value in entry.items() if key not in strays}
    return entry, alone, converts


def _is_same(x: Any, y: Tensor) -> bool:
    if not isinstance(x, Tensor) or (x.dtype, x.shape) != (y.dtype, y.shape):
        return False
    found, wanted = (
        each.detach().to(y.device).reshape(-1).clone(memory_format=torch.contiguous_format) for each in (x, y)
    )
    return torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def _keys(plan: ParamPlan) -> dict[str, set[str]]:
    """By slot, the keys of its tensors; under "", that of the low word."""
    low = set() if plan.weight_key is None else {plan.weight_key}
    return {slot.slot.name: {key for _, key in slot.keys} for slot in plan.all_slots} | {"": low}


def _renamed(group: Group, to: Mapping[str, str], number: int) -> dict[str, Any]:
    """A group that has the storages of single parameters by other names; they are checked."""
    found = dict(group)
    for key in (KEPT, STORAGES):
        what = f"{key!r} of group {number}"
        _check_kind(what, group.get(key, {}), Mapping, "a dict")
        for name, own in group.get(key, {}).items():
            _check_kind(f"a name in {what}", name, str, "a name")
            _check_kind(f"{name!r} in {what}", own, Mapping, "a dict")
            for option, value in own.items():
                _check_kind(f"{option!r} of {name!r} in {what}", value, str, "a name")
            if name not in to and clean_name(name) not in to:
                raise ValueError(f"state_dict: {what} must name its parameters, got {name!r}")
        if key in group:
            found[key] = {to.get(name) or to[clean_name(name)]: own for name, own in group[key].items()}
    return found


def _take_storages(mine: Group, saved: Group, group: dict[str, Any], number: int, notes: Notes) -> None:
    """Keep the storages that single parameters were made with, and take over those that `convert` chose since.

    Those of a parameter that the two were not made alike with are left out.
    """
    changed, theirs = mine.get(STORAGES, {}), saved.get(STORAGES, {})
    if theirs:
        alike = {name: own for name, own in theirs.items() if _made_with(mine, name) == _made_with(saved, name)}
        changed = {**{name: own for name, own in changed.items() if name in theirs}, **alike}
        if len(alike) < len(theirs):
            what = f"left out {STORAGES!r} of single parameters, as those that they were made with differ"
            notes.add(what, f"group {number}")
    for key, value in ((KEPT, mine.get(KEPT)), (STORAGES, changed)):
        group.pop(key, None)
        if value:
            group[key] = value


def _made_with(group: Group, name: str) -> dict[str, Any]:
    found = {"weights": group.get("weights"), "states": group.get("states"), **group.get(KEPT, {}).get(name, {})}
    found.pop(REASON, None)
    return found


def check_form(given: Any) -> None:
    """Refuse what is not a torch optimizer's state_dict, naming the place and the value."""
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
        keys = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        raise ValueError(f"state_dict must be a dict with 'state' and 'param_groups', got {keys}")
    states, groups = given["state"], given["param_groups"]
    _check_kind("'state'", states, Mapping, "a dict")
    for identity, entry in states.items():
        _check_kind(f"the state of {identity!r}", entry, Mapping, "a dict")
    _check_kind("'param_groups'", groups, (list, tuple), "a list")
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
            raise ValueError(
                f"state_dict: group {number} must be a dict with a list of 'params', got {group!r:.200}"
            )
        for option in group:
            _check_kind(f"an option of group {number}", option, str, "a name")
        for identity in group["params"]:
            _check_kind(f"a parameter of group {number}", identity, (int, str), "a number or a name")
            if identity in states:
                _check_entry(f"the state of {identity!r}", states[identity])


def check_members(groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse groups that do not list each parameter once, naming the group or the parameter."""
    for number, group in enumerate(groups):
        named, count = group.get("param_names"), len(group["params"])
        if named is None:
            continue
        names = isinstance(named, list | tuple) and all(isinstance(name, str) for name in named)
        if not names or len(named) != count:
            raise ValueError(f"state_dict: param_names of group {number} must be {count} names, got {named!r:.200}")
    counts = Counter(identity for group in groups for identity in group["params"])
    if twice := [identity for identity, count in counts.items() if count > 1]:
        raise ValueError(f"state_dict: 'params' must have each parameter once, got {twice[0]!r} twice")


def check_order(own: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Refuse parameters of the same names in another order: a state goes to parameters by their places."""
    mine, theirs = (
        [name for group in groups for name in group.get("param_names") or ()] for groups in (own, saved)
    )
    if mine != theirs and sorted(mine) == sorted(theirs):
        name, saved_name = next(pair for pair in zip(mine, theirs, strict=True) if pair[0] != pair[1])
        raise ValueError(
            f"state_dict: parameters must be in the order of the state, got {name!r} for {saved_name!r}"
        )


def _check_entry(what: str, entry: Mapping[Any, Any]) -> None:
    for key, value in entry.items():
        _check_kind(f"a key in {what}", key, str, "a name")
        if isinstance(value, Mapping):
            _check_entry(f"{key!r} in {what}", value)
        if isinstance(value, Tensor) and (value.is_meta or value.layout is not torch.strided or value.is_complex()):
            raise ValueError(
                f"state_dict: {key!r} in {what} must be of dense real numbers, got {value.dtype} "
                f"({value.layout}, on {value.device})"
            )


def _check_kind(what: str, value: Any, kind: type | tuple[type, ...], words: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"state_dict: {what} must be {words}, got {shown(value)}")
