"""LAMB: Adam's direction, each parameter's step as long as its weights ask for.

    u = m_hat / (sqrt(v_hat) + eps) + weight_decay w        (m_hat, v_hat as in AdamW)
    delta = -lr ||w|| / ||u|| u

The ratio is 1 where either norm is 0. The norms are of the whole parameter.

Source: You et al. 2020, Algorithm 2, with phi the identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.rules._adam import Adam
from narrowgauge.rules._rule import Arithmetic, Scalar


class Lamb(Adam):
    """LAMB; see the module."""

    def __init__(self) -> None:
        super().__init__("lamb", decoupled=True)

    def terms(
        self,
        arithmetic: Arithmetic,
        weight: Tensor,
        grad: Tensor,
        moments: Mapping[str, Any],
        s: Mapping[str, Scalar],
    ) -> dict[str, Tensor]:
        u, _ = self.direction(arithmetic, weight, grad, moments, s)
        return {"weight_squares": arithmetic.square(weight), "update_squares": arithmetic.square(u)}

    def update(
        self,
        arithmetic: Arithmetic,
        weight: Tensor,
        grad: Tensor,
        moments: Mapping[str, Any],
        s: Mapping[str, Scalar],
    ) -> tuple[Tensor, dict[str, Any]]:
        u, moments = self.direction(arithmetic, weight, grad, moments, s)
        ratio = trust_ratio(s["weight_squares"], s["update_squares"])
        return -(s["lr"] * ratio) * u, moments

    def reach(
        self, arithmetic: Arithmetic, weight: Tensor, moments: Mapping[str, Any], s: Mapping[str, Scalar]
    ) -> dict[str, Tensor | Scalar]:
        ratio = trust_ratio(s["weight_squares"], s["update_squares"])
        return {slot: ratio * unit for slot, unit in super().reach(arithmetic, weight, moments, s).items()}


def trust_ratio(weight_squares: Scalar, other_squares: Scalar, decay: Scalar = 0.0, eps: Scalar = 0.0) -> Tensor:
    """||w|| / (||x|| + decay ||w|| + eps) from sums of squares; 1 where either norm is 0. Finite in float32."""
    w, x = torch.as_tensor(weight_squares).sqrt(), torch.as_tensor(other_squares).sqrt()
    ratio = w / (x + decay * w + eps)
    largest = min(torch.finfo(dtype).max for dtype in (ratio.dtype, torch.float32))
    return torch.where((w > 0) & (x > 0), ratio.clamp_max(largest), 1.0)


LAMB = Lamb()
