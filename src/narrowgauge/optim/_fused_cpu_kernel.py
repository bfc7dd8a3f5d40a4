"""A compiled step, and how it is called: addresses of words, a key of random numbers, numbers of the equation."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from narrowgauge.kernels._c_library import load
from narrowgauge.kernels._c_source import Step, step_source
from narrowgauge.kernels._graph import Node, evaluate, uniforms

# Below, a thread costs more to wake than it saves.
_ELEMENTS_FOR_THREADS = 1 << 16
_KEY, _MASK = ctypes.c_uint32 * 6, 0xFFFFFFFF


class Place(NamedTuple):
    """Where random numbers come from, and how many elements the whole parameter has."""

    seed: int
    stream: int
    step: int
    origin: int
    elements: int


class _Known(NamedTuple):
    """A rule's scalars, and what was made of them; no values where sums come first."""

    given: Mapping[str, Any]
    scalars: dict[str, float]
    values: Any


class Kernel:
    """A compiled step.

    Attributes:
        step: what it was made for.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        library = load(step_source(step))
        self._roots = uniforms(step.roots)
        self._term_roots = uniforms(step.terms.values())
        tables = [m.codec.table for m in step.kept if m.codec.table is not None]
        self._arrays = [array for table in tables for array in (table.values, table.entries)]
        self._tables = (ctypes.c_void_p * (len(self._arrays) or 1))(*(a.ctypes.data for a in self._arrays))
        pointer, long = ctypes.c_void_p, ctypes.c_long
        arguments: list[Any] = [long, long, long, *[pointer] * 4, ctypes.c_float, ctypes.c_int]
        self._step, self._finite = library.take_step, library.all_finite
        self._step.argtypes, self._step.restype = arguments, None
        self._finite.argtypes, self._finite.restype = [long, pointer, ctypes.c_int], ctypes.c_int
        if step.terms:
            self._sum = library.sum_terms
            self._sum.argtypes, self._sum.restype = [*arguments, pointer], None
        self._addresses: Any = ctypes.c_void_p * len(step.words)
        self._last: _Known | None = None
        self._threaded = bool(ctypes.c_int.in_dll(library, "threaded"))

    def finite(self, grad: Tensor) -> bool:
        """Whether all of a gradient is."""
        return bool(self._finite(grad.numel(), grad.data_ptr(), _threads(grad.numel())))

    def sums(
        self, words: Sequence[Tensor], given: Mapping[str, Any], place: Place, maximize: bool
    ) -> dict[str, float]:
        """The sums of the rule's terms over what lies here, by name; args as of `take`."""
        if not self.step.terms:
            return {}
        n = words[0].numel()
        sums = np.zeros((-(-n // self.step.block), len(self.step.terms)))
        uniform = self._uniforms(self._term_roots, self._know(given).scalars)
        self._over(self._sum, n, self._common(words, place, maximize), uniform, sums.ctypes.data)
        return dict(zip(self.step.terms, map(float, sums.sum(axis=0)), strict=True))

    def take(
        self,
        words: Sequence[Tensor],
        given: Mapping[str, Any],
        place: Place,
        maximize: bool,
        summed: Mapping[str, float] | None = None,
    ) -> None:
        """Take a step: parameter and state are written over.

        Args:
            words: as `Step.words`, all contiguous; the gradient's sign is not changed yet.
            given: the rule's scalars. They are worked on once as long as the same object comes.
            place: of the parameter.
            maximize: whether to go along the gradient.
            summed: the sums of the terms over the whole parameter, where this is not all of it.
        """
        _, scalars, values = self._know(given)
        if values is None:
            sums = self.sums(words, given, place, maximize) if summed is None else summed
            values = self._uniforms(self._roots, {**scalars, **sums, "elements": float(place.elements)})
        self._over(self._step, words[0].numel(), self._common(words, place, maximize), values)
        # What autograd has saved of them is not what it was: it looks at the version.
        increment_version([word for word in (words[0], *words[2:]) if not word.is_inference()])

    def _know(self, given: Mapping[str, Any]) -> _Known:
        # Optimizers share kernels, and threads may step them: what is known is one object, and read once.
        known = self._last
        if known is None or known.given is not given:
            scalars = {name: float(value) for name, value in given.items()}
            values = self._uniforms(self._roots, scalars) if not self.step.terms else None
            self._last = known = _Known(given, scalars, values)
        return known

    def _common(self, words: Sequence[Tensor], place: Place, maximize: bool) -> tuple[Any, ...]:
        step, eighth = place.step, place.origin // 8
        return (
            self._addresses(*[word.data_ptr() for word in words]),
            self._tables,
            _KEY(
                place.seed & _MASK, place.stream & _MASK, step & _MASK, step >> 32 & _MASK,
                eighth & _MASK, eighth >> 32,
            ),
            -1.0 if maximize else 1.0,
        )  # fmt: skip

    @staticmethod
    def _uniforms(roots: tuple[Node, ...], scalars: Mapping[str, float]) -> Any:
        values = evaluate(roots, scalars)
        return (ctypes.c_double * (len(values) or 1))(*values)

    def _over(self, function: Any, n: int, common: tuple[Any, ...], uniform: Any, *more: Any) -> None:
        """Call a function of the library on all blocks of n elements."""
        words, tables, key, sign = common
        blocks, threads = -(-n // self.step.block), _threads(n)
        inner = threads if self._threaded else 1
        if inner == threads:
            function(0, blocks, n, words, tables, uniform, key, sign, inner, *more)
            return

        def part(first: int, last: int) -> None:
            function(first, last, n, words, tables, uniform, key, sign, inner, *more)

        # A compiler without OpenMP: Python's threads, which leave the interpreter while they are in C.
        ends = [blocks * k // threads for k in range(threads + 1)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(part, ends, ends[1:]))


def _threads(elements: int) -> int:
    return torch.get_num_threads() if elements >= _ELEMENTS_FOR_THREADS else 1
