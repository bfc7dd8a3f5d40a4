"""Steps on a GPU: one launch for a list of parameters that are kept in the same way.

What differs between the parameters of a launch is in a table on the device (`_launch_tables`), which is written
again only when an entry of it has changed. Hyperparameters that change at every step are a few numbers beside it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from narrowgauge.kernels._codec import KINDS
from narrowgauge.kernels._cuda_graphs import keep_for_graph, release_destroyed
from narrowgauge.kernels._step._launch import Cut, TritonKernels, cut_for_sums
from narrowgauge.kernels._step._layout import AT, WIDTH, Layout
from narrowgauge.optim._changes import OfGroup, TensorSnapshot
from narrowgauge.optim._launch_tables import LaunchTables, ListLaunch
from narrowgauge.optim._plan import PLAIN, ParamPlan, ParamStep, SlotPlan, State, moments_of
from narrowgauge.optim._sharding import Rows, origin_of, to_device, whole_of
from narrowgauge.optim._tracing import FACTOR, Hyperparameters, Static, equation, scalar_graph
from narrowgauge.optim._verdict import GradientReport, Verdict
from narrowgauge.rules import Rule
from narrowgauge.storage import Float8Weight

FactorMode: TypeAlias = Literal["", "given", "norm"]
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class LaunchKey:
    """What the parameters of one launch have in common."""

    rule: Rule
    layout: Layout
    traced: tuple[str, ...]
    static: tuple[tuple[str, Static], ...]
    skip: bool
    device: torch.device
    factor: FactorMode = ""


def unsupported(plan: ParamPlan, param: Tensor) -> str | None:
    """Why no kernel steps a parameter, whatever its gradient and state; None if one does."""
    blocks = [slot.block_size for slot in plan.slots if _in_blocks(slot)]
    if blocks and blocks[0] not in _BLOCKS:
        return f"block_size {blocks[0]} is none of {', '.join(map(str, _BLOCKS))}"
    if any(slot.codec is None or slot.codec.triton is None for slot in plan.slots):
        return "a moment's storage has no kernel"
    if sum(len(slot.codec.words) for slot in plan.slots if slot.codec) > WIDTH - len(AT):
        return f"moments of more than {WIDTH - len(AT)} tensors"
    weight = plan.weight.codec(plan.dtype)
    if weight is None or weight.triton is None:
        return "the weight's storage has no kernel"
    if plan.weight.float8 and plan.has_terms:
        return f"{plan.rule.name} sums over a Float8Weight"
    if isinstance(param, Float8Weight):
        return None if param.is_whole and param.is_contiguous() else "not whole and contiguous"
    return None if type(param) in PLAIN else f"a {type(param).__name__}"


def _in_blocks(slot: SlotPlan) -> bool:
    """Whether a storage has numbers of a block."""
    return slot.storage.quantized or (slot.codec is not None and any(word.per_block for word in slot.codec.words))


def why_not(step: ParamStep) -> str | None:
    """Why a step has no kernel, or None if it has."""
    why = unsupported(step.plan, step.param)
    if why is not None:
        return why
    if step.grad.dtype not in _FLOATS:
        return f"the gradient is {step.grad.dtype}"
    tensors = [*step.tensors()[:1], step.grad, *step.state.values()]
    if any(type(tensor) not in PLAIN for tensor in tensors):
        return "a tensor is of a class of its own"
    if not all(tensor.is_contiguous() and not tensor.is_neg() for tensor in tensors):
        return "a tensor is not contiguous"
    if any(tensor.device != step.param.device for tensor in tensors):
        return "a tensor is on another device"
    # Kernels trust the addresses they are given.
    return None if step.grad.shape == step.param.shape and _fits(step) else "the state is not what was planned"


def _fits(step: ParamStep) -> bool:
    """Whether the state has all that a kernel reads and writes."""
    plan, state, n = step.plan, step.state, step.param.numel()
    counters = {"step": torch.float32, "skipped": torch.int64}
    if any(name not in state or state[name].dtype != dtype for name, dtype in counters.items()):
        return False
    for slot in plan.slots:
        if sum(x.nbytes for x in slot.tensors(state).values()) != slot.storage.nbytes(
            step.param.shape, slot.block_size
        ):
            return False
    if plan.weight_key is None:
        return True
    low = state.get(plan.weight_key)
    return low is not None and low.nbytes == math.ceil(n * plan.weight.bytes_added(plan.dtype))


class TritonSteps:
    """A `StepList`: the steps of parameters on GPUs.

    Args:
        steps: the list.
        factor: what gradients are multiplied by: ``""`` for nothing, ``"given"`` for a number that is known,
            ``"norm"`` for one that depends on the norm of all.
        measured: whether to measure what each step does.

    `left` has, by position in the list, why a step has no kernel; the rest is in `steps`, and all of it in
    `watched`: what has no kernel at this step may have one at the next.
    """

    reads_steps = False

    def __init__(self, steps: Sequence[ParamStep], factor: FactorMode = "", measured: bool = False) -> None:
        self.left: dict[int, str] = {}
        own = {id(step.group): step.group for step in steps}.values()
        self._groups = [OfGroup(group, Hyperparameters.of) for group in own]
        numbers = {id(group.group): group.current() for group in self._groups}
        keys: dict[LaunchKey, dict[int, ParamStep]] = {}
        for position, step in enumerate(steps):
            why = why_not(step)
            if why is None:
                key = launch_key(step, numbers[id(step.group)], measured, factor)
                keys.setdefault(key, {})[position] = step
            else:
                self.left[position] = why
        launches: dict[torch.device, list[ListLaunch]] = {}
        for key, same in keys.items():
            try:
                made = _launch(key, same, list(numbers))
            except NotImplementedError as error:  # the rule is not elementwise, or does what has no kernel
                self.left |= dict.fromkeys(same, str(error))
            else:
                launches.setdefault(key.device, []).append(made)
        self.watched = list(steps)
        self.steps = [step for position, step in enumerate(steps) if position not in self.left]
        self._kinds = [(found.traced, found.static) for found in numbers.values()]
        self._numbers = list(numbers.values())
        self._tables = [LaunchTables(device, some) for device, some in launches.items()]
        self._now = self._tables
        every = [launch for tables in self._tables for launch in tables.launches]
        self._names = [[steps[position].plan.name for position in launch.members] for launch in every]
        self._moving = [step.param for step in self.steps if not step.param.is_inference()]
        self._params = [step.param for step in steps]
        self._snapshot = TensorSnapshot(self._params, [s.grad for s in steps], [s.state for s in steps])

    def refresh(self, grads: Sequence[Tensor], states: Sequence[State]) -> bool:
        """Whether the list still holds. Uploads changed numbers and gradients' addresses."""
        if not self._snapshot.unchanged(grads, states):
            return False
        self._numbers = [group.current() for group in self._groups]
        if [(found.traced, found.static) for found in self._numbers] != self._kinds:
            return False
        self.upload()
        return True

    def upload(self) -> None:
        """Bring the device's tables up to date for this step."""
        self._now = self._tables
        if any(capturing(tables.device) for tables in self._tables):
            # Replayed with these addresses, whatever becomes of this list; a graph keeps nothing alive.
            self._now = [tables.of_a_graph() for tables in self._tables]
            keep_for_graph(self._now)
        else:
            release_destroyed()
        assert self._snapshot.gradients is not None or not self._now
        for tables in self._now:
            tables.write(self._snapshot.gradients, self._numbers)  # type: ignore[arg-type]

    def inspect(self, verdict: Verdict) -> list[GradientReport]:
        return [found for tables in self._now for found in tables.inspect(verdict.inverse_on(tables.device))]

    def terms(self, verdict: Verdict) -> list[Rows]:
        return [one for tables in self._now for one in tables.terms(verdict.on_device(tables.device))]

    def run(
        self, verdict: Verdict | None, summed: bool = False, indices: Sequence[int] | None = None
    ) -> list[tuple[list[str], Tensor]]:
        found: list[Tensor | None] = []
        for tables in self._now:
            found += tables.launch(verdict.on_device(tables.device) if verdict is not None else None, summed)
        # Autograd cannot see what kernels write.
        increment_version(self._moving)
        return [(names, rows) for names, rows in zip(self._names, found, strict=True) if rows is not None]


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def launch_key(
    step: ParamStep, numbers: Hyperparameters, measured: bool = False, factor: FactorMode = ""
) -> LaunchKey:
    """What the launch that takes a step depends on."""
    plan, group = step.plan, step.group
    weight = plan.weight.codec(plan.dtype)
    assert weight is not None
    block = next((slot.block_size for slot in plan.slots if _in_blocks(slot)), 512)
    layout = Layout(
        weight,
        "uint8" if plan.weight.float8 else KINDS[plan.dtype],
        KINDS[step.grad.dtype],
        moments_of(plan.slots),
        block,
        all(tensor.data_ptr() % 16 == 0 for tensor in step.tensors()),
        bool(group["maximize"]),
        measured,
        plan.shard is not None,
    )
    skip = group["nonfinite"] == "skip"
    return LaunchKey(plan.rule, layout, numbers.traced, numbers.static, skip, step.param.device, factor)


@functools.lru_cache(maxsize=256)
def kernels_of(key: LaunchKey) -> TritonKernels:
    """The kernels of a launch; NotImplementedError if the rule does what has no kernel."""
    # Rules are values, and have hashes.
    scalars = scalar_graph(key.rule, key.traced, key.static)
    given = (*scalars, FACTOR) if key.factor else tuple(scalars)
    found = equation(key.rule, tuple(moment.name for moment in key.layout.moments), given)
    factor = FACTOR if key.factor else None
    return TritonKernels(key.layout, found, scalars, key.traced, key.skip, factor, key.factor == "norm")


def _launch(key: LaunchKey, steps: dict[int, ParamStep], groups: list[int]) -> ListLaunch:
    """The launch of steps with one key, by their position in the list; `groups` are the ids of all groups in
    order.
    """
    kernels, device = kernels_of(key), key.device
    if capturing(device):
        raise RuntimeError(
            "step: a captured step must repeat the step before it; take one with these parameters, options "
            "and gradients before capturing"
        )
    layout, each = key.layout, key.layout.units * key.layout.unit
    mine = list(dict.fromkeys(id(step.group) for step in steps.values()))
    sizes = np.array([step.param.numel() for step in steps.values()])
    counts = [-(-sizes // size) for size in (each, layout.pass_units * layout.unit)]
    tensors = np.arange(len(sizes), dtype=np.int32)
    rows = np.array([_row(layout, step, mine.index(id(step.group))) for step in steps.values()], np.int64)
    for column, count in zip(("first", "pass_first"), counts, strict=True):
        rows[:, AT[column]] = np.cumsum(count) - count
    rows[:, AT["passes"]] = counts[1]
    programs, passes = (to_device(torch.from_numpy(np.repeat(tensors, count)), device) for count in counts)
    return ListLaunch(
        kernels,
        rows,
        programs,
        passes,
        [table.on(device) for table in layout.tables],
        np.array(list(steps), dtype=np.int64),
        np.array([step.index for step in steps.values()], dtype=np.int64),
        tuple(groups.index(group) for group in mine),
        len(key.traced),
        Cut(*(to_device(torch.from_numpy(part), device) for part in cut_for_sums(counts[0])))
        if layout.gauges
        else None,
    )


def _row(layout: Layout, step: ParamStep, group: int) -> list[int]:
    plan, state = step.plan, step.state
    p, _, *further = step.tensors()
    row = [0] * WIDTH
    given = {
        "p": p.data_ptr(),
        "grad": step.grad.data_ptr(),
        "low": further[0].data_ptr() if layout.weight.words else 0,
        "numel": step.param.numel(),
        "seed": step.group["seed"] & 0xFFFFFFFF,
        "stream": plan.index & 0xFFFFFFFF,
        "count": state["step"].data_ptr(),
        "skipped": state["skipped"].data_ptr(),
        "hyper": group,
        "elements": whole_of(step.param, plan.shard),
        "origin": origin_of(plan.shard),
        "scale": step.param.scale.data_ptr() if isinstance(step.param, Float8Weight) else 0,
    }
    for name, value in given.items():
        row[AT[name]] = value
    tensors = {slot.slot.name: slot.tensors(state) for slot in plan.slots}
    for (slot, name), column in layout.columns().items():
        row[column] = tensors[slot][name].data_ptr()
    return row
