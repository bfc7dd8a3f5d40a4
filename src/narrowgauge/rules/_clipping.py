"""Update clipping: the step is shortened where the second moment lags behind the gradient.

    RMS = sqrt(mean over the parameter of g^2 / max(v_hat, eps^2))
    lr <- lr / max(1, RMS)

RMS is about 1 while v_hat is an honest average of g^2. Where gradients have grown faster than v follows, the update
is too large by that factor, and loss spikes come one to eight steps later. Clipping divides the learning rate, the
weight decay with it, for this parameter and this step.

It is a rule around any rule that has a second moment. AdamW with it is StableAdamW: the paper writes the debiased
averages with decay rates of their own, beta (1 - beta^(t-1)) / (1 - beta^t), which is the bias correction in
another place.

Source: Shazeer and Stern 2018 (Adafactor), Section 5; Wortsman et al. 2023, Algorithm 2 and Section 3.4.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from narrowgauge.rules._rule import (
    Arithmetic,
    Around,
    Effects,
    Moments,
    Rule,
    Scalar,
    Scalars,
    Second,
    Terms,
    Update,
    bare,
)

_SMALLEST_NORMAL = 2.0**-126


@runtime_checkable
class HasSecondMoment(Rule, Protocol):
    """A rule that divides by the root of an average of squares, in its slot ``v``."""

    def second_moment(self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, v: Any, s: Scalars) -> Second:
        """(the new v, the tensor whose root the equation divides by)."""
        raise NotImplementedError


@functools.cache
def clipped(rule: Rule) -> ClipUpdates | None:
    """A rule with update clipping, always the same object; None for a rule without a second moment."""
    return ClipUpdates(rule) if isinstance(rule, HasSecondMoment) else None


def squared_ratio(
    rule: Rule, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars
) -> Tensor | None:
    """g^2 / max(v_hat, eps^2), whose mean is RMS^2, in the gradient's shape; None for rules without second moment.

    v_hat is at least float32's smallest normal number here: nothing is divided by zero, whatever eps is.
    """
    inner = bare(rule)
    if not isinstance(inner, HasSecondMoment):
        return None
    _, v_hat = inner.second_moment(arithmetic, weight, grad, moments["v"], s)
    least = s["eps"] * s["eps"]
    least = least.clamp_min(_SMALLEST_NORMAL) if isinstance(least, Tensor) else max(least, _SMALLEST_NORMAL)
    return grad * v_hat.clamp(min=least).reciprocal() * grad


class ClipUpdates(Around):
    """Another rule with update clipping; see the module."""

    suffix = "clipped"
    rule: HasSecondMoment

    def terms(self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars) -> Terms:
        _, v_hat = self.rule.second_moment(arithmetic, weight, grad, moments["v"], s)
        bounded = v_hat.clamp(min=s["eps"] * s["eps"])  # a number stays a number: no copy to the device
        # Divided before it is multiplied: the square alone could overflow.
        ratio = grad / bounded * grad
        # If eps^2 is 0, an element that never had a gradient is 0 / 0. Below float32's normal numbers a gradient
        # counts as zero.
        ratio = torch.where(bounded >= _SMALLEST_NORMAL, ratio, 0.0)
        return {**self.rule.terms(arithmetic, weight, grad, moments, s), "clip_squares": ratio}

    def direction(
        self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars
    ) -> Update:
        return self.rule.direction(arithmetic, weight, grad, moments, s)

    def delta(self, u: Tensor, weight: Tensor, s: Scalars) -> Tensor:
        return self.rule.delta(u, weight, self._clipped(s))

    def update(self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars) -> Update:
        return self.rule.update(arithmetic, weight, grad, moments, self._clipped(s))

    def remaining_effect(self, arithmetic: Arithmetic, weight: Tensor, moments: Moments, s: Scalars) -> Effects:
        return self.rule.remaining_effect(arithmetic, weight, moments, self._clipped(s))

    @staticmethod
    def _clipped(s: Scalars) -> dict[str, Scalar]:
        rms = (torch.as_tensor(s["clip_squares"]) / s["elements"]).sqrt()
        return {**s, "lr": s["lr"] / rms.clamp_min(1.0)}
