"""The three multiplies of a linear layer, as a plan has them, on matrices or their codes.

A multiply in eight bits reads both operands along what it sums over, so an operand's codes are wanted straight or
transposed: W straight in the output and transposed in the gradient of the input. With one scale for the tensor
both are the same codes and come from one pass, in the forward pass, and the transposed ones are kept for the
backward pass. That is the rule for what is saved: codes, where the forward pass has made those that the backward
pass wants, else the matrix itself or, by the plan, codes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from narrowgauge.linear import _ops
from narrowgauge.linear._matmul import scaled_matmul
from narrowgauge.linear._plan import MULTIPLIES, LinearPlan, Multiply, Operand, Quantity
from narrowgauge.linear._quantize import ScaledCodes

Order = Literal["straight", "transposed"]

# How the codes of the left and the right operand are wanted.
_ORDERS: dict[Multiply, tuple[Order, Order]] = {
    "output": ("straight", "straight"),
    "grad_input": ("straight", "transposed"),
    "grad_weight": ("transposed", "transposed"),
}
# Where a quantity stands in the averages.
_SLOTS = {"input": 0, "weight": 1, "grad_output": 2}


class Multiplies:
    """One pass, forward or backward: what it has of input, weight and gradient, each operand quantized once.

    Args:
        plan: what is done in eight bits.
        averages: of the absmax, (3,), for a plan that has them.
        dtype: of the results, and of what is dequantized.
        matrices: the quantities that are there in high precision.
        wants: whether the gradients of input, weight and bias are wanted.
    """

    def __init__(
        self, plan: LinearPlan, averages: Tensor | None, dtype: torch.dtype, matrices: dict[Quantity, Tensor],
        wants: tuple[bool, bool, bool],
    ) -> None:  # fmt: skip
        self.plan, self.averages, self.dtype, self.matrices, self.wants = plan, averages, dtype, matrices, wants
        self.codes: dict[tuple[Operand, Order], ScaledCodes] = {}
        # Of quantities with a tensor-wise scale under averages: their own absmax, and the one in use, (2,).
        self.absmax: dict[Quantity, Tensor] = {}
        self.sums: Tensor | None = None  # of the columns of the gradient of the output

    def output(self, bias: Tensor | None) -> Tensor:
        """X Wᵀ, and the bias."""
        operands = self._operands("output")
        if operands is None:
            return torch.nn.functional.linear(self.matrix("input"), self.matrix("weight"), bias)
        return self._product(operands[0], operands[1].t(), bias)

    def grad_input(self) -> Tensor:
        """G W."""
        operands = self._operands("grad_input")
        if operands is None:
            return self.matrix("grad_output") @ self.matrix("weight")
        return self._product(*operands, None)

    def grad_weight(self) -> Tensor:
        """Gᵀ X."""
        operands = self._operands("grad_weight")
        if operands is None:
            return self.matrix("grad_output").t() @ self.matrix("input")
        return self._product(operands[0].t(), operands[1], None)

    def grad_bias(self) -> Tensor:
        """The sums of the columns of G; after the other gradients, which may have found them."""
        return self.matrices["grad_output"].sum(0) if self.sums is None else self.sums.to(self.dtype)

    def matrix(self, quantity: Quantity) -> Tensor:
        """A quantity in high precision: itself, or what its saved codes stand for."""
        if quantity in self.matrices:
            return self.matrices[quantity]
        codes = next(codes for (operand, _), codes in self.codes.items() if operand.quantity == quantity)
        return codes.dequantize(self.dtype)

    def quantized(self, operand: Operand, order: Order) -> ScaledCodes:
        """The codes of an operand, (rows, columns) in either order, which says how they lie in memory."""
        if (operand, order) not in self.codes:
            self._quantize(operand)
        return self.codes[operand, order]

    def save(self) -> list[Tensor]:
        """What the backward pass needs for the gradients that are wanted; `restore` reads it back."""
        saved: list[Tensor] = []
        for quantity, kept in self._kept():
            saved.extend([self.matrices[quantity]] if kept is None else self.quantized(*kept))
        if self.averages is not None:
            none = self.averages.new_zeros(2, dtype=torch.float32)
            saved.extend(self.absmax.get(quantity, none) for quantity in ("input", "weight"))
        return saved

    def restore(self, saved: Sequence[Tensor]) -> None:
        """Take over what the forward pass saved."""
        tensors = list(saved)
        for quantity, kept in self._kept():
            if kept is None:
                self.matrices[quantity] = tensors.pop(0)
            else:
                self.codes[kept] = ScaledCodes(tensors.pop(0), tensors.pop(0))
        if self.averages is not None:
            self.absmax["input"], self.absmax["weight"] = tensors

    def move_averages(self) -> None:
        """One step of the averages. Zeros, inf and NaN do not move them; the first absmax starts them."""
        if self.averages is None:
            return
        for quantity, pair in self.absmax.items():
            own, average = pair[0], self.averages[_SLOTS[quantity]]
            moved = torch.where(average > 0, average.lerp(own.to(average.dtype), 1 - self.plan.decay), own)
            average.copy_(torch.where((own > 0) & (own < torch.inf), moved, average))

    def _operands(self, multiply: Multiply) -> tuple[ScaledCodes, ScaledCodes] | None:
        operands = self.plan.operands(multiply)
        if operands is None:
            return None
        left, right = _ORDERS[multiply]
        return self.quantized(operands[0], left), self.quantized(operands[1], right)

    def _product(self, left: ScaledCodes, right: ScaledCodes, bias: Tensor | None) -> Tensor:
        if self.plan.arithmetic == "simulated":
            return scaled_matmul(left, right, bias, self.dtype, "simulated")
        product: Tensor = _ops.multiply_codes(
            left.codes, right.codes, left.scale, right.scale, bias, self.dtype, self.plan.accumulation
        )
        return product

    def _quantize(self, operand: Operand) -> None:
        """Make the codes of an operand in all orders that will be wanted."""
        matrix = self.matrices[operand.quantity]
        # Float64 is summed in itself.
        sums = (
            operand.quantity == "grad_output" and self.wants[2] and self.sums is None
            and matrix.dtype != torch.float64
        )  # fmt: skip
        if operand.scaling == "row":
            codes, scale, total = _ops.quantize_rows(matrix, operand.format, sums)
            self.codes[operand, "straight"] = ScaledCodes(codes, scale)
        elif operand.scaling == "column":
            codes, scale, total = _ops.quantize_columns(matrix, operand.format, sums)
            self.codes[operand, "transposed"] = ScaledCodes(codes.t(), scale)
        else:
            orders, average = self._orders(operand), self._average(operand.quantity)
            straight, transposed, scale, own, total = _ops.quantize_tensor(
                matrix, average, operand.format, "straight" in orders, "transposed" in orders, sums
            )
            if "straight" in orders:
                self.codes[operand, "straight"] = ScaledCodes(straight, scale)
            if "transposed" in orders:
                self.codes[operand, "transposed"] = ScaledCodes(transposed.t(), scale)
            if average is not None and operand.quantity not in self.absmax:
                own = own.reshape(())
                self.absmax[operand.quantity] = torch.stack([own, torch.where(average > 0, average, own)])
        if sums:
            self.sums = total

    def _average(self, quantity: Quantity) -> Tensor | None:
        """The absmax to use in place of a tensor's own, if above zero; it stays that of the forward pass."""
        if self.averages is None:
            return None
        if quantity in self.absmax:
            return self.absmax[quantity][1]
        # A copy: the buffer moves, and an operator's argument should not.
        return self.averages[_SLOTS[quantity]].to(torch.float32).clone()

    def _orders(self, operand: Operand) -> set[Order]:
        """How an operand is wanted, by the multiplies that this pass and the backward pass do."""
        orders: set[Order] = set()
        for multiply, runs in zip(MULTIPLIES, (True, *self.wants[:2]), strict=True):
            operands = self.plan.operands(multiply)
            if runs and operands is not None:
                orders |= {order for one, order in zip(operands, _ORDERS[multiply], strict=True) if one == operand}
        # What is quantized only to be saved and dequantized.
        return orders or {"straight"}

    def _kept(self) -> list[tuple[Quantity, tuple[Operand, Order] | None]]:
        """What goes from forward to backward: quantities, as codes of an operand or as they are (None)."""
        kept: list[tuple[Quantity, tuple[Operand, Order] | None]] = []
        output = self.plan.operands("output")
        # The backward multiplies read these on the right; `output` has the input left and the weight right.
        uses: tuple[tuple[bool, Quantity, Multiply, int], ...] = (
            (self.wants[1], "input", "grad_weight", 0), (self.wants[0], "weight", "grad_input", 1),
        )  # fmt: skip
        for wanted, quantity, multiply, side in uses:
            if not wanted:
                continue
            backward = self.plan.operands(multiply)
            made = None if output is None else output[side]
            if backward is not None and (self.plan.saved == "codes" or backward[1] == made):
                kept.append((quantity, (backward[1], _ORDERS[multiply][1])))
            elif self.plan.saved == "codes" and made is not None:
                kept.append((quantity, (made, "straight")))
            else:
                kept.append((quantity, None))
        return kept
