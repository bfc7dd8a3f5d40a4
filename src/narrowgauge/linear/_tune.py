"""Measuring which kernel multiplies fastest, once per GPU and shape, for all later processes."""

from __future__ import annotations

import torch

from narrowgauge.linear._ops import no_kernels
from narrowgauge.linear._passes import forget
from narrowgauge.linear._plan import MULTIPLIES, LinearPlan
from narrowgauge.linear._quantize import FORMATS, Format, ScaledCodes, Scaling, quantize


def tune(
    tokens: int, in_features: int, out_features: int, plan: LinearPlan, *, bias: bool = True,
    dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cuda",
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Time every kernel for the multiplies of a layer and keep the fastest in the user's cache folder.

    Without it layers take defaults, and measure nothing. A result that is wrong takes a kernel out of the race.

    Args:
        tokens: rows of the input, batch times sequence.
        in_features, out_features: of the layer.
        plan: its plan.
        bias: whether it has one.
        dtype: of its output.
        device: a CUDA device.

    Returns:
        For each multiply in eight bits, milliseconds by kernel, the fastest first.

    Raises:
        ValueError: for sizes below 1, what is no plan, or a dtype that kernels do not write.
        RuntimeError: where there are no kernels; the message says why.
    """
    for name, size in (("tokens", tokens), ("in_features", in_features), ("out_features", out_features)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}: got {size!r}, takes an integer of at least 1")
    if not isinstance(plan, LinearPlan):
        raise ValueError(f"plan: got {plan!r}, takes a LinearPlan such as narrowgauge.linear.SWITCHBACK")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"dtype: got {dtype}, takes torch.bfloat16, torch.float16 or torch.float32")
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"no kernels to tune on {where}: torch sees no CUDA device")
    for form in plan.formats:
        why = no_kernels(where, FORMATS[form].dtype)
        if why is not None:
            raise RuntimeError(f"no kernels to tune for {form}: {why}")
    b, n, m = tokens, in_features, out_features
    # Rows, columns and what is summed over; how rows of the left and columns of the right operand are called.
    sides = {"output": (b, m, n), "grad_input": (b, n, m), "grad_weight": (m, n, b)}
    times: dict[str, dict[str, float]] = {}
    for multiply in MULTIPLIES:
        operands = plan.operands(multiply)
        if operands is None or plan.arithmetic == "simulated":
            continue
        from narrowgauge.kernels._linear._choose import tune as tune_multiply

        rows, columns, inner = sides[multiply]
        left = _codes(rows, inner, operands[0].scaling, operands[0].format, where)
        right = _codes(columns, inner, operands[1].scaling, operands[1].format, where)
        added = torch.randn(columns, dtype=dtype, device=where) if bias and multiply == "output" else None
        _, found, _ = tune_multiply(
            left.codes, right.codes, left.scale, right.scale.t().contiguous(), added, dtype,
            plan.accumulation == "full",
        )  # fmt: skip
        times[multiply] = {str(way): ms for way, ms in found.items()}
    forget()
    return times


def _codes(rows: int, inner: int, scaling: Scaling, format: Format, device: torch.device) -> ScaledCodes:
    """Codes of normal data; a scale a row and a scale a column of the operand's transpose are the same to it."""
    x = torch.randn(rows, inner, device=device)
    return quantize(x, "tensor" if scaling == "tensor" else "row", format)
