"""AdEMAMix: Adam with a second, slow first moment.

    m  <- beta1 m + (1 - beta1) g
    m2 <- beta3 m2 + (1 - beta3) g
    v  <- beta2 v + (1 - beta2) g^2
    u = (m / (1 - beta1^t) + alpha m2) / (sqrt(v / (1 - beta2^t)) + eps)
    delta = -lr (u + weight_decay w)

The slow moment remembers ten thousand gradients where m remembers ten. It is not corrected for its start at zero:
it comes in as it fills. There are two warm-ups. Over the first t_alpha steps alpha grows linearly from 0. Over the
first t_beta3 steps beta3 grows from beta1, so that the number of gradients that m2 remembers grows linearly:

    log beta3_t = log beta1 log beta3 / ((1 - t / t_beta3) log beta3 + t / t_beta3 log beta1)

Source: Pagliardini et al. 2024, Algorithm 1 and Section 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.rules._adam import AdamRule
from narrowgauge.rules._rule import Arithmetic, Moments, Scalar, Scalars, Slot, Update


class AdemamixRule(AdamRule):
    """AdEMAMix; see the module."""

    betas = 3
    # Of m2 there is no `remaining_effect`: what it loses would act over ten thousand steps. Given to the weight at
    # once it would come that much too early.
    moments = (
        Slot("m", signed=True, preset="bf16", normalizer="v"),
        Slot("m2", signed=True, normalizer="v"),
        Slot("v", signed=False),
    )
    averaging = (*AdamRule.averaging, "beta3", "new_weight3")

    def __init__(self) -> None:
        super().__init__("ademamix", decoupled=True)

    def scalars(self, group: Mapping[str, Any], step: Scalar) -> dict[str, Scalar]:
        (beta1, _, beta3), alpha = group["betas"], group["alpha"]
        if group["t_alpha"] is not None:
            alpha = alpha * _share(step, group["t_alpha"])
        if group["t_beta3"] is not None:
            done = _share(step, group["t_beta3"])
            beta3 = beta3 ** (1 / ((1 - done) * (_logarithm(beta3) / _logarithm(beta1)) + done))
        return {**super().scalars(group, step), "alpha": alpha, "beta3": beta3, "new_weight3": 1 - beta3}

    def direction(
        self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars
    ) -> Update:
        m = arithmetic.accumulate(moments["m"], grad, s["beta1"], s["new_weight1"])
        m2 = arithmetic.accumulate(moments["m2"], grad, s["beta3"], s["new_weight3"])
        v, _ = self.second_moment(arithmetic, weight, grad, moments["v"], s)
        root = arithmetic.root(arithmetic.value(v), s["correction2"])
        both = arithmetic.value(m) / s["correction1"] + s["alpha"] * arithmetic.value(m2)
        return both / (root + s["eps"]), {"m": m, "m2": m2, "v": v}


def _share(step: Scalar, length: Scalar) -> Scalar:
    """The share of a warm-up that is over after a step, at most 1."""
    share = step / length
    return torch.where(share < 1, share, 1.0) if isinstance(share, Tensor) else min(share, 1.0)


def _logarithm(x: Scalar) -> Scalar:
    """log(x), -inf for 0: a beta1 of 0 has a beta3 that grows from 0."""
    if isinstance(x, Tensor):
        return x.log()
    return math.log(x) if x > 0 else -math.inf


ADEMAMIX = AdemamixRule()
