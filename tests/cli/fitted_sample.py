"""A fitted recipe as one of a small GPT-2 looks: sixteen groups, two of them of linear layers in eight bits."""

from __future__ import annotations

from typing import Any

import torch

from narrowgauge.linear import SWITCHBACK
from narrowgauge.recipes import FittedRecipe
from narrowgauge.recipes._choices import Choice, Computed, Kept, LayerChoice

LOG8, MIXED, LOG4 = ({"m": m, "v": v} for m, v in (("log8", "log8"), ("log4", "log8"), ("log4", "log4")))
FP32 = {"m": "fp32", "v": "fp32"}
LARGE = {
    "transformer.wte.weight": (38_597_376, 1, 0.0031, 0.00022, 0.0031, 0.182),
    "transformer.h.*.mlp.c_fc.weight": (28_311_552, 12, 0.061, 0.00041, 0.0052, 0.131),
    "transformer.h.*.mlp.c_proj.weight": (28_311_552, 12, 0.0584, 0.00037, 0.0044, 0.133),
    "transformer.h.*.attn.c_attn.weight": (21_233_664, 12, 0.0713, 0.00043, 0.0129, 0.101),
    "transformer.h.*.attn.c_proj.weight": (7_077_888, 12, 0.0097, 0.000064, 0.0018, 0.041),
    "transformer.wpe.weight": (98_304, 1, 0.0009, 0.00000031, 0.000042, 0.004),
}
SMALL = {
    "transformer.h.*.mlp.c_fc.bias": 36_864, "transformer.h.*.attn.c_attn.bias": 27_648,
    "transformer.h.*.ln_1.weight": 9_216, "transformer.h.*.ln_1.bias": 9_216, "transformer.h.*.ln_2.weight": 9_216,
    "transformer.h.*.ln_2.bias": 9_216, "transformer.h.*.attn.c_proj.bias": 9_216,
    "transformer.h.*.mlp.c_proj.bias": 9_216,
}  # fmt: skip


def kept(
    weights: str, states: dict[str, str], each: float, noise: float, loss: float, ms: float | None = None
) -> Kept:
    return Kept(weights, states, each, noise, loss, ms)


def choices() -> tuple[Choice, ...]:
    found = []
    for name, (elements, tensors, noise, loss, narrower, ms) in LARGE.items():
        states, each = (MIXED, 6.52) if noise < 0.05 else (LOG8, 7.02)
        fewer = LOG4 if states is MIXED else MIXED
        found.append(
            Choice(
                (name,), tensors, elements, kept("split8", states, each, noise, loss, ms),
                kept("split8", fewer, each - 0.5, 4 * noise, narrower, ms * 1.04),
                kept("split", states, each + 1, noise / 2, loss / 2, ms),
                f"may move the loss by {loss:.2g}, narrower by {narrower:.2g}", (0.43, 0.971),
            )
        )  # fmt: skip
    found += [
        Choice(
            (name, name.replace("*", "12")) if "ln_2.bias" in name else (name,), 12, elements,
            kept("split", FP32, 16.0, 0.0, 0.0), kept("split8", LOG8, 7.04, 0.48, 0.000003), None,
            "smaller than 4096 elements: fp32 moments", None,
        )
        for name, elements in SMALL.items()
    ]  # fmt: skip
    return tuple(found)


def layers() -> tuple[LayerChoice, ...]:
    int8, e4m3 = SWITCHBACK.with_format("int8"), SWITCHBACK.with_format("e4m3")
    noise = {"output": 0.011, "grad_input": 0.013}
    exact = Computed(type(int8)(name="bf16"), {}, 0.0, 3.1)
    return (
        LayerChoice(
            ("transformer.h.*.mlp.c_fc", "transformer.h.*.mlp.c_proj"), 24, Computed(int8, noise, 0.41, 1.9),
            None, exact, "int8 is quieter than the batch",
        ),
        LayerChoice(
            ("transformer.h.*.attn.c_attn",), 12, exact,
            Computed(e4m3, {"output": 0.041, "grad_input": 0.052}, 1.31, 1.7), None,
            "e4m3 would be louder than the batch",
        ),
    )  # fmt: skip


def recipe(**facts: Any) -> FittedRecipe:
    known = {
        "parameters": 123_749_376, "lr": 6e-4, "steps": 10_000, "schedule": "cosine", "final_lr": 0.1,
        "limit": "a tolerance of 0.002 nats", "noise": 0.0523, "loss": 0.0015, "bytes": 6.87,
        "tolerance": 0.002, "probe_steps": 100, "seconds": 71.4, "device": "NVIDIA H200",
    }  # fmt: skip
    return FittedRecipe(
        "fitted", "fitted to GPT2LMHeadModel: 6.87 bytes a parameter", torch.bfloat16, "split8", "log8",
        choices=choices(), layers=layers(), facts=known | facts,
    )  # fmt: skip
