"""Recipes inside Hugging Face's Trainer, in one line.

    Trainer(model, args, optimizer_cls_and_kwargs=(RecipeFactory, {"recipe": "adamw8bit-split8", "args": args}))

If the class is not an optimizer, Trainer calls it without arguments, and calls the resulting object with the model.
At that time the model is on its device and not yet wrapped, so the recipe can cast it and swap its linear layers.
The schedule stays Trainer's own.

A callback with the gauges is `narrowgauge.gauges.HuggingFaceCallback`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from narrowgauge import recipes
from narrowgauge._arguments import check_instance
from narrowgauge._text import warn
from narrowgauge.linear import LinearPlan, SwapReport, named_plan, swap_linears
from narrowgauge.linear._swap import ADAPTERS, output_heads
from narrowgauge.optim import NarrowOptimizer
from narrowgauge.recipes import Recipe


class RecipeFactory:
    """Applies a recipe to the model of a `transformers.Trainer`."""

    def __call__(
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        *,
        recipe: str | Recipe,
        lr: float | None = None,
        linear: str | LinearPlan | None = None,
        keep: Iterable[str] | None = None,
        **options: Any,
    ) -> NarrowOptimizer:
        """Cast the model, swap its linear layers if asked for, and make its optimizer.

        Args:
            model: Trainer's; changed in place.
            args: the Trainer's arguments, for learning rate, weight decay, betas and epsilon. Options given by name
                take precedence. Hyperparameters that the recipe's optimizer does not have are ignored. Without
                `args` the optimizer's defaults hold.
            recipe: name of a recipe, the path of a fitted one's file, or a recipe.
            lr: learning rate; must be given without `args`.
            linear: plan for the linear layers, or its name and format: ``"SWITCHBACK:e4m3"``. None swaps none.
            keep: linear layers to keep; see `narrowgauge.linear.swap_linears`. None keeps output layers and
                adapters.
            **options: of `Recipe.apply` and of the optimizer: ``weight_decay``, ``max_grad_norm``, ``decay_all``, …

        Raises:
            ValueError: without a learning rate, for an unknown recipe, for a plan that fits no layer or goes with a
                recipe that has plans itself, for `keep` without `linear`, and for arguments that the optimizer
                refuses.
            TypeError: for a key that nothing takes.
        """
        if keep is not None and linear is None:
            raise ValueError(f"keep must be None without linear, got {keep!r}")
        chosen = recipes.get(recipe) if isinstance(recipe, str) else recipe
        plan = named_plan(linear) if isinstance(linear, str) else linear
        if plan is not None and chosen.layer_plans:
            raise ValueError(
                f"linear must be None with recipe {chosen.name!r}, which has plans of layers, got {plan.title}"
            )
        given = {**chosen.known(hyperparameters(args)), **options} if args is not None else options
        if args is not None and (args.bf16 or args.fp16) and chosen.dtype != torch.float32:
            what = "args.bf16 and args.fp16 switch on autocast: leave them out, the recipe casts the model"
            warn(what)
        if args is not None and (args.optim not in ("adamw_torch", "adamw_torch_fused") or args.optim_args):
            warn("args.optim and args.optim_args are ignored: leave them out, the recipe makes the optimizer")
        if lr is not None:
            given["lr"] = lr
        if "lr" not in given:
            raise ValueError(
                "lr must be given, or args=TrainingArguments(...): Trainer does not pass on its own, got None"
            )
        try:
            optimizer: NarrowOptimizer = chosen.apply(model, **given)
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            named = {**inspect.signature(self.__call__).parameters, **inspect.signature(chosen.apply).parameters}
            keys = [key for key, p in named.items() if key not in ("model", "around") and p.kind != p.VAR_KEYWORD]
            raise TypeError(f"RecipeFactory: {error}; other keys are {', '.join(keys)}") from None
        if plan is not None:
            swap(model, plan, keep)  # the parameters stay, so the optimizer may come first
        return optimizer


def hyperparameters(args: TrainingArguments) -> dict[str, Any]:
    """What Trainer gives to its own AdamW."""
    check_instance("args", args, TrainingArguments, "transformers.TrainingArguments(...)")
    betas = (args.adam_beta1, args.adam_beta2)
    return {
        "lr": args.learning_rate, "weight_decay": args.weight_decay, "betas": betas, "eps": args.adam_epsilon
    }  # fmt: skip


def swap(model: nn.Module, plan: LinearPlan, keep: Iterable[str] | None = None) -> SwapReport:
    """Swap the linear layers of a transformers model, of one with peft's adapters too.

    Args:
        model: changed in place.
        plan: of the layers.
        keep: layers to keep; None keeps the output layers and the adapters' own small layers.

    Raises:
        ValueError: if no layer could be swapped, and none has the plan already; the message says why.
    """
    if keep is None:
        base = getattr(model, "get_base_model", lambda: model)()  # under peft
        keep = [*output_heads(base), ADAPTERS]
    report = swap_linears(model, plan, keep)
    if not report.swapped and not any(getattr(layer, "plan", None) == plan for layer in model.modules()):
        raise ValueError(f"linear: no layer of {type(model).__name__} could be swapped\n{report}")
    return report
