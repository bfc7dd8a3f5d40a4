"""NAdam."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from narrowgauge import rules
from narrowgauge.optim._optimizer import NarrowOptimizer
from narrowgauge.optim._options import Options


class NAdam(NarrowOptimizer):
    """NAdam, which is Adam with Nesterov's momentum, with any weight storage and any state storage.

    Arguments up to `decoupled_weight_decay` are those of `torch.optim.NAdam`, in its order and with its defaults.

    Args:
        params: float32, bfloat16 or float16 parameters, named or not, or groups, which may override any option.
        lr: learning rate, a number or a 0-d tensor.
        betas: decay rates of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: added to the gradient, as L2 regularization is, unless it is decoupled.
        momentum_decay: how fast the momentum warms up: by 1 - 0.96^(t momentum_decay) / 2.
        decoupled_weight_decay: True makes the decay AdamW's, applied with the update as one sum.
        **options: the options of every optimizer; see `Options`. Slots: ``"m"``, ``"v"``.

    Raises:
        ValueError: for a wrong value or combination, by name.

    Source: Dozat 2016, as in torch.
    """

    rule = rules.NADAM

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        hyperparameters = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "momentum_decay": momentum_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        }  # fmt: skip
        super().__init__(params, hyperparameters, options)

    def base_rule(self, group: Mapping[str, Any]) -> rules.Rule:
        return rules.NADAMW if group["decoupled_weight_decay"] else rules.NADAM
