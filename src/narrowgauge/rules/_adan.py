"""Adan: Nesterov momentum from differences of gradients.

    d = g - previous g, 0 at the first step
    m <- beta1 m + (1 - beta1) g
    diff <- beta2 diff + (1 - beta2) d
    v <- beta3 v + (1 - beta3) (g + beta2 d)^2
    u = (m / (1 - beta1^t) + beta2 diff / (1 - beta2^t)) / (sqrt(v / (1 - beta3^t)) + eps)
    w <- (w - lr u) / (1 + lr weight_decay)

The difference says how the gradient changes along the way, so no gradient is taken at a point ahead. The previous
gradient is a moment like the others. The decay is that of a proximal step, a division.

Source: Xie et al. 2022, Algorithm 1, whose betas are one minus these; the bias corrections, and the betas' meaning,
are those of the authors' code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from narrowgauge.rules._adam import sum_of_powers
from narrowgauge.rules._rule import Arithmetic, Effects, Moments, Rule, Scalar, Scalars, Slot, Update
from narrowgauge.rules._sgd import first_step


class AdanRule(Rule):
    """Adan; see the module."""

    name = "adan"
    betas = 3
    moments = (
        Slot("m", signed=True, preset="bf16", normalizer="v"),
        Slot("diff", signed=True, preset="bf16", normalizer="v"),
        Slot("v", signed=False),
        Slot("previous", signed=True, preset="bf16"),
    )
    averaging = ("beta1", "new_weight1", "beta2", "new_weight2", "beta3", "new_weight3")

    def scalars(self, group: Mapping[str, Any], step: Scalar) -> dict[str, Scalar]:
        beta1, beta2, beta3 = group["betas"]
        return {
            "lr": group["lr"],
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "beta1": beta1,
            "new_weight1": 1 - beta1,
            "beta2": beta2,
            "new_weight2": 1 - beta2,
            "beta3": beta3,
            "new_weight3": 1 - beta3,
            "ahead": beta2,
            "has_previous": first_step(step, 0.0, 1.0),
            "correction1": 1 - beta1**step,
            "correction2": 1 - beta2**step,
            "correction3": 1 - beta3**step,
        }

    def direction(
        self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars
    ) -> Update:
        d = s["has_previous"] * (grad - arithmetic.value(moments["previous"]))
        m = arithmetic.accumulate(moments["m"], grad, s["beta1"], s["new_weight1"])
        diff = arithmetic.accumulate(moments["diff"], d, s["beta2"], s["new_weight2"])
        v = arithmetic.accumulate_square(moments["v"], grad + s["ahead"] * d, s["beta3"], s["new_weight3"])
        previous = arithmetic.accumulate(moments["previous"], grad, 0.0, 1.0)
        both = arithmetic.value(m) / s["correction1"] + s["ahead"] / s["correction2"] * arithmetic.value(diff)
        u = both / (arithmetic.root(arithmetic.value(v), s["correction3"]) + s["eps"])
        return u, {"m": m, "diff": diff, "v": v, "previous": previous}

    def delta(self, u: Tensor, weight: Tensor, s: Scalars) -> Tensor:
        # (w - lr u) / (1 + lr weight_decay) - w
        return -(s["lr"] / (1 + s["lr"] * s["weight_decay"])) * (u + s["weight_decay"] * weight)

    def remaining_effect(self, arithmetic: Arithmetic, weight: Tensor, moments: Moments, s: Scalars) -> Effects:
        root = arithmetic.root(arithmetic.value(moments["v"]), s["correction3"])
        step = -(s["lr"] / (1 + s["lr"] * s["weight_decay"])) / (root + s["eps"])
        # A unit less of the previous gradient is a unit more of the next difference, and all later steps together
        # take beta2 of it.
        return {
            "m": step * sum_of_powers(s["beta1"]),
            "diff": step * s["ahead"] * sum_of_powers(s["beta2"]),
            "previous": -s["ahead"] * step,
        }


ADAN = AdanRule()
