"""One parameter's step on a CPU as one pass over memory: compiled from its rule's graph and its storages.

The eager step is the specification and reads and writes memory some fifty times. Here the same numbers are worked
out block by block, and codes come out the same; floats may differ by the ulps that `kernels` allows itself. Why a
parameter cannot be stepped so is said by `kernel_of`, and then the eager step takes it.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

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
from narrowgauge.kernels._c_library import Unavailable
from narrowgauge.kernels._c_source import Moment, Step
from narrowgauge.optim._equation import equation
from narrowgauge.optim._fused_cpu_kernel import Kernel
from narrowgauge.optim._plan import ParameterPlan, SlotPlan
from narrowgauge.optim._update import numbers
from narrowgauge.rules import Rule
from narrowgauge.storage import StateStorage, WeightStorage
from narrowgauge.storage._states._blocks import BlockwiseState, Float8State, FourBitState
from narrowgauge.storage._states._floats import ExpansionState
from narrowgauge.storage._states._logarithms import LogState, RelativeState, SignedLogState

_WEIGHTS = ("plain", "kahan", "expansion", "split", "split8", "master", "stochastic")
_CPU = torch.device("cpu")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Exactly these: a class derived from one may keep its words otherwise.
_STATES = (
    StateStorage, ExpansionState, BlockwiseState, FourBitState, Float8State,
    LogState, RelativeState, SignedLogState,
)  # fmt: skip
# Elements a block where no storage asks for blocks; and the most that a stack takes.
_BLOCK, _LARGEST_BLOCK = 1024, 8192
_C_TYPES = {
    torch.float32: "float",
    torch.bfloat16: "u16",
    torch.float16: "_Float16",
    torch.int16: "int16_t",
    torch.int8: "int8_t",
}


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
    # C is given addresses, and believes them.
    made_for = kernel, p.numel()
    if plan.kernels.get("made for") != made_for:
        plan.kernels["made for"], plan.kernels["sizes"] = made_for, kernel.step.nbytes(p.numel())
    return words if [word.nbytes for word in words] == plan.kernels["sizes"] else None


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
