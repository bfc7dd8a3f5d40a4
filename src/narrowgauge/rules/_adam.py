"""Adam, AdamW and LAMB.

    m <- beta1 m + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2
    u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
    AdamW: delta = -lr (u + weight_decay w)
    Adam:  delta = -lr u, with g + weight_decay w in place of g
    LAMB:  delta = -lr ||w|| / ||u + weight_decay w|| (u + weight_decay w)

AdamW's decay is decoupled from the gradient but part of one update, added to the weight once: applied on its own,
as torch does, it is the smallest number in the step and the first that a narrow weight loses (Collage, Appendix D).
Epsilon stands outside the root, as in Adam and torch; Collage's Algorithm 2 prints it inside.

With a schedule lambda for the second moment, beta2 = 1 - t^-lambda: the first square enters with weight 1, later
ones with less and less, and the weights add up to one at every step. No bias correction is needed then.

LAMB's ratio is 1 where either norm is 0. The norms are of the whole parameter.

Source: Kingma and Ba 2015; Loshchilov and Hutter 2019; the schedule: Shazeer and Stern 2018 (Adafactor), Section
7.2; LAMB: You et al. 2020, Algorithm 2, with phi the identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.rules._rule import Arithmetic, Effects, Moments, Rule, Scalar, Scalars, Second, Slot, Terms, Update


class AdamRule(Rule):
    """Adam with the decay in the gradient, or in the update; see the module."""

    # Collage-plus doubles the second moment only: the first has no trouble following the gradient.
    moments: tuple[Slot, ...] = (
        Slot("m", signed=True, preset="bf16", torch_key="exp_avg", normalizer="v"),
        Slot("v", signed=False, torch_key="exp_avg_sq"),
    )
    averaging: tuple[str, ...] = ("beta1", "new_weight1", "beta2", "new_weight2")

    def __init__(self, name: str, decoupled: bool) -> None:
        self.name = name
        self._decoupled = decoupled

    def scalars(self, group: Mapping[str, Any], step: Scalar) -> dict[str, Scalar]:
        beta1, beta2 = group["betas"][:2]
        schedule = group.get("beta2_schedule")
        new_weight2 = 1 - beta2 if schedule is None else step**-schedule
        return {
            "lr": group["lr"],
            "beta1": beta1,
            "new_weight1": 1 - beta1,
            "beta2": 1 - new_weight2 if schedule is not None else beta2,
            "new_weight2": new_weight2,
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "correction1": 1 - beta1**step,
            "correction2": 1 - beta2**step if schedule is None else 1.0,
        }

    def second_moment(self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, v: Any, s: Scalars) -> Second:
        """(the new v, the bias-corrected v whose root the equation divides by)."""
        v = arithmetic.accumulate_square(v, self._gradient(weight, grad, s), s["beta2"], s["new_weight2"])
        return v, arithmetic.value(v) / s["correction2"]

    def direction(
        self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars
    ) -> Update:
        g = self._gradient(weight, grad, s)
        m = arithmetic.accumulate(moments["m"], g, s["beta1"], s["new_weight1"])
        v, _ = self.second_moment(arithmetic, weight, grad, moments["v"], s)
        root = arithmetic.root(arithmetic.value(v), s["correction2"])
        return self.numerator(arithmetic, m, g, s) / (root + s["eps"]), {"m": m, "v": v}

    def numerator(self, arithmetic: Arithmetic, m: Any, g: Tensor, s: Scalars) -> Tensor:
        """What the direction divides by the root, from the new m and the gradient."""
        return arithmetic.value(m) / s["correction1"]

    def delta(self, u: Tensor, weight: Tensor, s: Scalars) -> Tensor:
        return -s["lr"] * (u + s["weight_decay"] * weight if self._decoupled else u)

    def remaining_effect(self, arithmetic: Arithmetic, weight: Tensor, moments: Moments, s: Scalars) -> Effects:
        # The bias correction of m is left out: it is 1 at most of the later steps.
        root = arithmetic.root(arithmetic.value(moments["v"]), s["correction2"])
        return {"m": -s["lr"] * sum_of_powers(s["beta1"]) / (root + s["eps"])}

    def _gradient(self, weight: Tensor, grad: Tensor, s: Scalars) -> Tensor:
        return grad if self._decoupled else grad + s["weight_decay"] * weight


class LambRule(AdamRule):
    """LAMB; see the module."""

    def __init__(self) -> None:
        super().__init__("lamb", decoupled=True)

    def terms(self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars) -> Terms:
        u, _ = self.direction(arithmetic, weight, grad, moments, s)
        decayed = u + s["weight_decay"] * weight
        return {"weight_squares": arithmetic.square(weight), "update_squares": arithmetic.square(decayed)}

    def delta(self, u: Tensor, weight: Tensor, s: Scalars) -> Tensor:
        ratio = trust_ratio(s["weight_squares"], s["update_squares"])
        return -(s["lr"] * ratio) * (u + s["weight_decay"] * weight)

    def remaining_effect(self, arithmetic: Arithmetic, weight: Tensor, moments: Moments, s: Scalars) -> Effects:
        ratio = trust_ratio(s["weight_squares"], s["update_squares"])
        effects = super().remaining_effect(arithmetic, weight, moments, s)
        return {slot: ratio * effect for slot, effect in effects.items()}


def sum_of_powers(decay: Scalar) -> Scalar:
    """decay + decay^2 + ...: how often a unit of an average counts in later steps; 0 for a decay of 1."""
    if isinstance(decay, Tensor):
        return torch.where(decay < 1, decay / (1 - decay), 0.0)
    return decay / (1 - decay) if decay < 1 else 0.0


def trust_ratio(weight_squares: Scalar, other_squares: Scalar, decay: Scalar = 0.0, eps: Scalar = 0.0) -> Tensor:
    """||w|| / (||x|| + decay ||w|| + eps) from sums of squares; 1 where either norm is 0. Finite in float32."""
    w, x = torch.as_tensor(weight_squares).sqrt(), torch.as_tensor(other_squares).sqrt()
    ratio = w / (x + decay * w + eps)
    largest = min(torch.finfo(dtype).max for dtype in (ratio.dtype, torch.float32))
    return torch.where((w > 0) & (x > 0), ratio.clamp_max(largest), 1.0)


ADAM = AdamRule("adam", decoupled=False)
ADAMW = AdamRule("adamw", decoupled=True)
LAMB = LambRule()
