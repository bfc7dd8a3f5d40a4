"""Adam, AdamW, StableAdamW, Collage, LAMB, NAdam, Adan and AdEMAMix."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from narrowgauge import rules
from narrowgauge._arguments import check_choice, is_number
from narrowgauge.optim._optimizer import NarrowOptimizer
from narrowgauge.optim._options import EIGHT_BIT, Options, with_defaults


class Adam(NarrowOptimizer):
    """Adam with any weight storage and any state storage.

    Arguments up to `amsgrad` are those of `torch.optim.Adam`, in its order and with its defaults.

    Args:
        params: float32, bfloat16 or float16 parameters, named or not, or groups, which may override any option.
        lr: learning rate, a number or a 0-d tensor.
        betas: decay rates of the first and second moment, each in [0, 1); two numbers, or two tensors of one
            element.
        eps: added to the root of the second moment (outside the root, as in torch).
        weight_decay: added to the gradient, as L2 regularization is.
        amsgrad: refused if True.
        decoupled_weight_decay: True makes it AdamW.
        beta2_schedule: lambda of beta2 = 1 - t^-lambda, which replaces ``betas[1]``; None for no schedule.
        **options: the options of every optimizer; see `Options`. Slots: ``"m"``, ``"v"``; ``states="expansion"``
            stores m in bf16 and v as hi + lo (Collage-plus).

    Raises:
        ValueError: for a wrong value or combination, by name.

    Source: Kingma and Ba 2015.
    """

    rule = rules.ADAM

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        decoupled_weight_decay: bool = False,
        beta2_schedule: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        hyperparameters = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "decoupled_weight_decay": decoupled_weight_decay, "beta2_schedule": beta2_schedule,
        }  # fmt: skip
        super().__init__(params, hyperparameters, options)

    def base_rule(self, group: Mapping[str, Any]) -> rules.Rule:
        return rules.ADAMW if group.get("decoupled_weight_decay", self.rule is rules.ADAMW) else rules.ADAM

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        if group["foreach"] and not group["capturable"]:
            named = {"lr": group["lr"], "betas[0]": group["betas"][0], "betas[1]": group["betas"][1]}
            for name, value in named.items():
                if isinstance(value, Tensor):
                    raise ValueError(f"{name} as a Tensor is not supported for capturable=False and foreach=True")


class AdamW(Adam):
    """AdamW with any weight storage and any state storage.

    Arguments up to `amsgrad` are those of `torch.optim.AdamW`, in its order and with its defaults.

    Args:
        params, lr, betas, eps, amsgrad, beta2_schedule, **options: the arguments of `Adam`.
        weight_decay: decoupled decay, applied with the update as one sum.

    Source: Loshchilov and Hutter 2019; Collage, Algorithm 2; 8-bit Optimizers via Block-wise Quantization.
    """

    rule = rules.ADAMW
    identity: ClassVar[tuple[str, ...]] = ("decoupled_weight_decay",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        beta2_schedule: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad,
            decoupled_weight_decay=True, beta2_schedule=beta2_schedule,
            **with_defaults(type(self), options),
        )  # fmt: skip


class StableAdamW(AdamW):
    """AdamW with update clipping: each parameter's step is divided by how far its second moment lags behind.

    The debiased averages of the paper's Algorithm 2 are AdamW's bias correction in another place; its learning
    rate scales the decay too.

    Args:
        params, lr, betas, weight_decay, beta2_schedule, **options: the arguments of `AdamW`.
        eps: added to the root of the second moment; its square is the lower bound of the second moment in the
            ratio that clips.

    It clips unless it is made with ``clip_updates=False``; loading a checkpoint of AdamW does not change that.

    Source: Wortsman et al. 2023, Algorithm 2.
    """

    identity = (*AdamW.identity, "clip_updates")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        beta2_schedule: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        options.setdefault("clip_updates", True)
        super().__init__(params, lr, betas, eps, weight_decay, beta2_schedule=beta2_schedule, **options)


class CollageAdamW(AdamW):
    """Collage: AdamW on bf16 words alone, with expansions where precision matters.

    Args:
        variant: ``"light"``: weights as expansions, bf16 states (10 bytes a parameter, gradient included);
            ``"plus"``: the second moment as an expansion too (12 bytes).
        *args, **options: the arguments of AdamW but `weights` and `states`, which follow from the variant.

    Source: Collage, Algorithm 2 and Table 2.
    """

    def __init__(
        self, params: ParamsT, *args: Any, variant: Literal["light", "plus"] = "plus", **options: Any
    ) -> None:
        check_choice("variant", variant, ("light", "plus"))
        states = "bf16" if variant == "light" else "expansion"
        super().__init__(params, *args, weights="expansion", states=states, **options)


class LAMB(NarrowOptimizer):
    """LAMB: AdamW's direction, each parameter's step in proportion to the norm of its weights.

    Args:
        params: float32, bfloat16 or float16 parameters, named or not, or groups, which may override any option.
        lr: learning rate, a number or a 0-d tensor.
        betas: decay rates of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, part of the direction.
        beta2_schedule: lambda of beta2 = 1 - t^-lambda, which replaces ``betas[1]``; None for no schedule.
        **options: the options of every optimizer; see `Options`. Slots: ``"m"``, ``"v"``.

    Raises:
        ValueError: for a wrong value or combination, by name.

    Source: You et al. 2020, Algorithm 2.
    """

    rule = rules.LAMB

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
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "beta2_schedule": beta2_schedule,
        }  # fmt: skip
        super().__init__(params, hyperparameters, options)


class NAdam(NarrowOptimizer):
    """NAdam, which is Adam with Nesterov's momentum, with any weight storage and any state storage.

    Arguments up to `decoupled_weight_decay` are those of `torch.optim.NAdam`, in its order and with its defaults.

    Args:
        params: float32, bfloat16 or float16 parameters, named or not, or groups, which may override any option.
        lr: learning rate, a number or a 0-d tensor.
        betas: decay rates of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: added to the gradient, as L2 regularization is, unless it is decoupled.
        momentum_decay: how fast the momentum warms up: by 1 - 0.96^(t momentum_decay) / 2.
        decoupled_weight_decay: True makes the decay AdamW's, applied with the update as one sum.
        **options: the options of every optimizer; see `Options`. Slots: ``"m"``, ``"v"``.

    Raises:
        ValueError: for a wrong value or combination, by name.

    Source: Dozat 2016, as in torch.
    """

    rule = rules.NADAM

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        hyperparameters = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "momentum_decay": momentum_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        }  # fmt: skip
        super().__init__(params, hyperparameters, options)

    def base_rule(self, group: Mapping[str, Any]) -> rules.Rule:
        return rules.NADAMW if group["decoupled_weight_decay"] else rules.NADAM


class Adan(NarrowOptimizer):
    """Adan: Nesterov momentum from differences of gradients, with any weight storage and any state storage.

    Args:
        params: float32, bfloat16 or float16 parameters, named or not, or groups, which may override any option.
        lr: learning rate, a number or a 0-d tensor.
        betas: decay rates of the first moment, of the average difference and of the second moment, each in [0, 1).
            As in the authors' code, they are one minus the paper's betas.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay: weights are divided by 1 + lr weight_decay.
        **options: the options of every optimizer; see `Options`. Slots: ``"m"``, ``"diff"``, ``"v"`` and
            ``"previous"``, the last gradient.

    Raises:
        ValueError: for a wrong value or combination, by name.

    Source: Xie et al. 2022, Algorithm 1.
    """

    rule = rules.ADAN

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        hyperparameters = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, hyperparameters, options)


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


class Adam8bit(Adam):
    """Adam with 8-bit states: both moments in `log8`. Takes all of Adam's arguments."""

    default_states = EIGHT_BIT


class AdamW8bit(AdamW):
    """AdamW with 8-bit states: both moments in `log8`. Takes all of AdamW's arguments."""

    default_states = EIGHT_BIT


class LAMB8bit(LAMB):
    """LAMB with both moments in `log8`. Takes all of LAMB's arguments."""

    default_states = EIGHT_BIT


class AdEMAMix8bit(AdEMAMix):
    """AdEMAMix with m and v in `log8` and the slow moment m2 in fp32. Takes all of AdEMAMix's arguments.

    A step moves m2 by a ten-thousandth of the gradient, which narrow codes round away. The rounding error cannot be
    added to the weight either, because it would act over ten thousand steps. After 20,000 steps with m2 in `8bit`
    weights are off by 67 % of the distance moved, in `bf16` by 18 % (docs/decisions/slow-moment.md).
    """

    default_states: ClassVar[Any] = MappingProxyType({"m": EIGHT_BIT, "m2": "fp32", "v": EIGHT_BIT})
