"""Many parameters' steps by kernels: what `update` computes for one, for a whole list at once.

Parameters that are kept in the same way make one launch. What differs between them is in a table on the device,
which is written anew only when something in it has changed; hyperparameters that change at every step are a few
numbers of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from narrowgauge.kernels._step._launch import Step, cut_for_sums
from narrowgauge.kernels._step._layout import AT, WIDTH, Layout, Moment
from narrowgauge.optim._equation import FACTOR, equation, scalar_graph
from narrowgauge.optim._fused_board import Board, Found, Launch
from narrowgauge.optim._fused_codebooks import FIRST_CELL, codebook_cells, mirror
from narrowgauge.optim._fused_entry import KINDS, Entry, storage_name, why_not, words_of
from narrowgauge.optim._fused_numbers import Group, Options, sent
from narrowgauge.optim._plan import ParameterPlan
from narrowgauge.optim._unchanged import Seen, identical
from narrowgauge.rules import Rule
from narrowgauge.storage._states._blocks import BlockwiseState


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
    factor: Literal["", "given", "norm"] = ""


class Judge(Protocol):
    """What decides, between two halves of a step, what gradients are multiplied by."""

    def inverse_on(self, device: torch.device) -> Tensor:
        """What gradients are multiplied by in any case: float32, 0-d."""

    def __call__(self, found: list[Found]) -> None:
        """Decide, all gradients having been looked at."""

    def on(self, device: torch.device) -> Tensor:
        """float32 (2,): the factor, and whether the step is held; once it is decided."""


class FusedSteps:
    """Steps of lists of parameters; remembers what it has told the device.

    The usual step finds everything where it was. That is looked at; numbers that changed are told, and gradients
    that lie elsewhere now. Anything else has the tables made anew.

    Args:
        gauges: whether steps are measured.
        factor: what gradients are multiplied by: ``""`` for nothing, ``"given"`` for a number that is known,
            ``"norm"`` for one that depends on the norm of all.

    Attributes:
        left: why, by its place in the last list, what has no kernel has none.
        stats: what the last step measured: names of parameters, and rows for `StepStats`.
    """

    def __init__(self, gauges: bool = False, factor: Literal["", "given", "norm"] = "") -> None:
        self._factor: Literal["", "given", "norm"] = factor
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

    def __call__(self, entries: Sequence[Entry], judge: Judge | None = None) -> list[Entry]:
        """Take one step with every parameter that has a kernel; states and parameters are written in place.

        Args:
            entries: the parameters.
            judge: where gradients have a factor.

        Returns:
            Those that have none (see `why_not`), untouched.

        Raises:
            RuntimeError: inside a CUDA graph, if it is not the step before it over again.
        """
        same = identical([e.plan for e in entries], self._plans)
        same = same and identical([e.group for e in entries], self._owners)
        columns = [e.p for e in entries], [e.grad for e in entries], [e.state for e in entries]
        if not (same and self.again(*columns, judge)):
            self._look(entries)
            self._take([group.options() for group in self._groups], judge)
        return [entries[number] for number in self.left]

    def again(
        self,
        ps: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        judge: Judge | None = None,
    ) -> bool:
        """Take a step with the same parameters, plans and groups as the last one, if all else is as it was then.

        Returns:
            False, with nothing done, if more has changed than numbers and the places of gradients.
        """
        if self._seen is None or not self._seen.holds(ps, grads, states):
            return False
        options = [group.options() for group in self._groups]
        if [(option.names, option.others) for option in options] != self._kinds:
            return False
        self._take(options, judge)
        return True

    def _take(self, options: list[Options], judge: Judge | None) -> None:
        boards = self._boards
        if any(_capturing(board.device) for board in boards):
            # Replayed with these addresses whatever comes after; kept, since a graph keeps nothing alive.
            boards = [board.of_a_graph() for board in boards]
            self._captured += boards
        for board in boards:
            assert self._seen is not None
            assert self._seen.gradients is not None
            board.write(self._seen.gradients, options)
        found: list[Tensor | None] = []
        if judge is not None:
            judge([seen for board in boards for seen in board.look(judge.inverse_on(board.device))])
        for board in boards:
            found += board.launch(judge.on(board.device) if judge is not None else None)
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
                kinds.setdefault(_kind(entry, options[id(entry.group)], self._gauges, self._factor), {})[number] = (
                    entry
                )
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
    mine = list(dict.fromkeys(id(entry.group) for entry in entries.values()))
    sizes = np.array([entry.p.numel() for entry in entries.values()])
    counts = [-(-sizes // (units * kind.layout.unit)) for units in (kind.layout.units, kind.layout.pass_units)]
    tensors = np.arange(len(sizes), dtype=np.int32)
    rows = np.array([_row(kind.layout, entry, mine.index(id(entry.group))) for entry in entries.values()], np.int64)
    for column, count in zip(("first", "pass_first"), counts, strict=True):
        rows[:, AT[column]] = np.cumsum(count) - count
    rows[:, AT["passes"]] = counts[1]
    cuts: list[Tensor] = []
    if kind.layout.gauges:
        cuts = [sent(torch.from_numpy(part), device) for part in cut_for_sums(counts[0])]
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
        *cuts,
    )


def _kind(entry: Entry, options: Options, gauges: bool = False, factor: Literal["", "given", "norm"] = "") -> _Kind:
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
        gauges,
    )
    skip = group["nonfinite"] == "skip"
    return _Kind(plan.rule, layout, tuple(books), options.names, options.others, skip, entry.p.device, factor)


@functools.lru_cache(maxsize=256)
def _step(kind: _Kind) -> Step:
    # Rules are values, and have hashes.
    scalars = scalar_graph(kind.rule, kind.numbers, kind.others)  # type: ignore[arg-type]
    given = (*scalars, FACTOR) if kind.factor else tuple(scalars)
    found = equation(kind.rule, tuple(moment.name for moment in kind.layout.moments), given)  # type: ignore[arg-type]
    equations = found.delta, found.moments, found.reach, found.terms
    factor = FACTOR if kind.factor else None
    squares = kind.factor == "norm"
    return Step(kind.layout, *equations, scalars, kind.numbers, kind.skip, found.ratio, factor, squares)


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
