"""Many parameters' steps by kernels: what `update` computes for one, for a whole list at once.

Parameters that are kept in the same way make one launch. What differs between them is in a table on the device,
which is written anew only when something in it has changed; hyperparameters that change at every step are a few
numbers of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from narrowgauge.kernels._step import _sampling
from narrowgauge.kernels._step._launch import Cut, Step, cut_for_sums
from narrowgauge.kernels._step._layout import AT, WIDTH, Layout, Moment
from narrowgauge.optim._equation import equation, scalar_graph
from narrowgauge.optim._fused_board import Board, Launch
from narrowgauge.optim._fused_codebooks import FIRST_CELL, codebook_cells, mirror
from narrowgauge.optim._fused_entry import KINDS, Entry, storage_name, why_not, words_of
from narrowgauge.optim._fused_numbers import Group, Options, sent
from narrowgauge.optim._plan import ParameterPlan
from narrowgauge.optim._unchanged import Seen, identical
from narrowgauge.rules import Rule
from narrowgauge.storage._states._blocks import BlockwiseState

_Counts: TypeAlias = npt.NDArray[np.int64]


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


class FusedSteps:
    """Steps of lists of parameters; remembers what it has told the device.

    The usual step finds everything where it was. That is looked at; numbers that changed are told, and gradients
    that lie elsewhere now. Anything else has the tables made anew.

    Args:
        gauges: whether steps are measured: all that they do, or a sample.

    Attributes:
        left: why, by its place in the last list, what has no kernel has none.
        stats: what the last step measured: names of parameters, and rows for `StepStats`.
    """

    def __init__(self, gauges: bool | Literal["sampled"] = False) -> None:
        self.left: dict[int, str] = {}
        self.stats: list[tuple[list[str], Tensor]] = []
        self._gauges = gauges
        self._names: list[list[str]] = []
        self._seen: Seen | None = None
        self._plans: list[ParameterPlan] = []
        self._owners: list[Mapping[str, Any]] = []
        self._groups: list[Group] = []
        self._kinds: list[tuple[Any, ...]] = []
        self._moving: list[Tensor] = []
        self._boards: list[Board] = []
        self._captured: list[Board] = []

    def __call__(self, entries: Sequence[Entry]) -> list[Entry]:
        """Take one step with every parameter that has a kernel; states and parameters are written in place.

        Returns:
            Those that have none (see `why_not`), untouched.

        Raises:
            RuntimeError: inside a CUDA graph, if it is not the step before it over again.
        """
        same = identical([e.plan for e in entries], self._plans)
        same = same and identical([e.group for e in entries], self._owners)
        columns = [e.p for e in entries], [e.grad for e in entries], [e.state for e in entries]
        if not (same and self.again(*columns)):
            self._look(entries)
            self._take([group.options() for group in self._groups])
        return [entries[number] for number in self.left]

    def again(self, ps: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]) -> bool:
        """Take a step with the same parameters, plans and groups as the last one, if all else is as it was then.

        Returns:
            False, with nothing done, if more has changed than numbers and the places of gradients.
        """
        if self._seen is None or not self._seen.holds(ps, grads, states):
            return False
        options = [group.options() for group in self._groups]
        if [(option.names, option.others) for option in options] != self._kinds:
            return False
        self._take(options)
        return True

    def _take(self, options: list[Options]) -> None:
        boards = self._boards
        if any(_capturing(board.device) for board in boards):
            # Replayed with these addresses whatever comes after; kept, since a graph keeps nothing alive.
            boards = [board.of_a_graph() for board in boards]
            self._captured += boards
        for board in boards:
            assert self._seen is not None
            assert self._seen.gradients is not None
            board.write(self._seen.gradients, options)
        found = [stats for board in boards for stats in board.launch()]
        self.stats = [(names, rows) for names, rows in zip(self._names, found, strict=True) if rows is not None]
        # Autograd cannot see what kernels write.
        increment_version(self._moving)

    def _look(self, entries: Sequence[Entry]) -> None:
        """Make all launches anew."""
        self._seen, self.left = None, {}
        self._plans, self._owners = [e.plan for e in entries], [e.group for e in entries]
        self._groups = [Group(group) for group in {id(group): group for group in self._owners}.values()]
        options = {id(group.group): group.options() for group in self._groups}
        self._kinds = [(option.names, option.others) for option in options.values()]
        kinds: dict[_Kind, dict[int, Entry]] = {}
        for number, entry in enumerate(entries):
            why = why_not(entry)
            if why is None:
                kinds.setdefault(_kind(entry, options[id(entry.group)], self._gauges), {})[number] = entry
            else:
                self.left[number] = why
        launches: dict[torch.device, list[Launch]] = {}
        for kind, same in kinds.items():
            try:
                made = _launch(kind, same, list(options))
            except NotImplementedError as error:  # the rule is not elementwise, or does what has no kernel
                self.left |= dict.fromkeys(same, str(error))
            else:
                launches.setdefault(kind.device, []).append(made)
        self._boards = [Board(device, some) for device, some in launches.items()]
        every = [launch for board in self._boards for launch in board.launches]
        self._names = [[self._plans[place].name for place in launch.members] for launch in every]
        moving = [entry.p for number, entry in enumerate(entries) if number not in self.left]
        self._moving = [p for p in moving if not p.is_inference()]
        self._seen = Seen([e.p for e in entries], [e.grad for e in entries], [e.state for e in entries])


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _launch(kind: _Kind, entries: Mapping[int, Entry], groups: list[int]) -> Launch:
    """What steps entries of one kind.

    Args:
        kind: theirs.
        entries: by their place in the list.
        groups: the ids of all groups, in the order of their numbers.

    Raises:
        NotImplementedError: if there is no kernel for them.
        RuntimeError: inside a CUDA graph: the tables have to be on the device before it.
    """
    step, device = _step(kind), kind.device
    if _capturing(device):
        raise RuntimeError(
            "step: what is captured must be the step before it over again; take one with these parameters, options "
            "and gradients before capturing"
        )
    each = kind.layout.units * kind.layout.unit
    if kind.layout.turns:  # short tensors first
        entries = dict(sorted(entries.items(), key=lambda item: _sampling.long(item[1].p.numel(), each)))
    mine = list(dict.fromkeys(id(entry.group) for entry in entries.values()))
    sizes = np.array([entry.p.numel() for entry in entries.values()])
    counts = [-(-sizes // size) for size in (each, kind.layout.pass_units * kind.layout.unit)]
    tensors = np.arange(len(sizes), dtype=np.int32)
    rows = np.array([_row(kind.layout, entry, mine.index(id(entry.group))) for entry in entries.values()], np.int64)
    for column, count in zip(("first", "pass_first"), counts, strict=True):
        rows[:, AT[column]] = np.cumsum(count) - count
    rows[:, AT["passes"]] = counts[1]
    cut = _cut(sizes, counts[0], each, bool(kind.layout.turns), device) if kind.layout.gauges else None
    programs, passes = (sent(torch.from_numpy(np.repeat(tensors, count)), device) for count in counts)
    return Launch(
        step,
        rows,
        programs,
        passes,
        [codebook_cells(*book, device) for book in kind.codebooks],
        np.array(list(entries), dtype=np.int64),
        tuple(groups.index(group) for group in mine),
        len(kind.numbers),
        cut,
    )


def _cut(sizes: _Counts, programs: _Counts, each: int, sampled: bool, device: torch.device) -> Cut:
    """Where gauges are added up.

    Args:
        sizes, programs: elements and programs of each tensor.
        each: elements of a program.
        sampled: whether not all of them measure.
        device: where it is to be.
    """
    short = int(sum(programs[i] for i, size in enumerate(sizes) if not _sampling.long(size, each)))
    slices, ends = (sent(torch.from_numpy(part), device) for part in cut_for_sums(programs))
    turns = torch.tensor([short, int(programs.sum())], dtype=torch.int32)
    return Cut(slices, ends, short, sent(turns, device) if sampled else None)


def _kind(entry: Entry, options: Options, gauges: bool | Literal["sampled"] = False) -> _Kind:
    plan, group = entry.plan, entry.group
    moments, books = [], []
    for number, slot in enumerate(plan.slots, start=1):
        table = None
        if isinstance(slot.storage, BlockwiseState):
            book = (slot.storage.codebook, slot.slot.signed, slot.storage.bits)
            books += [book] if book not in books else []
            table = books.index(book)
        beside = slot.beside.slot.name if slot.beside is not None else None
        storage = storage_name(slot)
        assert storage is not None
        moments.append(Moment(slot.slot.name, storage, slot.slot.signed, beside, number, table))
    quantized = any(slot.storage.quantized for slot in plan.slots)
    block = group["block_size"] if quantized else 512
    layout = Layout(
        plan.weight.name,
        KINDS[plan.dtype],
        KINDS[entry.grad.dtype],
        tuple(moments),
        block,
        all(tensor.data_ptr() % 16 == 0 for tensor in words_of(entry)),
        bool(group["maximize"]),
        tuple((FIRST_CELL, mirror(*book)) for book in books),
        bool(gauges),
        "sample" if gauges == "sampled" else "",
    )
    return _Kind(
        plan.rule, layout, tuple(books), options.names, options.others, group["nonfinite"] == "skip", entry.p.device
    )


@functools.lru_cache(maxsize=256)
def _step(kind: _Kind) -> Step:
    # Rules are values, and have hashes.
    scalars = scalar_graph(kind.rule, kind.numbers, kind.others)  # type: ignore[arg-type]
    found = equation(kind.rule, tuple(moment.name for moment in kind.layout.moments), tuple(scalars))  # type: ignore[arg-type]
    equations = found.delta, found.moments, found.reach, found.terms
    return Step(kind.layout, *equations, scalars, kind.numbers, kind.skip, found.ratio)


def _row(layout: Layout, entry: Entry, group: int) -> list[int]:
    plan, state = entry.plan, entry.state
    row = [0] * WIDTH
    given = {
        "p": entry.p.data_ptr(),
        "grad": entry.grad.data_ptr(),
        "low": state[plan.weight_key].data_ptr() if plan.weight_key is not None else 0,
        "numel": entry.p.numel(),
        "seed": _signed(entry.group["seed"]),
        "stream": _signed(plan.index),
        "count": state["step"].data_ptr(),
        "skipped": state["skipped"].data_ptr(),
        "hyper": group,
    }
    for name, value in given.items():
        row[AT[name]] = value
    words = {slot.slot.name: slot.words(state) for slot in plan.slots}
    for (slot, word), column in layout.columns().items():
        row[column] = words[slot][word].data_ptr()
    return row


def _signed(number: int) -> int:
    return number & 0xFFFFFFFF
