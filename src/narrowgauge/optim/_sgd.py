"""SGD with momentum, and LARS."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from narrowgauge.optim._eight_bit import EightBit
from narrowgauge.optim._optimizer import NarrowOptimizer
from narrowgauge.optim._options import Options
from narrowgauge.rules import LARS as LARS_RULE
from narrowgauge.rules import SGD as SGD_RULE


class SGD(NarrowOptimizer):
    """Stochastic gradient descent with any weight storage, its momentum in any state storage.

    Arguments up to `nesterov` are those of `torch.optim.SGD`, in its order and with its defaults.

    Args:
        params: parameters, named parameters or groups; float32, bfloat16 or float16. Groups may override any
            option below.
        lr: learning rate, a number or a 0-d tensor.
        momentum: decay rate of the momentum; 0 keeps no state. A scheduler may switch it on and off. One that
            starts after the first step starts from ``1 - dampening`` of the gradient, where torch takes all of it.
        dampening: what is taken off the gradient's share of the momentum.
        weight_decay: added to the gradient, as L2 regularization is.
        nesterov: step along the momentum as it will be, which takes a momentum and no dampening.
        **options: those of every optimizer; see `Options`. Slot: ``"m"``, if there is momentum.

    Raises:
        ValueError: for a value or a combination that is not taken, by name.

    Source: Sutskever et al. 2013, as in torch.
    """

    rule = SGD_RULE

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        hyperparameters = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, hyperparameters, options)


class SGD8bit(EightBit, SGD):
    """SGD with its momentum in `log8`. Takes all of SGD's arguments."""


class LARS(NarrowOptimizer):
    """LARS: SGD with momentum on gradients scaled to each parameter's weights.

    Args:
        params, lr, dampening, weight_decay, nesterov, **options: as `SGD` takes them.
        momentum: decay rate of the momentum.
        trust_coefficient: the share of its norm by which a parameter may move, at learning rate 1.
        eps: added to the norm of the gradient.

    Raises:
        ValueError: for a value or a combination that is not taken, by name.

    Source: You et al. 2017, Algorithm 1.
    """

    rule = LARS_RULE

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        **options: Unpack[Options],
    ) -> None:
        hyperparameters = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
        }
        super().__init__(params, hyperparameters, options)


class LARS8bit(EightBit, LARS):
    """LARS with its momentum in `log8`. Takes all of LARS's arguments."""
