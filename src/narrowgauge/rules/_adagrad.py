"""AdaGrad, optionally with momentum.

    g <- g + weight_decay w
    v <- v + g^2, starting from initial_accumulator_value
    u = g / (sqrt(v) + eps)
    delta = -lr / (1 + (t - 1) lr_decay) u

With momentum, m <- momentum m + u takes the place of u, as the 8-bit paper's Appendix H suggests.

Source: Duchi et al. 2011, as torch.optim.Adagrad has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from narrowgauge.rules._adam import sum_of_powers
from narrowgauge.rules._rule import Arithmetic, Effects, Moments, Rule, Scalar, Scalars, Second, Slot, Update


class AdagradRule(Rule):
    """AdaGrad; see the module."""

    name = "adagrad"
    moments = (
        Slot("m", signed=True, preset="bf16", option="momentum"),
        Slot("v", signed=False, torch_key="sum", start="initial_accumulator_value"),
    )
    averaging = ("momentum",)

    def scalars(self, group: Mapping[str, Any], step: Scalar) -> dict[str, Scalar]:
        return {
            "lr": group["lr"] / (1 + (step - 1) * group["lr_decay"]),
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "momentum": group.get("momentum", 0.0),
        }

    def second_moment(self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, v: Any, s: Scalars) -> Second:
        """(the new v, the v whose root the equation divides by); both are the same here."""
        v = arithmetic.accumulate_square(v, grad + s["weight_decay"] * weight, 1.0, 1.0)
        return v, arithmetic.value(v)

    def direction(
        self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars
    ) -> Update:
        v, total = self.second_moment(arithmetic, weight, grad, moments["v"], s)
        u = (grad + s["weight_decay"] * weight) / (arithmetic.root(total, 1.0) + s["eps"])
        if "m" not in moments:
            return u, {"v": v}
        m = arithmetic.accumulate(moments["m"], u, s["momentum"], 1.0)
        return arithmetic.value(m), {"m": m, "v": v}

    def remaining_effect(self, arithmetic: Arithmetic, weight: Tensor, moments: Moments, s: Scalars) -> Effects:
        return {"m": -s["lr"] * sum_of_powers(s["momentum"])} if "m" in moments else {}


ADAGRAD = AdagradRule()
