"""AdamW.

    m <- beta1 m + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2
    delta = -lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay w)

The decay is decoupled from the gradient but part of one update, added to the weight once: applied on its own, as
torch does, it is the smallest number in the step and the first that a narrow weight loses (Collage, Appendix D).
Epsilon stands outside the root, as in Adam and torch; Collage's Algorithm 2 prints it inside.

Source: Loshchilov and Hutter 2019; Kingma and Ba 2015.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from narrowgauge.rules._rule import Arithmetic, Scalar, Slot


class AdamW:
    """Adam with decoupled weight decay; see the module."""

    name = "adamw"
    # Collage-plus doubles the second moment only: the first has no trouble following the gradient.
    slots: tuple[Slot, ...] = (Slot("m", signed=True, preset="bf16"), Slot("v", signed=False))

    def scalars(self, group: Mapping[str, Any], step: Scalar) -> dict[str, Scalar]:
        beta1, beta2 = group["betas"]
        return {
            "lr": group["lr"],
            "beta1": beta1,
            "beta2": beta2,
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "correction1": 1 - beta1**step,
            "correction2": 1 - beta2**step,
        }

    def update(
        self,
        arithmetic: Arithmetic,
        weight: Tensor,
        grad: Tensor,
        moments: Mapping[str, Any],
        s: Mapping[str, Scalar],
    ) -> tuple[Tensor, dict[str, Any]]:
        m = arithmetic.ema(moments["m"], grad, s["beta1"])  # type: ignore[arg-type]
        v = arithmetic.ema_of_square(moments["v"], grad, s["beta2"])  # type: ignore[arg-type]
        m_hat = arithmetic.value(m) / s["correction1"]
        v_hat = arithmetic.value(v) / s["correction2"]
        delta = -s["lr"] * (m_hat / (arithmetic.sqrt(v_hat) + s["eps"]) + s["weight_decay"] * weight)
        return delta, {"m": m, "v": v}


ADAMW = AdamW()
