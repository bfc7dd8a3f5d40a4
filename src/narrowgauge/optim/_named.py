"""The named optimizers: a rule, its hyperparameters in torch's order and with torch's defaults, and options.

The names that end in 8bit store moments as `log8`: where gradients of one block differ in scale, as an embedding's
do, the paper's codes lose small second moments, and training is no longer that of 32-bit states
(docs/studies/bytes_and_loss.md). The paper's codes, which are also bitsandbytes', are `states="8bit"`.

Source of the 8-bit names: 8-bit Optimizers via Block-wise Quantization.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from narrowgauge import rules
from narrowgauge._arguments import check_choice, is_integer, is_number
from narrowgauge.optim._optimizer import NarrowOptimizer
from narrowgauge.optim._options import Options, with_defaults


class EightBit:
    """Mixin, as the first base: makes `log8` the default of `states`."""

    def __init__(
        self, params: ParamsT, *args: Any, states: str | Mapping[str, str] = "log8", **options: Any
    ) -> None:
        super().__init__(params, *args, states=states, **options)  # type: ignore[call-arg]


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
            **with_defaults(type(self).__name__, options),
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


class Muon(NarrowOptimizer):
    """Muon: orthogonalized momentum for matrices, in any weight storage, its momentum in any state storage.

    Arguments up to `adjust_lr_fn` are those of `torch.optim.Muon`, in its order and with its defaults.

    Args:
        params: matrices (two dimensions), named or in groups; float32, bfloat16 or float16. Biases, norms and
            embeddings go to another optimizer.
        lr: learning rate, a number or a 0-d tensor.
        weight_decay: decoupled decay.
        momentum: decay rate of the momentum.
        nesterov: orthogonalize the momentum as it will be.
        ns_coefficients: of the Newton-Schulz iteration.
        eps: lower bound of the norm that a matrix is divided by.
        ns_steps: iterations, fewer than 100.
        adjust_lr_fn: ``"original"`` (also None) scales steps by sqrt(max(1, rows / columns)), ``"match_rms_adamw"``
            by 0.2 sqrt(max(rows, columns)).
        **options: the options of every optimizer; see `Options`. Slot: ``"m"``. ``arithmetic="strict"`` rounds
            what is elementwise; the orthogonalization is in bf16 with float32 accumulation in any case.

    Raises:
        ValueError: for a wrong value, shape or combination, by name.
        RuntimeError: for a complex parameter.

    Source: Jordan et al. 2024; Liu et al. 2025; as in torch.
    """

    refusals: ClassVar[Mapping[str, str]] = {
        "lr": "Learning rate should be >= 0 but is",
        "momentum": "momentum should be >= 0 but is",
        "weight_decay": "weight decay should be >= 0 but is",
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        hyperparameters = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
        }  # fmt: skip
        super().__init__(params, hyperparameters, options)

    def base_rule(self, group: Mapping[str, Any]) -> rules.Rule:
        coefficients, steps, ratio = (group[key] for key in ("ns_coefficients", "ns_steps", "adjust_lr_fn"))
        if ratio not in (None, "original", "match_rms_adamw"):
            raise ValueError(f"Adjust learning rate function {ratio} is not supported")
        if not is_integer(steps) or not 0 <= steps < 100:
            raise ValueError(
                "Number of steps must be less than 100 for computational efficiency; "
                f"ns_steps must be from 0 to 99, got {steps!r}"
            )
        three = isinstance(coefficients, tuple | list) and len(coefficients) == 3
        if not three or not all(map(is_number, coefficients)):
            raise ValueError(
                f"Coefficients must be a tuple of exactly 3 values; ns_coefficients is {coefficients!r}"
            )
        return rules.Muon(tuple(coefficients), steps, group["eps"], ratio or "original")

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        for p in group.get("params", ()):
            if p.is_complex():
                raise RuntimeError(f"Muon does not support complex parameters, got {p.dtype}")
            if p.dim() != 2:
                raise ValueError(
                    f"Muon only supports 2D parameters whereas we found a parameter with size: {p.size()}"
                )


class Adam8bit(EightBit, Adam):
    """Adam with 8-bit states: both moments in `log8`. Takes all of Adam's arguments."""


class AdamW8bit(EightBit, AdamW):
    """AdamW with 8-bit states: both moments in `log8`. Takes all of AdamW's arguments."""


class LAMB8bit(EightBit, LAMB):
    """LAMB with both moments in `log8`. Takes all of LAMB's arguments."""


class SGD8bit(EightBit, SGD):
    """SGD with its momentum in `log8`. Takes all of SGD's arguments.

    With a momentum above 0.95 `states="bf16"` is nearer to the exact one: what `log8` passes on to the weight is
    then tens of steps long (docs/states.md).
    """


class LARS8bit(EightBit, LARS):
    """LARS with its momentum in `log8`. Takes all of LARS's arguments; of its momentum see `SGD8bit`."""


class Adagrad8bit(EightBit, Adagrad):
    """AdaGrad with its sum of squares in `log8`. Takes all of Adagrad's arguments."""


class Lion8bit(EightBit, Lion):
    """Lion with its moment in block-wise dynamic codes. Takes all of Lion's arguments.

    `log8`, the storage of the other 8-bit optimizers, has no advantage here: a direction of signs is not linear in
    the moment, so its rounding error cannot be given to the weight (docs/studies/state_codecs.md).
    """

    def __init__(
        self, params: ParamsT, *args: Any, states: str | Mapping[str, str] = "8bit", **options: Any
    ) -> None:
        super().__init__(params, *args, states=states, **options)
