"""Rules, weight storages, state storages, arithmetics and dtypes: every pair of them that goes together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from narrowgauge.storage import state_storage, state_storages, weight_storage, weight_storages
from pairwise import EVERYTHING, cases

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Record:
    """One rule; a new one is one more line in RECORDS.

    Attributes:
        name: of the optimizer.
        options: what it needs to move weights near 1 by about 0.01 to 0.3 in 60 steps.
        loose: how much more than AdamW's the narrow states' error may be: further moments add to it, an
            orthogonalization amplifies it.
        few: whether it runs with the storages of FEW alone: with the others it does what the rules before it do.
            With `--slow` it runs with all.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    loose: float = 1.0
    few: bool = False


RECORDS = {
    "adamw": Record("AdamW", {"lr": 1e-3}),
    "adam": Record("Adam", {"lr": 1e-3, "weight_decay": 0.1}, few=True),
    "stable-adamw": Record("StableAdamW", {"lr": 1e-3}),
    "adamw-schedule": Record("AdamW", {"lr": 1e-3, "beta2_schedule": 0.8}, few=True),
    "sgd": Record("SGD", {"lr": 0.05, "momentum": 0.9}),
    "sgd-nesterov": Record("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}, few=True),
    "sgd-bare": Record("SGD", {"lr": 0.5}, few=True),
    "lamb": Record("LAMB", {"lr": 1e-3}, few=True),
    "lars": Record("LARS", {"lr": 1.0}, few=True),
    "adagrad": Record("Adagrad", {"lr": 1e-3}),
    "adagrad-momentum": Record("Adagrad", {"lr": 2e-4, "momentum": 0.9}, few=True),
    "adafactor": Record("Adafactor", {"lr": 1e-3}),
    "lion": Record("Lion", {"lr": 1e-3}),
    "rmsprop": Record("RMSprop", {"lr": 1e-4, "momentum": 0.9, "weight_decay": 0.1}, few=True),
    "nadam": Record("NAdam", {"lr": 1e-3}, few=True),
    "adan": Record("Adan", {"lr": 1e-3, "weight_decay": 0.1}, loose=1.5, few=True),
    "cautious": Record("AdEMAMix", {"lr": 1e-3, "alpha": 1.0, "cautious": True}, loose=1.5, few=True),
    "muon": Record("Muon", {"lr": 2e-3}, loose=4.0),
    "schedule-free": Record("ScheduleFreeAdamW", {"lr": 2e-3, "warmup_steps": 10}),
}
Case = tuple[str, str, str, str, torch.dtype]  # rule, weights, states, arithmetic, dtype
ARITHMETICS = ("fp32", "strict")
FEW = ("plain", "split8", "bf16", "log8")


def taken(rule: str, weights: str, states: str, arithmetic: str, dtype: torch.dtype) -> bool:
    """Whether an optimizer takes this combination."""
    fits = dtype in weight_storage(weights).dtypes
    # Without momentum there is no state to be rounded.
    rounded = weight_storage(weights).rounded and (state_storage(states).rounded or rule == "sgd-bare")
    if weight_storage(weights).float8 and rule == "schedule-free":  # writes to parameters between steps
        return False
    if RECORDS[rule].few and not EVERYTHING and not {weights, states} <= set(FEW):
        return False
    return fits and (arithmetic == "fp32" or rounded)


def differs(rule: str, weights: str, states: str, arithmetic: str, dtype: torch.dtype) -> bool:
    """Whether it is taken, and another than with fp32: without a second moment `factored` is fp32."""
    alone = rule.startswith(("sgd", "lars", "lion", "muon")) and states == "factored"
    return taken(rule, weights, states, arithmetic, dtype) and not alone


CASES = [
    pytest.param(case.values, marks=case.marks)
    for case in cases(RECORDS, weight_storages(), state_storages(), ARITHMETICS, DTYPES, allowed=differs)
]
