"""Convert one parameter's state from the storages that wrote it to its present storages.

A moment is decoded by the storage that wrote it and encoded by the one that keeps it; if both are the same, its
tensors are copied bit for bit. A conversion rounds once, to the new storage; a wider one loses nothing. A low
word means something only beside its parameter: the weight of both is computed, and split again.

Two callers: `_checkpoint` reads a saved state, and `replan` follows options that changed in `param_groups`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from narrowgauge._torch_private import local
from narrowgauge.optim._plan import ParamPlan, SlotPlan
from narrowgauge.optim._sharded_state import LOW_CODES, in_blocks
from narrowgauge.optim._sharding import Shard
from narrowgauge.rules import bare
from narrowgauge.storage import (
    Float8Weight,
    StateContext,
    StateStorage,
    WeightStorage,
    state_storage,
    state_storages,
    weight_storage,
    weight_storages,
)
from narrowgauge.storage._weights import Split4, Split8, to_nibbles


class Notes(dict[str, list[str]]):
    """What was changed or dropped, and the names of the parameters or groups."""

    def add(self, what: str, name: str) -> None:
        self.setdefault(what, []).append(name)

    def __str__(self) -> str:
        parts = []
        for what, names in self.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{what} ({', '.join(names[:3])}{more})")
        return "; ".join(parts)


@dataclass
class StateReader:
    """Reads one parameter's saved state.

    Attributes:
        optimizer: the optimizer's name, for messages.
        plan, p: the parameter's plan, and the parameter; of a shared one the local shard.
        entry: the saved state, under this library's keys.
        declared: the storage that each slot should have been written by; if there are several answers, the
            likeliest first.
        block_size: of the saved state.
        notes: collects what is not taken over.
        wide: after `read`, the weight that a float32 parameter and a narrow one's low word are together; the caller
            writes it. None without such a word.
        converted: after `read`, whether a low word or `wide` comes from the saved word and the parameter as it is.
    """

    optimizer: str
    plan: ParamPlan
    p: Tensor
    entry: Mapping[str, Any]
    declared: Sequence[Mapping[str, StateStorage]]
    block_size: int
    notes: Notes
    wide: Tensor | None = None
    converted: bool = False

    def read(self, fresh: dict[str, Tensor]) -> dict[str, Tensor]:
        """Write the saved state into a new one, `fresh`, which sets dtypes, devices and layouts."""
        new: dict[str, Tensor] = {}
        read: set[str] = set()
        for slot in sorted(self.plan.slots, key=lambda slot: slot.normalizer is not None):  # normalizers first
            saved = slot.tensors(self.entry)
            new |= self._moment(slot, saved, new)
            read |= slot.keyed(saved).keys()
        for key in [key for key in self.entry if key.startswith("weight.")]:
            read.add(key)
            low = self._low_word(key)
            if low is not None and self.plan.weight_key is not None:
                new[self.plan.weight_key] = low
        self._counters(fresh, new)
        for key, value in new.items():
            fresh[key].copy_(value)
        for key in sorted(self.entry.keys() - read - new.keys()):
            self.notes.add(f"dropped {key!r}, which {self.optimizer} does not keep", self.plan.name)
        return fresh

    def moments_of(self, box: Shard, saved: Mapping[str, Tensor], block_size: int) -> dict[str, Tensor]:
        """The moments of a box of the parameter that are stored as codes or factors, decoded, by slot.

        `saved` has the box's tensors, those of normalizers among them, in blocks of `block_size`.
        """
        part = torch.empty(box.sizes, dtype=self.p.dtype, device=self.p.device)
        plan = self.plan.with_inactive(saved)
        reader = replace(self, plan=plan, p=part, entry=saved, block_size=block_size)
        blocks = in_blocks(saved)
        slots = [slot for slot in reader.plan.slots if blocks & slot.keyed(slot.tensors(saved)).keys()]
        for slot in slots:
            reader._check(slot)
        return {slot.slot.name: reader._decoded(slot) for slot in slots}

    def _counters(self, fresh: Mapping[str, Tensor], new: dict[str, Tensor]) -> None:
        """Copy the counts that both states have."""
        if "step" not in self.entry:
            raise ValueError(f"state_dict: {self.plan.name} must have 'step', got {sorted(self.entry)}")
        slots = {key for slot in self.plan.slots for key in slot.tensors(fresh)}
        for key in fresh.keys() - new.keys() - slots - {self.plan.weight_key}:
            if key not in self.entry:
                continue
            value = torch.as_tensor(self.entry[key])
            # The step seeds the random bits and must fit into 63 bits.
            good = (value >= 0).all() and (key != "step" or ((value < 2.0**63) & (value % 1 == 0)).all())
            if not good:
                raise ValueError(f"state_dict: {key!r} of {self.plan.name} must be a count of steps, got {value}")
            if value.numel() != fresh[key].numel():
                raise ValueError(
                    f"state_dict: {key!r} of {self.plan.name} must have shape {tuple(fresh[key].shape)}, got "
                    f"{tuple(value.shape)}"
                )
            new[key] = value.reshape(fresh[key].shape)

    def _moment(self, slot: SlotPlan, saved: Mapping[str, Any], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A slot's tensors in its present storage: copied, or decoded and encoded again."""
        if not saved and slot.slot.option is not None:
            self.notes.add(f"found no {slot.slot.name!r}, which starts anew", self.plan.name)
            return {}
        if not saved:
            raise ValueError(
                f"state_dict: {self.plan.name} must have {slot.slot.name!r} for {self.optimizer}, got "
                f"{sorted(self.entry)}"
            )
        self._check(slot)
        if self._is_unchanged(slot):
            return slot.keyed(self._on_device(saved))
        moment = self._decoded(slot)
        made = slot.encode(moment, state=new)
        if slot.normalizer is not None:
            unit = slot.normalizer.decode(new, moment.shape)
            stored = slot.decode(made, moment.shape, unit)
            if ((stored == 0) & (moment != 0) & (unit == 0)).any():
                name = slot.normalizer.slot.name
                self.notes.add(f"dropped {slot.slot.name!r} where {name!r} is 0", self.plan.name)
        return made

    def _check(self, slot: SlotPlan) -> None:
        """Refuse a saved moment that its storage does not write."""
        flaw = self._storage(slot).validate(self._on_device(slot.tensors(self.entry)), slot.slot.signed)
        if flaw is not None:
            raise ValueError(f"state_dict: {slot.slot.name!r} of {self.plan.name} has {flaw}: it was damaged")

    def _is_unchanged(self, slot: SlotPlan) -> bool:
        """Whether a slot's tensors can be copied: same storage, same blocks, and same normalizer if it has one."""
        if self._storage(slot) != slot.storage:
            return False
        same = not slot.storage.quantized or self.block_size == slot.block_size
        return same and (slot.normalizer is None or self._is_unchanged(slot.normalizer))

    def _decoded(self, slot: SlotPlan) -> Tensor:
        """The saved moment."""
        storage = self._storage(slot)
        normalizer = next((s for s in self.plan.slots if s.slot.name == slot.slot.normalizer), None)
        beside = self._decoded(normalizer) if storage.normalized and normalizer is not None else None
        context = StateContext(self.p.shape, slot.slot.signed, self.block_size, beside)
        return storage.decode(self._on_device(slot.tensors(self.entry)), context)

    def _on_device(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        return {key: tensor.detach().to(self.p.device) for key, tensor in saved.items()}

    def _storage(self, slot: SlotPlan) -> StateStorage:
        """The storage that wrote a slot's tensors."""
        found = self._storages.get(slot.slot.name)
        if found is None:
            moment = f"state_dict: {slot.slot.name!r} of {self.plan.name}"
            shape = self._other_shape(slot)
            if shape is not None:
                raise ValueError(
                    f"{moment} is of shape {shape} in the checkpoint, and the parameter has {tuple(self.p.shape)}"
                )
            wanted = self.declared[-1].get(slot.slot.name, slot.storage).name
            raise ValueError(
                f"{moment} must be a moment of shape {tuple(self.p.shape)} in {wanted!r}, "
                f"block_size={self.block_size}, got {_signature(slot.tensors(self.entry))}"
            )
        return found

    def _other_shape(self, slot: SlotPlan) -> tuple[int, ...] | None:
        """The shape of a saved moment that some storage would have written for a parameter of another shape."""
        saved = slot.tensors(self.entry)
        # The shape of these words is the moment's; pairs of codes are flat and fit no storage.
        word = next((key for key in ("", "hi", "codes") if isinstance(saved.get(key), Tensor)), None)
        if word is None or saved[word].shape == self.p.shape:
            return None
        other = torch.empty(saved[word].shape, dtype=self.p.dtype, device="meta")
        for one in map(state_storage, state_storages()):
            for beside in (False, True):
                storage = one.for_slot(slot.slot.signed, beside)
                if _signature(saved) == _signature(storage.init(other, slot.slot.signed, self.block_size)):
                    return tuple(other.shape)
        return None

    @functools.cached_property
    def _storages(self) -> Mapping[str, StateStorage | None]:
        """By slot, the storage that wrote its tensors; None if no storage has such keys, dtypes and shapes.

        A small or marked parameter may have another storage than its group declares. Tensors of one slot may fit
        two: a first moment of `8bit` looks like one of `log8`. So one name that fits all slots comes first.
        """
        slots = {slot.slot.name: slot for slot in self.plan.slots if slot.tensors(self.entry)}
        got = {name: _signature(slot.tensors(self.entry)) for name, slot in slots.items()}
        kept = {slot.slot.name for slot in self.plan.all_slots}

        def fits(name: str, storage: StateStorage | None) -> bool:
            signed = slots[name].slot.signed
            return storage is not None and got[name] == _signature(storage.init(self.p, signed, self.block_size))

        known = [state_storage(name) for name in state_storages()]
        named = (
            {name: s.for_slot(slot.slot.signed, slot.slot.normalizer in kept) for name, slot in slots.items()}
            for s in known
        )
        for one in (*self.declared, *named):
            if all(fits(name, one.get(name)) for name in slots):
                return {name: one[name] for name in slots}
        found = {}
        for name, slot in slots.items():
            likely = (one.get(name) for one in self.declared)
            others = (s.for_slot(slot.slot.signed, beside) for s in known for beside in (False, True))
            found[name] = next((s for s in (*likely, *others) if fits(name, s)), None)
        return found

    def _low_word(self, key: str) -> Tensor | None:
        """The low word of the present weight storage for a saved one; None if there is none."""
        target, name = self.plan.weight, self.plan.name
        low = torch.as_tensor(self.entry[key]).detach().to(self.p.device)
        p = _narrow(self.p, low, key)
        source = _weight_storage_of(key.removeprefix("weight."), low, p)
        wanted = tuple(self.p.shape) if source is None else tuple(source.low_shape(self.p))
        if tuple(low.shape) != wanted:
            got = tuple(low.shape)
            raise ValueError(f"state_dict: {key!r} of {name} must have shape {wanted}, got {got}")
        if source is None:
            beside = "a Float8Weight" if isinstance(self.p, Float8Weight) else _name(self.p.dtype)
            what = f"dropped {key!r} in {_name(low.dtype)}, which means nothing beside {beside}"
            self.notes.add(what, name)
            return None
        if (torch.isnan(source.exact(p, low)) & torch.isfinite(p)).any():
            raise ValueError(f"state_dict: {key!r} of {name} has NaN beside a finite parameter: it was damaged")
        if p is not self.p:
            self.wide, self.converted = source.exact(p, low).to(torch.float32), True
            return None
        if source is target:
            return low
        if isinstance(target, Split4) and key == LOW_CODES:  # a byte each: copied, whatever the parameter is now
            return to_nibbles(low)
        if target.key is None and is_lossy(source, self.p, low):
            # Words of split4 are read here as those of split8.
            written = Split4.name if key == LOW_CODES else source.name
            what = f"dropped {key!r} of {written!r}, which {target.name!r} has no place for"
            self.notes.add(what, name)
        weight = source.exact(self.p, low).to(torch.float32)
        made = low_word(target, self.p, weight)
        if isinstance(target, Split4) and ((target.read(self.p, made) != weight) & ~weight.isnan()).any():
            self.notes.add(f"rounded {key!r} of {source.name!r} to the 4 bits of {target.name!r}", name)
        self.converted = made is not None
        return made


@torch.no_grad()
def replan(
    optimizer: str,
    old: dict[Tensor, ParamPlan],
    new: Mapping[Tensor, ParamPlan],
    groups: Sequence[Mapping[str, Any]],
    state: dict[Tensor, dict[str, Tensor]],
) -> Notes:
    """Convert, in place, the states of parameters whose plan changed; notes of what was lost.

    Each plan in `old` is replaced as soon as its state is converted, so that plans and states agree even if memory
    runs out in between.
    """
    for p, plan in new.items():
        was, now = (bare(each.rule).name for each in (old.get(p, plan), plan))
        if state.get(p) and was != now:
            raise ValueError(
                f"rule of {plan.name} must stay {was!r}, whose moments it has, got {now!r}: put it back, or make "
                "another optimizer"
            )
    notes = Notes()
    for group in groups:
        for p in (p for p in group["params"] if p in new):  # lazy parameters have no plan yet
            if p in old and state.get(p):
                state[p] = _converted(optimizer, local(p), state[p], old[p], new[p], group, notes)
            old[p] = new[p]
    return notes


def _converted(
    optimizer: str,
    p: Tensor,
    state: dict[str, Tensor],
    old: ParamPlan,
    new: ParamPlan,
    group: Mapping[str, Any],
    notes: Notes,
) -> dict[str, Tensor]:
    """A parameter's state under another plan: the same object if no storage changed."""
    had = {slot.slot.name: slot for slot in old.all_slots}
    found = tuple(slot for slot in new.all_slots if slot.tensors(state))
    same_storages = (
        old.weight is new.weight
        and old.dtype == new.dtype
        and all(had.get(slot.slot.name, slot) == slot for slot in found)
    )
    if same_storages and set(new.slots) <= set(found):
        return state
    fresh = new.init(p, group)
    entry = state
    if not same_storages:
        plan = replace(new, slots=found)
        declared = {slot.slot.name: had.get(slot.slot.name, slot).storage for slot in found}
        block_size = max((slot.block_size for slot in had.values()), default=1)
        reader = StateReader(optimizer, plan, p, entry, (declared,), block_size, notes)
        entry = reader.read(plan.init(p, group))
        if reader.wide is not None:
            with torch.no_grad():
                p.copy_(reader.wide)
    return {**fresh, **entry}


def is_lossy(storage: WeightStorage, p: Tensor, low: Tensor) -> bool:
    """Whether dropping the low word changes the weight."""
    return bool((storage.exact(p, low) != p).any())


def low_word(storage: WeightStorage, p: Tensor, value: Tensor) -> Tensor | None:
    """The low word that brings p nearest to a value within half a unit in p's last place; None without low
    words.
    """
    if isinstance(storage, Split4):
        lo = low_word(weight_storage("split8"), p, value)
        return to_nibbles(lo) if lo is not None else None
    low = storage.init(p)
    if low is None:
        return None
    # `add` may round a value near halfway to p's neighbor, and split8 rounds twice. So three candidates are tried:
    # the value moved toward p by 1/128 of the way, the value moved by one float32, and the value. The last that
    # rounds to p wins. If none does, the value belongs to another parameter, and `init`'s low word stays.
    wide, bare = p.to(torch.float32), low
    for candidate in (wide + (value - wide) * (1 - 2.0**-7), torch.nextafter(value, wide), value):
        hi, found = storage.add(p, bare, candidate, torch.zeros_like(value), _no_noise)
        assert found is not None
        low = torch.where(hi == p, found, low)
    return low


def _no_noise() -> Tensor:
    raise AssertionError("storages with a low word of a byte or more round to nearest")


def _narrow(p: Tensor, low: Tensor, key: str) -> Tensor:
    """A float32 parameter in the format that its low word was stored beside, if it has just come from there.

    A model that was trained in bfloat16 and is loaded in float32 has bfloat16's numbers; with the low words its
    weights are those that the optimizer had.
    """
    for dtype in (torch.bfloat16, torch.float16) if p.dtype == torch.float32 else ():
        narrow = p.to(dtype)
        if _weight_storage_of(key.removeprefix("weight."), low, narrow) is not None and torch.equal(
            narrow.float(), p
        ):
            return narrow
    return p


def _weight_storage_of(key: str, low: Tensor, p: Tensor) -> WeightStorage | None:
    """The storage whose low word beside p has this key and dtype.

    Words of `split4` come from sharded parameters as those of `split8`.
    """
    if key == Split4.key and low.dtype == torch.int8:
        key = Split8.key
    for storage in map(weight_storage, weight_storages()):
        if storage.float8 != isinstance(p, Float8Weight):
            continue
        if storage.key == key and p.dtype in storage.dtypes and storage.low_dtype(p.dtype) == low.dtype:
            return storage
    return None


Signature = dict[str, tuple[torch.dtype, tuple[int, ...]] | type]


def _signature(tensors: Mapping[str, Any]) -> Signature:
    return {key: (x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else type(x) for key, x in tensors.items()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
