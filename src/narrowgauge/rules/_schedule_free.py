"""Schedule-Free AdamW: an average of the weights in place of a learning rate schedule.

Three sequences: z takes the steps, x is their average, and gradients are taken between the two, at y:

    y = (1 - beta1) z + beta1 x
    v <- beta2 v + (1 - beta2) g^2,              g the gradient at y
    u = g / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay y
    z <- z - lr_t u
    x <- (1 - c_t) x + c_t z

with lr_t = lr min(1, t / T) for T steps of warm-up. The parameter holds y, and x is not stored, for the first line
gives it: x = y + (1 / beta1 - 1) (y - z). So y moves by

    delta = c_t (z - y) - lr_t (1 - beta1 (1 - c_t)) u,          z before its step

The average is weighted by w_t = lr_t^2: c_t = w_t / (w_1 + ... + w_t). That sum needs no state, because it has a
closed form. With m = min(t, T), the sum of the squares 1 + 4 + ... + m^2 is m (m + 1) (2 m + 1) / 6, and every step
after the warm-up adds T^2, all in units of (lr / T)^2:

    c_t = m^2 / (m (m + 1) (2 m + 1) / 6 + (t - m) T^2)

Without warm-up, T = 1, it is 1 / t. This holds for a constant lr; a schedule of lr is what the method replaces.

The paper's lr_t has the bias correction sqrt(1 - beta2^t) as a factor. Here it stands beside v, as in Adam, and not
in the weights w_t, as in the authors' own optimizer.

Source: Defazio et al. 2024, The Road Less Scheduled, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from narrowgauge.rules._rule import (
    WEIGHT,
    Arithmetic,
    Moments,
    Rule,
    Scalar,
    Scalars,
    Second,
    Slot,
    Update,
    larger,
    smaller,
)


class ScheduleFreeRule(Rule):
    """Schedule-Free AdamW; see the module.

    The slot y holds the parameter while that shows the average x.
    """

    name = "schedule-free"
    moments = (
        Slot("z", signed=True, start=WEIGHT, storages=("fp32", "expansion")),
        Slot("v", signed=False),
        Slot("y", signed=True, start=WEIGHT, storages=("fp32",), option="eval_mode"),
    )
    averaging = ("beta2", "new_weight2")

    def scalars(self, group: Mapping[str, Any], step: Scalar) -> dict[str, Scalar]:
        beta1, beta2 = group["betas"]
        warmup = larger(group["warmup_steps"], 1)
        warm = smaller(step, warmup)
        share = warm**2 / (warm * (warm + 1) * (2 * warm + 1) / 6 + (step - warm) * warmup**2)
        return {
            "lr": group["lr"] * (warm / warmup),
            "share": share,
            "rate": 1 - beta1 * (1 - share),
            "beta2": beta2,
            "new_weight2": 1 - beta2,
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "correction2": 1 - beta2**step,
        }

    def second_moment(self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, v: Any, s: Scalars) -> Second:
        """(the new v, the bias-corrected v whose root the equation divides by)."""
        v = arithmetic.accumulate_square(v, grad, s["beta2"], s["new_weight2"])
        return v, arithmetic.value(v) / s["correction2"]

    def update(self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars) -> Update:
        v, _ = self.second_moment(arithmetic, weight, grad, moments["v"], s)
        root = arithmetic.root(arithmetic.value(v), s["correction2"])
        u = grad / (root + s["eps"]) + s["weight_decay"] * weight
        z = arithmetic.accumulate(moments["z"], u, 1.0, -s["lr"])
        delta = s["share"] * (arithmetic.value(moments["z"]) - weight) - (s["lr"] * s["rate"]) * u
        return delta, {"z": z, "v": v}


SCHEDULE_FREE = ScheduleFreeRule()
