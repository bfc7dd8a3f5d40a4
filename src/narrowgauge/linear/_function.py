"""The autograd function that executes any plan.

For the backward pass a plan saves either operands, or codes of them that the forward pass made anyway
(`saved="input"`, Algorithm 1), or codes and scales only (`saved="codes"`, Algorithm 3). In both cases an operand
has the same codes wherever it is used in the same scaling and format, and it is quantized once.

Moving averages of the absmax are read in the forward pass and updated in the backward pass: gradient checkpointing
recomputes with the same averages, and evaluation does not change them.

On CUDA devices a pass over small matrices is bound by the host. The first passes of a kind are executed by
`Matmuls`, which compiles kernels and finds launches; then one is recorded (`kernels._linear._record`), and later
ones replay it. Passes are of one kind if plan, requested gradients, shapes, strides, dtypes and device are the
same. A pass that cannot be replayed, for an address off 16 bytes say, is executed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from narrowgauge._arguments import check_instance
from narrowgauge.linear._matmuls import Matmuls, Wants
from narrowgauge.linear._ops import CUDA, operations
from narrowgauge.linear._plan import LinearPlan
from narrowgauge.linear._tensor_parallel import on_parts
from narrowgauge.storage import Float8Weight

Result = TypeVar("Result")
_unsafe_view = torch.ops.aten._unsafe_view.default

# Ordinary passes before one is recorded: recording takes as long as a few of them, and where lengths vary from step
# to step most shapes occur once.
_BEFORE = 2
_MOST = 4096  # kinds of passes that are remembered

# By kind: how often it was executed, or its recording; False if it cannot be recorded.
_known: dict[Any, Any] = {}


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan, averages: Tensor | None = None
) -> Tensor:
    """`torch.nn.functional.linear` by a plan.

    Args:
        input: (..., in_features); nested tensors too, and DTensors with those of tensor parallelism.
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
    if input.is_nested:
        return _nested(input, lambda rows: linear(rows, weight, bias, plan, averages))
    _check(input, weight, bias, plan, averages)
    if hasattr(weight, "device_mesh") or hasattr(input, "device_mesh"):
        own = averages.to_local() if averages is not None and hasattr(averages, "to_local") else averages
        return on_parts(lambda x, w, b: linear(x, w, b, plan, own), input, weight, bias)
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


def _nested(input: Any, run: Callable[[Tensor], Tensor]) -> Tensor:
    """The rows of a nested tensor, computed together."""
    if input.layout == torch.jagged:
        rows = input.values()
        if not input.is_contiguous() or input.shape[1] == rows.shape[0]:  # as of a transposed one
            raise ValueError("input must be contiguous if it is nested, and ragged in its second dimension")
        return torch.nested.nested_tensor_from_jagged(run(rows), input.offsets())
    parts = input.unbind()
    rows = torch.split(run(torch.cat(parts)), list(map(len, parts)))
    return torch.nested.as_nested_tensor(list(rows))


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
        ctx.transposed = w.stride(0) < w.stride(1)

        def run() -> tuple[Tensor, list[Tensor]]:
            return _forward(plan, averages, _flat(x), w, bias, wants)

        y, saved = _without_autocast(x, run)
        ctx.save_for_backward(*saved)
        return _unflat(y, ctx.leading)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        wants = ctx.wants

        def run() -> tuple[Tensor | None, ...]:
            grad_x, grad_w, grad_bias = _backward(
                ctx.plan, ctx.averages, ctx.transposed, _flat(g), wants, ctx.saved_tensors
            )
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


# A layer's two passes


def forget() -> None:
    """Drop all recordings: the fastest kernels have changed."""
    _known.clear()


def _forward(
    plan: LinearPlan, averages: Tensor | None, x: Tensor, w: Tensor, bias: Tensor | None, wants: Wants
) -> tuple[Tensor, list[Tensor]]:
    """The output of a layer, and the tensors that its backward pass needs.

    Args:
        plan, averages, wants: as in `Matmuls`.
        x: (tokens, in_features).
        w: (out_features, in_features).
        bias: (out_features,) or None.
    """
    plain = _codes_of(w)
    run = operations(x, plain) if bias is None else operations(x, plain, bias)

    def whole(x: Tensor, bias: Tensor | None, w: Tensor) -> list[Tensor]:
        matmuls = Matmuls(plan, averages, x.dtype, {"input": x, "weight": w}, wants, run)
        return [matmuls.output(bias), *matmuls.save()]

    if run is not CUDA or averages is not None or plain is not w:
        y, *saved = whole(x, bias, w)
        return y, saved
    key = (
        plan, wants, x.shape, x.stride(), x.dtype, w.shape, w.stride(), x.device,
        None if bias is None else (bias.dtype, bias.stride()),
    )  # fmt: skip
    y, *saved = _replayed(key, whole, (x, bias, w))
    return y, saved


def _backward(
    plan: LinearPlan, averages: Tensor | None, transposed: bool, g: Tensor, wants: Wants, saved: Sequence[Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The requested gradients of input (tokens, in_features), weight and bias.

    Args:
        plan, averages, wants: as in `Matmuls`.
        transposed: whether the weight is stored transposed, as in a `Conv1D`. Its gradient gets the same layout,
            or autograd would copy it.
        g: (tokens, out_features), the gradient of the output.
        saved: the tensors that `_forward` returned.
    """
    plain = list(map(_codes_of, saved))
    run = operations(g, *plain)

    def whole(g: Tensor, *saved: Tensor) -> list[Tensor]:
        matmuls = Matmuls(plan, averages, g.dtype, {"grad_output": g}, wants, run, saved)
        made = [matmuls.grad_input()] if wants[0] else []
        made += [matmuls.grad_weight(transposed)] if wants[1] else []
        made += [matmuls.grad_bias()] if wants[2] else []
        matmuls.move_averages()
        return made

    if run is not CUDA or averages is not None or any(a is not b for a, b in zip(plain, saved, strict=True)):
        made: Sequence[Tensor] = whole(g, *saved)
    else:
        of = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in saved]
        key = (plan, wants, transposed, g.shape, g.stride(), g.dtype, g.device, *of)
        made = _replayed(key, whole, (g, *saved))
    gradients = iter(made)
    one, two, three = (next(gradients) if wanted else None for wanted in wants)
    return one, two.t() if two is not None and transposed else two, three


def _codes_of(x: Tensor) -> Tensor:
    """The codes of a `Float8Weight`, whose passes are not recorded; any other tensor itself."""
    return x.codes if isinstance(x, Float8Weight) else x


def _replayed(key: Any, run: Callable[..., Sequence[Tensor]], given: tuple[Tensor | None, ...]) -> Sequence[Tensor]:
    """A pass, replayed if one of its kind was recorded."""
    found = _known.get(key, 0)
    if found is False:
        return run(*given)
    if type(found) is int:
        if found < _BEFORE:
            if len(_known) >= _MOST:
                _known.clear()
            _known[key] = found + 1
            return run(*given)
        from narrowgauge.kernels._linear._record import record

        found = _known[key] = record(given, run) or False
        if found is False:
            return run(*given)
    results: Sequence[Tensor] | None = found(*given)
    return run(*given) if results is None else results
