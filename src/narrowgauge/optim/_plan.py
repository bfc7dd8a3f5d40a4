"""What is done with one parameter: its rule, its storages, its shard. Decided once, and shown by `describe()`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from narrowgauge._arguments import shown
from narrowgauge._torch_private import is_flattened
from narrowgauge.kernels._codec import Codec, Moment
from narrowgauge.optim._changes import KEPT, STORAGES
from narrowgauge.optim._sharding import Shard, is_shared, shard_of
from narrowgauge.rules import WEIGHT, Rule, Slot, has_terms
from narrowgauge.storage import (
    Float8Weight,
    StateContext,
    StateStorage,
    WeightStorage,
    automatic_weights,
    marked_states,
    state_storage,
    weight_storage,
)

# A parameter's dtype, the states that it is marked with, and whether it is a `Float8Weight`.
Kind = tuple[torch.dtype, str | None, bool]
State = dict[str, Tensor]
REASON = "reason"  # a key beside a parameter's storages under KEPT: why it has these, for `describe()`
PLAIN = (Tensor, torch.nn.Parameter)  # classes whose memory kernels may use

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class SlotPlan:
    """A moment and how it is kept.

    Attributes:
        slot: the rule's slot.
        storage: how it is kept.
        block_size: elements per block.
        normalizer: the slot whose root is this one's unit, if its storage is normalized.
        keys: (name in the storage, key in the parameter's state) of each of its tensors.
    """

    slot: Slot
    storage: StateStorage
    block_size: int
    normalizer: SlotPlan | None = None

    @functools.cached_property
    def keys(self) -> tuple[tuple[str, str], ...]:
        names = _tensor_names(self.storage, self.slot.signed)
        return tuple(zip(names, self.keyed(dict.fromkeys(names)), strict=True))

    @functools.cached_property
    def codec(self) -> Codec | None:
        """How kernels keep the moment; None if none does."""
        return self.storage.codec(self.slot.signed)

    def init(self, p: Tensor, group: Mapping[str, Any]) -> State:
        """The slot's part of a new state."""
        if self.slot.start == WEIGHT:
            return self.encode(p.to(torch.float32, memory_format=torch.preserve_format, copy=True))
        start = group[self.slot.start] if self.slot.start is not None else 0.0
        if start:
            return self.encode(torch.full_like(p, start, dtype=torch.float32))
        return self.keyed(self.storage.init(p, self.slot.signed, self.block_size))

    def tensors(self, state: Mapping[str, Tensor]) -> State:
        """This slot's tensors in a parameter's state, by their names in the storage; empty if there are none."""
        dotted = self.slot.name + "."
        return {
            key.removeprefix(self.slot.name).removeprefix("."): value
            for key, value in state.items()
            if key == self.slot.name or key.startswith(dotted)
        }

    def keyed(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors under the keys that the parameter's state has for them."""
        return {f"{self.slot.name}.{name}" if name else self.slot.name: value for name, value in tensors.items()}

    def decode(self, state: Mapping[str, Tensor], shape: torch.Size, normalizer: Tensor | None = None) -> Tensor:
        """The moment in float32. `normalizer` is the decoded one where the caller has it already."""
        return self.storage.decode(self.tensors(state), self._context(state, shape, normalizer))

    def lost(self, moment: Tensor, state: Mapping[str, Tensor], normalizer: Tensor | None = None) -> Tensor:
        """What storing the moment has lost; the weight can take it."""
        return self.storage.lost(moment, self.tensors(state), self._context(state, moment.shape, normalizer))

    def encode(
        self,
        moment: Tensor,
        random: Tensor | None = None,
        state: Mapping[str, Tensor] | None = None,
        normalizer: Tensor | None = None,
    ) -> State:
        """The moment's part of a state. `state` holds the normalizer, unless that is given decoded."""
        return self.keyed(self.storage.encode(moment, self._context(state, moment.shape, normalizer), random))

    def _context(
        self, state: Mapping[str, Tensor] | None, shape: torch.Size, normalizer: Tensor | None
    ) -> StateContext:
        if normalizer is None and self.normalizer is not None and state is not None:
            normalizer = self.normalizer.decode(state, shape)
        return StateContext(shape, self.slot.signed, self.block_size, normalizer)


def moments_of(slots: Sequence[SlotPlan]) -> tuple[Moment, ...]:
    """Moments as kernels keep them; each slot has a codec."""
    made = []
    for number, slot in enumerate(slots, start=1):
        assert slot.codec is not None
        normalizer = slot.normalizer.slot.name if slot.normalizer is not None else None
        made.append(Moment(slot.slot.name, slot.codec, normalizer, number))
    return tuple(made)


@functools.lru_cache(maxsize=256)
def _tensor_names(storage: StateStorage, signed: bool) -> tuple[str, ...]:
    return tuple(storage.init(torch.zeros(1), signed, 1))


@dataclass(frozen=True)
class ParamPlan:
    """One parameter's storages.

    Attributes:
        name: as the user named it, or its index among the groups.
        index: its index among all parameters; the stream of its random bits.
        rule: the update rule.
        weight: the weight storage.
        slots: one plan a moment.
        inactive: those of moments that the hyperparameters switch off; they may come back.
        strict: whether every operation is rounded to the storages' formats.
        why: the reason that was given for its storages, and what differs from what was asked for; empty if nothing.
        kind: what the plan depends on besides the options; see `kind_of`.
        shape: the parameter's, which its state was made for.
        shard: the part of the parameter on this rank; None if all of it is.
        weight_key: the state's key of the low word; None without one.
    """

    name: str
    index: int
    rule: Rule
    weight: WeightStorage
    slots: tuple[SlotPlan, ...]
    inactive: tuple[SlotPlan, ...]
    strict: bool
    why: str
    kind: Kind
    shape: torch.Size
    shard: Shard | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The parameter's."""
        return self.kind[0]

    @functools.cached_property
    def has_terms(self) -> bool:
        """Whether the rule asks for sums over the parameter."""
        return has_terms(self.rule)

    @functools.cached_property
    def weight_key(self) -> str | None:
        return f"weight.{self.weight.key}" if self.weight.key is not None else None

    @functools.cached_property
    def all_slots(self) -> tuple[SlotPlan, ...]:
        """The slots, inactive ones included."""
        return (*self.slots, *self.inactive)

    def low_of(self, state: Mapping[str, Tensor]) -> Tensor | None:
        """The low word in a state; None for weights without one."""
        return state[self.weight_key] if self.weight_key is not None else None

    def init(self, p: Tensor, group: Mapping[str, Any]) -> State:
        """The state of a parameter before its first step; of a sharded one, for the part on this rank."""
        if p.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"step: the first step of {self.name} (or since its options changed) cannot be captured; "
                "take one before capturing"
            )
        state = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "skipped": torch.zeros((), dtype=torch.int64, device=p.device),
        }
        for slot in self.slots:
            state |= slot.init(p, group)
        low = self.weight.init(p)
        if low is not None and self.weight_key is not None:
            state[self.weight_key] = low
        return state

    def with_inactive(self, state: Mapping[str, Any]) -> ParamPlan:
        """This plan, with inactive moments made active if a state holds them."""
        found = tuple(slot for slot in self.inactive if slot.tensors(state))
        return replace(self, slots=(*self.slots, *found)) if found else self

    def exact(self, p: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(the weight as it is stored, the weight that the model sees), in float64."""
        return self.weight.exact(p, self.low_of(state)), p.to(torch.float64, copy=True)

    def nbytes(self, p: Tensor) -> int:
        """Bytes that the optimizer keeps on this rank for this parameter: moments and low word."""
        shape = self.shard.sizes if self.shard is not None else tuple(p.shape)
        moments = sum(s.storage.nbytes(shape, s.block_size) for s in self.slots)
        return math.ceil(math.prod(shape) * self.weight.bytes_added(p.dtype)) + moments


@dataclass(slots=True)
class ParamStep:
    """One parameter in one step: what every backend is given.

    `index` is its index among all parameters. `param` and `grad` are the parts on this rank; `state` is written in
    place.
    """

    index: int
    plan: ParamPlan
    group: Mapping[str, Any]
    param: Tensor
    grad: Tensor
    state: State

    def tensors(self) -> list[Tensor]:
        """Parameter, gradient, low word and moments, in the order in which kernels name them."""
        plan, state = self.plan, self.state
        low = [state[plan.weight_key]] if plan.weight_key is not None else []
        p = self.param
        if isinstance(p, Float8Weight):
            low, p = [p.low], p.codes
        words = [slot.keyed(dict.fromkeys(w.name for w in slot.codec.words)) for slot in plan.slots if slot.codec]
        return [p, self.grad, *low, *(state[key] for keys in words for key in keys)]


def fits(step: ParamStep) -> bool:
    """Whether moments and low word have the shapes that a parameter of this shape gives them."""
    plan, p = step.plan, step.param
    shapes: dict[str, torch.Size | None] = {}
    for slot in plan.slots:
        shapes |= slot.keyed(_shapes(slot.storage, p.shape, p.dtype, slot.slot.signed, slot.block_size))
    if plan.weight_key is not None:
        shapes[plan.weight_key] = torch.Size(plan.weight.low_shape(p))
    return all(key in step.state and step.state[key].shape == shape for key, shape in shapes.items())


@functools.lru_cache(maxsize=4096)
def _shapes(
    storage: StateStorage, shape: torch.Size, dtype: torch.dtype, signed: bool, block_size: int
) -> dict[str, torch.Size]:
    tensors = storage.init(torch.empty(shape, dtype=dtype, device="meta"), signed, block_size)
    return {name: x.shape for name, x in tensors.items()}


def kind_of(p: Tensor) -> Kind:
    """What a plan depends on besides the options: the parameter's dtype, the states it is marked with, and whether
    it is a `Float8Weight`.

    A parameter of FSDP1 is refused; it may have been wrapped after its optimizer was made.
    """
    if is_flattened(p):
        raise ValueError(
            "params must be plain or of FSDP2 (torch.distributed.fsdp.fully_shard), got one that "
            "FullyShardedDataParallel (FSDP1) has flattened"
        )
    return p.dtype, marked_states(p), isinstance(p, Float8Weight)


def each_once(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group with each of its parameters at its first place only: torch warns of others, and it has one state."""
    keys = [id(p) if isinstance(p, Tensor) else repr(p) for p in group["params"]]  # a checkpoint has numbers
    places = sorted({key: place for place, key in reversed([*enumerate(keys)])}.values())
    if len(places) == len(keys):
        return dict(group)
    lists = [key for key in ("params", "param_names") if isinstance(group.get(key), list)]
    return {**group, **{key: [group[key][place] for place in places if place < len(group[key])] for key in lists}}


def never_trains(p: Tensor) -> bool:
    """Whether a frozen parameter holds what no step takes, as the codes of a quantized layer: it is left alone."""
    return not p.requires_grad and (p.dtype.is_complex or not p.dtype.is_floating_point or p.dtype.itemsize == 1)


def plan_param(rule: Rule, group: Mapping[str, Any], p: Tensor, name: str, index: int) -> ParamPlan:
    """Decide one parameter's storages; a ValueError for a dtype or a combination that is not supported."""
    dtype, mark, is_float8 = kind = kind_of(p)
    rule = rule.of_dim(p.dim())
    if dtype not in DTYPES:
        raise ValueError(f"params must be float32, bfloat16 or float16, got {dtype} ({name})")
    strict = group["arithmetic"] == "strict"
    own = own_storages(group, name, kind)
    asked, noted = own.pop("weights", group["weights"]), own.pop(REASON, None)
    try:
        automatic = "fp8split8" if is_float8 else automatic_weights(dtype, strict)
        weight = weight_storage(automatic if asked == "auto" else asked)
        storages, active = slot_storages(rule, group, own), rule.slots(group)
    except ValueError as error:  # a storage of its own is wrong; the group's have been checked
        raise ValueError(f"{error} ({name})") from None
    if dtype not in weight.dtypes:
        taken = " or ".join(str(dtype).removeprefix("torch.") for dtype in weight.dtypes)
        hint = (
            f"cast the model before its optimizer is made, or back to {taken} if it was cast since; one that shall "
            "stay as it is, as of a batch norm, needs a group with weights='plain'"
        )
        if is_shared(p):  # accelerate shards a model after that
            hint = "under accelerate mixed_precision must be 'no', or it makes sharded weights float32"
        raise ValueError(f"params must be {taken} for weights={weight.name!r}, got {dtype} ({name}); {hint}")
    if weight.float8 and not is_float8:
        what = "a DTensor, and must not be sharded" if is_shared(p) else f"{dtype}"
        raise ValueError(
            f"params must be a Float8Weight for weights={weight.name!r}, as "
            f"narrowgauge.linear.to_float8_weights makes them, got {what} ({name})"
        )
    if is_float8 and not weight.float8:
        raise ValueError(
            f"weights must be 'fp8split8' for a Float8Weight, got {weight.name!r} ({name}); convert() of the "
            "optimizer that trained it makes it a plain tensor"
        )
    if strict and not weight.rounded:
        raise ValueError(f"weights must be stored in floats for arithmetic='strict', got {weight.name!r}")
    shard = shard_of(p)
    why: dict[str, list[str]] = {}  # by reason, the slots that differ for it
    plans: dict[Slot, SlotPlan] = {}
    for slot in dict.fromkeys((*active, *rule.moments)):
        if slot.name not in storages:
            continue
        storage, reasons = storages[slot.name], []
        asked_of_slot = group["states"] if isinstance(group["states"], str) else group["states"].get(slot.name)
        asked_of_slot = own.get(slot.name, asked_of_slot)
        if asked_of_slot not in (None, "expansion", storage.name):
            what = "it is a weight" if slot.storages else f"{asked_of_slot} is for other moments"
            reasons.append(f"in {storage.name}: {what}")
        if mark is not None and storage.name != mark and not slot.storages:
            reasons.append(f"in {mark}: the parameter is marked so")
            storage = state_storage(mark).for_slot(slot.signed, slot.normalizer in storages)
        if storage.quantized and p.numel() < group["min_quantized_size"]:
            reasons.append(f"in fp32: fewer than min_quantized_size={group['min_quantized_size']} elements")
            storage = state_storage("fp32")
        if p.dim() < storage.least_dims:
            reasons.append(f"in fp32: {p.dim()} dimensions < {storage.least_dims} of {storage.name}")
            storage = state_storage("fp32")
        if storage.whole and shard is not None:
            raise ValueError(
                f"states must not be {storage.name!r} for {slot.name!r} of {name}, which is sharded: ranks hold "
                "parts of its rows or columns"
            )
        if strict and slot in active and not storage.rounded:
            raise ValueError(f"states must be stored in floats for arithmetic='strict', got {storage.name!r}")
        plans[slot] = SlotPlan(slot, storage, group["block_size"])
        for reason in reasons if slot in active else ():
            why.setdefault(reason, []).append(slot.name)
    by_name = {slot.name: plan for slot, plan in plans.items()}
    for slot, plan in plans.items():
        if plan.storage.normalized:
            plans[slot] = replace(plan, normalizer=by_name.get(slot.normalizer or ""))
    slots = tuple(plans.pop(slot) for slot in active)
    differing = (f"{', '.join(names)} {reason}" for reason, names in why.items())
    noted = "; ".join(filter(None, (noted, *differing)))
    return ParamPlan(name, index, rule, weight, slots, tuple(plans.values()), strict, noted, kind, p.shape, shard)


def own_storages(group: Mapping[str, Any], name: str, kind: Kind | None = None) -> dict[str, str]:
    """The storages that a parameter has in place of its group's: ``weights``, storages by slot, and the ``reason``.

    A checkpoint may contain weights that `NarrowOptimizer.convert` chose for another dtype. If the parameter's
    `kind` is given, weights that it does not have are left out.
    """
    changed = dict(group.get(STORAGES, {}).get(name, {}))
    if kind is not None and "weights" in changed:
        storage = weight_storage(changed["weights"])
        if kind[0] not in storage.dtypes or storage.float8 != kind[2]:
            del changed["weights"]
    return {**group.get(KEPT, {}).get(name, {}), **changed}


def unique_names(groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """By group the names of its parameters: as the user named them, or their places, ``"group.index"``.

    torch lets parameters share a name; reports by name must not mix them up, so a later one has its place in it.
    """
    found: list[list[str]] = []
    taken: set[str] = set()
    for number, group in enumerate(groups):
        given = group.get("param_names") or [f"{number}.{i}" for i in range(len(group["params"]))]
        if len(given) != len(group["params"]):
            raise ValueError(
                f"group {number} must have a name for each of its {len(group['params'])} parameters, got "
                f"{len(given)}: give it others by add_param_group"
            )
        found.append([])
        for index, name in enumerate(given, start=sum(map(len, found))):
            unique = name if name not in taken else f"{number}.{name}"
            unique = unique if unique not in taken else f"{number}.{index}.{name}"
            taken.add(unique)
            found[-1].append(unique)
    return found


def check_own_storages(group: Mapping[str, Any], number: int, names: Iterable[str]) -> None:
    """Refuse storages of single parameters whose keys are not names of the group's parameters."""
    for key in (KEPT, STORAGES):
        given = group.get(key, {})
        if not isinstance(given, Mapping) or not all(isinstance(own, Mapping) for own in given.values()):
            raise ValueError(f"{key!r} of group {number} must be a dict of dicts, by parameter, got {shown(given)}")
        if strays := given.keys() - set(names):
            raise ValueError(f"{key!r} of group {number} must name its parameters, got {min(map(str, strays))!r}")


def slot_storages(
    rule: Rule, group: Mapping[str, Any], own: Mapping[str, str] | None = None
) -> dict[str, StateStorage]:
    """The storage asked for each slot, inactive ones included; `own` has those of a single parameter.

    ``"expansion"``, as one name for all slots, is the preset of Collage-plus: each slot says what it means there. A
    slot that takes some storages only has the first of them where one name for all is none of them, or where a
    mapping leaves it out.
    """
    states, active = group["states"], rule.slots(group)
    if not isinstance(states, str | Mapping):
        raise ValueError(f"states must be a name or a mapping from slots to names, got {states!r}")
    slots = {slot.name: slot for slot in (*active, *rule.moments)}
    if isinstance(states, str):
        state_storage(states)  # refuses an unknown name even if the rule has no slot
        one, states = states, {}
        for name, slot in slots.items():
            asked = slot.preset if one == "expansion" else one
            states[name] = asked if asked in slot.storages or not slot.storages else slot.storages[0]
    else:
        states = {name: slot.storages[0] for name, slot in slots.items() if slot.storages} | dict(states)
    states = {**states, **(own or {})}
    names = [slot.name for slot in active]
    if not set(names) <= set(states) <= set(slots):
        raise ValueError(
            f"states must name a storage for each of {names} ({rule.name}), got {sorted(map(str, states))}"
        )
    for name, storage in states.items():
        allowed = slots[name].storages
        if allowed and storage not in allowed:
            raise ValueError(
                f"states must be {' or '.join(map(repr, allowed))} for {name!r} of {rule.name}, which is a weight, "
                f"got {storage!r}"
            )
    return {
        name: state_storage(storage).for_slot(slots[name].signed, slots[name].normalizer in states)
        for name, storage in states.items()
    }
