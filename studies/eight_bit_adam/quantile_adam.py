"""Adam with moments in codes that are made from the moments themselves, for `other_codes`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from narrowgauge.formats import codebook
from narrowgauge.optim import Adam
from narrowgauge.optim._plan import ParamPlan
from narrowgauge.storage import state_storage


class QuantileAdam(Adam):
    """Adam whose moments are, after every step, the nearest of the 256 quantiles of their own tensor.

    The quantiles are exact, of the tensor as it is then. Moments stay in fp32 tensors: what such codes do to a
    training is seen, not what they save. What has 32-bit states by its mark keeps them.

    Source: 8-bit Optimizers via Block-wise Quantization, Appendix F.2, Equation 5.
    """

    def __init__(self, params: Any, *args: Any, **options: Any) -> None:
        self._rounded: set[Tensor] = set()
        super().__init__(params, *args, states="8bit", **options)

    def _plan_group(self, plans: dict[Tensor, ParamPlan], number: int) -> None:
        super()._plan_group(plans, number)
        wide = state_storage("fp32")
        for p in self.param_groups[number]["params"]:
            plan = plans[p]
            if any(slot.storage.quantized for slot in plan.slots):
                self._rounded.add(p)
                plans[p] = replace(plan, slots=tuple(replace(slot, storage=wide) for slot in plan.slots))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        for p in self._rounded:
            for name, signed in (("m", True), ("v", False)):
                rounded(self.state[p][name], signed)
        return loss


def rounded(x: Tensor, signed: bool) -> Tensor:
    """Write into a tensor the nearest values of its own quantile map; zeros alone stay as they are."""
    largest = float(x.abs().max())
    if 0 < largest < math.inf:
        values = codebook("quantile", signed, data=x)
        x.copy_(values[torch.bucketize(x / largest, (values[1:] + values[:-1]) / 2)] * largest)
    return x
