"""AdaGrad."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from narrowgauge import rules
from narrowgauge._arguments import is_number
from narrowgauge.optim._named._eight_bit import EightBit
from narrowgauge.optim._optimizer import NarrowOptimizer
from narrowgauge.optim._options import Options


class Adagrad(NarrowOptimizer):
    """AdaGrad with any weight storage and any state storage, optionally with momentum.

    Arguments up to `foreach` are those of `torch.optim.Adagrad`, in its order and with its defaults.

    Args:
        params: float32, bfloat16 or float16 parameters, named or not, or groups, which may override any option.
        lr: learning rate, a number or a 0-d tensor.
        lr_decay: the learning rate is divided by 1 + (t - 1) lr_decay.
        weight_decay: added to the gradient, as L2 regularization is.
        initial_accumulator_value: what the sum of squares starts from.
        eps: added to the root of the sum of squares.
        foreach: accepted without effect; see `Options`.
        momentum: decay rate of a momentum over the scaled gradients; with 0 there is no such state, and schedulers
            find no momentum.
        **options: the options of every optimizer; see `Options`. Slots: ``"v"``, and ``"m"`` if there is momentum.

    Raises:
        ValueError: for a wrong value or combination, by name.

    Source: Duchi et al. 2011, as in torch; momentum: 8-bit Optimizers, Appendix H.
    """

    rule = rules.ADAGRAD

    def __init__(  # type: ignore[misc]  # `foreach`, one of the Options, has a position in torch's Adagrad
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        momentum: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        hyperparameters = {
            "lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value, "eps": eps,
        }  # fmt: skip
        # Schedulers look in the defaults for a momentum to cycle: with one there OneCycleLR would switch it on
        # unasked, as it does for SGD. torch's AdaGrad has no momentum in its defaults.
        if not is_number(momentum) or momentum != 0:
            hyperparameters["momentum"] = momentum
        super().__init__(params, hyperparameters, {**options, "foreach": foreach})


class Adagrad8bit(EightBit, Adagrad):
    """AdaGrad with its sum of squares in `log8`. Takes all of Adagrad's arguments."""
