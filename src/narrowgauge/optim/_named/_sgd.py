"""SGD and LARS."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from narrowgauge import rules
from narrowgauge.optim._named._eight_bit import EightBit
from narrowgauge.optim._optimizer import NarrowOptimizer
from narrowgauge.optim._options import Options


class SGD(NarrowOptimizer):
    """Stochastic gradient descent with any weight storage, its momentum in any state storage.

    Arguments up to `nesterov` are those of `torch.optim.SGD`, in its order and with its defaults.

    Args:
        params: float32, bfloat16 or float16 parameters, named or not, or groups, which may override any option.
        lr: learning rate, a number or a 0-d tensor.
        momentum: decay rate of the momentum; 0 for no state. A scheduler may switch it on and off. A momentum that
            starts after the first step starts from ``1 - dampening`` of the gradient, where torch takes all of it.
        dampening: subtracted from the gradient's weight in the momentum.
        weight_decay: added to the gradient, as L2 regularization is.
        nesterov: step along the momentum as it will be; needs a momentum and no dampening.
        **options: the options of every optimizer; see `Options`. Slot: ``"m"``, if there is momentum.

    Raises:
        ValueError: for a wrong value or combination, by name.

    Source: Sutskever et al. 2013, as in torch.
    """

    rule = rules.SGD

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
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov,
        }  # fmt: skip
        super().__init__(params, hyperparameters, options)


class LARS(NarrowOptimizer):
    """LARS: SGD with momentum on gradients scaled to each parameter's weights.

    Parameters with fewer than two dimensions (biases, the gains of norms) are not scaled: they take SGD's steps.

    Args:
        params, lr, dampening, weight_decay, nesterov, **options: the arguments of `SGD`.
        momentum: decay rate of the momentum.
        trust_coefficient: the fraction of its norm by which a parameter may move, at learning rate 1.
        eps: added to the norm of the gradient.

    Source: You et al. 2017, Algorithm 1.
    """

    rule = rules.LARS

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
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "trust_coefficient": trust_coefficient, "eps": eps,
        }  # fmt: skip
        super().__init__(params, hyperparameters, options)


class SGD8bit(EightBit, SGD):
    """SGD with its momentum in `log8`. Takes all of SGD's arguments.

    With a momentum above 0.95 `states="bf16"` is nearer to the exact one: what `log8` passes on to the weight is
    then tens of steps long (docs/states.md).
    """


class LARS8bit(EightBit, LARS):
    """LARS with its momentum in `log8`. Takes all of LARS's arguments; of its momentum see `SGD8bit`."""
