"""Lion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from narrowgauge import rules
from narrowgauge.optim._named._eight_bit import EightBit
from narrowgauge.optim._optimizer import NarrowOptimizer
from narrowgauge.optim._options import Options


class Lion(NarrowOptimizer):
    """Lion with any weight storage, its moment in any state storage.

    Args:
        params: float32, bfloat16 or float16 parameters, named or not, or groups, which may override any option.
        lr: learning rate, a number or a 0-d tensor: the step of every element, decay apart.
        betas: weight of the moment in the direction, and its decay rate, each in [0, 1).
        weight_decay: decoupled decay, applied with the update as one sum.
        **options: the options of every optimizer; see `Options`. Slot: ``"m"``.

    Raises:
        ValueError: for a wrong value or combination, by name.

    Source: Chen et al. 2023, Algorithm 2.
    """

    rule = rules.LION

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        hyperparameters = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, hyperparameters, options)


class Lion8bit(EightBit, Lion):
    """Lion with its moment in block-wise dynamic codes. Takes all of Lion's arguments.

    `log8`, the storage of the other 8-bit optimizers, has no advantage here: a direction of signs is not linear in
    the moment, so its rounding error cannot be given to the weight (docs/studies/state_codecs.md).
    """

    def __init__(
        self, params: ParamsT, *args: Any, states: str | Mapping[str, str] = "8bit", **options: Any
    ) -> None:
        super().__init__(params, *args, states=states, **options)
