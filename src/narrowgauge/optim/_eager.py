"""A step in eager torch: the specification that every kernel matches.

`update` computes one parameter's step without taking it: decode what is stored, evaluate the rule, encode the
result. `EagerSteps` takes the steps of a list, and writes.

A rule's equation is evaluated in one of two arithmetics:

- `Fp32Arithmetic`: moments are float32 tensors, decoded before and encoded after; every storage rounds once.
- `StrictArithmetic`: moments are tensors of their storage, and every operation of the equation is rounded to the
  format of its operands, constants included, as Collage's Algorithm 2 is written. An average is made in the format
  of its own tensors, the rest of the equation in the widest format that the parameter and its moments have: with
  bf16 throughout, all of it is bf16. The equation needs no second version: torch rounds every operation on narrow
  tensors, and the constants are rounded beforehand.

Eager torch makes some thirty tensors of a parameter's size for a step. A large parameter on a CPU is therefore
stepped in chunks that fit in the processor's caches: the same operations on the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from narrowgauge.formats import random_bits, random_halves
from narrowgauge.optim._changes import LISTS
from narrowgauge.optim._plan import ParamPlan, ParamStep, SlotPlan, State
from narrowgauge.optim._sharding import (
    MOST_TERMS,
    TERMS,
    Rows,
    Shard,
    apply_on_owners,
    apply_to_full,
    rows_of_ranks,
    whole_of,
)
from narrowgauge.optim._stats import UpdateStats
from narrowgauge.optim._verdict import GradientReport, Verdict, inspect_gradients
from narrowgauge.rules import Rule, Scalar, squared_ratio
from narrowgauge.storage import Float8Weight, StateStorage
from narrowgauge.storage._factored import FactoredState, factors, product

# A moment in strict arithmetic.
StrictMoment = tuple[StateStorage, State]

_CHUNK = 1 << 18  # elements of a chunk, more or less
_GRAIN = 8  # elements that one block of random numbers serves


@dataclass(frozen=True)
class Fp32Arithmetic:
    """Averages of float32 tensors; see the module.

    `shard` is the part of the parameter on this rank. `factors` has the slots that are stored as row means and
    column means. `whole` is the local part of what `of_whole` will be asked for, where ranks have worked that out
    before.
    """

    shard: Shard | None = None
    factors: frozenset[str] = frozenset()
    whole: Tensor | None = None

    def accumulate(self, average: Tensor, x: Tensor, decay: Scalar, new_weight: Scalar) -> Tensor:
        return decay * average + new_weight * x

    def accumulate_square(self, average: Tensor, x: Tensor, decay: Scalar, new_weight: Scalar) -> Tensor:
        return decay * average + new_weight * x * x

    def square(self, x: Tensor) -> Tensor:
        # A gradient of 1e20 is a float32 number, and so is one of 1e-24; their squares are not.
        return x.to(torch.float64).square()

    def total(self, summed: Scalar) -> Scalar:
        """A sum over all elements, which was made in float64, as the equation takes it."""
        return summed

    def of_whole(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return apply_to_full(self.shard, x, function) if self.whole is None else self.whole

    def value(self, average: Tensor) -> Tensor:
        return average

    def factored(self, slot: str, average: Tensor, least: Scalar) -> Tensor:
        return product(*factors(average), least) if slot in self.factors else average

    def root(self, x: Tensor, by: Scalar) -> Tensor:
        # `by` is one number for all elements. Dividing by its root keeps x from overflowing.
        return x.sqrt() / by**0.5


@dataclass(frozen=True)
class StrictArithmetic:
    """Averages as each slot's storage makes them; a moment is the pair (storage, tensors). See the module.

    `dtype` is the format of the rest of the equation, `shard` the part of the parameter on this rank.
    """

    dtype: torch.dtype
    shard: Shard | None = None

    def accumulate(self, average: StrictMoment, x: Tensor, decay: Scalar, new_weight: Scalar) -> StrictMoment:
        storage, tensors = average
        return storage, storage.accumulate(tensors, x, float(decay), float(new_weight))

    def accumulate_square(
        self, average: StrictMoment, x: Tensor, decay: Scalar, new_weight: Scalar
    ) -> StrictMoment:
        # The algorithm says (1 - beta) * x^2, and its overflow is part of it.
        return self.accumulate(average, x * x, decay, new_weight)

    def square(self, x: Tensor) -> Tensor:
        return x * x

    def total(self, summed: Scalar) -> Scalar:
        """A sum over all elements, which was made in float64: a 0-d tensor of the format, rounded once."""
        # In float64 the order of summation does not matter: its rounding is far below that of one term.
        return torch.as_tensor(summed, dtype=torch.float64).to(self.dtype)

    def of_whole(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return apply_to_full(self.shard, x, function)

    def value(self, average: StrictMoment) -> Tensor:
        storage, tensors = average
        return storage.value(tensors, self.dtype)

    def factored(self, slot: str, average: StrictMoment, least: Scalar) -> Tensor:
        return self.value(average)  # factors have no strict arithmetic

    def root(self, x: Tensor, by: Scalar) -> Tensor:
        return (x / by).sqrt()


_FP32 = Fp32Arithmetic()


@dataclass(frozen=True)
class Noise:
    """The random numbers of one parameter's step: a pure function of these values, with nothing to save.

    `p` gives shape and device. `origin`, a multiple of eight, is the element at which the numbers begin.
    """

    seed: int
    stream: int
    step: int | Tensor
    p: Tensor
    origin: int = 0

    def words(self) -> Tensor:
        """A random 32-bit number an element, for the weight."""
        bits = random_bits(
            self.p.numel(), seed=self.seed, stream=self.stream, step=self.step, offset=self.origin,
            device=self.p.device,
        )  # fmt: skip
        return bits.view(self.p.shape)

    def of_weight(self, plan: ParamPlan) -> Callable[[], Tensor]:
        """Makes the random bits of the weight: 32 an element, or 8 (see `weight_purpose`)."""
        if plan.weight.random_bits == 32:
            return self.words
        rounded = (number for number, slot in enumerate(plan.slots, start=1) if slot.storage.stochastic)
        purpose = next(rounded, 0)
        return lambda: self.halves(purpose) & 0xFF

    def halves(self, slot: int) -> Tensor:
        """16 random bits an element, for the state of a slot, counted from 1; 0 is the weight."""
        halves = random_halves(
            self.p.numel(), seed=self.seed, stream=self.stream, step=self.step, purpose=slot, offset=self.origin,
            device=self.p.device,
        )  # fmt: skip
        return halves.view(self.p.shape)


@dataclass(frozen=True)
class Operands:
    """What a rule is given: weight and gradient in the arithmetic's format, moments decoded (or, in strict
    arithmetic, as pairs of storage and tensors), and the scalars. `weight_dtype` is the weight's format before
    that.
    """

    arithmetic: Fp32Arithmetic | StrictArithmetic
    weight: Tensor
    weight_dtype: torch.dtype
    grad: Tensor
    moments: Mapping[str, Any]
    scalars: Mapping[str, Scalar]


def update(
    step: ParamStep,
    number: Scalar,
    noise: Noise,
    summed: Mapping[str, Scalar] | None = None,
    whole: Tensor | None = None,
) -> tuple[Tensor, State, Tensor]:
    """Compute a step without taking it.

    Args:
        step: the parameter's; its gradient as the rule is given it.
        number: the number of this step, from 1; a 0-d tensor on the device, or a number.
        noise: makes random numbers in the parameter's shape.
        summed: the sums of `term_sums` over the whole parameter, if other ranks hold parts of it.
        whole: see `Fp32Arithmetic`.

    Returns:
        (p, state, delta): the new parameter, its new state entries, and the intended update.
    """
    plan, p = step.plan, step.param
    low = plan.low_of(step.state)
    read = operands(step, number, whole)
    scalars = with_sums(plan, read, summed)
    delta, moments = plan.rule.update(read.arithmetic, read.weight, read.grad, read.moments, scalars)
    new_state: State
    if plan.strict:
        delta = delta.to(read.weight_dtype)
        new_p, new_low = plan.weight.add_rounded(p, low, delta, noise.of_weight(plan))
        new_state = {key: moments[slot.slot.name][1][name] for slot in plan.slots for name, key in slot.keys}
    else:
        # Beside a device's float64 numbers a 0-d moment has become float64.
        moments = {name: moment.to(torch.float32) for name, moment in moments.items()}
        feeds = any(slot.storage.error_feedback for slot in plan.slots)
        effect = plan.rule.remaining_effect(_FP32, read.weight, moments, scalars) if feeds else {}
        new_state, lost = encode_moments(plan, moments, noise, effect.keys())
        carried: Tensor | None = None
        for name, error in lost.items():
            part = effect[name] * error
            carried = part if carried is None else carried + part
        # Nothing is added where nothing is carried: adding zero would change the sign of a zero.
        delta = (delta if carried is None else delta + carried).to(torch.float32)
        new_p, new_low = plan.weight.add(p, low, read.weight, delta, noise.of_weight(plan))
    if plan.weight_key is not None and new_low is not None:
        new_state[plan.weight_key] = new_low
    return new_p, new_state, delta


def intended(
    step: ParamStep, number: Scalar, noise: Noise, summed: Mapping[str, Scalar] | None = None
) -> tuple[Tensor, Tensor | None]:
    """The update of `update`, and `squared_ratios`; without encoding moments, which takes longer than both."""
    plan = step.plan
    if plan.strict or any(slot.storage.error_feedback for slot in plan.slots):
        return update(step, number, noise, summed)[2], squared_ratios(step, number)
    read = operands(step, number)
    ratio = squared_ratio(plan.rule, read.arithmetic, read.weight, read.grad, read.moments, read.scalars)
    scalars = with_sums(plan, read, summed)
    delta, _ = plan.rule.update(read.arithmetic, read.weight, read.grad, read.moments, scalars)
    return delta.to(torch.float32), ratio


class _Asked(Exception):
    """Ends an update at its call of `of_whole`, with the arguments."""


class _Asking(Fp32Arithmetic):
    def of_whole(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        raise _Asked(x, function)


def asked_of_whole(step: ParamStep, number: Scalar) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
    """The arguments with which the rule will call `of_whole`; None if it will not."""
    read = operands(step, number)
    try:
        step.plan.rule.update(_Asking(step.plan.shard), read.weight, read.grad, read.moments, read.scalars)
    except _Asked as asked:
        x, function = asked.args
        return x, function
    return None


def operands(step: ParamStep, number: Scalar, whole: Tensor | None = None) -> Operands:
    """What the rule is given at the step of this number."""
    plan, p, state = step.plan, step.param, step.state
    low = plan.low_of(state)
    scalars: Mapping[str, Scalar] = plan.rule.scalars(numbers(step.group, p.device), number)
    if not plan.strict:
        factored = frozenset(slot.slot.name for slot in plan.slots if isinstance(slot.storage, FactoredState))
        arithmetic = Fp32Arithmetic(plan.shard, factored, whole) if factored or plan.shard is not None else _FP32
        moments: State = {}
        for slot in _units_first(plan):
            unit = moments[slot.normalizer.slot.name] if slot.normalizer is not None else None
            moments[slot.slot.name] = slot.decode(state, p.shape, unit)
        weight = plan.weight.read(p, low)
        return Operands(arithmetic, weight, torch.float32, step.grad.to(torch.float32), moments, scalars)
    strict = {s.slot.name: (s.storage, {name: state[key] for name, key in s.keys}) for s in plan.slots}
    weight = plan.weight.operand(p, low)
    dtypes = [tensor.dtype for _, tensors in strict.values() for tensor in tensors.values()]
    dtype = reduce(torch.promote_types, dtypes, weight.dtype)
    scalars = narrow_scalars(scalars, plan.rule.averaging, dtype, p.device)
    exact = StrictArithmetic(dtype, plan.shard)
    return Operands(exact, weight.to(dtype), weight.dtype, step.grad.to(dtype), strict, scalars)


def encode_moments(
    plan: ParamPlan, moments: Mapping[str, Tensor], noise: Noise, errors_of: Any = ()
) -> tuple[State, State]:
    """Moments as they are stored.

    Args:
        plan, moments: how they are stored, and float32 tensors by slot.
        noise: for storages that round stochastically.
        errors_of: the slots whose errors are wanted, if their storage feeds them back.

    Returns:
        (state entries, what those slots lose), the latter by slot.
    """
    purposes = {slot.slot.name: number for number, slot in enumerate(plan.slots, start=1)}
    state: State = {}
    stored: State = {}
    lost: State = {}
    units = {slot.normalizer.slot.name for slot in plan.slots if slot.normalizer is not None}
    for slot in _units_first(plan):
        name, moment = slot.slot.name, moments[slot.slot.name]
        random = noise.halves(purposes[name]) if slot.storage.stochastic else None
        unit = stored[slot.normalizer.slot.name] if slot.normalizer is not None else None
        state |= slot.encode(moment, random, normalizer=unit)
        fed_back = slot.storage.error_feedback and name in errors_of
        if name in units:
            stored[name] = slot.decode(state, moment.shape, unit)
        if fed_back:
            lost[name] = slot.lost(moment, state, unit)
    return state, {slot.slot.name: lost[slot.slot.name] for slot in plan.slots if slot.slot.name in lost}


def _units_first(plan: ParamPlan) -> list[SlotPlan]:
    return sorted(plan.slots, key=lambda slot: slot.normalizer is not None)


def numbers(group: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A group's hyperparameters, tensors among them as scalars on the device.

    A tensor of one element, of any shape, serves as a number. The device reads one on a GPU, as it reads the step
    count: a captured step follows it. The host reads one on the host: a captured step keeps its value.
    """

    def number(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if "cpu" in (value.device.type, device.type):
            return value.item()
        return value.detach().to(device, torch.float64).reshape(())

    return {
        key: tuple(map(number, value)) if isinstance(value, tuple | list) else number(value)
        for key, value in group.items()
        if key not in LISTS
    }


def narrow_scalars(
    scalars: Mapping[str, Scalar], averaging: tuple[str, ...], dtype: torch.dtype, device: torch.device
) -> dict[str, Scalar]:
    """The scalars as numbers of a format.

    They become 0-d tensors on the device, because torch multiplies by the reciprocal where a tensor on a GPU is
    divided by a number of the host. Those that decay or weigh averages stay as they are: `accumulate` rounds them
    to the format of the moment, as one number or, for an expansion, as two.
    """
    return {
        name: value
        if name in averaging
        else torch.tensor(float(value), dtype=torch.float64, device="cpu").to(dtype).to(device)
        for name, value in scalars.items()
    }


def squared_ratios(step: ParamStep, number: Scalar) -> Tensor | None:
    """g^2 / max(v_hat, eps^2) in the parameter's shape, before the step; None for rules without second moment."""
    read = operands(step, number)
    return squared_ratio(step.plan.rule, read.arithmetic, read.weight, read.grad, read.moments, read.scalars)


def term_sums(plan: ParamPlan, read: Operands) -> dict[str, Tensor]:
    """The sums of the rule's terms over the part on this rank, before the step: 0-d, float64, by name."""
    terms = plan.rule.terms(read.arithmetic, read.weight, read.grad, read.moments, read.scalars)
    return {name: term.to(torch.float64).sum() for name, term in terms.items()}


def with_sums(plan: ParamPlan, read: Operands, summed: Mapping[str, Scalar] | None = None) -> Mapping[str, Scalar]:
    """The scalars, and the sums over the parameter that the rule asks for."""
    if not plan.has_terms:
        return read.scalars
    sums = term_sums(plan, read) if summed is None else summed
    elements = float(whole_of(read.weight, plan.shard))
    return {
        **read.scalars,
        **{name: read.arithmetic.total(one) for name, one in sums.items()},
        "elements": elements,
    }


def check_terms(rule: Rule, group: Mapping[str, Any], dims: int) -> None:
    """Refuse a rule that sums more terms over a sharded parameter of so many dimensions than ranks exchange."""
    one = torch.ones((1,) * dims, device="cpu")
    scalars = {name: float(value) for name, value in rule.scalars(group, 1).items()}
    terms = rule.terms(_FP32, one, one, {slot.name: one for slot in rule.slots(group)}, scalars)
    if len(terms) > MOST_TERMS:
        raise ValueError(
            f"rule must have at most {MOST_TERMS} terms where ranks share parameters, got {len(terms)} of "
            f"{rule.name!r}"
        )


def next_number(step: ParamStep) -> int | Tensor:
    """The number of the step that comes."""
    # On a GPU the count stays there: reading it would make the host wait for the device at every parameter.
    count = step.state["step"]
    on_device = step.param.device.type != "cpu" and not step.plan.strict
    return count.to(torch.float64) + 1 if on_device else int(count.item()) + 1


def noise_of(step: ParamStep, number: int | Tensor, first: int = 0) -> Noise:
    """The random numbers of a step, or of a chunk of it that begins at element `first`."""
    shard = step.plan.shard
    origin = first if shard is None else shard.origin + first
    return Noise(step.group["seed"], step.plan.index, number, step.param, origin)


def chunks(
    step: ParamStep, elementwise: Callable[[ParamPlan, Mapping[str, Any]], bool]
) -> Iterator[tuple[int, ParamStep]]:
    """(first element, chunk) of a step; one chunk if the parameter is small or its rule needs all of it.

    A chunk is a run of whole blocks of the flat parameter. Its tensors are views: writing to them writes to the
    parameter and its state. `elementwise` tells whether a plan's rule treats every element by itself.
    """
    plan, p, n = step.plan, step.param, step.param.numel()
    unit = math.lcm(_GRAIN, *(slot.block_size for slot in plan.slots))
    size = max(1, _CHUNK // unit) * unit
    flat = _flat_state(step) if p.is_cpu and n > size and p.is_contiguous() else None
    if flat is None or plan.weight.float8 or not elementwise(plan, step.group):
        yield 0, step
        return
    param, grad = p.view(-1), step.grad.reshape(-1)
    for first in range(0, n, size):
        end = min(n, first + size)
        state = {key: x[first // per : -(-end // per)] for key, (x, per) in flat.items()}
        part = ParamStep(step.index, plan, step.group, param[first:end], grad[first:end], {**step.state, **state})
        yield first, part


def _flat_state(step: ParamStep) -> dict[str, tuple[Tensor, int]] | None:
    """Flat state tensors, and how many elements of the parameter an item of each serves; None if one cannot be."""
    plan, state, n = step.plan, step.state, step.param.numel()
    blocks = {key: slot.block_size for slot in plan.slots for _, key in slot.keys}
    low = [plan.weight_key] if plan.weight_key is not None else []
    found: dict[str, tuple[Tensor, int]] = {}
    for key in (*blocks, *low):
        x, block = state[key], blocks.get(key, 1)
        # An item for an element, for two, or for a block.
        per = 1 if x.numel() == n else {-(-n // 2): 2, -(-n // block): block}.get(len(x) if x.dim() else -1)
        if per is None or not x.is_contiguous():
            return None
        found[key] = x.view(-1) if per == 1 else x, per
    return found


def with_gradient(step: ParamStep, verdict: Verdict | None) -> ParamStep:
    """A step with the gradient that the rule is given: unscaled, clipped, negated if `maximize`."""
    grad = step.grad if verdict is None else verdict.scaled(step.grad)
    if step.group["maximize"]:
        grad = -grad
    return ParamStep(step.index, step.plan, step.group, step.param, grad, step.state)


class EagerSteps:
    """A `StepList`: the steps of parameters on one device, one after the other. For `elementwise` see `chunks`."""

    reads_steps = True

    def __init__(
        self,
        steps: Sequence[ParamStep],
        measured: bool,
        elementwise: Callable[[ParamPlan, Mapping[str, Any]], bool],
    ) -> None:
        self.steps, self.watched, self._measured, self._elementwise = steps, steps, measured, elementwise
        self._device = steps[0].param.device
        self._members = {step.index: number for number, step in enumerate(steps)}
        # Those whose rule may need all of a matrix that ranks hold in rows; the first step finds out.
        self._whole = {
            step.index
            for step in steps
            if not (step.plan.strict or step.plan.has_terms) and rows_of_ranks(step.plan.shard) is not None
        }
        self._report: GradientReport | None = None
        self._sums: dict[int, tuple[list[str], Tensor]] = {}

    def refresh(self, grads: Sequence[Tensor], states: Sequence[State]) -> bool:
        """Whether the list still holds: no gradient is sparse, no parameter has another dtype or device."""
        return all(
            (grad.layout, step.param.dtype, step.param.device) == (torch.strided, step.plan.kind[0], self._device)
            and isinstance(step.param, Float8Weight) == step.plan.kind[2]
            for step, grad in zip(self.steps, grads, strict=True)
        )

    def inspect(self, verdict: Verdict) -> list[GradientReport]:
        self._report = inspect_gradients(self.steps, verdict)
        return [self._report]

    def terms(self, verdict: Verdict) -> list[Rows]:
        self._sums = {}
        for step in self.steps:
            if step.plan.has_terms:
                sums = term_sums(step.plan, operands(with_gradient(step, verdict), next_number(step)))
                self._sums[step.index] = list(sums), torch.stack(list(sums.values()))[None]
        return [([index], TERMS, table) for index, (_, table) in self._sums.items()]

    def run(
        self, verdict: Verdict | None, summed: bool = False, indices: Sequence[int] | None = None
    ) -> list[tuple[list[str], Tensor]]:
        names, rows = [], []
        for index, whole in self._with_wholes(self._members if indices is None else indices, verdict):
            number = self._members[index]
            step, sums = self.steps[number], None
            if summed and index in self._sums:
                terms, table = self._sums[index]
                sums = dict(zip(terms, table[0].unbind(), strict=True))
            try:
                stats = self._take(step, self._admitted(step, number, verdict), verdict, sums, whole)
            except Exception as error:  # of a rule of anybody's
                error.add_note(f"in the step of {step.plan.name} by rule {step.plan.rule.name!r}")
                raise
            if stats is not None:
                names.append(step.plan.name)
                rows.append(stats.sums)
        return [(names, torch.stack(rows))] if rows else []

    def _with_wholes(self, indices: Iterable[int], verdict: Verdict | None) -> Iterator[tuple[int, Tensor | None]]:
        """The parameters, with what `of_whole` is for those that ranks work out together, a matrix a rank."""
        batch: list[tuple[int, Shard, Tensor, Callable[[Tensor], Tensor]]] = []

        def worked_out() -> Iterator[tuple[int, Tensor]]:
            if batch:
                of, shards, xs, functions = zip(*batch, strict=True)
                batch.clear()
                yield from zip(of, apply_on_owners(shards, xs, functions), strict=True)

        for index in indices:
            step = self.steps[self._members[index]]
            shard = step.plan.shard
            asked = None
            if shard is not None and index in self._whole:
                asked = asked_of_whole(with_gradient(step, verdict), next_number(step))
            if shard is None or asked is None:
                self._whole.discard(index)
                yield index, None
                continue
            if batch and batch[0][1].layout != shard.layout:
                yield from worked_out()
            batch.append((index, shard, *asked))
            if len(batch) == shard.count:
                yield from worked_out()
        yield from worked_out()

    def _admitted(self, step: ParamStep, number: int, verdict: Verdict | None) -> bool | Tensor:
        """Whether a parameter takes the step: True, False, or on a GPU a 0-d tensor that the host never reads."""
        if verdict is not None:
            return verdict.admit(step, self._report.flags[number] if self._report is not None else False)
        if step.group["nonfinite"] != "skip":
            return True
        # Steps compute in float32: what that does not hold is infinite.
        grad = step.grad.to(torch.float32) if step.grad.dtype == torch.float64 else step.grad
        finite = torch.isfinite(grad).all()
        step.state["skipped"] += ~finite
        return bool(finite) if grad.is_cpu else finite

    def _take(
        self,
        step: ParamStep,
        keep: bool | Tensor,
        verdict: Verdict | None,
        sums: Mapping[str, Tensor] | None,
        whole: Tensor | None,
    ) -> UpdateStats | None:
        """Take one parameter's step, unless it is refused; what was measured, if anything."""
        plan, p, state = step.plan, step.param, step.state
        if keep is False:
            return UpdateStats.none(p.device) if self._measured else None
        number, taken = next_number(step), with_gradient(step, verdict)
        before = plan.exact(p, state) if self._measured else None
        ratio = squared_ratios(taken, number) if self._measured else None
        in_one = self._measured or sums is not None or keep is not True
        for first, part in [(0, taken)] if in_one else chunks(taken, self._elementwise):
            new_p, new_state, delta = update(part, number, noise_of(part, number, first), sums, whole)
            for target, value in [(part.param, new_p), *((part.state[k], x) for k, x in new_state.items())]:
                target.copy_(value if keep is True else torch.where(keep, value, target))
        state["step"] += 1 if keep is True else keep
        if before is None:
            return None
        return UpdateStats.measure(delta, before, plan.exact(p, state), ratio).where(keep)
