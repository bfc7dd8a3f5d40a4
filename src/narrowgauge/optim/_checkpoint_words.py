"""One parameter's words, read into the storages that it has now.

Moments are decoded by the storage that wrote them and encoded by the one that keeps them; where both are the same,
the words are copied. Low words are turned into the weight that they and the parameter are, and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.optim._plan import ParameterPlan, SlotPlan
from narrowgauge.storage import (
    StateContext,
    StateStorage,
    WeightStorage,
    state_storage,
    state_storages,
    weight_storage,
    weight_storages,
)


class Notes(dict[str, list[str]]):
    """What was not taken over as it is, and for which parameters or groups."""

    def add(self, what: str, name: str) -> None:
        self.setdefault(what, []).append(name)

    def __str__(self) -> str:
        parts = []
        for what, names in self.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{what} ({', '.join(names[:3])}{more})")
        return "; ".join(parts)


@dataclass
class WordReader:
    """One parameter's saved state.

    Attributes:
        optimizer: the optimizer's name.
        plan, p: what the optimizer keeps, and beside which parameter.
        entry: the saved state, in our words.
        declared: the storage of each slot as the saved group has it.
        block_size: of the saved state.
        notes: where to write what is not taken over.
    """

    optimizer: str
    plan: ParameterPlan
    p: Tensor
    entry: Mapping[str, Any]
    declared: Mapping[str, StateStorage]
    block_size: int
    notes: Notes

    def read(self, fresh: dict[str, Tensor]) -> dict[str, Tensor]:
        """The saved state, written into a state that was just made: dtypes, devices and layouts are those."""
        new: dict[str, Tensor] = {}
        read: set[str] = set()
        # What gives another its unit comes before it.
        for slot in sorted(self.plan.slots, key=lambda slot: slot.beside is not None):
            words = slot.words(self.entry)
            new |= self._moment(slot, words, new)
            read |= slot.keyed(words).keys()
        for key, low in self._low_words():
            read.add(key)
            if low is not None and self.plan.weight_key is not None:
                new[self.plan.weight_key] = low
        self._counters(fresh, new)
        for key, value in new.items():
            fresh[key].copy_(value)
        for key in self.entry.keys() - read - new.keys():
            self.notes.add(f"dropped {key!r}, which {self.optimizer} does not keep", self.plan.name)
        return fresh

    def _counters(self, fresh: Mapping[str, Tensor], new: dict[str, Tensor]) -> None:
        """What is neither moment nor low word: taken as it is, where both sides have it."""
        if "step" not in self.entry:
            raise ValueError(f"state_dict: {self.plan.name} has no 'step', got {sorted(self.entry)}")
        slots = {key for slot in self.plan.slots for key in slot.words(fresh)}
        for key in fresh.keys() - new.keys() - slots - {self.plan.weight_key}:
            if key in self.entry:
                value = torch.as_tensor(self.entry[key])
                # Behind 2^63 there are no integers for random bits.
                good = (value >= 0).all() and (key != "step" or ((value < 2.0**63) & (value % 1 == 0)).all())
                if not good:
                    raise ValueError(f"state_dict: {key!r} of {self.plan.name} is {value}, takes a count of steps")
                if value.numel() != fresh[key].numel():
                    raise ValueError(
                        f"state_dict: {key!r} of {self.plan.name} has shape {tuple(value.shape)}, takes "
                        f"{tuple(fresh[key].shape)}"
                    )
                new[key] = value.reshape(fresh[key].shape)

    def _moment(self, slot: SlotPlan, words: Mapping[str, Any], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A slot's entries in the optimizer's storage: as they are, or decoded and encoded anew."""
        if not words and slot.slot.option is not None:
            self.notes.add(f"found no {slot.slot.name!r}, which starts anew", self.plan.name)
            return {}
        if not words:
            raise ValueError(
                f"state_dict: {self.plan.name} has no {slot.slot.name!r}, got {sorted(self.entry)}; "
                f"{self.optimizer} takes {' and '.join(repr(s.slot.name) for s in self.plan.slots)}"
            )
        storage = self._recognise(slot, words)
        words = self._here(words)
        flaw = storage.flaw(words, slot.slot.signed)
        if flaw is not None:
            raise ValueError(f"state_dict: {slot.slot.name!r} of {self.plan.name} has {flaw}: it was damaged")
        if self._is_kept(slot):
            return slot.keyed(words)
        return slot.encode(self._decoded(slot), state=new)

    def _is_kept(self, slot: SlotPlan) -> bool:
        """Whether a slot's words can stay as they are: storage, blocks, and the unit if it has one."""
        if self._recognise(slot, slot.words(self.entry)) != slot.storage:
            return False
        same = not slot.storage.quantized or self.block_size == slot.block_size
        return same and (slot.beside is None or self._is_kept(slot.beside))

    def _decoded(self, slot: SlotPlan) -> Tensor:
        """The saved moment."""
        words = slot.words(self.entry)
        storage = self._recognise(slot, words)
        unit = next((s for s in self.plan.slots if s.slot.name == slot.slot.unit), None)
        beside = self._decoded(unit) if storage.relative and unit is not None else None
        context = StateContext(self.p.shape, slot.slot.signed, self.block_size, beside)
        return storage.decode(self._here(words), context)

    def moments(self) -> dict[str, Tensor]:
        """The saved moments that are kept in codes, decoded, by slot."""
        slots = [slot for slot in self.plan.slots if f"{slot.slot.name}.codes" in self.entry]
        return {slot.slot.name: self._decoded(slot) for slot in slots}

    def _here(self, words: Mapping[str, Any]) -> dict[str, Tensor]:
        return {key: word.detach().to(self.p.device) for key, word in words.items()}

    def _recognise(self, slot: SlotPlan, words: Mapping[str, Any]) -> StateStorage:
        """The storage that wrote these words: the declared one if they can be its, else the one whose they are."""
        got = _signature(words)
        declared = self.declared[slot.slot.name]
        known = [state_storage(name) for name in state_storages()]
        variants = [s.for_slot(slot.slot.signed, beside) for s in known for beside in (False, True)]
        for storage in (declared, *variants):
            if got == _signature(storage.init(self.p, slot.slot.signed, self.block_size)):
                return storage
        wanted = f"{tuple(self.p.shape)} in {declared.name!r}, block_size={self.block_size}"
        raise ValueError(
            f"state_dict: {slot.slot.name!r} of {self.plan.name} has {_show(got)}, "
            f"which is not a moment of shape {wanted}"
        )

    def _low_words(self) -> Iterator[tuple[str, Tensor | None]]:
        """Keys of saved low words, with the low word to keep instead; None where there is none."""
        target, name = self.plan.weight, self.plan.name
        for key in [key for key in self.entry if key.startswith("weight.")]:
            low = torch.as_tensor(self.entry[key]).detach().to(self.p.device)
            if low.shape != self.p.shape:
                wanted = tuple(self.p.shape)
                raise ValueError(f"state_dict: {key!r} of {name} has shape {tuple(low.shape)}, takes {wanted}")
            source = _weight_storage_of(key.removeprefix("weight."), low, self.p)
            if source is None:
                what = f"dropped {key!r} in {_name(low.dtype)}, which means nothing beside {_name(self.p.dtype)}"
                self.notes.add(what, name)
                yield key, None
                continue
            if (torch.isnan(source.exact(self.p, low)) & torch.isfinite(self.p)).any():
                raise ValueError(f"state_dict: {key!r} of {name} has NaN beside a finite parameter: it was damaged")
            if source is target:
                yield key, low
            else:
                if target.key is None and says_more(source, self.p, low):
                    self.notes.add(
                        f"dropped {key!r} of {source.name!r}, which {target.name!r} has no place for", name
                    )
                yield key, low_word(target, self.p, source.exact(self.p, low).to(torch.float32))


def says_more(storage: WeightStorage, p: Tensor, low: Tensor) -> bool:
    """Whether the weight that is kept in p and its low word is another than p."""
    return bool((storage.exact(p, low) != p).any())


def low_word(storage: WeightStorage, p: Tensor, value: Tensor) -> Tensor | None:
    """What a weight storage keeps beside p so that the weight is value, as nearly as it can; None if nothing.

    Args:
        storage: the weight storage.
        p: the parameter, which stays as it is.
        value: float32 tensor of p's shape, within half a unit in p's last place.
    """
    bare = storage.init(p)
    if bare is None:
        return None
    # Storages differ in where they round what lies halfway between two parameters, and split8 rounds twice: a step
    # towards p decides, of one float32 unit or of split8's. What is not p even then is left over from another.
    wide, low = p.to(torch.float32), bare
    for candidate in (wide + (value - wide) * (1 - 2.0**-7), torch.nextafter(value, wide), value):
        hi, found = storage.add(p, bare, candidate, torch.zeros_like(value), _no_noise)
        assert found is not None
        low = torch.where(hi == p, found, low)
    return low


def _no_noise() -> Tensor:
    raise AssertionError("storages with a low word round to nearest")


def _weight_storage_of(key: str, low: Tensor, p: Tensor) -> WeightStorage | None:
    """The storage whose low word beside p has this key and dtype."""
    for storage in map(weight_storage, weight_storages()):
        if storage.key == key and p.dtype in storage.dtypes and storage.low_dtype(p.dtype) == low.dtype:
            return storage
    return None


Signature = dict[str, tuple[torch.dtype, tuple[int, ...]] | type]


def _signature(words: Mapping[str, Any]) -> Signature:
    return {
        key: (word.dtype, tuple(word.shape)) if isinstance(word, Tensor) else type(word)
        for key, word in words.items()
    }


def _show(signature: Signature) -> str:
    parts = []
    for key, value in sorted(signature.items()):
        what = f"{value[1]} in {_name(value[0])}" if isinstance(value, tuple) else value.__name__
        parts.append(f"{key} {what}".strip())
    return ", ".join(parts)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
