"""What is done with one parameter, decided once and shown by `describe()`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.optim._clip_gradients import new_history
from narrowgauge.rules import Rule, Slot
from narrowgauge.storage import StateStorage, WeightStorage, marked_states, state_storage, weight_storage

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class SlotPlan:
    """A moment and how it is kept."""

    slot: Slot
    storage: StateStorage
    block_size: int

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
        return self.storage.decode(self.words(state), shape, self.slot.signed, self.block_size)

    def encode(self, moment: Tensor, random: Tensor | None = None) -> dict[str, Tensor]:
        return self.keyed(self.storage.encode(moment, self.slot.signed, self.block_size, random))

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
        strict: whether every operation is rounded to the storages' formats.
        why: what was decided otherwise than asked for, and why; empty if nothing was.
    """

    name: str
    index: int
    rule: Rule
    weight: WeightStorage
    slots: tuple[SlotPlan, ...]
    strict: bool
    why: str

    @property
    def slots_asked(self) -> tuple[Slot, ...]:
        """The rule's slots, under the hyperparameters for which this was planned."""
        return tuple(plan.slot for plan in self.slots)

    @property
    def weight_key(self) -> str | None:
        """The state's key of the low word."""
        return f"weight.{self.weight.key}" if self.weight.key is not None else None

    def init(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """The state of a parameter that has not been stepped yet.

        Raises:
            RuntimeError: inside a CUDA graph, whose every replay would make the state anew.
        """
        if p.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"step: the first step of {self.name} cannot be captured; take one before capturing")
        state = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "skipped": torch.zeros((), dtype=torch.int64, device=p.device),
        }
        if group.get("percentile_clipping", 100) < 100:
            state["grad_norms"] = new_history(p.device)
        for slot in self.slots:
            state |= slot.init(p, group)
        low = self.weight.init(p)
        if low is not None and self.weight_key is not None:
            state[self.weight_key] = low
        return state

    def init_missing(self, p: Tensor, group: Mapping[str, Any], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """First values of the moments that a state has not got."""
        missing = [slot.init(p, group) for slot in self.slots if not slot.words(state)]
        return {key: value for words in missing for key, value in words.items()}

    def nbytes(self, p: Tensor) -> int:
        """Bytes the optimizer keeps for this parameter: moments and low word."""
        moments = sum(s.storage.nbytes(p.numel(), s.block_size) for s in self.slots)
        return p.numel() * self.weight.bytes_added(p.dtype) + moments


def plan_parameter(rule: Rule, group: Mapping[str, Any], p: Tensor, name: str, index: int) -> ParameterPlan:
    """Decide one parameter's storages.

    Raises:
        ValueError: naming the argument, for a dtype or a combination that is not taken.
    """
    if p.dtype not in _DTYPES:
        raise ValueError(f"params: {name} is {p.dtype}, takes float32, bfloat16 and float16 parameters")
    weight = weight_storage(group["weights"])
    if p.dtype not in weight.dtypes:
        taken = " and ".join(str(dtype).removeprefix("torch.") for dtype in weight.dtypes)
        raise ValueError(f"weights: {weight.name!r} takes {taken} parameters, {name} is {p.dtype}")
    strict = group["arithmetic"] == "strict"
    if strict and not weight.rounded:
        raise ValueError(f"arithmetic: 'strict' takes weights whose words are floats, got weights={weight.name!r}")
    slots, why = [], []
    asked, mark = slot_storages(rule, group), marked_states(p)
    for slot in rule.slots(group):
        storage = asked[slot.name]
        if mark is not None and storage.name != mark:
            why.append(f"{slot.name} in {mark}: the parameter is marked so")
            storage = state_storage(mark)
        if storage.quantized and p.numel() < group["min_quantized_size"]:
            why.append(f"{slot.name} in fp32: {p.numel()} elements < min_quantized_size")
            storage = state_storage("fp32")
        if strict and not storage.rounded:
            raise ValueError(
                f"arithmetic: 'strict' takes states whose words are floats, got states={storage.name!r}"
            )
        slots.append(SlotPlan(slot, storage, group["block_size"]))
    return ParameterPlan(name, index, rule, weight, tuple(slots), strict, "; ".join(why))


def slot_storages(rule: Rule, group: Mapping[str, Any]) -> dict[str, StateStorage]:
    """The storage asked for each slot.

    ``"expansion"``, as one name for all slots, is the preset of Collage-plus: each slot says what it means there.

    Raises:
        ValueError: for an unknown storage or slot, or a slot that a mapping leaves out.
    """
    states, slots = group["states"], rule.slots(group)
    names = [slot.name for slot in slots]
    if isinstance(states, str):
        state_storage(states)  # refused by name even where there is no slot to keep
        return {s.name: state_storage(s.preset if states == "expansion" else states) for s in slots}
    if set(states) != set(names):
        raise ValueError(f"states: got slots {sorted(states)}, takes a storage for each of {names} ({rule.name})")
    return {name: state_storage(states[name]) for name in names}
