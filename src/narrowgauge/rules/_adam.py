"""Adam and AdamW.

    m <- beta1 m + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2
    u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
    AdamW: delta = -lr (u + weight_decay w)
    Adam:  delta = -lr u, with g + weight_decay w in place of g

AdamW's decay is decoupled from the gradient but part of one update, added to the weight once: applied on its own,
as torch does, it is the smallest number in the step and the first that a narrow weight loses (Collage, Appendix D).
Epsilon stands outside the root, as in Adam and torch; Collage's Algorithm 2 prints it inside.

With a schedule lambda for the second moment, beta2 = 1 - t^-lambda: all of the first square counts, later ones less
and less, and their shares add up to one at every step. There is nothing to correct then.

Source: Kingma and Ba 2015; Loshchilov and Hutter 2019; the schedule: Shazeer and Stern 2018 (Adafactor), Section
7.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.rules._rule import Arithmetic, Rule, Scalar, Slot


class Adam(Rule):
    """Adam with the decay in the gradient, or in the update; see the module."""

    # Collage-plus doubles the second moment only: the first has no trouble following the gradient.
    moments = (
        Slot("m", signed=True, preset="bf16", torch_key="exp_avg", unit="v"),
        Slot("v", signed=False, torch_key="exp_avg_sq"),
    )
    averaging: tuple[str, ...] = ("beta1", "share1", "beta2", "share2")

    def __init__(self, name: str, decoupled: bool) -> None:
        self.name = name
        self._decoupled = decoupled

    def scalars(self, group: Mapping[str, Any], step: Scalar) -> dict[str, Scalar]:
        beta1, beta2 = group["betas"]
        schedule = group.get("beta2_schedule")
        share2 = 1 - beta2 if schedule is None else step**-schedule
        return {
            "lr": group["lr"],
            "beta1": beta1,
            "share1": 1 - beta1,
            "beta2": 1 - share2 if schedule is not None else beta2,
            "share2": share2,
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "correction1": 1 - beta1**step,
            "correction2": 1 - beta2**step if schedule is None else 1.0,
        }

    def second_moment(
        self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, v: Any, s: Mapping[str, Scalar]
    ) -> tuple[Any, Tensor]:
        """The new v, and what the equation divides by the root of, v corrected."""
        v = arithmetic.accumulate_square(v, self._gradient(weight, grad, s), s["beta2"], s["share2"])
        return v, arithmetic.value(v) / s["correction2"]

    def direction(
        self,
        arithmetic: Arithmetic,
        weight: Tensor,
        grad: Tensor,
        moments: Mapping[str, Any],
        s: Mapping[str, Scalar],
    ) -> tuple[Tensor, dict[str, Any]]:
        """The update over -lr, and the new moments."""
        g = self._gradient(weight, grad, s)
        m = arithmetic.accumulate(moments["m"], g, s["beta1"], s["share1"])
        v, _ = self.second_moment(arithmetic, weight, grad, moments["v"], s)
        root = arithmetic.root(arithmetic.value(v), s["correction2"])
        u = arithmetic.value(m) / s["correction1"] / (root + s["eps"])
        if self._decoupled:
            u = u + s["weight_decay"] * weight
        return u, {"m": m, "v": v}

    def update(
        self,
        arithmetic: Arithmetic,
        weight: Tensor,
        grad: Tensor,
        moments: Mapping[str, Any],
        s: Mapping[str, Scalar],
    ) -> tuple[Tensor, dict[str, Any]]:
        u, moments = self.direction(arithmetic, weight, grad, moments, s)
        return -s["lr"] * u, moments

    def reach(
        self, arithmetic: Arithmetic, weight: Tensor, moments: Mapping[str, Any], s: Mapping[str, Scalar]
    ) -> dict[str, Tensor | Scalar]:
        # The bias correction of m is left out: it is 1 at most of the later steps.
        root = arithmetic.root(arithmetic.value(moments["v"]), s["correction2"])
        return {"m": -s["lr"] * later(s["beta1"]) / (root + s["eps"])}

    def _gradient(self, weight: Tensor, grad: Tensor, s: Mapping[str, Scalar]) -> Tensor:
        return grad if self._decoupled else grad + s["weight_decay"] * weight


def later(decay: Scalar) -> Scalar:
    """decay + decay^2 + ...: how often a unit of an average is still counted; nothing that lasts for ever is."""
    if isinstance(decay, Tensor):
        return torch.where(decay < 1, decay / (1 - decay), 0.0)
    return decay / (1 - decay) if decay < 1 else 0.0


ADAM = Adam("adam", decoupled=False)
ADAMW = Adam("adamw", decoupled=True)
