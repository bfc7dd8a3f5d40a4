"""Many parameters' steps by kernels: what `update` computes for one, for a whole list at once.

Parameters that are kept in the same way make one launch. What differs between them is in a table on the device,
which is written anew only when something in it has changed; hyperparameters that change at every step are a few
numbers of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from narrowgauge.kernels._step._launch import Step, Tables
from narrowgauge.kernels._step._layout import AT, WIDTH, Layout, Moment
from narrowgauge.optim._equation import equation, scalar_graph
from narrowgauge.optim._fused_codebooks import FIRST_CELL, codebook_cells, mirror
from narrowgauge.optim._fused_numbers import Options, send_numbers, sent
from narrowgauge.optim._plan import ParameterPlan, SlotPlan
from narrowgauge.rules import Rule
from narrowgauge.storage._states._blocks import BlockwiseState
from narrowgauge.storage._states._logarithms import LogState, RelativeState, SignedLogState

_KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, eq=False)
class Entry:
    """One parameter's step: as `update` takes it.

    Attributes:
        plan: what to compute and how things are kept.
        p, grad: the parameter and its gradient.
        state: the parameter's state, the step's count among it; written in place.
        group: its hyperparameters.
    """

    plan: ParameterPlan
    p: Tensor
    grad: Tensor
    state: Mapping[str, Tensor]
    group: Mapping[str, Any]


@dataclass(frozen=True)
class _Kind:
    """What entries of one launch have in common."""

    rule: Rule
    layout: Layout
    codebooks: tuple[tuple[str, bool, int], ...]
    numbers: tuple[str, ...]
    others: tuple[tuple[str, Any], ...]
    skip: bool
    device: torch.device


@dataclass
class _Launch:
    """One launch: its kernels, its tables, and which entries it steps."""

    step: Step
    tables: Tables
    rows: list[list[int]]
    members: dict[int, int]  # the row of each entry
    groups: tuple[int, ...]
    hyper: list[tuple[Any, ...]] | None = None

    def send_numbers(self, options: Mapping[int, Options]) -> None:
        hyper = [options[group].numbers for group in self.groups]
        # A number of the device may have changed without a sign.
        on_device = any(isinstance(number, Tensor) for row in hyper for number in row)
        if on_device or hyper != self.hyper:
            send_numbers(self.tables.hyper, hyper)
            self.hyper = None if on_device else hyper

    def send_gradients(self, moved: Mapping[int, int]) -> None:
        mine = {self.members[entry]: address for entry, address in moved.items() if entry in self.members}
        for row, address in mine.items():
            self.rows[row][AT["grad"]] = address
        if mine:
            self.tables.rows.copy_(sent(torch.tensor(self.rows, dtype=torch.int64), self.tables.rows.device))


class FusedSteps:
    """Steps of lists of parameters; remembers what it has told the device.

    The usual step finds everything where it was: that is looked at, a few comparisons a parameter, and a gradient
    that lies elsewhere now is told. Anything else has the tables made anew.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[Any, ...]] = []
        self._tensors: list[list[Tensor]] = []
        self._kinds: dict[int, tuple[Any, ...]] = {}
        self._launches: list[_Launch] = []
        self._left: dict[int, None] = {}

    def __call__(self, entries: Sequence[Entry]) -> list[Entry]:
        """Take one step with every parameter that has a kernel; states and parameters are written in place.

        Returns:
            Those that have none (see `why_not`), untouched.
        """
        options = {key: Options.of(group) for key, group in {id(e.group): e.group for e in entries}.items()}
        moved = self._moved(entries, options)
        if moved is None:
            self._look(entries, options)
        for launch in self._launches:
            if moved:
                launch.send_gradients(moved)
            launch.send_numbers(options)
        for launch in self._launches:
            launch.step(launch.tables)
        # Autograd cannot see what kernels write.
        increment_version([entry.p for number, entry in enumerate(entries) if number not in self._left])
        return [entries[number] for number in self._left]

    def _moved(self, entries: Sequence[Entry], options: Mapping[int, Options]) -> dict[int, int] | None:
        """Gradients that lie elsewhere now, by entry; None if more has changed than that."""
        if len(entries) != len(self._seen) or self._kinds != {k: (o.names, o.others) for k, o in options.items()}:
            return None
        moved = {}
        for i, (entry, seen) in enumerate(zip(entries, self._seen, strict=True)):
            plan, group, p, dtype, before = seen
            grad, state, tensors = entry.grad, entry.state, self._tensors[i]
            address = grad.data_ptr()
            if (
                entry.plan is not plan
                or id(entry.group) != group
                or entry.p.data_ptr() != p
                or grad.dtype is not dtype
                or not grad.is_contiguous()
                or (address ^ before) % 16
                or len(state) != len(tensors)
                or any(a is not b for a, b in zip(state.values(), tensors, strict=True))
            ):
                return None
            if address != before:
                moved[i] = address
                self._seen[i] = (plan, group, p, dtype, address)
        return moved

    def _look(self, entries: Sequence[Entry], options: Mapping[int, Options]) -> None:
        """Make all launches anew."""
        kinds: dict[_Kind, dict[int, Entry]] = {}
        self._launches, self._left = [], {}
        for number, entry in enumerate(entries):
            if why_not(entry) is None:
                kinds.setdefault(_kind(entry, options[id(entry.group)]), {})[number] = entry
            else:
                self._left[number] = None
        for kind, same in kinds.items():
            try:
                self._launches.append(_launch(kind, same))
            except NotImplementedError:  # the rule is not elementwise, or does what has no kernel
                self._left |= dict.fromkeys(same)
        self._kinds = {key: (option.names, option.others) for key, option in options.items()}
        self._tensors = [list(entry.state.values()) for entry in entries]
        self._seen = [
            (entry.plan, id(entry.group), entry.p.data_ptr(), entry.grad.dtype, entry.grad.data_ptr())
            for entry in entries
        ]


def _launch(kind: _Kind, entries: Mapping[int, Entry]) -> _Launch:
    rows, counts, first = [], [], 0
    device = next(iter(entries.values())).p.device
    places = {id(entry.group): 0 for entry in entries.values()}
    places = {group: place for place, group in enumerate(places)}
    for entry in entries.values():
        counts.append(-(-entry.p.numel() // kind.layout.tile))
        rows.append(_row(kind.layout, entry, first, counts[-1], places[id(entry.group)]))
        first += counts[-1]
    programs = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), torch.tensor(counts))
    hyper = torch.zeros(len(places), max(1, len(kind.numbers)), dtype=torch.float64, device=device)
    tables = Tables(
        sent(torch.tensor(rows, dtype=torch.int64), device).clone(),
        sent(programs, device),
        hyper,
        [codebook_cells(*book, device) for book in kind.codebooks],
    )
    return _Launch(_step(kind), tables, rows, {entry: row for row, entry in enumerate(entries)}, tuple(places))


def why_not(entry: Entry) -> str | None:
    """Why a parameter has no kernel, or None if it has."""
    plan, group = entry.plan, entry.group
    size = group["block_size"]
    tensors = [entry.p, entry.grad, *entry.state.values()]
    if plan.strict:
        return "arithmetic='strict' rounds every operation"
    if group.get("percentile_clipping", 100) < 100:
        return "percentile_clipping needs the norm of each gradient before it"
    if entry.grad.dtype not in _KINDS:
        return f"the gradient is {entry.grad.dtype}"
    if size not in _BLOCKS and any(slot.storage.quantized for slot in plan.slots):
        return f"block_size {size} is none of {', '.join(map(str, _BLOCKS))}"
    if any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors):
        return "a tensor is of a class of its own"
    if not all(tensor.is_contiguous() for tensor in tensors):
        return "a tensor is not contiguous"
    if any(_storage(slot) is None for slot in plan.slots):
        return "a moment's storage has no kernel"
    return None


def _kind(entry: Entry, options: Options) -> _Kind:
    plan, group = entry.plan, entry.group
    moments, books = [], []
    for number, slot in enumerate(plan.slots, start=1):
        table = None
        if isinstance(slot.storage, BlockwiseState):
            book = (slot.storage.codebook, slot.slot.signed, slot.storage.bits)
            books += [book] if book not in books else []
            table = books.index(book)
        beside = slot.beside.slot.name if slot.beside is not None else None
        storage = _storage(slot)
        assert storage is not None
        moments.append(Moment(slot.slot.name, storage, slot.slot.signed, beside, number, table))
    quantized = any(slot.storage.quantized for slot in plan.slots)
    block = group["block_size"] if quantized else 512
    layout = Layout(
        plan.weight.name,
        _KINDS[plan.dtype],
        _KINDS[entry.grad.dtype],
        tuple(moments),
        block,
        all(tensor.data_ptr() % 16 == 0 for tensor in _words(entry)),
        bool(group["maximize"]),
        tuple((FIRST_CELL, mirror(*book)) for book in books),
    )
    return _Kind(
        plan.rule, layout, tuple(books), options.names, options.others, group["nonfinite"] == "skip", entry.p.device
    )


def _storage(slot: SlotPlan) -> str | None:
    """What kernels call a slot's storage."""
    storage = slot.storage
    if isinstance(storage, RelativeState):
        return f"relative{storage.bits}"
    if isinstance(storage, SignedLogState):
        return "signed8"
    if isinstance(storage, LogState):
        return f"pattern{storage.bits}"
    return storage.name if storage.name in ("fp32", "bf16", "expansion", "8bit", "4bit", "fp8") else None


def _words(entry: Entry) -> list[Tensor]:
    """The tensors of elements."""
    plan = entry.plan
    low = [entry.state[plan.weight_key]] if plan.weight_key is not None else []
    return [entry.p, entry.grad, *low, *(word for slot in plan.slots for word in slot.words(entry.state).values())]


@functools.lru_cache(maxsize=256)
def _step(kind: _Kind) -> Step:
    # Rules are values, and have hashes.
    scalars = scalar_graph(kind.rule, kind.numbers, kind.others)  # type: ignore[arg-type]
    found = equation(kind.rule, tuple(moment.name for moment in kind.layout.moments), tuple(scalars))  # type: ignore[arg-type]
    return Step(kind.layout, found.delta, found.moments, found.reach, found.terms, scalars, kind.numbers, kind.skip)


def _row(layout: Layout, entry: Entry, first: int, programs: int, group: int) -> list[int]:
    plan, state = entry.plan, entry.state
    row = [0] * WIDTH
    given = {
        "p": entry.p.data_ptr(),
        "grad": entry.grad.data_ptr(),
        "low": state[plan.weight_key].data_ptr() if plan.weight_key is not None else 0,
        "first": first,
        "programs": programs,
        "programs": programs,
        "numel": entry.p.numel(),
        "seed": _signed(entry.group["seed"]),
        "stream": _signed(plan.index),
        "count": state["step"].data_ptr(),
        "skipped": state["skipped"].data_ptr(),
        "hyper": group,
    }
    for name, value in given.items():
        row[AT[name]] = value
    slots = {slot.slot.name: slot for slot in plan.slots}
    for (slot, word), column in layout.columns().items():
        row[column] = slots[slot].words(state)[word].data_ptr()
    return row


def _signed(number: int) -> int:
    return number & 0xFFFFFFFF
