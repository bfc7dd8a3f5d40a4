"""AdEMAMix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from narrowgauge import rules
from narrowgauge._arguments import is_number
from narrowgauge.optim._optimizer import NarrowOptimizer
from narrowgauge.optim._options import Options


class AdEMAMix(NarrowOptimizer):
    """AdEMAMix: AdamW with a second, slow momentum, with any weight storage and any state storage.

    Args:
        params: float32, bfloat16 or float16 parameters, named or not, or groups, which may override any option.
        lr: learning rate, a number or a 0-d tensor.
        betas: decay rates of the first moment, the second moment and the slow first moment, each in [0, 1).
        alpha: weight of the slow moment in the direction.
        t_alpha: steps over which alpha grows from 0; None for no warm-up. The paper warms up over all steps.
        t_beta3: steps over which the slow decay rate grows from ``betas[0]``; None for no warm-up.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, applied with the update as one sum.
        **options: the options of every optimizer; see `Options`. Slots: ``"m"``, ``"m2"`` (the slow one), ``"v"``.

    Raises:
        ValueError: for a wrong value or combination, by name.

    Source: Pagliardini et al. 2024, Algorithm 1; names of arguments as in bitsandbytes.
    """

    rule = rules.ADEMAMIX

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Unpack[Options],
    ) -> None:
        hyperparameters = {
            "lr": lr, "betas": betas, "alpha": alpha, "t_alpha": t_alpha, "t_beta3": t_beta3, "eps": eps,
            "weight_decay": weight_decay,
        }  # fmt: skip
        super().__init__(params, hyperparameters, options)

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        for name in ("t_alpha", "t_beta3"):
            if group[name] is not None and not (is_number(group[name]) and group[name] > 0):
                raise ValueError(f"{name} must be a number of steps above 0 or None, got {group[name]!r}")
        if group["t_beta3"] is not None and not group["betas"][2] > 0:
            raise ValueError(f"betas[2] must be above 0 with t_beta3, got {group['betas'][2]!r}")


class AdEMAMix8bit(AdEMAMix):
    """AdEMAMix with m and v in `log8` and the slow moment m2 in fp32. Takes all of AdEMAMix's arguments.

    A step moves m2 by a ten-thousandth of the gradient, which narrow codes round away. The rounding error cannot be
    added to the weight either, because it would act over ten thousand steps. After 20,000 steps with m2 in `8bit`
    weights are off by 67 % of the distance moved, in `bf16` by 18 % (docs/decisions/slow-moment.md).
    """

    def __init__(
        self, params: ParamsT, *args: Any, states: str | Mapping[str, str] | None = None, **options: Any
    ) -> None:
        states = {"m": "log8", "m2": "fp32", "v": "log8"} if states is None else states
        super().__init__(params, *args, states=states, **options)
