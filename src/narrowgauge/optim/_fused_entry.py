"""One parameter's step as kernels are asked for it, and why they may not take it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.optim._equation import equation, scalar_graph
from narrowgauge.optim._fused_numbers import Options
from narrowgauge.optim._plan import ParameterPlan, SlotPlan
from narrowgauge.storage._states._logarithms import LogState, RelativeState, SignedLogState

# What kernels call a dtype.
KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
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


def no_kernel(plan: ParameterPlan, p: Tensor, group: Mapping[str, Any]) -> str | None:
    """Why no kernel steps this parameter, whatever its gradient and state; or None."""
    size = group["block_size"]
    if plan.strict:
        return "arithmetic='strict' rounds every operation"
    if group.get("percentile_clipping", 100) < 100:
        return "percentile_clipping needs the norm of each gradient before it"
    if size not in _BLOCKS and any(slot.storage.quantized for slot in plan.slots):
        return f"block_size {size} is none of {', '.join(map(str, _BLOCKS))}"
    if any(storage_name(slot) is None for slot in plan.slots):
        return "a moment's storage has no kernel"
    if type(p) not in (Tensor, torch.nn.Parameter):
        return f"a {type(p).__name__}"
    return None if p.is_contiguous() else "not contiguous"


def no_equation(plan: ParameterPlan, group: Mapping[str, Any]) -> str | None:
    """Why its rule cannot be written as a kernel, or None."""
    options, names = Options.of(group), tuple(slot.slot.name for slot in plan.slots)
    try:
        # Rules are values, and have hashes.
        scalars = scalar_graph(plan.rule, options.names, options.others)  # type: ignore[arg-type]
        equation(plan.rule, names, tuple(scalars))  # type: ignore[arg-type]
    except NotImplementedError as error:
        return str(error)
    return None


def why_not(entry: Entry) -> str | None:
    """Why a parameter has no kernel, or None if it has."""
    why = no_kernel(entry.plan, entry.p, entry.group)
    if why is not None:
        return why
    if entry.grad.dtype not in KINDS:
        return f"the gradient is {entry.grad.dtype}"
    tensors = [entry.grad, *entry.state.values()]
    if any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors):
        return "a tensor is of a class of its own"
    if not all(tensor.is_contiguous() and not tensor.is_neg() for tensor in tensors):
        return "a tensor is not contiguous"
    if any(tensor.device != entry.p.device for tensor in tensors):
        return "a tensor is on another device"
    # Kernels are given addresses, and believe them.
    return None if entry.grad.shape == entry.p.shape and _whole(entry) else "the state is not what was planned"


def _whole(entry: Entry) -> bool:
    """Whether the state has all that a kernel reads and writes."""
    plan, state, n = entry.plan, entry.state, entry.p.numel()
    counters = {"step": torch.float32, "skipped": torch.int64}
    if any(name not in state or state[name].dtype != dtype for name, dtype in counters.items()):
        return False
    for slot in plan.slots:
        if sum(word.nbytes for word in slot.words(state).values()) != slot.storage.nbytes(n, slot.block_size):
            return False
    if plan.weight_key is None:
        return True
    low = state.get(plan.weight_key)
    return low is not None and low.nbytes == n * plan.weight.bytes_added(plan.dtype)


def storage_name(slot: SlotPlan) -> str | None:
    """What kernels call a slot's storage."""
    storage = slot.storage
    if isinstance(storage, RelativeState):
        return f"relative{storage.bits}"
    if isinstance(storage, SignedLogState):
        return "signed8"
    if isinstance(storage, LogState):
        return f"pattern{storage.bits}"
    return storage.name if storage.name in ("fp32", "bf16", "expansion", "8bit", "4bit", "fp8") else None


def words_of(entry: Entry) -> list[Tensor]:
    """The tensors of elements."""
    plan = entry.plan
    low = [entry.state[plan.weight_key]] if plan.weight_key is not None else []
    return [entry.p, entry.grad, *low, *(word for slot in plan.slots for word in slot.words(entry.state).values())]
