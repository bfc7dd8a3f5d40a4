# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Launching a step: which kernels there are for a layout and an equation, and in what order they run.

What launches read and write beside the tensors themselves is in memory that stays from step to step (`Tables`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.kernels._graph import Equation, Node, uniforms
from narrowgauge.kernels._launches import CachedKernel, FixedLaunch
from narrowgauge.kernels._step import _source, _stats
from narrowgauge.kernels._step._compile import Compilation, compiled
from narrowgauge.kernels._step._expressions import numbers_source, totals_source
from narrowgauge.kernels._step._layout import AT, WIDTH, Layout
from narrowgauge.kernels._triton import limits_registers

COLUMNS: int = _stats.COLUMNS.value
# Only what says so (`tl.fma`) is fused, so that all kernels round alike, whatever else they do.
UNFUSED = {"enable_fp_fusion": False}
_SCALARS = {"num_warps": 1, **UNFUSED}
# A launch: its name if its tensors are the same at every step, the kernel, programs, arguments, constants, options.
_Launch = tuple[str | None, CachedKernel, int, tuple[Any, ...], Mapping[str, Any], Mapping[str, Any]]

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


@dataclass(frozen=True)
class Cut:
    """Where programs of the step are added up for gauges, as `cut_for_sums` has it, on the device."""

    slices: Tensor
    ends: Tensor


@dataclass(frozen=True)
class Tables:
    """What a launch reads and writes beside the tensors themselves."""

    rows: Tensor  # int64 (tensors, WIDTH); see `_layout`
    programs: Tensor  # int32 (programs,): the tensor that each program of the step works on
    passes: Tensor  # int32, the same of programs that only read
    hyper: Tensor  # float64 (groups, hyperparameters)
    codebooks: Sequence[tuple[Tensor, Tensor]] = ()  # values, float32, and the cells that encode to them, int32
    cut: Cut | None = None  # where programs of the step are added up for gauges, if there are any
    scratch: dict[str, Tensor] = field(default_factory=dict)  # made on first use and kept
    launched: dict[str, FixedLaunch] = field(default_factory=dict)  # by name
    usual: list[FixedLaunch] = field(default_factory=list)  # those of a step without verdict and gauges, once taken

    @property
    def books(self) -> list[Tensor]:
        """Values and cells, one after the other."""
        return [tensor for pair in self.codebooks for tensor in pair]

    def buffer(self, name: str, dtype: torch.dtype, size: int) -> Tensor:
        if name not in self.scratch or self.scratch[name].numel() < size:
            self.scratch[name] = torch.zeros(max(1, size), dtype=dtype, device=self.rows.device)
        return self.scratch[name]

    def launch(
        self, name: str, launches: CachedKernel, programs: int, given: tuple[Any, ...],
        constants: Mapping[str, Any], options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Launch a kernel; faster where the last one of this name was the same."""
        known = self.launched.get(name)
        if known is None or not known.is_of(launches, (programs,), given):
            known = self.launched[name] = FixedLaunch(launches, (programs,), given, constants, options)
        known()


def cut_for_sums(programs: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(slices, ends): where slices of a step's programs begin, and where tensors begin among slices; the ends last.

    Args:
        programs: how many each tensor has.
    """
    counts = -(-programs // _stats.SLICE)
    first, firsts = np.cumsum(programs) - programs, np.cumsum(counts) - counts
    within = np.arange(counts.sum()) - np.repeat(firsts, counts)
    begins = np.repeat(first, counts) + within * _stats.SLICE
    return (
        np.append(begins, programs.sum()).astype(np.int32),
        np.append(firsts, counts.sum()).astype(np.int32),
    )


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
        self._kernels: dict[str, CachedKernel] = {}
        self._compiled = False
        self.layout, self.skip, self.factor, self.squares = layout, skip, factor, squares
        self.terms = tuple(equation.terms)
        ratio = equation.ratio if layout.gauges else None
        self.ratio = ratio is not None
        used = _source.effects_used(layout, equation).values()
        met = _met([equation.delta, *equation.moments.values(), *used, *([ratio] if ratio is not None else [])])
        scaled = layout.weight.scaled
        self.met = len(met) + 2 * scaled
        texts = tuple(codec.triton for codec in layout.codecs)
        self.step: Any = compiled(_source.step_source(layout, equation, met), "step", texts)
        self._numbers = scalars, hyper, self.terms, met, factor
        self.numbers: Any = compiled(numbers_source(*self._numbers, scaled=scaled), "numbers")
        if self.terms:
            met = _met(equation.terms.values())
            self.met_before = len(met)
            self.sums: Any = compiled(_source.sums_source(layout, equation.terms, met), "sums", texts)
            self.numbers_before: Any = compiled(numbers_source(scalars, hyper, (), met, factor), "numbers")
        if factor is not None:
            self.pass_before: Any = compiled(_source.look_source(layout, squares), "look")
        elif skip:
            self.finite: Any = compiled(_source.finite_source(layout), "finite")

    @functools.cached_property
    def totals(self) -> Any:
        return compiled(totals_source(self.terms), "totals")

    @functools.cached_property
    def numbers_summed(self) -> Any:
        return compiled(numbers_source(*self._numbers, summed=True), "numbers")

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
        given = tables.rows, tables.passes, inverse, flags, flags, partials, *tables.books
        with torch.cuda.device_of(tables.rows):
            _run(tables, [self._pass("pass_before", tables, given)])
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
        partials = self._partials(tables)
        with torch.cuda.device_of(tables.rows):
            _run(tables, self._sums(tables, [verdict], {"ADVANCE": False, "SKIP": False, "PEEK": True}))
            given = tables.rows, partials, totals
            _run(tables, [("totals", self._kernel("totals"), count, given, {}, {"num_warps": 4})])
        return totals[: terms * count].view(count, terms)

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
        usual = stats is None and verdict is None and not summed
        with torch.cuda.device_of(tables.rows):  # Triton launches on the current device
            if usual and tables.usual:
                for launch in tables.usual:
                    launch()
                return
            launches = self._launches(tables, verdict, stats, summed)
            _run(tables, launches)
            if usual:  # on the same tensors at every step
                tables.usual[:] = [tables.launched[name] for name, _, count, *_ in launches if name and count]

    def uncompiled(
        self, tables: Tables, stats: Tensor | None, verdict: Tensor | None, summed: bool
    ) -> list[Compilation]:
        """What the first call with these arguments has to compile, for `compile_together`; nothing later on."""
        if self._compiled:
            return []
        self._compiled = True
        launches = self._launches(tables, verdict, stats, summed)
        return [(of, (count,), x, c, o) for _, of, count, x, c, o in launches if count]

    def _launches(
        self, tables: Tables, decided: Tensor | None, stats: Tensor | None, summed: bool
    ) -> list[_Launch]:
        """The launches of a step, in order."""
        verdict, summed = [] if decided is None else [decided], summed and bool(self.terms)
        count, programs = tables.rows.shape[0], tables.programs.numel()
        flags, steps = (tables.buffer(name, torch.int32, count) for name in ("flags", "steps"))
        row = tables.buffer("uniforms", torch.float32, count * max(self.met, 1))
        partials = self._partials(tables)
        launches = []
        if self.skip and self.factor is None:
            read = tables.rows, tables.passes, row, steps, flags, partials, *tables.books
            launches.append(self._pass("finite", tables, read))
        advance = {"ADVANCE": True, "SKIP": self.skip, "PEEK": False}
        if self.terms and not summed:
            launches += self._sums(tables, verdict, advance)
            advance = {"ADVANCE": False, "SKIP": False, "PEEK": False}
        sums = tables.buffer("totals", torch.float64, len(self.terms) * count) if summed else partials
        known = tables.rows, tables.hyper, row, steps, flags, sums, *verdict
        name = "numbers_summed" if summed else "numbers"
        launches.append((name, self._kernel(name), count, known, advance, _SCALARS))
        if self.layout.gauges:
            partials = tables.buffer("gauges", torch.float32, programs * COLUMNS)
        given = tables.rows, tables.programs, row, steps, flags, partials, *tables.books
        launches.append(("step", self._kernel("step"), programs, given, {}, self._options(tables)))
        if stats is not None:
            assert tables.cut is not None
            cut = tables.cut.slices.numel() - 1
            slices = tables.buffer("slices", torch.float64, cut * COLUMNS)
            read = partials, tables.cut.slices, slices
            launches.append(("add_slices", _ADD_SLICES, cut, read, {}, {"num_warps": 4}))
            constants = {"WIDTH": WIDTH, "NUMEL": AT["numel"], "RATIO": self.ratio}
            last = tables.rows, steps, tables.cut.ends, slices, stats
            launches.append((None, _ADD_TENSORS, stats.shape[0], last, constants, {"num_warps": 1}))
        return launches

    def _sums(self, tables: Tables, verdict: list[Tensor], counting: Mapping[str, Any]) -> list[_Launch]:
        """The launches that sum each program's terms, after the numbers that these meet."""
        count = tables.rows.shape[0]
        flags, steps = (tables.buffer(name, torch.int32, count) for name in ("flags", "steps"))
        before = tables.buffer("uniforms before", torch.float32, count * max(self.met_before, 1))
        partials = self._partials(tables)
        known = tables.rows, tables.hyper, before, steps, flags, partials, *verdict
        read = tables.rows, tables.passes, before, steps, flags, partials, *tables.books
        return [
            ("numbers_before", self._kernel("numbers_before"), count, known, counting, _SCALARS),
            self._pass("sums", tables, read),
        ]

    def _partials(self, tables: Tables) -> Tensor:
        """Each program's sums of terms."""
        return tables.buffer("partials", torch.float64, len(self.terms) * tables.passes.numel())

    def _pass(self, name: str, tables: Tables, given: tuple[Any, ...]) -> _Launch:
        """The launch of a kernel that only reads."""
        return name, self._kernel(name), tables.passes.numel(), given, {}, self._options(tables)

    def _kernel(self, name: str) -> CachedKernel:
        if name not in self._kernels:
            self._kernels[name] = CachedKernel(getattr(self, name))
        return self._kernels[name]

    def _options(self, tables: Tables) -> dict[str, Any]:
        return _options(self.layout, tables.rows.device)


def _run(tables: Tables, launches: Sequence[_Launch]) -> None:
    """Launch kernels: faster by a name, where the tensors are the same at every step."""
    for name, kernel, programs, given, constants, options in launches:
        if programs and name is not None:
            tables.launch(name, kernel, programs, given, constants, options)
        elif programs:
            kernel((programs,), given, constants, options)


def _options(layout: Layout, device: torch.device) -> dict[str, Any]:
    most = {"maxnreg": layout.registers} if limits_registers(device) else {}
    return {"num_warps": layout.warps, **most, **UNFUSED}


def _met(roots: Any) -> list[Node]:
    """The numbers that a tensor's row holds; constants are written into the code."""
    return [node for node in uniforms(roots) if node.op != "constant"]
