"""The AdamW family: thin names over one optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

from narrowgauge.optim._optimizer import NarrowOptimizer, check_hyperparameters
from narrowgauge.rules import ADAMW


class AdamW(NarrowOptimizer):
    """AdamW with any weight storage and any state storage.

    Arguments up to `amsgrad` are those of `torch.optim.AdamW`, in its order and with its defaults.

    Args:
        params: parameters, named parameters or groups; float32, bfloat16 or float16. Groups may override any
            option below.
        lr: learning rate, a number or a 0-d tensor.
        betas: decay rates of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment (outside the root, as in torch).
        weight_decay: decoupled decay, applied with the update as one sum.
        amsgrad: refused if True.
        weights: ``"plain"``, ``"kahan"``, ``"expansion"``, ``"split"``, ``"split8"``, ``"stochastic"`` or
            ``"master"``; float32 parameters take ``"plain"`` only, float16 all but the splits.
        states: ``"fp32"``, ``"bf16"``, ``"expansion"`` (m in bf16, v as hi + lo: Collage-plus) or ``"8bit"``; or
            one a slot: ``{"m": "8bit", "v": "fp32"}``.
        block_size: elements that share a scale in 8-bit states.
        arithmetic: ``"fp32"`` computes in float32 and rounds each storage once, on write; ``"strict"`` rounds
            every operation to the storages' formats, as Collage's Algorithm 2 is written.
        nonfinite: what a gradient with inf or NaN does: ``"skip"`` leaves that parameter, its state, decay and
            step count untouched and counts it in `skipped`; ``"propagate"`` lets it through, as torch does;
            ``"raise"`` raises FloatingPointError.
        min_quantized_size: parameters with fewer elements keep fp32 states instead of 8-bit ones.
        seed: key of the random bits for stochastic rounding, which depend on it, the parameter's place, the
            element and the step alone.
        maximize: ascend instead.
        foreach, fused: accepted for compatibility and moot: there is one implementation per device.
        capturable: accepted and always so: on a GPU the step count lives on the device and the step does not
            synchronise (``arithmetic="strict"`` and ``nonfinite="raise"`` do, and cannot be captured).
        differentiable: refused if True.

    Raises:
        ValueError: for a value or a combination that is not taken, by name.

    Source: Loshchilov and Hutter 2019; Collage, Algorithm 2; 8-bit Optimizers via Block-wise Quantization.
    """

    rule = ADAMW

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        weights: str = "plain",
        states: str | Mapping[str, str] = "fp32",
        block_size: int = 256,
        arithmetic: Literal["fp32", "strict"] = "fp32",
        nonfinite: Literal["skip", "propagate", "raise"] = "skip",
        min_quantized_size: int = 4096,
        seed: int = 0,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "weights": weights,
            "states": states if isinstance(states, str) else dict(states),
            "block_size": block_size,
            "arithmetic": arithmetic,
            "nonfinite": nonfinite,
            "min_quantized_size": min_quantized_size,
            "seed": seed,
            "maximize": maximize,
            "capturable": capturable,
            "amsgrad": amsgrad,
            "differentiable": differentiable,
        }
        super().__init__(params, defaults)

    def check(self, group: Mapping[str, Any]) -> None:
        check_hyperparameters(group["lr"], group["betas"], group["eps"], group["weight_decay"])
        for name in ("amsgrad", "differentiable"):
            if group[name]:
                raise ValueError(f"{name}: got True, {type(self).__name__} takes False only")
        super().check(group)
        arithmetic, nonfinite = group["arithmetic"], group["nonfinite"]
        if group["capturable"] and (arithmetic == "strict" or nonfinite == "raise"):
            raise ValueError(
                f"capturable: got True with arithmetic={arithmetic!r}, nonfinite={nonfinite!r}; "
                "takes arithmetic='fp32' and nonfinite='skip' or 'propagate'"
            )


class AdamW8bit(AdamW):
    """AdamW with 8-bit states: both moments as block-wise dynamic codes. Takes all of AdamW's arguments.

    Source: 8-bit Optimizers via Block-wise Quantization.
    """

    def __init__(
        self, params: ParamsT, *args: Any, states: str | Mapping[str, str] = "8bit", **options: Any
    ) -> None:
        super().__init__(params, *args, states=states, **options)


class CollageAdamW(AdamW):
    """Collage: AdamW on bf16 words alone, with expansions where precision matters.

    Args:
        variant: ``"light"``: weights as expansions, bf16 states (10 bytes a parameter, gradient included);
            ``"plus"``: the second moment as an expansion too (12 bytes).
        *args, **options: as AdamW takes them; `weights` and `states` follow from the variant.

    Raises:
        ValueError: for an unknown variant, and whatever AdamW refuses.

    Source: Collage, Algorithm 2 and Table 2.
    """

    def __init__(
        self, params: ParamsT, *args: Any, variant: Literal["light", "plus"] = "plus", **options: Any
    ) -> None:
        states = {"light": "bf16", "plus": "expansion"}
        if variant not in states:
            raise ValueError(f"variant: got {variant!r}, takes 'light' or 'plus'")
        for name in ("weights", "states"):
            if name in options:
                raise ValueError(
                    f"{name}: got {options[name]!r}, follows from variant={variant!r} and is not taken"
                )
        super().__init__(params, *args, weights="expansion", states=states[variant], **options)
