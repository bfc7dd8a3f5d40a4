"""The three multiplies of a linear layer, as a plan has them, on matrices or their codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgauge.linear._matmul import scaled_matmul
from narrowgauge.linear._plan import LinearPlan, Operand, Quantity
from narrowgauge.linear._quantize import ScaledCodes, largest_magnitude, quantize

# Where a quantity stands in the averages.
_SLOTS = {"input": 0, "weight": 1, "grad_output": 2}


class Multiplies:
    """One pass, forward or backward: what it has of input, weight and gradient, each operand quantized once.

    Args:
        plan: what is done in eight bits.
        averages: of the absmax, (3,), for a plan that has them.
        dtype: of the results, and of what is dequantized.
        matrices: the quantities that are there in high precision.
    """

    def __init__(
        self, plan: LinearPlan, averages: Tensor | None, dtype: torch.dtype, matrices: dict[Quantity, Tensor]
    ) -> None:
        self.plan, self.averages, self.dtype, self.matrices = plan, averages, dtype, matrices
        self.codes: dict[Operand, ScaledCodes] = {}
        # Of quantities with a tensor-wise scale under averages: their own absmax, and the one in use, (2,).
        self.absmax: dict[Quantity, Tensor] = {}

    def output(self, bias: Tensor | None) -> Tensor:
        """X Wᵀ, and the bias."""
        operands = self.plan.operands("output")
        if operands is None:
            return torch.nn.functional.linear(self.matrix("input"), self.matrix("weight"), bias)
        left, right = map(self.quantized, operands)
        return scaled_matmul(left, right.t(), bias, self.dtype, self.plan.arithmetic)

    def grad_input(self) -> Tensor:
        """G W."""
        operands = self.plan.operands("grad_input")
        if operands is None:
            return self.matrix("grad_output") @ self.matrix("weight")
        left, right = map(self.quantized, operands)
        return scaled_matmul(left, right, None, self.dtype, self.plan.arithmetic)

    def grad_weight(self) -> Tensor:
        """Gᵀ X."""
        operands = self.plan.operands("grad_weight")
        if operands is None:
            return self.matrix("grad_output").t() @ self.matrix("input")
        left, right = map(self.quantized, operands)
        return scaled_matmul(left.t(), right, None, self.dtype, self.plan.arithmetic)

    def matrix(self, quantity: Quantity) -> Tensor:
        """A quantity in high precision: itself, or what its saved codes stand for."""
        if quantity in self.matrices:
            return self.matrices[quantity]
        return next(codes for operand, codes in self.codes.items() if operand.quantity == quantity).dequantize(
            self.dtype
        )

    def quantized(self, operand: Operand) -> ScaledCodes:
        """The codes of an operand."""
        if operand not in self.codes:
            matrix = self.matrices[operand.quantity]
            absmax = self._averaged(operand, matrix) if operand.scaling == "tensor" else None
            self.codes[operand] = quantize(matrix, operand.scaling, operand.format, absmax)
        return self.codes[operand]

    def save(self, for_input: bool, for_weight: bool) -> list[Tensor]:
        """What the backward pass needs for the gradients that are wanted; `restore` reads it back."""
        saved: list[Tensor] = []
        for quantity, operand in self._kept(for_input, for_weight):
            saved.extend([self.matrices[quantity]] if operand is None else self.quantized(operand))
        if self.averages is not None:
            none = self.averages.new_zeros(2, dtype=torch.float32)
            saved.extend(self.absmax.get(quantity, none) for quantity in ("input", "weight"))
        return saved

    def restore(self, saved: Sequence[Tensor], for_input: bool, for_weight: bool) -> None:
        """Take over what the forward pass saved."""
        tensors = list(saved)
        for quantity, operand in self._kept(for_input, for_weight):
            if operand is None:
                self.matrices[quantity] = tensors.pop(0)
            else:
                self.codes[operand] = ScaledCodes(tensors.pop(0), tensors.pop(0))
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

    def _averaged(self, operand: Operand, matrix: Tensor) -> Tensor | None:
        if self.averages is None:
            return None
        if operand.quantity not in self.absmax:
            own = largest_magnitude(matrix, "tensor", operand.format).reshape(())
            average = self.averages[_SLOTS[operand.quantity]].to(torch.float32)
            self.absmax[operand.quantity] = torch.stack([own, torch.where(average > 0, average, own)])
        return self.absmax[operand.quantity][1].reshape(1, 1)

    def _kept(self, for_input: bool, for_weight: bool) -> list[tuple[Quantity, Operand | None]]:
        """What goes from forward to backward: quantities, as codes of an operand or as they are (None)."""
        kept: list[tuple[Quantity, Operand | None]] = []
        output = self.plan.operands("output")
        for wanted, quantity, multiply, side in (
            (for_weight, "input", self.plan.operands("grad_weight"), 0),
            (for_input, "weight", self.plan.operands("grad_input"), 1),
        ):
            if wanted and self.plan.saved == "input":
                kept.append((quantity, None))  # type: ignore[arg-type]
            elif wanted:
                # The backward multiply reads it on the right; `output` has the input left and the weight right.
                operand = multiply[1] if multiply is not None else output[side] if output is not None else None
                kept.append((quantity, operand))  # type: ignore[arg-type]
        return kept
