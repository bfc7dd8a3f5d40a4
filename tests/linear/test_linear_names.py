"""Plans as they are typed."""

from __future__ import annotations

import pytest

from narrowgauge import linear
from narrowgauge.linear import LinearPlan, named_plan


def test_every_plan_has_its_name() -> None:
    plans = [value for value in vars(linear).values() if isinstance(value, LinearPlan)]
    assert len(plans) == 6
    for plan in plans:
        assert named_plan(plan.name) is plan
        assert named_plan(plan.name.lower()) is plan


def test_a_format_for_all_or_one_for_operands_and_one_for_gradients() -> None:
    assert named_plan("switchback:e4m3") == linear.SWITCHBACK.with_format("e4m3")
    assert named_plan("TENSORWISE_FP8:e4m3/e5m2") == linear.TENSORWISE_FP8.with_format("e4m3", "e5m2")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nimble", "plan: got 'nimble', takes names such as SWITCHBACK"),
        ("", "plan: got ''"),
        ("SWITCHBACK:e4m3/", "plan: got 'SWITCHBACK:e4m3/'"),
        ("HIGH_PRECISION:int8", "plan: got 'HIGH_PRECISION:int8'"),
        ("SWITCHBACK:int4", "plan: got 'SWITCHBACK:int4': format: got 'int4'"),
        ("TENSORWISE_FP8:int8/e4m3", "int8 beside int8"),
    ],
)
def test_what_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the message is compared below
        named_plan(text)
    assert says in str(caught.value)
