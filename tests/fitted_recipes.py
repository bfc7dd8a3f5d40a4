"""Fitted recipes, written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from narrowgauge.linear import SWITCHBACK, LinearPlan
from narrowgauge.recipes import FittedRecipe
from narrowgauge.recipes._fitted import Choice, Computed, Kept, LayerChoice

LOG, MIXED, WIDE = {"m": "log8", "v": "log8"}, {"m": "log4", "v": "log8"}, {"m": "fp32", "v": "fp32"}


def kept(
    weights: str, states: Mapping[str, str], bytes: float = 7.0, noise: float = 0.0, loss: float = 0.0
) -> Kept:
    return Kept(weights, states, bytes, noise, loss)


def choice(*names: str, elements: int, chosen: Kept, reason: str = "by hand") -> Choice:
    return Choice(names, 1, elements, chosen, None, None, reason)


def layers(*names: str, plan: LinearPlan = SWITCHBACK) -> LayerChoice:
    return LayerChoice(names, len(names), Computed(plan, {"output": 0.02}, 0.4), None, None, "by hand")


def fitted(*choices: Choice, plans: tuple[LayerChoice, ...] = (), **more: Any) -> FittedRecipe:
    return FittedRecipe("by-hand", "a test's", torch.bfloat16, choices=choices, layers=plans, **more)


# For the GPT-2 presets of trainers and of transformers: most parameters by the last choice.
GPT = fitted(
    choice("*.wte.*", "*.wpe.*", elements=20_000, chosen=kept("split8", LOG, 7.03)),
    choice("*.mlp.*.weight", elements=60_000, chosen=kept("split8", MIXED, 6.53), reason="little noise"),
    choice("*", elements=30_000, chosen=kept("master", WIDE, 16.0)),
    plans=(layers("*.mlp.c_fc"),),
    facts={"model": "micro"},
)
