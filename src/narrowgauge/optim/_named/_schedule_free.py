"""Schedule-Free AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import ParamsT

from narrowgauge import rules
from narrowgauge._arguments import Count, Flag, check
from narrowgauge._torch_private import local
from narrowgauge.optim._changes import KEPT, STORAGES
from narrowgauge.optim._optimizer import NarrowOptimizer
from narrowgauge.optim._options import Options
from narrowgauge.optim._sharding import is_shared

_MODE = "eval_mode"


class ScheduleFreeAdamW(NarrowOptimizer):
    """Schedule-Free AdamW: AdamW without a learning rate schedule and without a known number of steps.

    While training, the parameters hold y, the point where gradients are computed. The result of the method is the
    average x. Call `eval()` before validation and before you save the model for use; it writes x into the
    parameters. Call `train()` before the next step; it writes y back. A step before that raises RuntimeError.

    Do not change `lr` while training, by a scheduler or by hand: the average weights its terms for a constant `lr`
    after the warm-up.

    Args:
        params: float32, bfloat16 or float16 parameters, named or not, or groups, which may override any option.
        lr: learning rate, a number or a 0-d tensor.
        betas: the share of x in y = (1 - beta1) z + beta1 x, in (0, 1), and the decay rate of the second moment, in
            [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, at y.
        warmup_steps: steps in which the learning rate grows in proportion to the step, up to `lr`.
        **options: the options of every optimizer; see `Options`. Slots: ``"v"``, and ``"z"``, the weight that takes
            the steps, in `fp32` or `expansion`. If `states` is one name of another storage, z is in fp32.

    The average is weighted by the square of the learning rate, the authors' default. Their arguments `r` and
    `weight_lr_power`, which choose other weights, are left out.

    Raises:
        ValueError: for a wrong value or combination, by name.

    Source: Defazio et al. 2024, Algorithm 1.
    """

    rule = rules.SCHEDULE_FREE
    writes_weights = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.0025,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        **options: Unpack[Options],
    ) -> None:
        hyperparameters = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "warmup_steps": warmup_steps,
            _MODE: False,
        }  # fmt: skip
        super().__init__(params, hyperparameters, options)

    def check(self, group: Mapping[str, Any]) -> None:
        check("warmup_steps", group["warmup_steps"], Count)
        check(_MODE, group[_MODE], Flag)
        super().check(group)
        if not group["betas"][0] > 0:
            raise ValueError(f"betas[0] must be above 0: without y no average is known, got {group['betas'][0]}")

    def _is_evaluating(self) -> bool:
        return any(group[_MODE] for group in self.param_groups)

    @torch.no_grad()
    def eval(self) -> None:
        """Turn the parameters into the average x, rounded to their dtype.

        The bits of y are stored in the state until `train()`, in 4 bytes a parameter. Low words remain those of y.
        Calling it again does nothing.
        """
        if self._is_evaluating():
            return
        for group in self.param_groups:
            group[_MODE] = True
        for p, plan in self.plans(lazy=True):  # the slot y is on now, and starts at the parameter
            state, here = self.state.get(p), local(p)
            z = next((slot for slot in plan.slots if slot.slot.name == "z"), None)
            if not state or z is None:
                continue  # never stepped: x is y
            y = plan.weight.read(here, plan.low_of(state))
            own = self._group_of(p)
            assert own is not None
            beta1 = float(own["betas"][0])
            self._write(p, y + (1 / beta1 - 1) * (y - z.decode(state, here.shape)))

    @torch.no_grad()
    def train(self) -> None:
        """Turn the parameters back into y, bit for bit. Calling it again does nothing."""
        if not self._is_evaluating():
            return
        for p, _ in self.plans(lazy=True):
            y = self.state[p].pop("y", None) if p in self.state else None
            if y is not None:
                self._write(p, y)
        for group in self.param_groups:
            group[_MODE] = False

    @staticmethod
    def _write(p: Tensor, value: Tensor) -> None:
        local(p).copy_(value)
        if is_shared(p):
            increment_version([p])

    def full_weights(self) -> dict[Tensor, Tensor]:
        """As of every optimizer; after `eval()` the average x, as the parameters have it."""
        if not self._is_evaluating():
            return super().full_weights()
        return {p: p.detach().to(torch.float32, copy=True) for p, _ in self.plans()}

    def set_full_weights(self, weights: Mapping[Tensor, Tensor] | Mapping[str, Tensor]) -> None:
        """As of every optimizer; not after `eval()`, which is a RuntimeError."""
        if self._is_evaluating():
            raise RuntimeError("set_full_weights: the parameters hold the average; call train() first")
        super().set_full_weights(weights)

    def begin_step(self) -> None:
        if self._is_evaluating():
            raise RuntimeError("step: the parameters hold the average; call the optimizer's train() first")
        super().begin_step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as every optimizer does. The mode, `eval()` or `train()`, comes from the checkpoint.

        The model must have been saved in the same mode.

        Raises:
            ValueError: for a state of another rule or other shapes, and for one that was saved in `eval()` beside
                other `weights`; nothing is changed then.
        """
        groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
        for live, saved in zip(self.param_groups, groups if isinstance(groups, list | tuple) else (), strict=False):
            evaluates = isinstance(saved, Mapping) and saved.get(_MODE) is True
            if evaluates and _weights(saved) != _weights(live):
                raise ValueError(
                    f"state_dict: weights must be {_weights(saved)!r:.200} for a state that was saved in eval(), "
                    f"got {_weights(live)!r:.200}; save it after train()"
                )
        super().load_state_dict(state_dict)


def _weights(group: Mapping[str, Any]) -> Any:
    """The weight storages of a group and of its single parameters."""
    of_single = [group.get(key) for key in (KEPT, STORAGES)]
    own = [(name, of) for each in of_single if isinstance(each, Mapping) for name, of in each.items()]
    found = {name: of["weights"] for name, of in own if isinstance(of, Mapping) and "weights" in of}
    return (group.get("weights"), found) if found else group.get("weights")
