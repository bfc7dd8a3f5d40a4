"""The two passes of a layer: executed by a plan's schedule, or replayed from a recording.

On CUDA devices a pass over small matrices is bound by the host. The first passes of a kind are executed by
`Matmuls`, which compiles kernels and finds launches; then one is recorded (`kernels._linear._record`), and later
ones replay it. Passes are of one kind if plan, requested gradients, shapes, strides, dtypes and device are the
same. A pass that cannot be replayed, for an address off 16 bytes say, is executed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from narrowgauge.linear import _dispatch
from narrowgauge.linear._matmuls import Matmuls, Wants
from narrowgauge.linear._plan import LinearPlan

# Ordinary passes before one is recorded: recording takes as long as a few of them, and where lengths vary from step
# to step most shapes occur once.
_BEFORE = 2
_MOST = 4096  # kinds of passes that are remembered

# By kind: how often it was executed, or its recording; False if it cannot be recorded.
_known: dict[Any, Any] = {}


def forget() -> None:
    """Drop all recordings: the fastest kernels have changed."""
    _known.clear()


def forward(
    plan: LinearPlan, averages: Tensor | None, x: Tensor, w: Tensor, bias: Tensor | None, wants: Wants
) -> tuple[Tensor, list[Tensor]]:
    """The output of a layer, and the tensors that its backward pass needs.

    Args:
        plan, averages, wants: as in `Matmuls`.
        x: (tokens, in_features).
        w: (out_features, in_features).
        bias: (out_features,) or None.
    """
    run = _dispatch.operations(x, w) if bias is None else _dispatch.operations(x, w, bias)

    def whole(x: Tensor, bias: Tensor | None, w: Tensor) -> list[Tensor]:
        matmuls = Matmuls(plan, averages, x.dtype, {"input": x, "weight": w}, wants, run)
        return [matmuls.output(bias), *matmuls.save()]

    if run is not _dispatch.CUDA or averages is not None:
        y, *saved = whole(x, bias, w)
        return y, saved
    key = (
        plan, wants, x.shape, x.stride(), x.dtype, w.shape, w.stride(), x.device,
        None if bias is None else (bias.dtype, bias.stride()),
    )  # fmt: skip
    y, *saved = _replayed(key, whole, (x, bias, w))
    return y, saved


def backward(
    plan: LinearPlan, averages: Tensor | None, g: Tensor, wants: Wants, saved: Sequence[Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The requested gradients of input (tokens, in_features), weight and bias.

    Args:
        plan, averages, wants: as in `Matmuls`.
        g: (tokens, out_features), the gradient of the output.
        saved: the tensors that `forward` returned.
    """
    run = _dispatch.operations(g, *saved)

    def whole(g: Tensor, *saved: Tensor) -> list[Tensor]:
        matmuls = Matmuls(plan, averages, g.dtype, {"grad_output": g}, wants, run, saved)
        made = [matmuls.grad_input()] if wants[0] else []
        made += [matmuls.grad_weight()] if wants[1] else []
        made += [matmuls.grad_bias()] if wants[2] else []
        matmuls.move_averages()
        return made

    if run is not _dispatch.CUDA or averages is not None:
        made: Sequence[Tensor] = whole(g, *saved)
    else:
        of = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in saved]
        key = (plan, wants, g.shape, g.stride(), g.dtype, g.device, *of)
        made = _replayed(key, whole, (g, *saved))
    gradients = iter(made)
    one, two, three = (next(gradients) if wanted else None for wanted in wants)
    return one, two, three


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
