"""NAdam: Adam with Nesterov's look ahead, its momentum warmed up.

    mu_t = beta1 (1 - 0.96^(t momentum_decay) / 2)
    m, v as in Adam
    n = (1 - mu_t) / (1 - mu_1 ... mu_t) g + mu_(t+1) / (1 - mu_1 ... mu_(t+1)) m
    u = n / (sqrt(v / (1 - beta2^t)) + eps)
    delta = -lr u, with g + weight_decay w in place of g, or -lr (u + weight_decay w)

torch keeps the product of all mu in the state. Here it is a function of t, as the bias corrections are: a beta1
that changes during training changes it as a whole.

Source: Dozat 2016, as torch.optim.NAdam has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.rules._adam import AdamRule, sum_of_powers
from narrowgauge.rules._rule import Arithmetic, Effects, Moments, Scalar, Scalars

_TERMS = 32  # of the series below: it leaves out less than 2^-32


class NadamRule(AdamRule):
    """NAdam with the decay in the gradient, or in the update; see the module."""

    torch_numbers = ("mu_product",)

    def scalars(self, group: Mapping[str, Any], step: Scalar) -> dict[str, Scalar]:
        beta1, per_step = group["betas"][0], 0.96 ** group["momentum_decay"]
        mu, next_mu = (beta1 * (1 - 0.5 * per_step**t) for t in (step, step + 1))
        product = product_of_mu(beta1, per_step, step)
        return {
            **super().scalars(group, step),
            "mu_product": product,
            "of_gradient": (1 - mu) / (1 - product),
            "of_momentum": next_mu / (1 - product * next_mu),
        }

    def numerator(self, arithmetic: Arithmetic, m: Any, g: Tensor, s: Scalars) -> Tensor:
        return s["of_momentum"] * arithmetic.value(m) + s["of_gradient"] * g

    def remaining_effect(self, arithmetic: Arithmetic, weight: Tensor, moments: Moments, s: Scalars) -> Effects:
        root = arithmetic.root(arithmetic.value(moments["v"]), s["correction2"])
        return {"m": -s["lr"] * s["of_momentum"] * sum_of_powers(s["beta1"]) / (root + s["eps"])}


def product_of_mu(beta1: Scalar, per_step: Scalar, step: Scalar) -> Scalar:
    """beta1^t times the product of all 1 - per_step^i / 2 for i from 1 to t.

    log(1 - x / 2) is -(x / 2 + (x / 2)^2 / 2 + (x / 2)^3 / 3 + ...), and the powers of x = per_step^i add up over i
    as a geometric series.
    """
    first: Scalar = 1.0  # per_step^k
    last: Scalar = 1.0  # per_step^(k t)
    logarithm: Scalar = 0.0
    all_steps = per_step**step
    for k in range(1, _TERMS + 1):
        first, last = first * per_step, last * all_steps
        logarithm = logarithm - 0.5**k / k * _geometric(first, last, step)
    return beta1**step * math.e**logarithm


def _geometric(q: Scalar, q_to_count: Scalar, count: Scalar) -> Scalar:
    """q + q^2 + ... + q^count, for q in [0, 1]."""
    if isinstance(q, Tensor):
        return torch.where(1 - q > 1e-9, q * (1 - q_to_count) / (1 - q), count)
    return q * (1 - q_to_count) / (1 - q) if 1 - q > 1e-9 else count


NADAM = NadamRule("nadam", decoupled=False)
NADAMW = NadamRule("nadam", decoupled=True)
