"""Compiled steps on a CPU: one call of a C function for a list of parameters, one pass over memory for each.

The eager step is the specification; it reads and writes memory some fifty times. The C function is compiled from
the rule's graph and the storages. Its codes are the eager step's, bit for bit; floats may differ by the ulps that
`kernels` states.

A list is a table: a row of addresses and lengths for each parameter. It is kept as long as nothing changes but
hyperparameters and the addresses of gradients.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from narrowgauge._text import warn
from narrowgauge.kernels._c_library import Unavailable, load, threads_for
from narrowgauge.kernels._c_source import COLUMNS, StepSpec, blocks_of_chunk, step_source
from narrowgauge.kernels._graph import evaluator, uniforms
from narrowgauge.optim._changes import OfGroup, TensorSnapshot
from narrowgauge.optim._eager import intended, next_number, noise_of, numbers, with_gradient
from narrowgauge.optim._plan import PLAIN, ParamPlan, ParamStep, SlotPlan, State, moments_of
from narrowgauge.optim._sharding import TERMS, Rows, origin_of, whole_of
from narrowgauge.optim._stats import UpdateStats
from narrowgauge.optim._tracing import FACTOR, equation
from narrowgauge.optim._verdict import GradientReport, Verdict, inspect_gradients
from narrowgauge.rules import Rule
from narrowgauge.storage import Float8Weight, WeightStorage

_CPU = torch.device("cpu")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Elements per block if no storage asks for blocks; the most that fit on a stack.
_BLOCK, _LARGEST_BLOCK = 1024, 8192
_warned: set[str] = set()
_AT = {name: number for number, name in enumerate(COLUMNS)}


class CKernel:
    """The compiled functions of one equation and its storages; Unavailable without a compiler."""

    def __init__(self, step: StepSpec) -> None:
        self.step = step
        self.roots = evaluator(uniforms(step.equation.roots))
        self.term_roots = evaluator(uniforms(step.equation.terms.values()))
        self.count = len(uniforms(step.equation.roots))
        library = load(step_source(step))
        self.threaded = bool(ctypes.c_int.in_dll(library, "threaded"))
        tables = [moment.codec.table for moment in step.kept if moment.codec.table is not None]
        self._arrays = [array for table in tables for array in (table.values, table.entries)]
        self.tables = (ctypes.c_void_p * (len(self._arrays) or 1))(*(a.ctypes.data for a in self._arrays))
        self.chunk = blocks_of_chunk(step.block)
        address, long, sign, integer = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
        chunks, layout = [long] * 2, [address] * 3
        self.check = _function(library.check, [*chunks, *layout, address, integer])
        self.take_step = _function(library.take_step, [*chunks, *layout, *[address] * 3, sign, integer])
        self.step_list = _function(
            library.step_list, [*chunks, *chunks, *layout, *[address] * 3, sign, integer, integer]
        )
        self.count_steps = _function(library.count_steps, [*chunks, address, address])
        self.read_counts = _function(library.read_counts, [long, address, address])
        if step.equation.terms:
            arguments = [*chunks, *layout, *[address] * 3, sign, integer, address]
            self.sum_terms = _function(library.sum_terms, arguments)


def _function(function: Any, arguments: list[Any]) -> Any:
    function.argtypes, function.restype = arguments, None
    return function


def kernel_of(plan: ParamPlan, group: Mapping[str, Any], grad_dtype: torch.dtype, scaled: bool) -> CKernel | str:
    """The kernel of a parameter's steps, or why there is none; `scaled` if gradients are multiplied by a factor."""
    names = tuple(plan.rule.scalars(numbers(group, _CPU), 1))
    names = (*names, FACTOR) if scaled else names
    # Rules are values, and have hashes.
    return _made(plan.rule, plan.weight, plan.slots, plan.dtype, grad_dtype, names)


def unsupported(plan: ParamPlan, param: Tensor, group: Mapping[str, Any]) -> str | None:
    """Why a parameter is not stepped in C, whatever its gradient and state; None if it is."""
    kernel = kernel_of(plan, group, plan.dtype, False)
    return _unknown(param) or (kernel if isinstance(kernel, str) else None)


def _unknown(p: Tensor) -> str | None:
    """What class a parameter is of, if C must not use its memory."""
    if isinstance(p, Float8Weight):
        return None if p.is_whole else "not whole and contiguous"
    return None if type(p) in PLAIN else f"a {type(p).__name__}"


def why_not(kernel: CKernel | str, step: ParamStep) -> str | None:
    """Why C does not take a step, or None if it does: C trusts the addresses it is given."""
    if isinstance(kernel, str):
        return kernel
    if (why := _unknown(step.param)) is not None:
        return why
    state, tensors = step.state, step.tensors()
    if type(step.grad) not in PLAIN:
        return "a tensor is of a class of its own"
    if not all(x.is_cpu for x in tensors):
        return "a tensor is on another device"
    if not all(x.is_contiguous() and not x.is_neg() for x in (*tensors, state["step"])):
        return "a tensor is not contiguous"
    counters = state["step"].dtype, state["skipped"].dtype
    fitting = [x.nbytes for x in tensors] == kernel.step.nbytes(step.param.numel())
    if step.grad.shape != step.param.shape or counters != (torch.float32, torch.int64) or not fitting:
        return "the state is not what was planned"
    return None


class CSteps:
    """A `StepList`: the steps of parameters on a CPU. `steps` are those of the list that have a kernel.

    `left` has, by position in the list, why a step has none.
    """

    reads_steps = True

    def __init__(self, steps: Sequence[ParamStep], scaled: bool, measured: bool) -> None:
        self._measured = measured
        self.steps: list[ParamStep] = []
        self.left: dict[int, str] = {}
        self.watched = self.steps  # one that was left stays left until something else changes
        tables: dict[Any, list[ParamStep]] = {}
        known: dict[tuple[Any, ...], CKernel | str] = {}
        for position, step in enumerate(steps):
            plan, group = step.plan, step.group
            key = id(plan.rule), plan.weight, plan.slots, plan.dtype, step.grad.dtype, id(group)
            if key not in known:
                known[key] = kernel_of(plan, group, step.grad.dtype, scaled)
            kernel = known[key]
            why = why_not(kernel, step)
            if why is not None:
                self.left[position] = why
            else:
                self.steps.append(step)
                tables.setdefault((kernel, *_switches(group)), []).append(step)
        own = {id(step.group): step for step in self.steps}
        groups = {at: OfGroup(s.group, partial(_Numbers.of, s.plan.rule)) for at, s in own.items()}
        self._groups = list(groups.values())
        self._fixed = [group.current().fixed for group in self._groups]
        self._tables = [_Table(kernel, some, groups) for (kernel, *_), some in tables.items()]
        members = [(table, number) for table in self._tables for number in range(len(table.steps))]
        self._members = {table.steps[number].index: (table, number) for table, number in members}
        self._params = [step.param for step in self.steps]
        self._snapshot = TensorSnapshot(self._params, [s.grad for s in self.steps], [s.state for s in self.steps])
        self._report: GradientReport | None = None

    def refresh(self, grads: Sequence[Tensor], states: Sequence[State]) -> bool:
        before = self._snapshot.gradients
        for group, fixed in zip(self._groups, self._fixed, strict=True):
            if group.current().fixed != fixed:
                return False
        if not self._snapshot.unchanged(grads, states):
            return False
        if self._snapshot.gradients is not before:
            for table in self._tables:
                table.find_gradients()
        return True

    def inspect(self, verdict: Verdict) -> list[GradientReport]:
        self._report = inspect_gradients(self.steps, verdict)
        return [self._report]

    def terms(self, verdict: Verdict) -> list[Rows]:
        return [table.sum_terms(verdict) for table in self._tables if table.kernel.step.equation.terms]

    def run(
        self, verdict: Verdict | None, summed: bool = False, indices: Sequence[int] | None = None
    ) -> list[tuple[list[str], Tensor]]:
        held = verdict is not None and verdict.held
        flags: dict[int, bool] | None = None
        if verdict is not None and self._report is not None:
            flags = dict(zip(self._report.indices.tolist(), (self._report.flags > 0).tolist(), strict=True))
        if not self._measured and indices is None:
            for table in () if held else self._tables:
                table.run(verdict, flags, summed)
            return []
        names, rows = [], []
        for index in self._members if indices is None else indices:
            table, number = self._members[index]
            if self._measured:
                names.append(table.steps[number].plan.name)
                stats = UpdateStats.none(_CPU) if held else table.measure(verdict, flags, summed, number)
                rows.append(stats.sums)
            elif not held:
                table.run(verdict, flags, summed, number, number + 1)
        return [(names, torch.stack(rows))] if rows else []


@dataclass(frozen=True)
class _Numbers:
    """A group's hyperparameters, tensors among them as numbers; and what asks for another list if it changes."""

    numbers: dict[str, Any]
    fixed: tuple[Any, ...]

    @classmethod
    def of(cls, rule: Rule, group: Mapping[str, Any]) -> _Numbers:
        found = numbers(group, _CPU)
        return cls(found, (*_switches(group), tuple(rule.scalars(found, 1))))


def _switches(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return bool(group["maximize"]), group["nonfinite"] == "skip", group["seed"]


class _Table:
    """Parameters, one at least, that one kernel steps in one call; `groups` is by their groups' identities."""

    def __init__(
        self, kernel: CKernel, steps: Sequence[ParamStep], groups: Mapping[int, OfGroup[_Numbers]]
    ) -> None:
        self.kernel, self.steps = kernel, steps
        group = steps[0].group
        self._sign, self._skips = -1.0 if group["maximize"] else 1.0, group["nonfinite"] == "skip"
        sizes = np.array([step.param.numel() for step in steps], dtype=np.int64)
        blocks = -(-sizes // kernel.step.block)
        chunks = -(-blocks // kernel.chunk)
        self._first_chunks = np.append(np.cumsum(chunks) - chunks, chunks.sum()).tolist()
        self._first_blocks = np.cumsum(blocks) - blocks
        self._blocks = blocks
        self._owners = np.repeat(np.arange(len(steps), dtype=np.int64), chunks)
        within = np.arange(len(self._owners), dtype=np.int64) - np.repeat(self._first_chunks[:-1], chunks)
        self._begins = (within * kernel.chunk).astype(np.int64)
        self._rows = np.zeros((len(steps), len(COLUMNS) + len(kernel.step.words)), dtype=np.int64)
        for row, step, first in zip(self._rows, steps, self._first_blocks, strict=True):
            state, p = step.state, step.param
            given = {
                "numel": p.numel(), "first": first, "counter": state["step"].data_ptr(),
                "skipped": state["skipped"].data_ptr(), "seed": step.group["seed"], "stream": step.plan.index,
                "origin": origin_of(step.plan.shard),
                "scale": p.numbers.data_ptr() if isinstance(p, Float8Weight) else 0,
            }  # fmt: skip
            for name, value in given.items():
                row[_AT[name]] = value
            row[len(COLUMNS) :] = [x.data_ptr() for x in step.tensors()]
        self._flags = np.zeros(len(steps), dtype=np.uint8)
        self._counts = np.zeros(len(steps))
        own = list(dict.fromkeys(id(step.group) for step in steps))
        self._groups = [groups[identity] for identity in own]
        self._group_of = np.array([own.index(id(step.group)) for step in steps], dtype=np.int64)
        self._elements = int(sizes.sum())
        self._layout = tuple(array.ctypes.data for array in (self._rows, self._owners, self._begins))
        self._moving = [step.param for step in steps]
        self._sums: Tensor | None = None

    @property
    def _threads(self) -> int:
        return threads_for(self._elements)  # torch.set_num_threads may be called between steps

    def find_gradients(self) -> None:
        """Take down where gradients are now."""
        self._rows[:, len(COLUMNS) + 1] = [step.grad.data_ptr() for step in self.steps]

    def run(
        self, verdict: Verdict | None, flags: Mapping[int, bool] | None, summed: bool,
        first: int = 0, end: int | None = None,
    ) -> None:  # fmt: skip
        """Step tensors `first` to `end`; `flags` tells, by index, whose gradients are not finite, if known."""
        end = len(self.steps) if end is None else end
        self._flag(flags, first, end)
        kernel, checks = self.kernel, self._skips and flags is None
        if checks and kernel.step.equation.terms:  # sums leave flagged tensors out, so flags come first
            self._check(first, end)
            checks = False
        if kernel.step.equation.terms and not summed:
            self.sum_terms(verdict, first, end)
        uniform = self._numbers(verdict, kernel.roots, self._sums, first, end)
        chunks = self._first_chunks[first], self._first_chunks[end]
        known = *self._layout, kernel.tables, uniform.ctypes.data, self._flags.ctypes.data, self._sign
        if kernel.threaded or self._threads == 1:
            kernel.step_list(*chunks, first, end, *known, checks, self._threads)
        else:
            if checks:
                self._check(first, end)
            self._spread(chunks, lambda a, b, threads: kernel.take_step(a, b, *known, threads))
            kernel.count_steps(first, end, self._layout[0], self._flags.ctypes.data)
        # Autograd cannot see what C writes.
        increment_version([p for p in self._moving[first:end] if not p.is_inference()])

    def measure(
        self, verdict: Verdict | None, flags: Mapping[int, bool] | None, summed: bool, number: int
    ) -> UpdateStats:
        """Step one tensor, and measure the step against the specification's update."""
        step = self.steps[number]
        self._flag(flags, number, number + 1)
        if self._skips and flags is None:
            self._check(number, number + 1)
            flags = {step.index: bool(self._flags[number])}
        if self._flags[number]:
            self.run(verdict, flags, summed, number, number + 1)
            return UpdateStats.none(_CPU)
        taken, count = with_gradient(step, verdict), next_number(step)
        sums = None
        if summed and self._sums is not None:
            sums = dict(zip(self.kernel.step.equation.terms, self._sums[number].unbind(), strict=True))
        before = step.plan.exact(step.param, step.state)
        delta, ratio = intended(taken, count, noise_of(step, count), sums)
        self.run(verdict, flags if flags is not None else {}, summed, number, number + 1)
        return UpdateStats.measure(delta, before, step.plan.exact(step.param, step.state), ratio)

    def sum_terms(self, verdict: Verdict | None, first: int = 0, end: int | None = None) -> Rows:
        """The sums of the rule's terms over the parts on this rank: indices, the first column, (tensors, terms)."""
        end = len(self.steps) if end is None else end
        kernel, terms = self.kernel, len(self.kernel.step.equation.terms)
        sums = np.zeros((int(self._blocks.sum()), terms))
        uniform = self._numbers(verdict, kernel.term_roots, None, first, end)
        chunks = self._first_chunks[first], self._first_chunks[end]
        flags = np.zeros_like(self._flags)
        known = *self._layout, kernel.tables, uniform.ctypes.data, flags.ctypes.data, self._sign
        self._spread(chunks, lambda a, b, threads: kernel.sum_terms(a, b, *known, threads, sums.ctypes.data))
        table = np.zeros((len(self.steps), terms))
        for number in range(first, end):
            begin = self._first_blocks[number]
            table[number] = sums[begin : begin + self._blocks[number]].sum(axis=0)
        self._sums = torch.from_numpy(table)
        return [step.index for step in self.steps], TERMS, self._sums

    def _flag(self, flags: Mapping[int, bool] | None, first: int, end: int) -> None:
        self._flags[first:end] = 0
        if flags is not None and self._skips:
            self._flags[first:end] = [flags.get(step.index, False) for step in self.steps[first:end]]

    def _check(self, first: int, end: int) -> None:
        chunks = self._first_chunks[first], self._first_chunks[end]
        flags = self._flags.ctypes.data
        self._spread(chunks, lambda a, b, threads: self.kernel.check(a, b, *self._layout, flags, threads))

    def _numbers(self, verdict: Verdict | None, evaluate: Any, sums: Tensor | None, first: int, end: int) -> Any:
        """The equation's numbers, float64 (rows, numbers); each tensor's row is written down in the table.

        With `sums`, float64 (tensors, terms), every tensor has numbers of its own.
        """
        counts, column = self._counts, self._rows[:, _AT["numbers"]]
        self.kernel.read_counts(len(self.steps), self._layout[0], counts.ctypes.data)
        distinct: Any = counts[:1]
        which: Any = 0
        if (counts != counts[0]).any():
            distinct, which = np.unique(counts, return_inverse=True)
        factor = {} if verdict is None else {FACTOR: verdict.factor}
        rule = self.steps[0].plan.rule
        scalars = []
        for group in self._groups:
            for count in distinct.tolist():
                given = rule.scalars(group.found.numbers, int(count) + 1)
                scalars.append({**given, **factor})
        rows = self._group_of * len(distinct) + which
        if sums is None:
            column[:] = rows
            return np.array([evaluate(some) or [0.0] for some in scalars])
        column[:] = np.arange(len(self.steps))
        found = np.zeros((len(self.steps), max(1, self.kernel.count)))
        for number in range(first, end):
            if not self._flags[number]:
                step = self.steps[number]
                named = dict(zip(self.kernel.step.equation.terms, sums[number].tolist(), strict=True))
                elements = float(whole_of(step.param, step.plan.shard))
                values = evaluate({**scalars[rows[number]], **named, "elements": elements})
                found[number, : len(values)] = values
        return found

    def _spread(self, chunks: tuple[int, int], part: Callable[[int, int, int], None]) -> None:
        """Call a function of C with (first, end, threads): at once, or without OpenMP in threads of Python's."""
        (first, last), threads = chunks, self._threads
        if self.kernel.threaded or threads == 1:
            part(first, last, threads)
            return
        ends = [first + (last - first) * k // threads for k in range(threads + 1)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(part, ends, ends[1:], [1] * threads))


@functools.lru_cache(maxsize=256)
def _made(*what: Any) -> CKernel | str:
    """A kernel by the arguments of `_step`, or why there is none."""
    try:
        return CKernel(_step(*what))
    except NotImplementedError as error:
        return str(error)
    except Unavailable as error:
        _warn(str(error))
        return str(error)


def _warn(reason: str) -> None:
    """Say once that steps on a CPU are slow, even where warnings are errors."""
    if reason not in _warned:
        _warned.add(reason)
        warn(f"steps on this CPU are not compiled, and many times slower: {reason}")


def _step(
    rule: Rule,
    weight: WeightStorage,
    slots: tuple[SlotPlan, ...],
    dtype: torch.dtype,
    grad: torch.dtype,
    names: tuple[str, ...],
) -> StepSpec:
    """What to compile; NotImplementedError if a part of it has no kernel."""
    found = equation(rule, tuple(slot.slot.name for slot in slots), names)
    for slot in slots:
        if slot.codec is None or slot.codec.c is None:
            raise NotImplementedError(f"{slot.storage.name} states")
    kept = moments_of(slots)
    blocks = {slot.block_size for slot, m in zip(slots, kept, strict=True) if m.codec.blockwise}
    block = blocks.pop() if blocks else _BLOCK
    if block % 16 or block > _LARGEST_BLOCK:
        raise NotImplementedError(f"block_size {block} is no multiple of 16 up to {_LARGEST_BLOCK}")
    if grad not in _DTYPES:
        raise NotImplementedError(f"the gradient is {grad}")
    weight_codec = weight.codec(dtype)
    if weight_codec is None or weight_codec.c is None:
        raise NotImplementedError(f"weights={weight.name!r} of {dtype}")
    return StepSpec(found, kept, weight_codec, dtype, grad, block)
