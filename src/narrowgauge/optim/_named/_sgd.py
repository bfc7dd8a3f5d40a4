"""SGD, LARS, AdaGrad, RMSprop and Lion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from narrowgauge import rules
from narrowgauge._arguments import is_number
from narrowgauge.optim._optimizer import NarrowOptimizer
from narrowgauge.optim._options import EIGHT_BIT, Options
from narrowgauge.optim._plan import slot_storages


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


class RMSprop(NarrowOptimizer):
    """RMSprop with any weight storage and any state storage, optionally centered and with momentum.

    Arguments up to `differentiable` are those of `torch.optim.RMSprop`, in its order and with its defaults.

    Args:
        params: float32, bfloat16 or float16 parameters, named or not, or groups, which may override any option.
        lr: learning rate, a number or a 0-d tensor.
        alpha: decay rate of the average of squares, and of the mean gradient.
        eps: added to the root of the average of squares.
        weight_decay: added to the gradient, as L2 regularization is.
        momentum: decay rate of a momentum over the scaled gradients; 0 for no such state.
        centered: divide by the root of the gradient's variance, for which a mean gradient is kept. The variance is
            a small difference of two averages: these are then in ``"fp32"`` or ``"expansion"`` states.
        capturable, foreach, maximize, differentiable: see `Options`.
        **options: the options of every optimizer; see `Options`. Slots: ``"v"``, ``"mean"`` if it is centered, and
            ``"m"`` if there is momentum.

    Raises:
        ValueError: for a wrong value or combination, by name.

    Source: Tieleman and Hinton 2012, as in torch.
    """

    rule = rules.RMSPROP

    def __init__(  # type: ignore[misc]  # four of the Options have positions in torch's RMSprop
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **options: Unpack[Options],
    ) -> None:
        hyperparameters = {
            "lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum,
            "centered": centered,
        }  # fmt: skip
        positioned = {
            "capturable": capturable, "foreach": foreach, "maximize": maximize, "differentiable": differentiable,
        }  # fmt: skip
        super().__init__(params, hyperparameters, {**options, **positioned})

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        if group["centered"]:
            storages = slot_storages(self.rule, group)
            for slot in ("v", "mean"):
                if storages[slot].name not in ("fp32", "expansion"):
                    raise ValueError(
                        f"states of {slot!r} must be 'fp32' or 'expansion' with centered=True, which subtracts two "
                        f"averages, got {storages[slot].name!r}"
                    )


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


class SGD8bit(SGD):
    """SGD with its momentum in `log8`. Takes all of SGD's arguments.

    With a momentum above 0.95 `states="bf16"` is nearer to the exact one: what `log8` passes on to the weight is
    then tens of steps long (docs/states.md).
    """

    default_states = EIGHT_BIT


class LARS8bit(LARS):
    """LARS with its momentum in `log8`. Takes all of LARS's arguments; of its momentum see `SGD8bit`."""

    default_states = EIGHT_BIT


class Adagrad8bit(Adagrad):
    """AdaGrad with its sum of squares in `log8`. Takes all of Adagrad's arguments."""

    default_states = EIGHT_BIT


class RMSprop8bit(RMSprop):
    """RMSprop with its moments in `log8`. Takes all of its arguments; ``centered=True`` needs other states."""

    default_states = EIGHT_BIT


class Lion8bit(Lion):
    """Lion with its moment in block-wise dynamic codes. Takes all of Lion's arguments.

    `log8`, the storage of the other 8-bit optimizers, has no advantage here: a direction of signs is not linear in
    the moment, so its rounding error cannot be given to the weight (docs/studies/state_codecs.md).
    """

    default_states = "8bit"
