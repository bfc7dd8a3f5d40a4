"""RMSprop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from narrowgauge import rules
from narrowgauge.optim._named._eight_bit import EightBit
from narrowgauge.optim._optimizer import NarrowOptimizer
from narrowgauge.optim._options import Options
from narrowgauge.optim._plan import slot_storages


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


class RMSprop8bit(EightBit, RMSprop):
    """RMSprop with its moments in `log8`. Takes all of its arguments; ``centered=True`` needs other states."""
