"""Adafactor, as torch.optim has it: steps relative to the weight, from a second moment that may be factored.

    v <- (1 - t^tau) v + t^tau g^2
    u = g / max(sqrt(v), eps1)
    rho = min(lr, 1 / sqrt(t))
    delta = -lr weight_decay w - max(eps2, RMS(w)) rho u / max(1, RMS(u) / d)

RMS is the root mean square of the whole parameter. There is no momentum and no bias correction: at the first step
the decay rate 1 - t^tau is 0, and the average is its only square.

Of a matrix v is read as the outer product r c / max(mean(r), eps1) of its row means and column means where the
storage keeps those alone (`factored`); any other storage keeps every element, and the rule is the same without
factors.

torch differs from the paper in three points, and this rule follows torch: lr is the largest relative step (0.01
there), weight decay is decoupled, and eps1 bounds the mean and the root (there it is added to every square). torch
computes in the parameter's dtype and takes its machine epsilon for eps1 unless it is given; rules here compute in
float32, whatever the parameter, and take float32's.

Source: Shazeer and Stern 2018, Algorithms 4 to 6; `torch.optim.Adafactor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.rules._rule import Arithmetic, Moments, Rule, Scalar, Scalars, Second, Slot, Terms, Update, smaller

_EPS = torch.finfo(torch.float32).eps
_SMALLEST_NORMAL = 2.0**-126


class AdafactorRule(Rule):
    """Adafactor; see the module."""

    name = "adafactor"
    moments = (Slot("v", signed=False, torch_key="variance", torch_factors=("row_var", "col_var")),)
    averaging = ("beta2", "new_weight2")

    def scalars(self, group: Mapping[str, Any], step: Scalar) -> dict[str, Scalar]:
        eps1, eps2 = group["eps"]
        new_weight2 = step ** group["beta2_decay"]
        return {
            "lr": group["lr"],
            "rho": smaller(group["lr"], step**-0.5),
            "beta2": 1 - new_weight2,
            "new_weight2": new_weight2,
            "eps": _EPS if eps1 is None else eps1,
            "eps2": eps2,
            "d": group["d"],
            "weight_decay": group["weight_decay"],
        }

    def second_moment(self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, v: Any, s: Scalars) -> Second:
        """(the new v, v as the equation divides by its root)."""
        v = arithmetic.accumulate_square(v, grad, s["beta2"], s["new_weight2"])
        return v, arithmetic.factored("v", v, s["eps"])

    def direction(
        self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars
    ) -> Update:
        """(u, the new moments)."""
        v, read = self.second_moment(arithmetic, weight, grad, moments["v"], s)
        # With eps1 = 0 an element that never had a gradient is 0 / 0.
        root = read.sqrt().clamp_min(_SMALLEST_NORMAL)
        return grad / root.clamp_min(s["eps"]), {"v": v}

    def terms(self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars) -> Terms:
        u, _ = self.direction(arithmetic, weight, grad, moments, s)
        return {"weight_squares": arithmetic.square(weight), "update_squares": arithmetic.square(u)}

    def update(self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars) -> Update:
        u, moments = self.direction(arithmetic, weight, grad, moments, s)
        weight_rms, update_rms = (
            (torch.as_tensor(s[name], device=weight.device) / s["elements"]).sqrt()
            for name in ("weight_squares", "update_squares")
        )
        step = weight_rms.clamp_min(s["eps2"]) * s["rho"] / (update_rms / s["d"]).clamp_min(1.0)
        return -(s["lr"] * s["weight_decay"]) * weight - step * u, moments


class _GivenFactors(AdafactorRule):
    """Adafactor with v given as the equation reads it, from its new means."""

    def second_moment(self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, v: Any, s: Scalars) -> Second:
        return v, v


ADAFACTOR = AdafactorRule()
ADAFACTOR.given_factors = _GivenFactors()
