"""Adafactor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from narrowgauge import rules
from narrowgauge._arguments import is_number
from narrowgauge.optim._optimizer import NarrowOptimizer
from narrowgauge.optim._options import Options


class Adafactor(NarrowOptimizer):
    """Adafactor: steps relative to the weight, and a second moment with one number for each row and each column.

    Arguments up to `weight_decay` are those of `torch.optim.Adafactor`, in its order and with its defaults. As
    there, every parameter of two or more dimensions is factored, small ones too: `min_quantized_size` applies only
    to quantized storages.

    Args:
        params: float32, bfloat16 or float16 parameters, named or not, or groups, which may override any option.
        lr: the largest step relative to the weight; it also multiplies the weight decay. A number or a 0-d tensor.
        beta2_decay: tau in the second moment's decay rate 1 - t^tau; at most 0.
        eps: (eps1, eps2): lower bounds of the root of the second moment, and of the weight's root mean square. None
            for eps1 means float32's machine epsilon, because the step is computed in float32. torch uses that of
            the parameter's dtype.
        d: updates whose root mean square is above d are shortened to it; at least 1.
        weight_decay: decoupled decay.
        **options: the options of every optimizer except `clip_updates`, whose place `d` takes; see `Options`. Slot:
            ``"v"``, in `factored` by default. Any other storage makes it Adafactor without factors. `factored`
            refuses sharded parameters (DTensors) of two or more dimensions.

    Raises:
        ValueError: for a wrong value or combination, by name.

    Source: Shazeer and Stern 2018.
    """

    rule = rules.ADAFACTOR
    default_states = "factored"
    refusals: ClassVar[Mapping[str, str | None]] = {
        "lr": "Learning rate should be >= 0 but is",
        "weight_decay": "weight_decay should be >= 0 but is",
        "eps": None,
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        hyperparameters = {
            "lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay,
        }  # fmt: skip
        super().__init__(params, hyperparameters, options)

    def check(self, group: Mapping[str, Any]) -> None:
        tau, eps, d = group["beta2_decay"], group["eps"], group["d"]
        if not is_number(tau) or not -float("inf") < tau <= 0.0:
            raise ValueError(f"beta2_decay should be <= 0 but is: {tau!r}; it must be a finite number")
        if not isinstance(eps, tuple | list) or len(eps) != 2:
            raise ValueError(f"eps must be two numbers, the first of which may be None, got {eps!r}")
        for number, value in enumerate(eps, start=1):
            if not (value is None and number == 1) and not (is_number(value) and 0.0 <= value < float("inf")):
                raise ValueError(f"epsilon{number} should be >= 0 but is: {value!r}; it must be a finite number")
        if not is_number(d) or not 1.0 <= d < float("inf"):
            raise ValueError(f"Clipping threshold d should be >= 1 but is: {d!r}; it must be a finite number")
        if group["clip_updates"] is True:
            raise ValueError("clip_updates must be False for Adafactor, which clips updates by d, got True")
        super().check(group)
