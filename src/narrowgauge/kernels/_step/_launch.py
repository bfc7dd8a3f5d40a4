# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Launching a step: which kernels there are for a layout and an equation, and in what order they run."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.kernels._graph import Equation, Node, uniforms
from narrowgauge.kernels._launches import CachedKernel
from narrowgauge.kernels._step import _source, _stats
from narrowgauge.kernels._step._compile import compile_together, compiled
from narrowgauge.kernels._step._layout import AT, WIDTH, Layout
from narrowgauge.kernels._step._scalars import numbers_source, totals_source
from narrowgauge.kernels._step._tables import Tables
from narrowgauge.kernels._triton import limits_registers

COLUMNS: int = _stats.COLUMNS.value
# Only what says so (`tl.fma`) is fused, so that all kernels round alike, whatever else they do.
UNFUSED = {"enable_fp_fusion": False}


_PAGE = tl.constexpr(2048)


@triton.jit
def add_squares(table, flags, partials, squares, WIDTH: tl.constexpr, FIRST: tl.constexpr, PASSES: tl.constexpr):
    """`squares[i]`: the sum of tensor i's programs; 0 if the tensor is flagged: its sum may be NaN."""
    tensor = tl.program_id(0)
    row = table + tensor * WIDTH
    first, count = tl.load(row + FIRST), tl.load(row + PASSES)
    place = tl.arange(0, _PAGE)
    total = tl.zeros([_PAGE], tl.float64)
    done = count * 0
    while done < count:
        total += tl.load(partials + first + done + place, mask=done + place < count, other=0.0)
        done += _PAGE
    tl.store(squares + tensor, tl.where(tl.load(flags + tensor) > 0, 0.0, tl.sum(total, 0)))


_ADD_SQUARES = CachedKernel(add_squares)
_ADD_SLICES, _ADD_TENSORS = CachedKernel(_stats.add_slices), CachedKernel(_stats.add_tensors)


class _Noted(threading.local):
    """The launches that a step's first call collects, to compile at once.

    By thread: optimizers in other threads may share the step.
    """

    launches: list[tuple[Any, ...]] | None = None


class TritonKernels:
    """The kernels of one layout and one equation.

    Args:
        layout: how things are kept.
        equation: what is computed.
        scalars: the rule's scalars as graphs of hyperparameters and step.
        hyper: names of the hyperparameters, in the order of their row.
        skip: whether tensors with a gradient that is not finite are left alone.
        factor: name of the number of the equation that the gradient is multiplied by; None without one. With one, a
            step begins with `look`.
        squares: whether `look` sums squares.
    """

    def __init__(
        self,
        layout: Layout,
        equation: Equation,
        scalars: Mapping[str, Node],
        hyper: Sequence[str],
        skip: bool,
        factor: str | None = None,
        squares: bool = False,
    ) -> None:
        self._launches: dict[str, CachedKernel] = {}
        self._compiled = False
        self._noted = _Noted()
        self.layout = layout
        self.skip = skip
        self.factor = factor
        self.squares = squares
        self.terms = tuple(equation.terms)
        ratio = equation.ratio if layout.gauges else None
        self.ratio = ratio is not None
        used = _source.effects_used(layout, equation).values()
        met = _met([equation.delta, *equation.moments.values(), *used, *([ratio] if ratio is not None else [])])
        self.met = len(met)
        texts = tuple(codec.triton for codec in layout.codecs)
        self.step: Any = compiled(_source.step_source(layout, equation, met), "step", texts)
        self._numbers = scalars, hyper, self.terms, met, factor
        self.numbers: Any = compiled(numbers_source(*self._numbers), "numbers")
        if self.terms:
            met = _met(equation.terms.values())
            self.met_before = len(met)
            self.sums: Any = compiled(_source.sums_source(layout, equation.terms, met), "sums", texts)
            self.numbers_before: Any = compiled(numbers_source(scalars, hyper, (), met, factor), "numbers")
        if factor is not None:
            self.pass_before: Any = compiled(_source.look_source(layout, squares), "look")
        elif skip:
            self.finite: Any = compiled(_source.finite_source(layout), "finite")

    def look(self, tables: Tables, inverse: Tensor) -> tuple[Tensor, Tensor | None]:
        """Look at all gradients, before a step whose factor they decide.

        Args:
            tables: the tensors.
            inverse: float32, 0-d, on their device: what gradients will be multiplied by, whatever is decided.

        Returns:
            (flags, squares). Flags are int32, 1 for a tensor that then has inf or NaN. Squares are float64, the sum
            of squares of a gradient as it is in memory, 0 if flagged; None if not asked for.
        """
        count, passes = tables.rows.shape[0], tables.passes.numel()
        flags = tables.buffer("flags", torch.int32, count)
        partials = tables.buffer("partial squares", torch.float64, passes if self.squares else 0)
        options = _options(self.layout, tables.rows.device)
        with torch.cuda.device_of(tables.rows):
            if passes:
                given = tables.rows, tables.passes, inverse, flags, flags, partials, *tables.books
                self._run(tables, "pass_before", passes, given, options)
            if not self.squares:
                return flags[:count], None
            squares = tables.buffer("squares", torch.float64, count)
            constants = {"WIDTH": WIDTH, "FIRST": AT["pass_first"], "PASSES": AT["passes"]}
            _ADD_SQUARES((count,), (tables.rows, flags, partials, squares), constants, {"num_warps": 4})
        return flags[:count], squares[:count]

    def add_up(self, tables: Tables, verdict: Tensor) -> Tensor:
        """Add up the terms of the step that comes, before it.

        Args:
            tables: the tensors.
            verdict: float32 (2,), as for a step.

        Returns:
            float64 (tensors, terms), in the order of `terms`: of the local elements. A step that is `summed` reads
            what stands there then.
        """
        count, terms = tables.rows.shape[0], len(self.terms)
        totals = tables.buffer("totals", torch.float64, terms * count)
        with torch.cuda.device_of(tables.rows):
            partials = self._sum_terms(tables, [verdict], {"ADVANCE": False, "SKIP": False, "PEEK": True})
            self._run(tables, "totals", count, (tables.rows, partials, totals), {"num_warps": 4})
        return totals[: terms * count].view(count, terms)

    def _sum_terms(self, tables: Tables, verdict: list[Tensor], counting: Mapping[str, Any]) -> Tensor:
        """The sums of each program's terms, float64: with the numbers that they meet, worked out before."""
        count, passes = tables.rows.shape[0], tables.passes.numel()
        flags, steps = (tables.buffer(name, torch.int32, count) for name in ("flags", "steps"))
        before = tables.buffer("uniforms before", torch.float32, count * max(self.met_before, 1))
        partials = tables.buffer("partials", torch.float64, len(self.terms) * passes)
        known = tables.rows, tables.hyper, before, steps, flags, partials, *verdict
        self._run(tables, "numbers_before", count, known, {"num_warps": 1, **UNFUSED}, counting)
        if passes:
            read = tables.rows, tables.passes, before, steps, flags, partials, *tables.books
            self._run(tables, "sums", passes, read, _options(self.layout, tables.rows.device))
        return partials

    @functools.cached_property
    def totals(self) -> Any:
        return compiled(totals_source(self.terms), "totals")

    @functools.cached_property
    def numbers_summed(self) -> Any:
        return compiled(numbers_source(*self._numbers, summed=True), "numbers")

    def __call__(
        self, tables: Tables, stats: Tensor | None = None, verdict: Tensor | None = None, summed: bool = False
    ) -> None:
        """Take a step with every tensor of the tables.

        Args:
            tables: the tensors.
            stats: float64 (tensors, 8), where gauges leave their sums, in the order of `UpdateStats`.
            verdict: float32 (2,), where gradients have a factor: that, and whether no tensor takes the step.
            summed: whether `add_up` has been called, and its sums may have been added to.
        """
        summed = summed and bool(self.terms)
        given = [] if verdict is None else [verdict]
        # Triton launches on the current device.
        with torch.cuda.device_of(tables.rows):
            if not self._compiled:
                first: list[tuple[Any, ...]] = []
                self._compiled, self._noted.launches = True, first
                try:
                    self._launch(tables, given, stats, summed)
                finally:  # after an error, too: what is noted is not launched
                    self._noted.launches = None
                compile_together(first)
            self._launch(tables, given, stats, summed)

    def _measure(self, tables: Tables, stats: Tensor) -> None:
        """Add up what the step's programs have left."""
        cut = tables.cut
        assert cut is not None
        sums, steps = tables.buffer("gauges", torch.float32, 0), tables.buffer("steps", torch.int32, 0)
        count = cut.slices.numel() - 1
        slices = tables.buffer("slices", torch.float64, count * COLUMNS)
        if count:
            read = sums, cut.slices, slices
            self._start(tables, "add_slices", _ADD_SLICES, count, read, {}, {"num_warps": 4})
        constants = {"WIDTH": WIDTH, "NUMEL": AT["numel"], "RATIO": self.ratio}
        given = tables.rows, steps, cut.ends, slices, stats
        self._start(tables, None, _ADD_TENSORS, stats.shape[0], given, constants, {"num_warps": 1})

    def _run(
        self, tables: Tables, name: str, programs: int, given: tuple[Any, ...], options: Mapping[str, Any],
        constants: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Launch one of the kernels by its name."""
        if name not in self._launches:
            self._launches[name] = CachedKernel(getattr(self, name))
        self._start(tables, name, self._launches[name], programs, given, constants, options)

    def _start(
        self, tables: Tables, name: str | None, launches: CachedKernel, programs: int, given: tuple[Any, ...],
        constants: Mapping[str, Any], options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Launch a kernel: by a name, if always on the same tensors; or note what it is to be compiled for."""
        if self._noted.launches is not None:
            self._noted.launches.append((launches, (programs,), given, constants, options))
        elif name is None:
            launches((programs,), given, constants, options)
        else:
            tables.launch(name, launches, programs, given, constants, options)

    def _launch(self, tables: Tables, verdict: list[Tensor], stats: Tensor | None, summed: bool) -> None:
        count, programs, passes = tables.rows.shape[0], tables.programs.numel(), tables.passes.numel()
        flags = tables.buffer("flags", torch.int32, count)
        steps = tables.buffer("steps", torch.int32, count)
        row = tables.buffer("uniforms", torch.float32, count * max(self.met, 1))
        partials = tables.buffer("partials", torch.float64, len(self.terms) * passes)
        warps, shape = _options(self.layout, tables.rows.device), {"num_warps": 1, **UNFUSED}
        if self.skip and passes and self.factor is None:
            read = tables.rows, tables.passes, row, steps, flags, partials, *tables.books
            self._run(tables, "finite", passes, read, warps)
        advance = {"ADVANCE": True, "SKIP": self.skip, "PEEK": False}
        if self.terms and not summed:
            self._sum_terms(tables, verdict, advance)
            advance = {"ADVANCE": False, "SKIP": False, "PEEK": False}
        sums = tables.buffer("totals", torch.float64, len(self.terms) * count) if summed else partials
        known = tables.rows, tables.hyper, row, steps, flags, sums, *verdict
        self._run(tables, "numbers_summed" if summed else "numbers", count, known, shape, advance)
        if self.layout.gauges:
            partials = tables.buffer("gauges", torch.float32, programs * COLUMNS)
        given = tables.rows, tables.programs, row, steps, flags, partials
        if programs:
            self._run(tables, "step", programs, (*given, *tables.books), warps)
        if stats is not None:
            self._measure(tables, stats)


def _options(layout: Layout, device: torch.device) -> dict[str, Any]:
    most = {"maxnreg": layout.registers} if limits_registers(device) else {}
    return {"num_warps": layout.warps, **most, **UNFUSED}


def _met(roots: Any) -> list[Node]:
    """The numbers that a tensor's row holds; constants are written into the code."""
    return [node for node in uniforms(roots) if node.op != "constant"]
