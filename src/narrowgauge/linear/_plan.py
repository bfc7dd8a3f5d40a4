"""A linear layer's arithmetic as a value.

A linear layer is three matrix multiplies. With inputs X (b, n), weights W (m, n) and the gradient G (b, m) of
the loss with respect to the output,

    output       Y  = X Wᵀ      sums over n, the input features
    grad_input   Ẋ  = G W       sums over m, the output features
    grad_weight  Ẇ  = Gᵀ X      sums over b, the tokens of the batch

Each is done in high precision (the dtype of the layer, or autocast's) or in eight bits. In eight bits each
operand has a scaling and a format. A scale must be constant along what is summed over, or it could not be taken
out of the sum. A sum may also be taken 128 products at a time; then a scale must be constant along these. So each
multiply takes these scalings for each operand:

                 left                   right
    output       X: row, row128         W: row, row128
    grad_input   G: row, row128         W: column, column128      and "tensor" and "tile128" everywhere
    grad_weight  G: column, column128   X: column, column128

Rows and columns are those of X, W and G as written above, whichever multiply reads them. So the blocks of 128 that
`grad_weight` takes along the tokens are parts of columns, "column128", and X and G have other codes in it than in
the other two. Tiles of 128 x 128 have the same codes in all.

The noise of eight bits grows with the length of the sum (Appendix D), and b, batch times sequence, is by far
the longest: SwitchBack therefore leaves `grad_weight` in high precision.

Source: Wortsman et al. 2023, Section 2.2.1 (Algorithm 1, Equations 1 and 2), Appendix C (Algorithms 3 to 5,
Equation 4), Section 2.3 (tensor-wise float8, moving averages of the absmax). Blocks: DeepSeek-AI 2024, DeepSeek-V3
Technical Report, Section 3.3.2.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

import torch

from narrowgauge._arguments import Share, check, check_choice, check_instance
from narrowgauge.linear._quantize import BLOCK_SCALINGS, FORMATS, SCALINGS, Format, Scaling

Quantity = Literal["input", "weight", "grad_output"]
Multiply = Literal["output", "grad_input", "grad_weight"]

MULTIPLIES: tuple[Multiply, ...] = ("output", "grad_input", "grad_weight")
OPERANDS: dict[str, tuple[Quantity, Quantity]] = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
_VECTORS: dict[str, tuple[str, str]] = {
    "output": ("row", "row"),
    "grad_input": ("row", "column"),
    "grad_weight": ("column", "column"),
}
_SUMMED = {"output": "input features", "grad_input": "output features", "grad_weight": "tokens"}
_LETTERS = {"input": "X", "weight": "W", "grad_output": "G"}


@dataclass(frozen=True)
class EightBit:
    """How a multiply is done in eight bits.

    Args:
        left, right: scaling of its operands, as in the module's table: ``"row"``, ``"column"``, ``"tensor"``,
            ``"row128"``, ``"column128"`` or ``"tile128"``.
        left_format: ``"int8"``, ``"e4m3"`` or ``"e5m2"``.
        right_format: that of the left operand if None. Two float8 formats may be mixed, int8 goes with int8 only.

    Raises:
        ValueError: for a scaling or format that does not exist, and for int8 with float8.
    """

    left: Scaling
    right: Scaling
    left_format: Format = "int8"
    right_format: Format | None = None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            check_choice(name, getattr(self, name), SCALINGS)
        if self.right_format is None:
            object.__setattr__(self, "right_format", self.left_format)
        for name in ("left_format", "right_format"):
            check_choice(name, getattr(self, name), tuple(FORMATS))
        if "int8" in self.formats and self.left_format != self.right_format:
            raise ValueError(
                "right_format must be int8 with int8 on the left, or a float8 format with a float8 format, got "
                f"{self.right_format!r} with {self.left_format!r}"
            )

    @property
    def formats(self) -> tuple[Format, Format]:
        """The formats of the left and the right operand."""
        return self.left_format, self.right_format or self.left_format

    @property
    def blocks(self) -> bool:
        """Whether an operand has scales of blocks, so that the sum is taken 128 products at a time."""
        return self.left in BLOCK_SCALINGS or self.right in BLOCK_SCALINGS


class Operand(NamedTuple):
    """One side of a multiply in eight bits: which tensor, in which scaling and format."""

    quantity: Quantity
    scaling: Scaling
    format: Format

    def __str__(self) -> str:
        return f"{_LETTERS[self.quantity]} {self.format} by {self.scaling}"


@dataclass(frozen=True)
class LinearPlan:
    """Which multiplies of a linear layer are in eight bits, and what is saved for the backward pass.

    Args:
        output, grad_input, grad_weight: the three multiplies; None is high precision.
        saved: ``"input"`` saves input and weight for the backward pass, in high precision or, if the backward
            multiply uses the same codes as `output`, as these codes; ``"codes"`` saves codes and scales only: those
            of the backward multiply if that is in eight bits, else those of `output`, which are dequantized.
        arithmetic: ``"real"`` multiplies in eight bits where the device can and simulates elsewhere
            (`LowPrecisionLinear.path` says which); ``"simulated"`` multiplies the same codes in float32 on
            every device.
        tensor_absmax: where tensor-wise scales come from: ``"step"``, the tensor's own absmax, or
            ``"average"``, a moving average over the backward passes before this one (in the first, the own).
            Larger elements saturate, once: the average becomes a larger absmax at once.
        decay: of the moving average, by which it follows smaller ones.
        accumulation: how real float8 is summed: ``"fast"`` in the tensor cores, which keep about 14 bits of each
            addend, or ``"full"`` in float32 after every 128 products. Int8 is exact in both. With scales of blocks
            it is always the latter.
        name: for printing.

    Raises:
        ValueError: for a combination that cannot be computed; the message names the argument.

    Example:
        >>> LinearPlan(output=EightBit("row", "row", "e4m3"), name="FORWARD_ONLY")

    Source: Wortsman et al. 2023, Section 2 and Appendix C.
    """

    output: EightBit | None = None
    grad_input: EightBit | None = None
    grad_weight: EightBit | None = None
    saved: Literal["input", "codes"] = "input"
    arithmetic: Literal["real", "simulated"] = "real"
    tensor_absmax: Literal["step", "average"] = "step"
    decay: float = 0.9
    accumulation: Literal["fast", "full"] = "fast"
    name: str = field(default="LinearPlan", compare=False)
    _decay: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for multiply in MULTIPLIES:
            _check_multiply(multiply, getattr(self, multiply))
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        if self.saved == "codes" and self.output is None and None in (self.grad_input, self.grad_weight):
            raise ValueError(
                "saved must be 'input' unless output, or both grad_input and grad_weight, are in eight bits, got "
                "'codes': there would be no codes of what the backward pass needs"
            )
        if self.tensor_absmax == "average" and not self.tensor_scaled:
            raise ValueError("tensor_absmax must be 'step' in a plan without tensor-wise scaling, got 'average'")
        # The text is for compilers only. With dynamic shapes they treat a float as a variable, which they cannot
        # trace in a backward pass; text is a constant to them.
        object.__setattr__(self, "_decay", repr(float(check("decay", self.decay, Share))))

    @property
    def new_weight(self) -> float:
        """Weight of a smaller absmax in the moving average: 1 - decay."""
        return 1 - (float(self._decay) if torch.compiler.is_compiling() else self.decay)

    def operands(self, multiply: Multiply) -> tuple[Operand, Operand] | None:
        """Left and right operand of a multiply in eight bits, or None if it is in high precision."""
        how: EightBit | None = getattr(self, multiply)
        if how is None:
            return None
        left, right = OPERANDS[multiply]
        return Operand(left, how.left, how.formats[0]), Operand(right, how.right, how.formats[1])

    @property
    def tensor_scaled(self) -> tuple[Quantity, ...]:
        """The quantities that some multiply scales tensor-wise."""
        found = {o.quantity for name in MULTIPLIES for o in self.operands(name) or () if o.scaling == "tensor"}
        return tuple(q for q in _LETTERS if q in found)

    @property
    def formats(self) -> tuple[Format, ...]:
        """The formats in use, each once, in the order of the multiplies."""
        return tuple(dict.fromkeys(o.format for name in MULTIPLIES for o in self.operands(name) or ()))

    def with_format(self, format: Format, gradient: Format | None = None) -> LinearPlan:
        """The same plan in another format.

        Args:
            format: of inputs and weights: ``"int8"``, ``"e4m3"`` or ``"e5m2"``.
            gradient: of the gradients with respect to the output; the same if None.

        Raises:
            ValueError: for an unknown format, or int8 beside float8 in one multiply.
        """
        changed = {}
        for name in MULTIPLIES:
            how = getattr(self, name)
            if how is not None:
                left = format if name == "output" else gradient or format
                changed[name] = replace(how, left_format=left, right_format=format)
        return replace(self, **changed)

    def simulated(self) -> LinearPlan:
        """The same plan, its codes multiplied in float32 on every device."""
        return replace(self, arithmetic="simulated")

    def with_moving_average(self, decay: float = 0.9) -> LinearPlan:
        """The same plan with tensor-wise scales from a moving average of the absmax, which rises at once.

        Source: Wortsman et al. 2023, Section 2.3.
        """
        return replace(self, tensor_absmax="average", decay=decay)

    @property
    def title(self) -> str:
        """Name and formats, in a line."""
        parts = ["/".join(self.formats) or "high precision"]
        if self.arithmetic == "simulated":
            parts.append("simulated")
        if self.accumulation == "full":
            parts.append("full accumulation")
        if self.saved == "codes":
            parts.append("saves codes")
        if self.tensor_absmax == "average":
            parts.append(f"averages absmax ({self.decay})")
        return f"{self.name}: {', '.join(parts)}"

    def __str__(self) -> str:
        lines = [self.title]
        for name in MULTIPLIES:
            operands = self.operands(name)
            how = "high precision" if operands is None else " × ".join(map(str, operands))
            lines.append(f"  {name:<11}  {how}")
        return "\n".join(lines)


_CHOICES = {
    "saved": ("input", "codes"), "arithmetic": ("real", "simulated"),
    "accumulation": ("fast", "full"), "tensor_absmax": ("step", "average"),
}  # fmt: skip


def _check_multiply(name: Multiply, how: EightBit | None) -> None:
    if how is None:
        return
    if not isinstance(how, EightBit):
        raise ValueError(f"{name} must be an EightBit, or None for high precision, got {how!r}")
    for side, vector, quantity in zip(("left", "right"), _VECTORS[name], OPERANDS[name], strict=True):
        scaling = getattr(how, side)
        if scaling not in (vector, f"{vector}128", "tile128", "tensor"):
            raise ValueError(
                f"{name}.{side} must be '{vector}', '{vector}128', 'tile128' or 'tensor', got {scaling!r}: a scale "
                f"of {_LETTERS[quantity]} must be constant along the {_SUMMED[name]}, over which this multiply "
                "sums, or along 128 of them"
            )


SWITCHBACK = LinearPlan(EightBit("row", "tensor"), EightBit("row", "tensor"), name="SWITCHBACK")
SWITCHBACK_M = replace(SWITCHBACK, saved="codes", name="SWITCHBACK_M")
SWITCHBACK_Q = LinearPlan(EightBit("row", "row"), EightBit("row", "column"), name="SWITCHBACK_Q")
LLM_INT8 = replace(SWITCHBACK_Q, grad_weight=EightBit("column", "column"), name="LLM_INT8")
_TENSORS = EightBit("tensor", "tensor", "e4m3")
TENSORWISE_FP8 = LinearPlan(_TENSORS, _TENSORS, _TENSORS, name="TENSORWISE_FP8")
_BLOCKS = EightBit("row128", "tile128", "e4m3")
# X in blocks of columns for the backward pass comes from the pass that makes its blocks of rows for the output.
BLOCKWISE_FP8 = LinearPlan(
    _BLOCKS, _BLOCKS, EightBit("column128", "column128", "e4m3"), saved="codes", name="BLOCKWISE_FP8"
)
HIGH_PRECISION = LinearPlan(name="HIGH_PRECISION")
_NAMED = {
    plan.name: plan
    for plan in (
        SWITCHBACK, SWITCHBACK_M, SWITCHBACK_Q, LLM_INT8, TENSORWISE_FP8, BLOCKWISE_FP8, HIGH_PRECISION
    )
}  # fmt: skip


def as_plan(plan: LinearPlan | str) -> LinearPlan:
    """A plan, or the one of a name, as `named_plan` takes it; a ValueError for anything else."""
    plan = named_plan(plan) if isinstance(plan, str) else plan
    check_instance("plan", plan, LinearPlan, "narrowgauge.linear.SWITCHBACK")
    return plan


def named_plan(text: str) -> LinearPlan:
    """A plan by its name and format: ``SWITCHBACK``, ``switchback:e4m3``, ``TENSORWISE_FP8:e4m3/e5m2``.

    Raises:
        ValueError: for an unknown name or formats that do not go together.
    """
    name, colon, formats = text.partition(":")
    plan = _NAMED.get(name.upper())
    if plan is None or (colon and not plan.formats) or formats.endswith("/"):
        raise ValueError(
            f"plan must be a name such as {', '.join(_NAMED)}, those in eight bits with an optional format "
            f"(SWITCHBACK:e4m3, TENSORWISE_FP8:e4m3/e5m2), got {text!r}"
        )
    if not colon:
        return plan
    format, _, gradient = formats.partition("/")
    try:
        return plan.with_format(cast(Any, format), cast(Any, gradient or None))
    except ValueError as error:
        raise ValueError(f"plan {text!r}: {error}") from None
