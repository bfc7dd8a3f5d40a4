"""Weights that are there as codes: a layer's results are those of the whole weight, bit for bit."""

from __future__ import annotations

import pytest
import torch
from test_linear_multiplies import PLANS
from torch import Tensor, nn

from narrowgauge.linear import LinearPlan, _passes, linear, quantize
from narrowgauge.linear._coded import Coded, CodedWeight, Form

NAMES = ("SWITCHBACK", "SWITCHBACK_M", "TENSORWISE_FP8")
FORMATS = {"int8": ("int8", "int8"), "e4m3": ("e4m3", "e5m2")}


def coded(w: Tensor, plan: LinearPlan) -> CodedWeight:
    format = plan.operands("output")[1].format
    codes, scale = quantize(w, "tensor", format)
    return CodedWeight(Coded(codes, scale, Form(format, w.dtype)))


def results(plan: LinearPlan, w: Tensor, transposed: bool, seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    x, b, g = (torch.randn(shape, generator=random).to(w.device, w.dtype) for shape in ((21, 32), (16,), (21, 16)))
    w = nn.Parameter(w)
    y = linear(x.requires_grad_(), w.t() if transposed else w, b.requires_grad_(), plan)
    y.backward(g)
    return [y.detach(), x.grad, w.grad, b.grad]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_codes_are_as_good_as_the_weight(name: str, form: str, transposed: bool, kernels: str) -> None:
    """Also where a pass is played, which the last two of four are."""
    if name == "TENSORWISE_FP8" and form == "int8":
        form = "e4m3"
    plan = PLANS[name].with_format(*FORMATS[form])
    for seed in range(4):
        w = torch.randn((32, 16) if transposed else (16, 32), generator=torch.Generator().manual_seed(9 + seed))
        w = w.to(kernels, torch.bfloat16)
        wanted = results(plan, w, transposed, seed)
        found = results(plan, coded(w, plan), transposed, seed)
        assert all(
            type(one) is Tensor and torch.equal(one, other) for one, other in zip(found, wanted, strict=True)
        )
    assert all(type(found) is not int for found in _passes._known.values())


def test_another_plan_takes_what_they_stand_for() -> None:
    w = torch.randn(16, 32)
    plan = PLANS["SWITCHBACK"]
    codes = coded(w, plan)
    for other in (PLANS["LLM_INT8"], PLANS["HIGH_PRECISION"], plan.with_format("e4m3")):
        wanted = results(other, codes.coded.dequantize(), False, 0)
        assert all(torch.equal(*pair) for pair in zip(results(other, codes, False, 0), wanted, strict=True))


def test_other_operations_take_what_they_stand_for() -> None:
    w = torch.randn(5, 7)
    weight = nn.Parameter(coded(w, PLANS["SWITCHBACK"]))
    meant = weight.coded.dequantize()
    assert torch.equal(weight + 1, meant + 1)
    assert torch.equal(weight.t() @ torch.ones(5), meant.t() @ torch.ones(5))
    assert torch.equal(weight[1:3], meant[1:3])
    weight.sum().backward()
    assert torch.equal(weight.grad, torch.ones(5, 7))
    assert repr(weight.data) == "CodedWeight(int8, shape=(5, 7), dtype=torch.float32)"
