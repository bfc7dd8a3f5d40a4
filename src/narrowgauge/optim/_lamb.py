"""LAMB."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from narrowgauge.optim._eight_bit import EightBit
from narrowgauge.optim._optimizer import NarrowOptimizer
from narrowgauge.optim._options import Options
from narrowgauge.rules import LAMB as LAMB_RULE


class LAMB(NarrowOptimizer):
    """LAMB: AdamW's direction, each parameter's step in proportion to the norm of its weights.

    Args:
        params: parameters, named parameters or groups; float32, bfloat16 or float16. Groups may override any
            option below.
        lr: learning rate, a number or a 0-d tensor.
        betas: decay rates of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, part of the direction.
        beta2_schedule: lambda of beta2 = 1 - t^-lambda, which then takes the place of ``betas[1]``; None for none.
        **options: those of every optimizer; see `Options`. Slots: ``"m"``, ``"v"``.

    Raises:
        ValueError: for a value or a combination that is not taken, by name.

    Source: You et al. 2020, Algorithm 2.
    """

    rule = LAMB_RULE

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        beta2_schedule: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        hyperparameters = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "beta2_schedule": beta2_schedule,
        }
        super().__init__(params, hyperparameters, options)


class LAMB8bit(EightBit, LAMB):
    """LAMB with both moments in `log8`. Takes all of LAMB's arguments."""
