"""The schedule of a plan: which codes its two passes make, use and save.

A multiply in eight bits reads both operands along the summed dimension, so it needs an operand's codes straight or
transposed: W straight for the output and transposed for the gradient of the input. With one scale for the tensor
both are the same codes; one kernel makes them in the forward pass, and the transposed ones are saved for the
backward pass. That is the rule of saving: the codes, if the forward pass makes those that the backward pass needs;
else the matrix itself or, by the plan, codes only.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

from narrowgauge.linear._plan import MULTIPLIES, OPERANDS, LinearPlan, Multiply, Operand, Quantity

Order = Literal["straight", "transposed"]
# Whether the gradients of input, weight and bias are requested.
Wants = tuple[bool, bool, bool]

# The memory order of the left and the right operand's codes.
_ORDERS: dict[Multiply, tuple[Order, Order]] = {
    "output": ("straight", "straight"),
    "grad_input": ("straight", "transposed"),
    "grad_weight": ("transposed", "transposed"),
}


class Codes(NamedTuple):
    """Codes of an operand, in a memory order."""

    operand: Operand
    order: Order


class Schedule(NamedTuple):
    """The steps of a plan.

    Attributes:
        operands: left and right operand of each multiply in eight bits, None for one in high precision.
        orders: for each operand its straight and its transposed codes, None for those that are not needed.
        kept: the quantities saved for the backward pass, as codes or in high precision (None).
        scaled: the quantities that the forward pass scales tensor-wise. With averages the backward pass uses the
            same scales.
    """

    operands: dict[Multiply, tuple[Codes, Codes] | None]
    orders: dict[Operand, tuple[Codes | None, Codes | None]]
    kept: tuple[tuple[Quantity, Codes | None], ...]
    scaled: tuple[Quantity, ...]


def make_schedule(plan: LinearPlan, wants: Wants) -> Schedule:
    """The schedule of a plan for the requested gradients."""
    operands: dict[Multiply, tuple[Codes, Codes] | None] = {}
    for multiply in MULTIPLIES:
        pair, (left, right) = plan.operands(multiply), _ORDERS[multiply]
        operands[multiply] = None if pair is None else (Codes(pair[0], left), Codes(pair[1], right))
    kept = _kept(plan, wants, operands)
    wanted = {codes for _, codes in kept if codes is not None}
    in_forward = {operand for operand, _ in (*wanted, *(operands["output"] or ())) if operand.scaling == "tensor"}
    scaled = tuple(q for q in OPERANDS["output"] if any(operand.quantity == q for operand in in_forward))
    for multiply, runs in zip(MULTIPLIES, (True, *wants[:2]), strict=True):
        wanted.update(operands[multiply] or () if runs else ())
    orders = {}
    for operand, _ in wanted:
        both = Codes(operand, "straight"), Codes(operand, "transposed")
        orders[operand] = both[0] if both[0] in wanted else None, both[1] if both[1] in wanted else None
    return Schedule(operands, orders, kept, scaled)


schedule_of = functools.lru_cache(maxsize=256)(make_schedule)


def _kept(
    plan: LinearPlan, wants: Wants, operands: dict[Multiply, tuple[Codes, Codes] | None]
) -> tuple[tuple[Quantity, Codes | None], ...]:
    kept: list[tuple[Quantity, Codes | None]] = []
    output = operands["output"]
    # The backward multiplies read these on the right; `output` has the input left and the weight right.
    uses: tuple[tuple[bool, Quantity, Multiply, int], ...] = (
        (wants[1], "input", "grad_weight", 0), (wants[0], "weight", "grad_input", 1),
    )  # fmt: skip
    for wanted, quantity, multiply, side in uses:
        if not wanted:
            continue
        backward, made = operands[multiply], None if output is None else output[side]
        if backward is not None and (
            plan.saved == "codes" or (made is not None and backward[1].operand == made.operand)
        ):
            kept.append((quantity, backward[1]))
        elif plan.saved == "codes" and made is not None:
            kept.append((quantity, made))
        else:
            kept.append((quantity, None))
    return tuple(kept)
