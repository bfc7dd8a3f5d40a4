"""What is done with one parameter, decided once and shown by `describe()`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from narrowgauge.optim._clip_gradients import HISTORY, new_history
from narrowgauge.optim._shards import Shard, shard_of
from narrowgauge.rules import Rule, Slot
from narrowgauge.storage import (
    StateContext,
    StateStorage,
    WeightStorage,
    marked_states,
    state_storage,
    weight_storage,
)

# Dtype and mark.
Kind = tuple[torch.dtype, str | None]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class SlotPlan:
    """A moment and how it is kept.

    Attributes:
        beside: the moment in whose root's units it is kept, where it is.
    """

    slot: Slot
    storage: StateStorage
    block_size: int
    beside: SlotPlan | None = None

    def init(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        start = group[self.slot.start] if self.slot.start is not None else 0.0
        if start:
            return self.encode(torch.full_like(p, start, dtype=torch.float32))
        return self.keyed(self.storage.init(p, self.slot.signed, self.block_size))

    def words(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This slot's words out of a parameter's state."""
        dotted = self.slot.name + "."
        return {
            key.removeprefix(self.slot.name).removeprefix("."): value
            for key, value in state.items()
            if key == self.slot.name or key.startswith(dotted)
        }

    def decode(self, state: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
        return self.storage.decode(self.words(state), self._context(state, shape))

    def codes(self, state: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
        """The codes of a moment that is kept in some: uint8, one a byte, in the moment's shape."""
        return self.storage.codes(self.words(state), shape)

    def encode(
        self, moment: Tensor, random: Tensor | None = None, state: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The moment's entries of a state; `state` has those of the moment beside it."""
        return self.keyed(self.storage.encode(moment, self._context(state, moment.shape), random))

    def _context(self, state: Mapping[str, Tensor] | None, shape: torch.Size) -> StateContext:
        beside = self.beside.decode(state, shape) if self.beside is not None and state is not None else None
        return StateContext(shape, self.slot.signed, self.block_size, beside)

    def keyed(self, words: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Words under the keys that the parameter's state has for them."""
        return {f"{self.slot.name}.{word}" if word else self.slot.name: value for word, value in words.items()}


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter's storages.

    Attributes:
        name: as the user named it, or its place among the groups.
        index: its place among all parameters; the stream of its random bits.
        rule: the update rule.
        weight: the weight storage.
        slots: one plan a moment.
        dormant: those of moments that the hyperparameters switch off; they may come back.
        strict: whether every operation is rounded to the storages' formats.
        why: what was decided otherwise than asked for, and why; empty if nothing was.
        kind: what was found on the parameter; see `kind_of`.
        shard: what lies here of the parameter; None if all of it.
        kernels: what has been made to step it, by what it was made for; a changed plan starts with none.
    """

    name: str
    index: int
    rule: Rule
    weight: WeightStorage
    slots: tuple[SlotPlan, ...]
    dormant: tuple[SlotPlan, ...]
    strict: bool
    why: str
    kind: Kind
    shard: Shard | None = None
    kernels: dict[Any, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    @property
    def dtype(self) -> torch.dtype:
        """The parameter's."""
        return self.kind[0]

    @property
    def weight_key(self) -> str | None:
        """The state's key of the low word."""
        return f"weight.{self.weight.key}" if self.weight.key is not None else None

    def init(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """The state of a parameter that has not been stepped yet; of a shared one, of what lies here.

        Raises:
            RuntimeError: inside a CUDA graph, whose every replay would make the state anew.
        """
        if p.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"step: the first step of {self.name} (or since its options changed) cannot be captured; "
                "take one before capturing"
            )
        state = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "skipped": torch.zeros((), dtype=torch.int64, device=p.device),
        }
        if group.get("percentile_clipping", 100) < 100:
            state[HISTORY] = new_history(p.device)
        for slot in self.slots:
            state |= slot.init(p, group)
        low = self.weight.init(p)
        if low is not None and self.weight_key is not None:
            state[self.weight_key] = low
        return state

    def holding(self, state: Mapping[str, Any]) -> ParameterPlan:
        """This plan, with the moments awake that are dormant but in a state."""
        kept = tuple(slot for slot in self.dormant if slot.words(state))
        return replace(self, slots=(*self.slots, *kept)) if kept else self

    def exact(self, p: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(all that is stored of the weight, what the model sees), in float64."""
        low = state[self.weight_key] if self.weight_key is not None else None
        return self.weight.exact(p, low), p.to(torch.float64, copy=True)

    def nbytes(self, p: Tensor) -> int:
        """Bytes the optimizer keeps here for this parameter: moments and low word."""
        numel = self.shard.here if self.shard is not None else p.numel()
        moments = sum(s.storage.nbytes(numel, s.block_size) for s in self.slots)
        return numel * self.weight.bytes_added(p.dtype) + moments


def kind_of(p: Tensor) -> Kind:
    """What of a parameter its plan depends on: its dtype, and the states that it is marked with."""
    return p.dtype, marked_states(p)


def plan_parameter(rule: Rule, group: Mapping[str, Any], p: Tensor, name: str, index: int) -> ParameterPlan:
    """Decide one parameter's storages.

    Raises:
        ValueError: naming the argument, for a dtype or a combination that is not taken.
    """
    dtype, mark = kind = kind_of(p)
    if dtype not in _DTYPES:
        raise ValueError(f"params: {name} is {dtype}, takes float32, bfloat16 and float16 parameters")
    weight = weight_storage(group["weights"])
    if dtype not in weight.dtypes:
        taken = " and ".join(str(dtype).removeprefix("torch.") for dtype in weight.dtypes)
        raise ValueError(f"weights: {weight.name!r} takes {taken} parameters, {name} is {dtype}")
    strict = group["arithmetic"] == "strict"
    if strict and not weight.rounded:
        raise ValueError(f"arithmetic: 'strict' takes weights whose words are floats, got weights={weight.name!r}")
    asked, awake = slot_storages(rule, group), rule.slots(group)
    why, plans = [], {}
    for slot in dict.fromkeys((*awake, *rule.moments)):
        if slot.name not in asked:
            continue
        storage, reasons = asked[slot.name], []
        if mark is not None and storage.name != mark:
            reasons.append(f"{slot.name} in {mark}: the parameter is marked so")
            storage = state_storage(mark).for_slot(slot.signed, slot.unit in asked)
        if storage.quantized and p.numel() < group["min_quantized_size"]:
            reasons.append(f"{slot.name} in fp32: {p.numel()} elements < min_quantized_size")
            storage = state_storage("fp32")
        if strict and slot in awake and not storage.rounded:
            raise ValueError(
                f"arithmetic: 'strict' takes states whose words are floats, got states={storage.name!r}"
            )
        plans[slot] = SlotPlan(slot, storage, group["block_size"])
        why += reasons if slot in awake else []
    plans = {slot: replace(s, beside=_unit(s, plans.values())) for slot, s in plans.items()}
    slots = tuple(plans.pop(slot) for slot in awake)
    said = "; ".join(why)
    return ParameterPlan(name, index, rule, weight, slots, tuple(plans.values()), strict, said, kind, shard_of(p))


def _unit(plan: SlotPlan, slots: Iterable[SlotPlan]) -> SlotPlan | None:
    """The slot in whose root's units this one is kept."""
    if not plan.storage.relative:
        return None
    return next((other for other in slots if other.slot.name == plan.slot.unit), None)


def slot_storages(rule: Rule, group: Mapping[str, Any]) -> dict[str, StateStorage]:
    """The storage asked for each slot, also for those that are off now.

    ``"expansion"``, as one name for all slots, is the preset of Collage-plus: each slot says what it means there.

    Raises:
        ValueError: for an unknown storage or slot, or a slot that a mapping leaves out.
    """
    states, awake = group["states"], rule.slots(group)
    if not isinstance(states, str | Mapping):
        raise ValueError(f"states: got {states!r}, takes a name, or a mapping from slots to names")
    slots = {slot.name: slot for slot in (*awake, *rule.moments)}
    if isinstance(states, str):
        state_storage(states)  # refused by name even where there is no slot to keep
        states = {name: s.preset if states == "expansion" else states for name, s in slots.items()}
    names = [slot.name for slot in awake]
    if not set(names) <= set(states) <= set(slots):
        raise ValueError(f"states: got slots {sorted(states)}, takes a storage for each of {names} ({rule.name})")
    return {
        name: state_storage(storage).for_slot(slots[name].signed, slots[name].unit in states)
        for name, storage in states.items()
    }
