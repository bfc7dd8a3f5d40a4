"""What the next step will write to quantized moments, beside the numbers that the codes stand for.

These exist in registers only, and only during the step. So they are worked out once more, by the specification
that kernels match: of one parameter to the bit, or of all from samples. Operations on one parameter are some
hundreds, each a launch, so samples of parameters that are kept in the same way are laid one after the other and
stepped as one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.optim._blocks import Blocks
from narrowgauge.optim._clip_gradients import HISTORY
from narrowgauge.optim._pieces import by_element
from narrowgauge.optim._plan import ParameterPlan
from narrowgauge.optim._update import Noise, next_moments
from narrowgauge.rules import ClipUpdates

if TYPE_CHECKING:
    from narrowgauge.optim._optimizer import NarrowOptimizer

# A parameter's sample has at most about so many elements, and so many are stepped as one.
MOST, TOGETHER = 1 << 15, 1 << 22


@dataclass(frozen=True, eq=False)
class QuantizedMoment:
    """A moment as a step makes it, and as it is kept.

    Attributes:
        slot: the equation's letter.
        format: the storage's name.
        exact: float32, in the parameter's shape, or flat if it is of several.
        codes: uint8, in the same shape, one a byte.
        kept: what the codes stand for, float32, in the same shape.
        correction: what the equation divides the moment by because it began at zero; 1 where it does not.
        eps: what the equation adds to the root of the second moment; None in rules that do not divide
            a first moment by one.
    """

    slot: str
    format: str
    exact: Tensor
    codes: Tensor
    kept: Tensor
    correction: float
    eps: float | None

    def dequantize(self) -> Tensor:
        """What the codes stand for."""
        return self.kept


@dataclass(frozen=True, eq=False)
class Foreseen:
    """Moments of some parameters, one after the other.

    Attributes:
        ps: the parameters.
        counts: how many elements each has in the moments: all, or those of a sample.
        each: a number of elements that divides all of these.
        moments: one a slot that is quantized.
    """

    ps: list[Tensor]
    counts: list[int]
    each: int
    moments: list[QuantizedMoment]


@dataclass(frozen=True, eq=False)
class _Piece:
    """A parameter's sample."""

    p: Tensor
    plan: ParameterPlan
    group: Mapping[str, Any]
    grad: Tensor
    state: Mapping[str, Tensor]
    blocks: Blocks
    step: int


def foresee(optimizer: NarrowOptimizer, p: Tensor, group: Mapping[str, Any]) -> list[QuantizedMoment]:
    """See `Watched.foresee`."""
    plan = optimizer._plan(p)
    grad = _gradient(plan, p)
    if grad is None:
        return []
    grad = _scaled(grad, optimizer.inverse_scale())
    if not torch.isfinite(grad).all():
        return []
    state = optimizer.state.get(p) or plan.init(p, group)
    if HISTORY in state:
        return []
    return _moments(plan, p, grad, state, group, int(state["step"].item()) + 1)


def foresee_samples(optimizer: NarrowOptimizer, turn: int) -> list[Foreseen]:
    """See `Watched.foresee_samples`."""
    optimizer._follow()  # options that have changed since the last step: so the step will have it
    found: list[Foreseen] = []
    lists: dict[Any, list[_Piece]] = {}
    for piece in _taking_part(optimizer, turn):
        plan, blocks = piece.plan, piece.blocks
        # The last block of a short parameter may not be whole.
        if (blocks.share > 1 or blocks.count == blocks.elements) and by_element(plan, piece.group):
            key = id(piece.group), id(plan.rule), plan.weight, plan.slots, piece.p.dtype, piece.grad.dtype
            lists.setdefault((*key, piece.p.device, piece.step), []).append(piece)
        elif alone := foresee(optimizer, piece.p, piece.group):
            found.append(Foreseen([piece.p], [piece.p.numel()], piece.p.numel(), alone))
    inverse = optimizer.inverse_scale()
    return [*found, *(_together(some, inverse) for pieces in lists.values() for some in _cut(pieces))]


def _gradient(plan: ParameterPlan, p: Tensor) -> Tensor | None:
    """A parameter's gradient if its step can be foreseen, but for numbers that are not finite."""
    quantized = any(slot.storage.quantized for slot in plan.slots)
    grad = p.grad
    if not quantized or plan.strict or grad is None or grad.layout is not torch.strided or not p.numel():
        return None
    return grad


def _taking_part(optimizer: NarrowOptimizer, turn: int) -> Iterator[_Piece]:
    found: list[tuple[Mapping[str, Any], Tensor, Tensor, Mapping[str, Tensor]]] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            plan = optimizer._plan(p)
            grad = _gradient(plan, p) if optimizer.cannot_foresee(p, group) is None else None
            if grad is not None:
                found.append((group, p, grad, optimizer.state.get(p) or plan.init(p, group)))
    if not found:
        return
    answers = _answers(optimizer, [grad for _, _, grad, _ in found], [state["step"] for *_, state in found])
    for (group, p, grad, state), finite, step in zip(found, *(answers or ((), ())), strict=answers is not None):
        if not finite or HISTORY in state:
            continue
        blocks = Blocks(p.numel(), group["block_size"], 1, 0)
        share = min(p.numel() // MOST, p.numel() // blocks.each)
        if share > 1:
            share = _apart(share, p, blocks.each)
            blocks = replace(blocks, share=share, first=turn % share)
        plan = optimizer._plan(p)
        if isinstance(plan.rule, ClipUpdates):  # which looks at all of a parameter, and leaves moments alone
            plan = replace(plan, rule=plan.rule.rule)
        yield _Piece(p, plan, group, grad, state, blocks, step + 1)


def _answers(
    optimizer: NarrowOptimizer, grads: Sequence[Tensor], counts: Sequence[Tensor]
) -> tuple[list[bool], list[int]] | None:
    """Which gradients are finite once unscaled, and how many steps were taken: asked of the device at once.

    None where the step will move no parameter, as whoever scaled the loss holds all of them for one.
    """
    asked, held = optimizer._unscaling, getattr(optimizer, "found_inf", None)
    looked = list(grads)
    if asked is not None and asked.whole:
        own = set(map(id, grads))
        all_grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        looked += [x for x in all_grads if x is not None and id(x) not in own and _is_dense(x)]
    steps, inverse = _column(counts), optimizer.inverse_scale()
    largest = _largest(looked).to(steps.device)
    if inverse is not None:
        largest = largest * inverse.to(steps.device)
    verdict = steps.new_zeros(1) if held is None else held.reshape(1).to(steps)
    *numbers, stop = torch.cat([largest, steps, verdict]).tolist()
    finite = [top < torch.finfo(torch.float32).max for top in numbers[: len(looked)]]
    if stop > 0 or (asked is not None and asked.whole and not all(finite)):
        return None
    return finite[: len(grads)], [int(count) for count in numbers[len(looked) :]]


def _is_dense(grad: Tensor) -> bool:
    return grad.layout is torch.strided and not hasattr(grad, "to_local") and grad.numel() > 0


def _apart(share: int, p: Tensor, each: int) -> int:
    """How many blocks samples of a matrix lie apart, at least `share`, so that not all are of the same columns."""
    width = math.prod(p.shape[1:])
    period = width // math.gcd(width, each)  # blocks after which columns repeat
    while math.gcd(share, period) > 1 and share < p.numel() // each:
        share += 1
    return share


def _largest(grads: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of each: float64."""
    devices: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, grad in enumerate(grads):
        devices.setdefault((grad.device, grad.dtype), []).append(place)
    found: dict[int, Tensor] = {}
    for places in devices.values():
        found |= zip(places, torch._foreach_norm([grads[place] for place in places], torch.inf), strict=True)
    return _column([found[place] for place in range(len(grads))])


def _column(numbers: Sequence[Tensor]) -> Tensor:
    """Tensors of one number each as one: float64, on the first one's device."""
    first = numbers[0]
    if any((x.device, x.dtype) != (first.device, first.dtype) for x in numbers):
        numbers = [x.to(first.device, torch.float64) for x in numbers]
    return torch.stack(list(numbers)).to(torch.float64)


def _cut(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    some: list[_Piece] = []
    for piece in pieces:
        if some and sum(one.blocks.count for one in (*some, piece)) > TOGETHER:
            yield some
            some = []
        some.append(piece)
    yield some


def _together(pieces: list[_Piece], inverse: Tensor | None) -> Foreseen:
    """The moments of samples of some parameters that are kept in the same way, and have taken as many steps."""
    first = pieces[0]
    blocks = [one.blocks for one in pieces]
    p = _samples(blocks, [one.p.detach() for one in pieces])
    grad = _scaled(_samples(blocks, [one.grad for one in pieces]), inverse)
    state = {key: _samples(blocks, [one.state[key] for one in pieces]) for key in first.state}
    moments = _moments(first.plan, p, grad, state, first.group, first.step)
    return Foreseen([one.p for one in pieces], [one.blocks.count for one in pieces], first.blocks.each, moments)


def _samples(blocks: Sequence[Blocks], tensors: Sequence[Tensor]) -> Tensor:
    """Samples of some tensors, one after the other; of counts the first."""
    rows = [some.rows(x) for some, x in zip(blocks, tensors, strict=True)]
    if rows[0] is None:
        return tensors[0]
    return torch.cat([row for row in rows if row is not None]).flatten(0, 1)


def _scaled(grad: Tensor, inverse: Tensor | None) -> Tensor:
    return grad if inverse is None else grad.to(torch.float32) * inverse.to(grad.device)


def _moments(
    plan: ParameterPlan, p: Tensor, grad: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], step: int
) -> list[QuantizedMoment]:
    if group["maximize"]:
        grad = -grad
    noise = Noise(group["seed"], plan.index, step, p)
    moments, new, scalars = next_moments(plan, p, grad, state, group, step, noise)
    return [
        QuantizedMoment(
            slot=slot.slot.name,
            format=slot.storage.name,
            exact=moments[slot.slot.name],
            codes=slot.codes(new, p.shape),
            kept=slot.decode(new, p.shape),
            correction=_number(scalars, {"m": "correction1", "v": "correction2"}.get(slot.slot.name)),
            eps=float(scalars["eps"]) if "correction1" in scalars else None,
        )
        for slot in plan.slots
        if slot.storage.quantized
    ]


def _number(scalars: Mapping[str, Any], name: str | None) -> float:
    return float(scalars[name]) if name is not None and name in scalars else 1.0
