"""The three multiplies of a linear layer, on matrices or their codes, by the schedule of a plan.

A multiply in eight bits reads both operands along the summed dimension, so it needs an operand's codes straight or
transposed: W straight for the output and transposed for the gradient of the input. With one scale for the tensor or
for each tile both are the same codes; they are made at once in the forward pass, and the transposed ones are saved
for the backward pass. That is the rule of saving: the codes, if the forward pass makes those that the backward pass
needs; else the matrix itself or, by the plan, codes only.

A `Float8Weight` consists of e4m3 codes: where a plan wants such codes of W, they are taken as they are, with the
weight's one scale whatever the plan's scaling, and the weight itself is saved for the backward pass.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from narrowgauge.linear._ops import Operations, eager_product
from narrowgauge.linear._plan import MULTIPLIES, OPERANDS, LinearPlan, Multiply, Operand, Quantity
from narrowgauge.linear._quantize import BLOCK_SCALINGS, scale_shape
from narrowgauge.storage import Float8Weight
from narrowgauge.storage._float8_weight import LARGEST_CODE

Order = Literal["straight", "transposed"]
# Whether the gradients of input, weight and bias are requested.
Wants = tuple[bool, bool, bool]

# The memory order of the left and the right operand's codes.
_ORDERS: dict[Multiply, tuple[Order, Order]] = {
    "output": ("straight", "straight"),
    "grad_input": ("straight", "transposed"),
    "grad_weight": ("transposed", "transposed"),
}
# Index of a quantity in the averages.
_SLOTS = {"input": 0, "weight": 1, "grad_output": 2}


class Codes(NamedTuple):
    """Codes of an operand, in a memory order."""

    operand: Operand
    order: Order


class Schedule(NamedTuple):
    """The steps of a plan."""

    # Left and right operand of each multiply in eight bits, None for one in high precision.
    operands: dict[Multiply, tuple[Codes, Codes] | None]
    # For each operand its straight and its transposed codes, None for those that are not needed.
    orders: dict[Operand, tuple[Codes | None, Codes | None]]
    # For an operand in blocks that a pass needs in one order, codes in other blocks of that matrix that it needs
    # in the other: both are made at once.
    pairs: dict[Operand, Codes]
    # The quantities saved for the backward pass, as codes or in high precision (None).
    kept: tuple[tuple[Quantity, Codes | None], ...]
    # Those that the forward pass scales tensor-wise. With averages the backward pass uses the same scales.
    scaled: tuple[Quantity, ...]


def make_schedule(plan: LinearPlan, wants: Wants) -> Schedule:
    operands: dict[Multiply, tuple[Codes, Codes] | None] = {}
    for multiply in MULTIPLIES:
        pair, (left, right) = plan.operands(multiply), _ORDERS[multiply]
        operands[multiply] = None if pair is None else (Codes(pair[0], left), Codes(pair[1], right))
    kept = _kept(plan, wants, operands)
    wanted = {codes for _, codes in kept if codes is not None}
    in_forward = {operand for operand, _ in (*wanted, *(operands["output"] or ())) if operand.scaling == "tensor"}
    scaled = tuple(q for q in OPERANDS["output"] if any(operand.quantity == q for operand in in_forward))
    backward = {
        codes for m, runs in zip(MULTIPLIES[1:], wants, strict=False) if runs for codes in operands[m] or ()
    }
    pairs = {}
    for made in ({*wanted, *(operands["output"] or ())}, backward - wanted):
        for one, other in itertools.permutations(
            (codes for codes in made if codes.operand.scaling in BLOCK_SCALINGS), 2
        ):
            same = one.operand[::2] == other.operand[::2]  # the matrix and the format
            if same and one.order != other.order and one.operand != other.operand:
                pairs[one.operand] = other
    wanted.update(operands["output"] or (), backward)
    orders = {}
    for operand, _ in wanted:
        both = Codes(operand, "straight"), Codes(operand, "transposed")
        orders[operand] = both[0] if both[0] in wanted else None, both[1] if both[1] in wanted else None
    return Schedule(operands, orders, pairs, kept, scaled)


schedule_of = functools.lru_cache(maxsize=256)(make_schedule)


def _kept(
    plan: LinearPlan, wants: Wants, operands: dict[Multiply, tuple[Codes, Codes] | None]
) -> tuple[tuple[Quantity, Codes | None], ...]:
    kept: list[tuple[Quantity, Codes | None]] = []
    made = operands["output"] or (None, None)
    # The backward multiplies read these on the right; `output` has the input left and the weight right.
    uses: tuple[tuple[bool, Quantity, Multiply, Codes | None], ...] = (
        (wants[1], "input", "grad_weight", made[0]), (wants[0], "weight", "grad_input", made[1]),
    )  # fmt: skip
    for wanted, quantity, multiply, in_forward in uses:
        if not wanted:
            continue
        pair = operands[multiply]
        in_backward = None if pair is None else pair[1]
        same = in_forward is not None and in_backward is not None and in_forward.operand == in_backward.operand
        if same or (plan.saved == "codes" and in_backward is not None):
            kept.append((quantity, in_backward))
        else:
            kept.append((quantity, in_forward if plan.saved == "codes" else None))
    return tuple(kept)


def has_codes(matrix: Tensor | None, operand: Operand) -> bool:
    """Whether a matrix consists of the codes of an operand, so that nothing needs to be quantized."""
    return isinstance(matrix, Float8Weight) and operand.format == "e4m3"


class Matmuls:
    """One pass, forward or backward; each operand is quantized once.

    Args:
        plan: the plan.
        averages: of the absmax, (3,), for a plan with averages.
        dtype: of the results, and of dequantized codes.
        matrices: the quantities that are available in high precision.
        wants: whether gradients of input, weight and bias are requested.
        run: the operations to use.
        saved: in the backward pass, the tensors that the forward pass saved.
    """

    def __init__(
        self, plan: LinearPlan, averages: Tensor | None, dtype: torch.dtype, matrices: dict[Quantity, Tensor],
        wants: Wants, run: Operations, saved: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        self.plan, self.averages, self.dtype, self.matrices, self.wants = plan, averages, dtype, matrices, wants
        # A compiler warns of caches.
        self.schedule = (make_schedule if torch.compiler.is_compiling() else schedule_of)(plan, wants)
        self.run = run
        # Codes in the requested memory order, and their scales.
        self.codes: dict[Codes, tuple[Tensor, Tensor]] = {}
        # For tensor-wise scales with averages: the tensor's own absmax and the one in use, (2,).
        self.absmax: dict[Quantity, Tensor] = {}
        self.sums: Tensor | None = None  # column sums of the gradient of the output
        if saved:
            self._restore(saved)

    def output(self, bias: Tensor | None) -> Tensor:
        """X Wᵀ, and the bias."""
        codes = self.schedule.operands["output"]
        if codes is None:
            return torch.nn.functional.linear(self.matrix("input"), self.matrix("weight"), bias)
        return self._product(codes, bias)

    def grad_input(self) -> Tensor:
        """G W."""
        codes = self.schedule.operands["grad_input"]
        if codes is None:
            return torch.mm(self.matrix("grad_output"), self.matrix("weight"))
        return self._product(codes, None)

    def grad_weight(self, transposed: bool) -> Tensor:
        """Gᵀ X, or, for a weight that is stored transposed, Xᵀ G; contiguous."""
        codes = self.schedule.operands["grad_weight"]
        if codes is None:
            g, x = self.matrix("grad_output"), self.matrix("input")
            return torch.mm(x.t(), g) if transposed else torch.mm(g.t(), x)
        return self._product((codes[1], codes[0]) if transposed else codes, None)

    def grad_bias(self) -> Tensor:
        """The column sums of G. Call it after the other gradients, which may have computed them."""
        return self.matrices["grad_output"].sum(0) if self.sums is None else self.sums

    def matrix(self, quantity: Quantity) -> Tensor:
        """A quantity in high precision: itself, or its saved codes dequantized."""
        if quantity in self.matrices:
            return self.matrices[quantity]
        found = next(codes for codes in self.codes if codes.operand.quantity == quantity)
        codes, scale = self.codes[found]
        if found.order == "straight":
            return self.run.dequantize(codes, scale, self.dtype)
        return self.run.dequantize(codes, scale.t(), self.dtype).t()

    def quantized(self, wanted: Codes) -> tuple[Tensor, Tensor]:
        """Codes, (rows, columns) or transposed, and their scales, in the shape that `quantize` gives them."""
        if wanted not in self.codes:
            self._quantize(wanted.operand)
        return self.codes[wanted]

    def save(self) -> list[Tensor]:
        """The tensors that the backward pass needs for the requested gradients."""
        saved: list[Tensor] = []
        for quantity, kept in self.schedule.kept:
            if kept is None or has_codes(self.matrices[quantity], kept.operand):
                saved.append(self.matrices[quantity])
            else:
                saved.extend(self.quantized(kept))
        if self.averages is not None:
            saved.extend(self.absmax[quantity] for quantity in self.schedule.scaled)
        return saved

    def _restore(self, saved: Sequence[Tensor]) -> None:
        tensors = iter(saved)
        for quantity, kept in self.schedule.kept:
            first = next(tensors)
            if kept is None or isinstance(first, Float8Weight):
                self.matrices[quantity] = first
            else:
                self.codes[kept] = first, next(tensors)
        if self.averages is not None:
            self.absmax.update(zip(self.schedule.scaled, tensors, strict=True))

    def move_averages(self) -> None:
        """One step of the averages: at once to a larger absmax, slowly to a smaller one.

        Zeros, inf and NaN do not move them.
        """
        if self.averages is None:
            return
        new_weight = self.plan.new_weight
        for quantity, pair in self.absmax.items():
            own, average = pair[0], self.averages[_SLOTS[quantity]]
            latest = own.to(average.dtype)
            moved = torch.maximum(average.lerp(latest, new_weight), latest)
            average.copy_(torch.where((own > 0) & (own < torch.inf), moved, average))

    def _product(self, operands: tuple[Codes, Codes], bias: Tensor | None) -> Tensor:
        """The product of a multiply's operands, each contiguous along the summed dimension."""
        left, left_scale = self.quantized(operands[0])
        right, right_scale = self.quantized(operands[1])
        if any(codes.operand.scaling in BLOCK_SCALINGS for codes in operands):
            # An operator where it is simulated too, because its loop over blocks is not for compilers to unroll.
            left_scale = left_scale if operands[0].order == "straight" else left_scale.t()
            right_scale = right_scale if operands[1].order == "straight" else right_scale.t()
            how = "blocks" if self.plan.arithmetic == "real" else "simulated blocks"
            return self.run.product(left, right, left_scale, right_scale, bias, self.dtype, how)
        if self.plan.arithmetic == "simulated":
            return eager_product(left, right, left_scale, right_scale, bias, self.dtype, "full", "simulated")
        return self.run.product(left, right, left_scale, right_scale, bias, self.dtype, self.plan.accumulation)

    def _quantize(self, operand: Operand) -> None:
        """Quantize an operand, in all memory orders that will be needed."""
        quantity, scaling, format = operand
        straight, transposed = self.schedule.orders[operand]
        matrix = self.matrix(quantity)
        if isinstance(matrix, Float8Weight):
            if has_codes(matrix, operand):
                self._take_codes(operand, matrix)
                return
            matrix = matrix.dequantize()
        # Float64 columns are summed in float64.
        sums = quantity == "grad_output" and self.wants[2] and self.sums is None and matrix.dtype != torch.float64
        total: Tensor | None
        turned_scale: Tensor | None = None
        if scaling == "tensor":
            average = self._average(quantity)
            codes, turned, scale, own, total = self.run.quantize_tensor(
                matrix, average, format, straight is not None, transposed is not None, sums, self.dtype
            )
            if average is not None and quantity not in self.absmax:
                own = own.reshape(())
                self.absmax[quantity] = torch.stack([own, torch.where(average > 0, average, own)])
        elif scaling in BLOCK_SCALINGS:
            pair = self.schedule.pairs.get(operand)
            straight, transposed = (straight or pair, transposed) if transposed else (straight, transposed or pair)
            orders = ("" if wanted is None else wanted.operand.scaling for wanted in (straight, transposed))
            codes, scale, turned, turned_scale, total = self.run.quantize_blocks(
                matrix, *orders, format, sums, self.dtype
            )
        else:
            quantize = self.run.quantize_rows if scaling == "row" else self.run.quantize_columns
            codes, scale, total = quantize(matrix, format, sums, self.dtype)
            turned = codes
        if straight is not None:
            self.codes[straight] = codes, scale
        if transposed is not None:
            self.codes[transposed] = turned, scale if turned_scale is None else turned_scale
        if sums:
            self.sums = total

    def _take_codes(self, operand: Operand, weight: Float8Weight) -> None:
        """The codes that a weight consists of. Its scale is that of each of its rows, columns and tiles, too."""
        straight, transposed = self.schedule.orders[operand]
        # Not `weight.scale`: the compiler would take a weight's attribute for another's, and stop.
        one = weight.numbers[0]
        scale = one.expand(scale_shape(operand.scaling, *weight.shape)).contiguous()
        if self.averages is not None and operand.scaling == "tensor":
            self.absmax[operand.quantity] = (one * LARGEST_CODE).expand(2).clone()
        if straight is not None:
            self.codes[straight] = weight.codes.contiguous(), scale
        if transposed is not None:
            self.codes[transposed] = weight.codes.t().contiguous(), scale

    def _average(self, quantity: Quantity) -> Tensor | None:
        """The absmax to use for the tensor's own, if above zero; in the backward pass the forward pass's."""
        if self.averages is None:
            return None
        if quantity in self.absmax:
            return self.absmax[quantity][1]
        # A copy: the buffer is updated later, and an operator's argument must not change.
        return self.averages[_SLOTS[quantity]].to(torch.float32).clone()
