"""RMSprop: the gradient over the root of an average of its square.

    g <- g + weight_decay w
    v <- alpha v + (1 - alpha) g^2
    u = g / (sqrt(v) + eps)
    delta = -lr u

Centered, an average of the gradient itself, mean <- alpha mean + (1 - alpha) g, makes a variance of v: the root is
that of v - mean^2. With momentum, m <- momentum m + u takes the place of u.

v is not corrected for its start at zero, so the first steps are the longest: 1 / sqrt(1 - alpha) learning rates.
Where v - mean^2 is rounded to a number below zero, it counts as zero (torch has NaN there).

Source: Tieleman and Hinton 2012; centered: Graves 2013; as torch.optim.RMSprop has both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from narrowgauge.rules._adam import sum_of_powers
from narrowgauge.rules._rule import Arithmetic, Effects, Moments, Rule, Scalar, Scalars, Second, Slot, Update


class RmspropRule(Rule):
    """RMSprop; see the module."""

    name = "rmsprop"
    moments = (
        Slot("m", signed=True, preset="bf16", torch_key="momentum_buffer", option="momentum"),
        Slot("mean", signed=True, torch_key="grad_avg", option="centered"),
        Slot("v", signed=False, torch_key="square_avg"),
    )
    averaging = ("momentum", "alpha", "new_weight")

    def scalars(self, group: Mapping[str, Any], step: Scalar) -> dict[str, Scalar]:
        return {
            "lr": group["lr"],
            "alpha": group["alpha"],
            "new_weight": 1 - group["alpha"],
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "momentum": group["momentum"],
        }

    def second_moment(self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, v: Any, s: Scalars) -> Second:
        """(the new v, its value): what clipping compares the gradient with, centered or not."""
        g = grad + s["weight_decay"] * weight
        v = arithmetic.accumulate_square(v, g, s["alpha"], s["new_weight"])
        return v, arithmetic.value(v)

    def direction(
        self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars
    ) -> Update:
        g = grad + s["weight_decay"] * weight
        v, square = self.second_moment(arithmetic, weight, grad, moments["v"], s)
        new = {"v": v}
        if "mean" in moments:
            new["mean"] = arithmetic.accumulate(moments["mean"], g, s["alpha"], s["new_weight"])
            mean = arithmetic.value(new["mean"])
            square = (square - mean * mean).clamp(min=0.0)
        u = g / (arithmetic.root(square, 1.0) + s["eps"])
        if "m" not in moments:
            return u, new
        new["m"] = arithmetic.accumulate(moments["m"], u, s["momentum"], 1.0)
        return arithmetic.value(new["m"]), new

    def remaining_effect(self, arithmetic: Arithmetic, weight: Tensor, moments: Moments, s: Scalars) -> Effects:
        return {"m": -s["lr"] * sum_of_powers(s["momentum"])} if "m" in moments else {}


RMSPROP = RmspropRule()
