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
        ("nimble", "plan must be a name such as SWITCHBACK, .*, got 'nimble'"),
        ("SWITCHBACK:e4m3/", "plan must be .*, got 'SWITCHBACK:e4m3/'"),
        ("HIGH_PRECISION:int8", "plan must be .*, got 'HIGH_PRECISION:int8'"),
        ("SWITCHBACK:int4", "plan 'SWITCHBACK:int4': format must be .*, got 'int4'"),
        ("TENSORWISE_FP8:int8/e4m3", "right_format must be int8 with int8"),
    ],
)
def test_what_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        named_plan(text)
