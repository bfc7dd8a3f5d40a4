"""Lion: the sign of an average.

    c = beta1 m + (1 - beta1) g
    delta = -lr (sign(c) + weight_decay w)
    m <- beta2 m + (1 - beta2) g

Every element moves by the same amount, so a learning rate three to ten times below Adam's is usual.

Source: Chen et al. 2023, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from narrowgauge.rules._rule import Arithmetic, Moments, Rule, Scalar, Scalars, Slot, Update


class LionRule(Rule):
    """Lion; see the module."""

    name = "lion"
    moments = (Slot("m", signed=True, torch_key="exp_avg"),)
    averaging = ("beta1", "new_weight1", "beta2", "new_weight2")

    def scalars(self, group: Mapping[str, Any], step: Scalar) -> dict[str, Scalar]:
        beta1, beta2 = group["betas"]
        return {
            "lr": group["lr"],
            "beta1": beta1,
            "new_weight1": 1 - beta1,
            "beta2": beta2,
            "new_weight2": 1 - beta2,
            "weight_decay": group["weight_decay"],
        }

    def direction(
        self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars
    ) -> Update:
        c = arithmetic.accumulate(moments["m"], grad, s["beta1"], s["new_weight1"])
        m = arithmetic.accumulate(moments["m"], grad, s["beta2"], s["new_weight2"])
        return arithmetic.value(c).sign(), {"m": m}

    def delta(self, u: Tensor, weight: Tensor, s: Scalars) -> Tensor:
        return -s["lr"] * (u + s["weight_decay"] * weight)


LION = LionRule()
