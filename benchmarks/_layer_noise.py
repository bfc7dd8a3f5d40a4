"""How much noise eight bits bring: each result of a layer against the same in float64.

Two kinds of inputs and gradients: normal ones, and normal ones of which a few features are much larger, as those of
transformers become. There what shares a scale matters: a row has such a feature too, and so has the whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.cli._bench._linear import Layer, Operands, Shape, operands, pass_of
from narrowgauge.cli._bench._timing import why

INPUTS = ("normal", "outliers")
RESULTS = ("output", "grad_input", "grad_weight")
_EVERY, _TIMES = 64, 30.0  # one feature in so many is so many times larger


def noise(
    of: str, shape: Shape, layers: Sequence[Layer], dtype: torch.dtype, device: torch.device, bias: bool = True
) -> dict[str, dict[str, Any]]:
    """Signal to noise of a layer's results, in decibels.

    Args:
        of: ``"normal"`` or ``"outliers"``.
        shape, layers, dtype, device: what, where.
        bias: whether the layers have one.

    Returns:
        By layer `output`, `grad_input` and `grad_weight`, 10 log10 of the power of the exact result of the operands
        as they are in their dtype over that of the difference; or `failed`.
    """
    fed = operands(shape, dtype, device)
    if not bias:
        fed.linear.bias = None
    if of == "outliers":
        fed = Operands(_with_outliers(fed.x).requires_grad_(), _with_outliers(fed.g), fed.linear)
    exact = _exact(fed)
    rows: dict[str, dict[str, Any]] = {}
    for layer in layers:
        try:
            module = layer.made(fed.linear)
            with torch.no_grad():
                y = module(fed.x)
            got = (y, *pass_of(module, fed)()[:2])
            rows[layer.name] = {
                name: _decibels(result, wanted) for name, result, wanted in zip(RESULTS, got, exact, strict=True)
            }
        except Exception as error:
            rows[layer.name] = {"failed": why(error)}
    return rows


def _with_outliers(x: Tensor) -> Tensor:
    larger = x.detach().clone()
    larger[:, ::_EVERY] *= _TIMES
    return larger


def _exact(fed: Operands) -> tuple[Tensor, Tensor, Tensor]:
    x, g, w = fed.x.detach().double(), fed.g.double(), fed.linear.weight.detach().double()
    bias = 0 if fed.linear.bias is None else fed.linear.bias.detach().double()
    return x @ w.t() + bias, g @ w, g.t() @ x


def _decibels(got: Tensor, exact: Tensor) -> float:
    error = (got.detach().double() - exact).square().sum()
    return float(10 * torch.log10(exact.square().sum() / error))
