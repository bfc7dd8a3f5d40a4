"""Stochastic gradient descent with momentum.

    g <- g + weight_decay w
    m <- momentum m + (1 - dampening) g, and m = g at the first step
    delta = -lr m, or with Nesterov's momentum -lr (g + momentum m)

Without momentum nothing is kept and delta = -lr g.

Source: Sutskever et al. 2013, as torch.optim.SGD has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.rules._adam import later
from narrowgauge.rules._rule import Arithmetic, Rule, Scalar, Slot


class SGD(Rule):
    """SGD with momentum; see the module."""

    name = "sgd"
    moments = (Slot("m", signed=True, torch_key="momentum_buffer", option="momentum"),)
    averaging = ("momentum", "share")

    def scalars(self, group: Mapping[str, Any], step: Scalar) -> dict[str, Scalar]:
        share = 1 - group["dampening"]
        return {
            "lr": group["lr"],
            "momentum": group["momentum"],
            "share": first_step(step, 1.0, share),
            "weight_decay": group["weight_decay"],
            **nesterov(group["momentum"], 1.0, group["nesterov"]),
        }

    def update(
        self,
        arithmetic: Arithmetic,
        weight: Tensor,
        grad: Tensor,
        moments: Mapping[str, Any],
        s: Mapping[str, Scalar],
    ) -> tuple[Tensor, dict[str, Any]]:
        g = grad + s["weight_decay"] * weight
        if "m" not in moments:
            return -s["lr"] * g, {}
        m = arithmetic.accumulate(moments["m"], g, s["momentum"], s["share"])
        return -s["lr"] * ahead(arithmetic.value(m), g, s), {"m": m}

    def reach(
        self, arithmetic: Arithmetic, weight: Tensor, moments: Mapping[str, Any], s: Mapping[str, Scalar]
    ) -> dict[str, Tensor | Scalar]:
        return {"m": -s["lr"] * s["of_momentum"] * later(s["momentum"])} if "m" in moments else {}


def nesterov(momentum: float, share: float, on: bool) -> dict[str, Scalar]:
    """The scalars of `ahead`: the momentum alone, or what it will be if the gradient comes once more."""
    return {"of_momentum": momentum, "of_gradient": share} if on else {"of_momentum": 1.0, "of_gradient": 0.0}


def ahead(m: Tensor, g: Tensor, s: Mapping[str, Scalar]) -> Tensor:
    """The direction to go in: the momentum, with Nesterov's look ahead if the scalars say so."""
    return s["of_momentum"] * m + s["of_gradient"] * g


def first_step(step: Scalar, first: float, later: float) -> Scalar:
    """One number at a parameter's first step and another after it, on the device if the step is there."""
    if isinstance(step, Tensor):
        return torch.where(step <= 1, first, later).to(torch.float64)
    return first if step <= 1 else later


SGD_RULE = SGD()
