"""Plans: what they say, print and refuse."""

from __future__ import annotations

import pickle

import pytest

import narrowgauge as ng
from narrowgauge.linear import EightBit, LinearPlan

PLANS = {
    name: plan for name in ng.linear.__all__ if isinstance(plan := getattr(ng.linear, name), LinearPlan)
}  # fmt: skip


def test_plans_are_values() -> None:
    assert len(PLANS) == 6
    for name, plan in PLANS.items():
        assert plan.name == name
        assert pickle.loads(pickle.dumps(plan)) == plan
        assert not plan.formats or plan.with_format("e5m2").with_format(plan.formats[0]) == plan
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


def test_a_plan_prints_its_three_multiplies() -> None:
    assert str(ng.linear.SWITCHBACK_M.with_format("e4m3", "e5m2").simulated().with_moving_average()) == (
        "SWITCHBACK_M: e4m3/e5m2, simulated, saves codes, averages absmax (0.9)\n"
        "  output       X e4m3 by row × W e4m3 by tensor\n"
        "  grad_input   G e5m2 by row × W e4m3 by tensor\n"
        "  grad_weight  high precision"
    )


REFUSED = {
    "left: got 'block', takes 'row', 'column' or 'tensor'": lambda: EightBit("block", "row"),
    "right_format: got 'fp8', takes 'int8', 'e4m3' or 'e5m2'": lambda: EightBit("row", "row", "e4m3", "fp8"),
    "right_format: got 'e4m3' beside 'int8'": lambda: EightBit("row", "row", "int8", "e4m3"),
    "output: got 'int8', takes an EightBit, or None": lambda: LinearPlan("int8"),
    r"output.left: got 'column', takes 'row' or 'tensor' \(a scale of X": lambda: LinearPlan(
        EightBit("column", "row")
    ),
    r"grad_input.right: got 'row', takes 'column' or 'tensor' \(a scale of W must be constant along the output": (
        lambda: LinearPlan(grad_input=EightBit("row", "row"))
    ),
    "grad_weight.left: got 'row', takes 'column' or 'tensor'": (
        lambda: LinearPlan(grad_weight=EightBit("row", "column"))
    ),
    "saved: got 'nothing', takes 'input' or 'codes'": lambda: LinearPlan(saved="nothing"),
    "saved: got 'codes', takes 'input' where": (
        lambda: LinearPlan(grad_input=EightBit("row", "column"), saved="codes")
    ),
    "arithmetic: got 'exact', takes 'real' or 'simulated'": lambda: LinearPlan(arithmetic="exact"),
    "tensor_absmax: got 'average', takes 'step' in a plan without": lambda: (
        ng.linear.LLM_INT8.with_moving_average()
    ),
    "decay: got 1, takes a number from 0 to below 1": lambda: ng.linear.SWITCHBACK.with_moving_average(1),
    "format: got 'fp8', takes": lambda: ng.linear.SWITCHBACK.with_format("fp8"),
    "gradient: got 'fp8', takes": lambda: ng.linear.SWITCHBACK.with_format("e4m3", "fp8"),
    "right_format: got 'int8' beside 'e5m2'": lambda: ng.linear.SWITCHBACK.with_format("int8", "e5m2"),
}


@pytest.mark.parametrize(("words", "make"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_computed_is_refused(words: str, make) -> None:
    with pytest.raises(ValueError, match=words):
        make()
