"""LARS: momentum on gradients that are scaled to each parameter's weights.

    r = trust_coefficient ||w|| / (||g|| + weight_decay ||w|| + eps)
    m <- momentum m + (1 - dampening) r (g + weight_decay w), and m = r (g + weight_decay w) at the first step
    delta = -lr m, or with Nesterov's momentum -lr (r (g + weight_decay w) + momentum m)

r is 1 where either norm is 0. The norms are of the whole parameter.

Source: You et al. 2017, Algorithm 1, with the learning rate outside the momentum as in torch.optim.SGD.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.rules._lamb import trust_ratio
from narrowgauge.rules._rule import Arithmetic, Scalar
from narrowgauge.rules._sgd import SGD, ahead


class Lars(SGD):
    """LARS; see the module."""

    name = "lars"

    def scalars(self, group: Mapping[str, Any], step: Scalar) -> dict[str, Scalar]:
        own = {"trust": group["trust_coefficient"], "eps": group["eps"]}
        return {**super().scalars(group, step), **own}

    def terms(
        self,
        arithmetic: Arithmetic,
        weight: Tensor,
        grad: Tensor,
        moments: Mapping[str, Any],
        s: Mapping[str, Scalar],
    ) -> dict[str, Tensor]:
        return {"weight_squares": arithmetic.square(weight), "grad_squares": arithmetic.square(grad)}

    def update(
        self,
        arithmetic: Arithmetic,
        weight: Tensor,
        grad: Tensor,
        moments: Mapping[str, Any],
        s: Mapping[str, Scalar],
    ) -> tuple[Tensor, dict[str, Any]]:
        ratio = trust_ratio(s["weight_squares"], s["grad_squares"], s["weight_decay"], s["eps"])
        both = (torch.as_tensor(s["weight_squares"]) > 0) & (torch.as_tensor(s["grad_squares"]) > 0)
        g = torch.where(both, s["trust"] * ratio, ratio) * (grad + s["weight_decay"] * weight)
        if "m" not in moments:
            return -s["lr"] * g, {}
        m = arithmetic.accumulate(moments["m"], g, s["momentum"], s["share"])
        return -s["lr"] * ahead(arithmetic.value(m), g, s), {"m": m}


LARS = Lars()
