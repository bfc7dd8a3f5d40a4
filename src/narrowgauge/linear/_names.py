"""Plans as people type them: a name, and behind a colon the format, or one for operands and one for gradients."""

from __future__ import annotations

from typing import Any, cast

from narrowgauge._arguments import typed
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


@typed
def named_plan(text: str) -> LinearPlan:
    """A plan by its name and format: ``SWITCHBACK``, ``switchback:e4m3``, ``TENSORWISE_FP8:e4m3/e5m2``.

    Raises:
        ValueError: for an unknown name or formats that do not go together.
    """
    name, colon, formats = text.partition(":")
    plan = _PLANS.get(name.upper())
    if plan is None or (colon and not plan.formats) or formats.endswith("/"):
        raise ValueError(
            f"plan: got {text!r}, takes names such as {', '.join(_PLANS)}, in eight bits with a format behind a "
            "colon: SWITCHBACK:e4m3, TENSORWISE_FP8:e4m3/e5m2"
        )
    if not colon:
        return plan
    format, slash, gradient = formats.partition("/")
    try:
        return plan.with_format(cast(Any, format), cast(Any, gradient) if slash else None)
    except ValueError as error:
        raise ValueError(f"plan: got {text!r}: {error}") from None
