"""One parameter's step on a CPU as one pass over memory: compiled from its rule's graph and its storages.

The eager step is the specification and reads and writes memory some fifty times. Here the same numbers are worked
out block by block, and codes come out the same; floats may differ by the ulps that `kernels` allows itself. Why a
parameter cannot be stepped so is said by `kernel_of`, and then the eager step takes it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from narrowgauge.kernels._c_codecs import (
    BFLOAT16,
    EXPANSION,
    FLOAT8,
    FLOAT32,
    LOGARITHMS,
    PATTERNS,
    RELATIVE,
    Codec,
    Word,
    table_codec,
)
from narrowgauge.kernels._c_library import Unavailable, load
from narrowgauge.kernels._c_source import Moment, Step, step_source
from narrowgauge.kernels._graph import Node, evaluate, uniforms
from narrowgauge.optim._equation import equation
from narrowgauge.optim._plan import ParameterPlan, SlotPlan
from narrowgauge.optim._update import numbers
from narrowgauge.rules import Rule
from narrowgauge.storage import StateStorage, WeightStorage
from narrowgauge.storage._states._blocks import BlockwiseState, Float8State, FourBitState
from narrowgauge.storage._states._floats import ExpansionState
from narrowgauge.storage._states._logarithms import LogState, RelativeState, SignedLogState

_WEIGHTS = ("plain", "kahan", "expansion", "split", "split8", "master", "stochastic")
_CPU = torch.device("cpu")
_KEY, _MASK = ctypes.c_uint32 * 6, 0xFFFFFFFF
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Exactly these: a class derived from one may keep its words otherwise.
_STATES = (
    StateStorage, ExpansionState, BlockwiseState, FourBitState, Float8State,
    LogState, RelativeState, SignedLogState,
)  # fmt: skip
# Elements a block where no storage asks for blocks; and the most that a stack takes.
_BLOCK, _LARGEST_BLOCK = 1024, 8192
# Below, a thread costs more to wake than it saves.
_ELEMENTS_FOR_THREADS = 1 << 16
_C_TYPES = {
    torch.float32: "float",
    torch.bfloat16: "u16",
    torch.float16: "_Float16",
    torch.int16: "int16_t",
    torch.int8: "int8_t",
}


class Place(NamedTuple):
    """Where random numbers come from, and how many elements the whole parameter has."""

    seed: int
    stream: int
    step: int
    origin: int
    elements: int


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
        self._arrays = [array for table in tables for array in (table.values, table.cells)]
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
        self._given: Mapping[str, Any] | None = None
        self._scalars: dict[str, float] = {}
        self._values: Any = None
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
        self._know(given)
        n = words[0].numel()
        sums = np.zeros((-(-n // self.step.block), len(self.step.terms)))
        uniform = self._uniforms(self._term_roots, self._scalars)
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
        self._know(given)
        values = self._values
        if values is None:
            sums = self.sums(words, given, place, maximize) if summed is None else summed
            values = self._uniforms(self._roots, {**self._scalars, **sums, "elements": float(place.elements)})
        self._over(self._step, words[0].numel(), self._common(words, place, maximize), values)
        # What autograd has saved of them is not what it was: it looks at the version.
        increment_version([word for word in (words[0], *words[2:]) if not word.is_inference()])

    def _know(self, given: Mapping[str, Any]) -> None:
        if given is not self._given:
            self._scalars = {name: float(value) for name, value in given.items()}
            self._values = self._uniforms(self._roots, self._scalars) if not self.step.terms else None
            self._given = given

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


def kernel_of(plan: ParameterPlan, p: Tensor, group: Mapping[str, Any]) -> Kernel | str:
    """The kernel for a parameter, or why there is none; an empty string where the eager step was asked for."""
    return kernel_for(plan, p, group, plan.rule.scalars(numbers(group, _CPU), 1))


def kernel_for(plan: ParameterPlan, p: Tensor, group: Mapping[str, Any], given: Mapping[str, Any]) -> Kernel | str:
    """As `kernel_of`, with the rule's scalars known."""
    if plan.strict or not p.is_cpu:
        return ""
    if type(p) not in (Tensor, torch.nn.Parameter):
        return f"not fused: a {type(p).__name__}"
    if not p.is_contiguous():
        return "not fused: not contiguous"
    if group.get("percentile_clipping", 100) < 100:
        return "not fused: percentile_clipping"
    wanted = p.dtype, tuple(given)
    if wanted not in plan.kernels:
        rule = cast(Hashable, plan.rule)
        plan.kernels[wanted] = _made(rule, plan.weight, plan.slots, plan.dtype, *wanted)
    found: Kernel | str = plan.kernels[wanted]
    return found


def words_for(
    kernel: Kernel, plan: ParameterPlan, p: Tensor, grad: Tensor, state: Mapping[str, Tensor]
) -> list[Tensor] | None:
    """The tensors of a step, in the order of `Step.words`; None if they are not as the kernel expects them."""
    if type(grad) is not Tensor or grad.dtype != kernel.step.grad_dtype or torch.compiler.is_compiling():
        return None
    if "words" not in plan.kernels:
        plan.kernels["words"] = _keys(plan)
    words = [p, grad, *[state[key] for key in plan.kernels["words"]]]
    for word in words:
        if not (word.is_contiguous() and word.is_cpu) or word.is_neg():
            return None
    return words


def _keys(plan: ParameterPlan) -> list[str]:
    """Under which a parameter's state has what a step needs of it."""
    moments = [
        f"{slot.slot.name}.{word.name}" if word.name else slot.slot.name
        for slot in plan.slots
        for word in codec_of(slot.storage, slot.slot.signed).words
    ]
    return [plan.weight_key, *moments] if plan.weight_key is not None else moments


@functools.lru_cache(maxsize=256)
def _made(
    rule: Hashable,
    weight: WeightStorage,
    slots: tuple[SlotPlan, ...],
    dtype: torch.dtype,
    grad: torch.dtype,
    names: tuple[str, ...],
) -> Kernel | str:
    # Kept by its plan as well, where it is found without the hash of a rule and of storages.
    try:
        return Kernel(_step(cast(Rule, rule), weight, slots, dtype, grad, names))
    except (NotImplementedError, Unavailable) as error:
        return f"not fused: {error}"


def _step(
    rule: Rule,
    weight: WeightStorage,
    slots: tuple[SlotPlan, ...],
    dtype: torch.dtype,
    grad: torch.dtype,
    names: tuple[str, ...],
) -> Step:
    """What to compile.

    Raises:
        NotImplementedError: if something of it has no kernel.
    """
    graph = equation(rule, tuple(slot.slot.name for slot in slots), names)  # type: ignore[arg-type]  # rules are values, and have hashes
    kept = tuple(
        Moment(
            slot.slot.name,
            codec_of(slot.storage, slot.slot.signed),
            slot.beside.slot.name if slot.beside is not None else None,
            slot.storage.hands_over(slot.slot.signed),
            number,
        )
        for number, slot in enumerate(slots, start=1)
    )
    blocks = {
        slot.block_size for slot, m in zip(slots, kept, strict=True) if any(not w.bits for w in m.codec.words)
    }
    block = blocks.pop() if blocks else _BLOCK
    if block % 16 or block > _LARGEST_BLOCK:
        raise NotImplementedError(f"block_size {block}; takes multiples of 16 up to {_LARGEST_BLOCK}")
    narrow = weight.name == "stochastic" and dtype != torch.bfloat16
    if narrow or weight.name not in _WEIGHTS:
        raise NotImplementedError(f"weights={weight.name!r} of {dtype}")
    low_dtype = weight.low_dtype(dtype)
    low = Word("low", _C_TYPES[low_dtype], 8 * low_dtype.itemsize) if low_dtype is not None else None
    return Step(graph.delta, graph.moments, graph.reach, graph.terms, kept, weight.name, low, dtype, grad, block)


@functools.lru_cache(maxsize=64)
def codec_of(storage: StateStorage, signed: bool) -> Codec:
    """How C keeps a moment.

    Raises:
        NotImplementedError: if it does not.
    """
    if type(storage) not in _STATES:
        raise NotImplementedError(f"{storage.name} states")
    if isinstance(storage, BlockwiseState):
        return table_codec(storage.coder(signed, _CPU), storage.bits)
    if isinstance(storage, LogState):
        return PATTERNS[storage.bits]
    if isinstance(storage, RelativeState):
        return RELATIVE[storage.bits]
    if isinstance(storage, SignedLogState):
        return LOGARITHMS
    if isinstance(storage, Float8State):
        return FLOAT8[signed]
    if isinstance(storage, ExpansionState):
        return EXPANSION
    return {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}[storage.dtype]


def _threads(elements: int) -> int:
    return torch.get_num_threads() if elements >= _ELEMENTS_FOR_THREADS else 1
