"""Adan."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from narrowgauge import rules
from narrowgauge.optim._optimizer import NarrowOptimizer
from narrowgauge.optim._options import Options


class Adan(NarrowOptimizer):
    """Adan: Nesterov momentum from differences of gradients, with any weight storage and any state storage.

    Args:
        params: float32, bfloat16 or float16 parameters, named or not, or groups, which may override any option.
        lr: learning rate, a number or a 0-d tensor.
        betas: decay rates of the first moment, of the average difference and of the second moment, each in [0, 1).
            As in the authors' code, they are one minus the paper's betas.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay: weights are divided by 1 + lr weight_decay.
        **options: the options of every optimizer; see `Options`. Slots: ``"m"``, ``"diff"``, ``"v"`` and
            ``"previous"``, the last gradient.

    Raises:
        ValueError: for a wrong value or combination, by name.

    Source: Xie et al. 2022, Algorithm 1.
    """

    rule = rules.ADAN

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        hyperparameters = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, hyperparameters, options)
