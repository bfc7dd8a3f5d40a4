"""Plans: what they say, print and refuse, and how they are typed."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

import narrowgauge as ng
from narrowgauge.linear import EightBit, LinearPlan, named_plan

PLANS = {name: plan for name in ng.linear.__all__ if isinstance(plan := getattr(ng.linear, name), LinearPlan)}


def test_plans_are_values() -> None:
    assert len(PLANS) == 7
    for name, plan in PLANS.items():
        assert plan.name == name
        assert pickle.loads(pickle.dumps(plan)) == plan
        assert not plan.formats or plan.with_format("e5m2").with_format(plan.formats[0]) == plan
        assert named_plan(name) is named_plan(name.lower()) is plan
    assert EightBit("row", "tensor", "e4m3") == EightBit("row", "tensor", "e4m3", "e4m3")
    assert PLANS["SWITCHBACK"] == LinearPlan(EightBit("row", "tensor"), EightBit("row", "tensor"))
    assert PLANS["SWITCHBACK"].simulated() != PLANS["SWITCHBACK"]


def test_with_format_changes_formats_only() -> None:
    plan = ng.linear.LLM_INT8.with_format("e4m3", gradient="e5m2")
    assert plan.output == EightBit("row", "row", "e4m3")
    assert plan.grad_input == EightBit("row", "column", "e5m2", "e4m3")
    assert plan.grad_weight == EightBit("column", "column", "e5m2", "e4m3")
    assert plan.with_format("int8") == ng.linear.LLM_INT8
    assert ng.linear.SWITCHBACK_M.with_format("e4m3").saved == "codes"
    assert ng.linear.HIGH_PRECISION.with_format("e4m3") == ng.linear.HIGH_PRECISION
    assert named_plan("switchback:e4m3") == ng.linear.SWITCHBACK.with_format("e4m3")
    assert named_plan("TENSORWISE_FP8:e4m3/e5m2") == ng.linear.TENSORWISE_FP8.with_format("e4m3", "e5m2")


def test_a_plan_prints_its_three_multiplies() -> None:
    assert str(ng.linear.SWITCHBACK_M.with_format("e4m3", "e5m2").simulated().with_moving_average()) == (
        "SWITCHBACK_M: e4m3/e5m2, simulated, saves codes, averages absmax (0.9)\n"
        "  output       X e4m3 by row × W e4m3 by tensor\n"
        "  grad_input   G e5m2 by row × W e4m3 by tensor\n"
        "  grad_weight  high precision"
    )
    assert LinearPlan(EightBit("row", "row"), accumulation="full").title.endswith("full accumulation")


REFUSED: dict[str, Callable[[], object]] = {
    "left must be 'row', 'column', .* or 'tile128', got 'block'": lambda: EightBit("block", "row"),
    "right_format must .*, got 'e4m3' with 'int8'": lambda: EightBit("row", "row", "int8", "e4m3"),
    "output must be an EightBit, or None.*, got 'int8'": lambda: LinearPlan("int8"),
    "output.left must be 'row', 'row128', 'tile128' or 'tensor', got 'column': a scale of X": lambda: LinearPlan(
        EightBit("column", "row")
    ),
    "grad_input.right must be 'column', .* got 'row': a scale of W must be constant along the output": (
        lambda: LinearPlan(grad_input=EightBit("row", "row"))
    ),
    "grad_weight.left must be 'column', .*, got 'row'": lambda: LinearPlan(grad_weight=EightBit("row", "column")),
    "grad_weight.right must be 'column', .* got 'row128': a scale of X must be .* tokens, .* along 128 of them": (
        lambda: LinearPlan(grad_weight=EightBit("column128", "row128"))
    ),
    "accumulation must be 'fast' or 'full'.*, got 'slow'": lambda: LinearPlan(accumulation="slow"),
    "saved must be 'input' unless .*, got 'codes'": (
        lambda: LinearPlan(grad_input=EightBit("row", "column"), saved="codes")
    ),
    "tensor_absmax must be 'step' in a plan without.*, got 'average'": lambda: (
        ng.linear.LLM_INT8.with_moving_average()
    ),
    "decay must be a number from 0 to below 1.*, got 1": lambda: ng.linear.SWITCHBACK.with_moving_average(1),
    "right_format must .*, got 'int8' with 'e5m2'": lambda: ng.linear.SWITCHBACK.with_format("int8", "e5m2"),
    "plan must be a name such as SWITCHBACK, .*, got 'nimble'": lambda: named_plan("nimble"),
    "plan must be .*, got 'SWITCHBACK:e4m3/'": lambda: named_plan("SWITCHBACK:e4m3/"),
    "plan must be .*, got 'HIGH_PRECISION:int8'": lambda: named_plan("HIGH_PRECISION:int8"),
    "plan 'SWITCHBACK:int4': left_format must be 'int8', .*, got 'int4'": lambda: named_plan("SWITCHBACK:int4"),
}


@pytest.mark.parametrize(("words", "make"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_computed_is_refused(words: str, make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=words):
        make()
