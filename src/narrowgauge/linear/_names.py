"""Plans by name (``SWITCHBACK:e4m3``), and the output layers of models by name."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from narrowgauge.linear._plan import (
    HIGH_PRECISION,
    LLM_INT8,
    SWITCHBACK,
    SWITCHBACK_M,
    SWITCHBACK_Q,
    TENSORWISE_FP8,
    LinearPlan,
)

_PLANS = {
    plan.name: plan for plan in (SWITCHBACK, SWITCHBACK_M, SWITCHBACK_Q, LLM_INT8, TENSORWISE_FP8, HIGH_PRECISION)
}


def named_plan(text: str) -> LinearPlan:
    """A plan by its name and format: ``SWITCHBACK``, ``switchback:e4m3``, ``TENSORWISE_FP8:e4m3/e5m2``.

    Raises:
        ValueError: for an unknown name or formats that do not go together.
    """
    name, colon, formats = text.partition(":")
    plan = _PLANS.get(name.upper())
    if plan is None or (colon and not plan.formats) or formats.endswith("/"):
        raise ValueError(
            f"plan must be a name such as {', '.join(_PLANS)}, those in eight bits with an optional format "
            f"(SWITCHBACK:e4m3, TENSORWISE_FP8:e4m3/e5m2), got {text!r}"
        )
    if not colon:
        return plan
    format, slash, gradient = formats.partition("/")
    try:
        return plan.with_format(cast(Any, format), cast(Any, gradient) if slash else None)
    except ValueError as error:
        raise ValueError(f"plan {text!r}: {error}") from None


# In transformers models. They stay in high precision: their noise would be the loss's.
_HEADS = ("lm_head", "cls", "visual_projection", "text_projection", "classifier")


def output_heads(model: nn.Module) -> list[str]:
    """The names of a transformers model's output layers, for `swap_linears` to keep."""
    return [name for name, _ in model.named_children() if name in _HEADS]
