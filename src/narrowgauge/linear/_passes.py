"""The two passes through a layer: as a plan's schedule has them, or played from what was recorded of them.

On CUDA devices a pass over small matrices is bound by the host. The first passes of a kind go the long way
(`Multiplies`), which compiles kernels and finds launches; then one is recorded (`kernels._linear._record`), and
those that follow play what it did. Passes are of a kind if plan, gradients wanted, shapes, strides, dtypes and
device are the same. Where nothing can be played, for an address off 16 bytes say, the long way is always there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from narrowgauge.linear import _direct
from narrowgauge.linear._multiplies import Multiplies
from narrowgauge.linear._plan import LinearPlan
from narrowgauge.linear._schedule import Wants

# The long way is gone so many times before a pass is recorded: recording takes as long as a few of them, and where
# lengths vary from step to step most shapes come once.
_BEFORE = 2
_MOST = 4096  # kinds of passes that are remembered

# Of a kind: how often it has gone the long way, or its program; False where there can be none.
_known: dict[Any, Any] = {}


def forget() -> None:
    """Record anew: which kernels are the fastest has changed."""
    _known.clear()


def forward(
    plan: LinearPlan, averages: Tensor | None, x: Tensor, w: Tensor, bias: Tensor | None, wants: Wants
) -> tuple[Tensor, list[Tensor]]:
    """The output of a layer, and what its backward pass needs.

    Args:
        plan, averages, wants: as `Multiplies` takes them.
        x: (tokens, in_features).
        w: (out_features, in_features).
        bias: (out_features,) or None.
    """
    run = _direct.operations(x, w) if bias is None else _direct.operations(x, w, bias)

    def whole(x: Tensor, bias: Tensor | None, w: Tensor) -> list[Tensor]:
        multiplies = Multiplies(plan, averages, x.dtype, {"input": x, "weight": w}, wants, run=run)
        return [multiplies.output(bias), *multiplies.save()]

    if run is not _direct.CUDA or averages is not None:
        y, *saved = whole(x, bias, w)
        return y, saved
    key = (
        plan, wants, x.shape, x.stride(), x.dtype, w.shape, w.stride(), x.device,
        None if bias is None else (bias.dtype, bias.stride()),
    )  # fmt: skip
    y, *saved = _played(key, whole, (x, bias, w))
    return y, saved


def backward(
    plan: LinearPlan,
    averages: Tensor | None,
    g: Tensor,
    wants: Wants,
    saved: Sequence[Tensor],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients that are wanted of input (tokens, in_features), weight and bias.

    Args:
        plan, averages, wants: as `Multiplies` takes them.
        g: (tokens, out_features), the gradient of the output.
        saved: what `forward` has returned.
    """
    run = _direct.operations(g, *saved)

    def whole(g: Tensor, *saved: Tensor) -> list[Tensor]:
        multiplies = Multiplies(plan, averages, g.dtype, {"grad_output": g}, wants, saved, run)
        made = [multiplies.grad_input()] if wants[0] else []
        made += [multiplies.grad_weight()] if wants[1] else []
        made += [multiplies.grad_bias()] if wants[2] else []
        multiplies.move_averages()
        return made

    if run is not _direct.CUDA or averages is not None:
        made: Sequence[Tensor] = whole(g, *saved)
    else:
        of = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in saved]
        key = (plan, wants, g.shape, g.stride(), g.dtype, g.device, *of)
        made = _played(key, whole, (g, *saved))
    gradients = iter(made)
    one, two, three = (next(gradients) if wanted else None for wanted in wants)
    return one, two, three


def _played(key: Any, run: Callable[..., Sequence[Tensor]], given: tuple[Tensor | None, ...]) -> Sequence[Tensor]:
    """A pass, played if one of its kind was recorded."""
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
