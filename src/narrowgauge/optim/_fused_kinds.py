"""What makes a launch of parameters that are kept alike: their kind, its kernels, and the tables they read."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from narrowgauge.kernels._step import _sampling
from narrowgauge.kernels._step._launch import Step
from narrowgauge.kernels._step._layout import AT, WIDTH, Layout, Moment
from narrowgauge.kernels._step._tables import Cut, cut_for_sums
from narrowgauge.optim._equation import FACTOR, equation, scalar_graph
from narrowgauge.optim._fused_board import Launch
from narrowgauge.optim._fused_codebooks import FIRST_CELL, codebook_cells, mirror
from narrowgauge.optim._fused_entry import KINDS, Entry, storage_name, words_of
from narrowgauge.optim._fused_numbers import Options, sent
from narrowgauge.optim._shards import origin_of, whole_of
from narrowgauge.rules import Rule
from narrowgauge.storage._states._blocks import BlockwiseState

_Counts: TypeAlias = npt.NDArray[np.int64]
GaugesMode: TypeAlias = bool | Literal["sampled"]
FactorMode: TypeAlias = Literal["", "given", "norm"]


@dataclass(frozen=True)
class Kind:
    """What entries of one launch have in common."""

    rule: Rule
    layout: Layout
    codebooks: tuple[tuple[str, bool, int], ...]
    numbers: tuple[str, ...]
    others: tuple[tuple[str, Any], ...]
    skip: bool
    device: torch.device
    factor: Literal["", "given", "norm"] = ""


def capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def launch_of(kind: Kind, entries: Mapping[int, Entry], groups: list[int]) -> Launch:
    """What steps entries of one kind.

    Args:
        kind: theirs.
        entries: by their place in the list.
        groups: the ids of all groups, in the order of their numbers.

    Raises:
        NotImplementedError: if there is no kernel for them.
        RuntimeError: inside a CUDA graph: the tables have to be on the device before it.
    """
    step, device = kernels_of(kind), kind.device
    if capturing(device):
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


def kind_of(entry: Entry, options: Options, gauges: GaugesMode = False, factor: FactorMode = "") -> Kind:
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
        plan.shard is not None,
    )
    skip = group["nonfinite"] == "skip"
    return Kind(plan.rule, layout, tuple(books), options.names, options.others, skip, entry.p.device, factor)


@functools.lru_cache(maxsize=256)
def kernels_of(kind: Kind) -> Step:
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
        "elements": whole_of(entry.p, plan.shard),
        "origin": origin_of(plan.shard),
    }
    for name, value in given.items():
        row[AT[name]] = value
    words = {slot.slot.name: slot.words(state) for slot in plan.slots}
    for (slot, word), column in layout.columns().items():
        row[column] = words[slot][word].data_ptr()
    return row


def _signed(number: int) -> int:
    return number & 0xFFFFFFFF
