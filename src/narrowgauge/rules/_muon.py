"""Muon: momentum, orthogonalized.

    m <- momentum m + (1 - momentum) g
    d = m, or with Nesterov's momentum momentum m + (1 - momentum) g
    delta = -lr (ratio orthogonalize(d) + weight_decay w)

For matrices only. The orthogonalization is five steps of a Newton-Schulz iteration in bf16 that brings all singular
values near 1 (roughly: the usual coefficients trade exactness for speed). The ratio makes the step's size
independent of the matrix's shape: sqrt(max(1, rows / columns)), or 0.2 sqrt(max(rows, columns)), which matches the
root mean square of AdamW's steps.

Source: Jordan et al. 2024; Liu et al. 2025 (Moonlight) for the second ratio; the operations, and their order, are
those of torch.optim.Muon.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.rules._rule import Arithmetic, Moments, Rule, Scalar, Scalars, Slot, Update
from narrowgauge.rules._sgd import look_ahead, nesterov


@dataclass(frozen=True)
class Muon(Rule):
    """Muon with its matrix function; see the module.

    Attributes:
        coefficients: of the quintic x -> a x + b x^3 + c x^5 that is applied to the singular values.
        steps: how often it is applied.
        eps: lower bound of the norm that the matrix is divided by.
        ratio: ``"original"``, ``"match_rms_adamw"`` or ``"spectral_unclamped"``.
    """

    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    steps: int = 5
    eps: float = 1e-7
    ratio: str = "original"

    name = "muon"
    moments = (Slot("m", signed=True, torch_key="momentum_buffer"),)
    averaging = ("momentum", "new_weight")

    def scalars(self, group: Mapping[str, Any], step: Scalar) -> dict[str, Scalar]:
        new_weight = 1 - group["momentum"]
        return {
            "lr": group["lr"],
            "momentum": group["momentum"],
            "new_weight": new_weight,
            "weight_decay": group["weight_decay"],
            **nesterov(group["momentum"], new_weight, group["nesterov"]),
        }

    def direction(
        self, arithmetic: Arithmetic, weight: Tensor, grad: Tensor, moments: Moments, s: Scalars
    ) -> Update:
        m = arithmetic.accumulate(moments["m"], grad, s["momentum"], s["new_weight"])

        def scaled(x: Tensor) -> Tensor:
            return self._ratio(x.shape) * self.orthogonalize(x).to(weight.dtype)

        # In the format that it is computed in: ranks that share the matrix send bf16.
        return arithmetic.of_whole(look_ahead(arithmetic.value(m), grad, s).to(torch.bfloat16), scaled), {"m": m}

    def delta(self, u: Tensor, weight: Tensor, s: Scalars) -> Tensor:
        return -s["lr"] * (u + s["weight_decay"] * weight)

    def orthogonalize(self, x: Tensor) -> Tensor:
        """A matrix with x's singular vectors and singular values near 1, in bf16."""
        a, b, c = self.coefficients
        x = x.to(torch.bfloat16)
        tall = x.size(0) > x.size(1)
        x = x.T if tall else x
        x = x / x.norm().clamp(min=self.eps)
        for _ in range(self.steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.T if tall else x

    def _ratio(self, shape: torch.Size) -> float:
        rows, columns = shape
        if self.ratio == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(rows / columns if self.ratio == "spectral_unclamped" else max(1, rows / columns))
