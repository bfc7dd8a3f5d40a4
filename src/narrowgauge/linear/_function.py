"""The autograd function that executes any plan.

For the backward pass a plan saves either operands, or codes of them that the forward pass made anyway
(`saved="input"`, Algorithm 1), or codes and scales only (`saved="codes"`, Algorithm 3). In both cases an operand
has the same codes wherever it is used in the same scaling and format, and it is quantized once.

Moving averages of the absmax are read in the forward pass and updated in the backward pass: gradient checkpointing
recomputes with the same averages, and evaluation does not change them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from narrowgauge._arguments import check_instance
from narrowgauge.linear import _passes
from narrowgauge.linear._matmuls import Wants
from narrowgauge.linear._plan import LinearPlan

Result = TypeVar("Result")
_unsafe_view = torch.ops.aten._unsafe_view.default


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan, averages: Tensor | None = None
) -> Tensor:
    """`torch.nn.functional.linear` by a plan.

    Args:
        input: (..., in_features).
        weight: (out_features, in_features), of input's dtype unless autocast is on.
        bias: (out_features,) or None.
        plan: the plan.
        averages: float tensor (3,), updated in the backward pass: averages of the absmax of input, weight and the
            gradient of the output, zero before the first. Only for a plan with `tensor_absmax="average"`.

    Returns:
        (..., out_features), of input's dtype or autocast's.

    Raises:
        ValueError: for shapes, dtypes or devices that do not match, a `plan` that is no `LinearPlan`, and averages
            that are missing or that the plan does not use.
        RuntimeError: when the gradient is differentiated: rounding has no derivative.
    """
    _check(input, weight, bias, plan, averages)
    device = input.device.type
    if _autocast(device) and input.dtype != torch.float64:  # which autocast does not change
        dtype = torch.get_autocast_dtype(device)
        input, weight = input.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if input.dtype != weight.dtype:
        raise ValueError(
            f"input must have the weight's dtype {weight.dtype} unless autocast is on, got {input.dtype}"
        )
    graded = torch.is_grad_enabled()
    wants = (
        graded and input.requires_grad,
        graded and weight.requires_grad,
        graded and bias is not None and bias.requires_grad,
    )
    result: Tensor = _Linear.apply(input, weight, bias, plan, averages, wants)  # type: ignore[no-untyped-call]
    return result


def _check(input: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan, averages: Tensor | None) -> None:
    """Refuse tensors that do not match. Kernels take addresses: they would read beyond the end."""
    check_instance("plan", plan, LinearPlan, "narrowgauge.linear.SWITCHBACK")
    if not input.is_floating_point():
        raise ValueError(f"input must have a float dtype, got {input.dtype}")
    if weight.dim() != 2:
        raise ValueError(f"weight must have shape (out_features, in_features), got shape {tuple(weight.shape)}")
    out_features, in_features = weight.shape
    if input.dim() == 0 or input.shape[-1] != in_features:
        raise ValueError(f"input must have shape (..., {in_features}), got shape {tuple(input.shape)}")
    device = weight.device
    if input.device != device:
        raise ValueError(f"input must be on the weight's device, {device}, got {input.device}")
    if bias is not None and (bias.device != device or bias.shape != (out_features,)):
        raise ValueError(
            f"bias must have shape ({out_features},) on the weight's device, {device}, got shape "
            f"{tuple(bias.shape)} on {bias.device}"
        )
    if (averages is None) != (plan.tensor_absmax == "step"):
        raise ValueError(
            "averages must be a tensor of 3 floats with tensor_absmax='average', None with 'step', got "
            f"{'None' if averages is None else 'a tensor'} with {plan.tensor_absmax!r}"
        )
    if averages is not None and (averages.device != device or averages.shape != (3,)):
        raise ValueError(
            f"averages must have shape (3,) on the weight's device, {device}, got shape {tuple(averages.shape)} on "
            f"{averages.device}"
        )


class _Linear(torch.autograd.Function):
    """X (..., n), W (m, n) -> Y (..., m)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, plan: LinearPlan, averages: Tensor | None, wants: Wants
    ) -> Tensor:
        ctx.plan, ctx.averages, ctx.wants, ctx.leading = plan, averages, wants, x.shape[:-1]

        def run() -> tuple[Tensor, list[Tensor]]:
            return _passes.forward(plan, averages, _flat(x), w, bias, wants)

        y, saved = _without_autocast(x, run)
        ctx.save_for_backward(*saved)
        return _unflat(y, ctx.leading)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        wants = ctx.wants

        def run() -> tuple[Tensor | None, ...]:
            grad_x, grad_w, grad_bias = _passes.backward(ctx.plan, ctx.averages, _flat(g), wants, ctx.saved_tensors)
            grad_x = None if grad_x is None else _unflat(grad_x, ctx.leading)
            return grad_x, grad_w, grad_bias

        return *_without_autocast(g, run), None, None, None


def _flat(x: Tensor) -> Tensor:
    """(..., n) as a matrix."""
    if x.dim() == 2:
        return x
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return x.reshape(rows, x.shape[-1])


def _unflat(y: Tensor, leading: tuple[int, ...]) -> Tensor:
    # Not a view to autograd, which refuses in-place changes of views made within a function.
    return y if len(leading) == 1 else _unsafe_view(y, (*leading, y.shape[-1]))


def _autocast(device: str) -> bool:
    """Whether autocast is on; torch raises for the meta device."""
    return device != "meta" and torch.is_autocast_enabled(device)


def _without_autocast(x: Tensor, run: Callable[[], Result]) -> Result:
    """Run with autocast off: dtypes are settled. Switching it off when it is off would cost microseconds."""
    device = x.device.type
    if not _autocast(device):
        return run()
    with torch.autocast(device, enabled=False):
        return run()
