"""Stochastic gradient descent with momentum, and LARS.

    g <- g + weight_decay w
    m <- momentum m + (1 - dampening) g, and m = g at the first step
    delta = -lr m, or with Nesterov's momentum -lr (g + momentum m)

Without momentum there is no state and delta = -lr g. LARS scales the gradient to the parameter's weights:

    r = trust_coefficient ||w|| / (||g|| + weight_decay ||w|| + eps)
    g <- r (g + weight_decay w), and the rest as above

r is 1 where either norm is 0. The norms are of the whole parameter. Vectors and scalars (biases, the gains of
norms) take SGD's step with the gradient as it is, since their norms begin at 0 or 1 and say nothing of a layer's
scale. The paper's rates are those of layers; the implementations of SimCLR and MLPerf exempt biases and norms too.

Source: Sutskever et al. 2013, as in torch.optim.SGD; LARS: You et al. 2017, Algorithm 1, with the learning rate
outside the momentum as in torch.optim.SGD.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.rules._adam import sum_of_powers, trust_ratio
from narrowgauge.rules._rule import Arithmetic, Effects, Moments, Rule, Scalar, Scalars, Slot, Terms, Update


class SgdRule(Rule):
    """SGD with momentum; see the module."""

    name = "sgd"
    moments = (Slot("m", signed=True, torch_key="momentum_buffer", option="momentum"),)
    averaging = ("momentum", "new_weight")

    def scalars(self, group: Mapping[str, Any], step: Scalar) -> dict[str, Scalar]:
        return {
            "lr": group["lr"],
            "momentum": group["momentum"],
            "new_weight": first_step(step, 1.0, 1 - group["dampening"]),
            "weight_decay": group["weight_decay"],
            **nesterov(group["momentum"], 1.0, group["nesterov"]),
        }

    def direction(
        self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars
    ) -> Update:
        return momentum_of(arithmetic, grad + s["weight_decay"] * weight, moments, s)

    def remaining_effect(self, arithmetic: Arithmetic, weight: Tensor, moments: Moments, s: Scalars) -> Effects:
        return {"m": -s["lr"] * s["of_momentum"] * sum_of_powers(s["momentum"])} if "m" in moments else {}


class LarsRule(SgdRule):
    """LARS; see the module."""

    name = "lars"
    direction = Rule.direction  # its momentum depends on the sums of `terms`

    def of_dim(self, dim: int) -> Rule:
        return self if dim > 1 else SGD

    def scalars(self, group: Mapping[str, Any], step: Scalar) -> dict[str, Scalar]:
        own = {"trust": group["trust_coefficient"], "eps": group["eps"]}
        return {**super().scalars(group, step), **own}

    def terms(self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars) -> Terms:
        return {"weight_squares": arithmetic.square(weight), "grad_squares": arithmetic.square(grad)}

    def update(self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars) -> Update:
        ratio = trust_ratio(s["weight_squares"], s["grad_squares"], s["weight_decay"], s["eps"])
        both = (torch.as_tensor(s["weight_squares"]) > 0) & (torch.as_tensor(s["grad_squares"]) > 0)
        g = torch.where(both, s["trust"] * ratio, ratio) * (grad + s["weight_decay"] * weight)
        u, moments = momentum_of(arithmetic, g, moments, s)
        return -s["lr"] * u, moments


def momentum_of(arithmetic: Arithmetic, g: Tensor, moments: Moments, s: Scalars) -> Update:
    """A momentum of g as the direction of a step, or g itself without one; and the new momentum."""
    if "m" not in moments:
        return g, {}
    m = arithmetic.accumulate(moments["m"], g, s["momentum"], s["new_weight"])
    return look_ahead(arithmetic.value(m), g, s), {"m": m}


def nesterov(momentum: float, new_weight: float, on: bool) -> dict[str, Scalar]:
    """The scalars of `look_ahead`: the momentum alone, or what it will be if the gradient comes once more."""
    return {"of_momentum": momentum, "of_gradient": new_weight} if on else {"of_momentum": 1.0, "of_gradient": 0.0}


def look_ahead(m: Tensor, g: Tensor, s: Scalars) -> Tensor:
    """The direction of the step: the momentum, with Nesterov's look ahead if the scalars say so."""
    return s["of_momentum"] * m + s["of_gradient"] * g


def first_step(step: Scalar, first: float, later: float) -> Scalar:
    """One number at a parameter's first step and another after it, on the device if the step is there."""
    if isinstance(step, Tensor):
        return torch.where(step <= 1, first, later).to(torch.float64)
    return first if step <= 1 else later


SGD = SgdRule()
LARS = LarsRule()
