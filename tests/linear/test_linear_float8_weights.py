"""Layers whose weight is float8 codes multiply what they would quantize, and quantize nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from narrowgauge.linear import (
    BLOCKWISE_FP8,
    LLM_INT8,
    SWITCHBACK,
    SWITCHBACK_M,
    SWITCHBACK_Q,
    TENSORWISE_FP8,
    LinearPlan,
    LowPrecisionConv1D,
    LowPrecisionLinear,
    linear,
    quantize,
    swap_linears,
    to_float8_weights,
)
from narrowgauge.linear._ops import EAGER
from narrowgauge.linear._quantize import scale_shape
from narrowgauge.storage import Float8Weight

PLANS = {
    plan.title: plan
    for plan in (
        TENSORWISE_FP8, TENSORWISE_FP8.with_format("e4m3", "e5m2"), SWITCHBACK.with_format("e4m3"),
        SWITCHBACK_M.with_format("e4m3"), SWITCHBACK_Q.with_format("e4m3"), LLM_INT8.with_format("e4m3"),
        LinearPlan(TENSORWISE_FP8.output, name="OUTPUT"),
        LinearPlan(TENSORWISE_FP8.output, name="OUTPUT", saved="codes"),
        LinearPlan(None, TENSORWISE_FP8.output, name="GRAD_INPUT"), TENSORWISE_FP8.with_moving_average(),
        BLOCKWISE_FP8,
    )
}  # fmt: skip


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def pass_of(plan: LinearPlan, weight: Tensor, seed: int = 0) -> list[Tensor]:
    """Output and gradients of one pass."""
    averages = torch.zeros(3) if plan.tensor_absmax == "average" else None
    x, bias = numbers(5, 32, seed=seed + 1).requires_grad_(), numbers(48, seed=seed + 2).requires_grad_()
    weight = weight.detach().requires_grad_()
    y = linear(x, weight, bias, plan, averages)
    y.backward(numbers(5, 48, seed=seed + 3))
    return [y.detach(), x.grad, weight.grad, bias.grad]


@pytest.mark.parametrize("simulated", [True, False])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_products_are_those_of_quantizing_the_same_numbers_by_the_scale(
    plan: LinearPlan, simulated: bool, monkeypatch
) -> None:
    """The codes' numbers in bfloat16, and a quantizer that is given the weight's absmax: 448 times its scale."""
    plan = plan.simulated() if simulated else plan
    weight = Float8Weight.of(numbers(48, 32) * 0.02)
    found = pass_of(plan, weight)
    plain = weight.dequantize()

    def by_the_scale(x: Tensor, scaling: str, format: str = "int8", absmax: Tensor | None = None):
        if torch.equal(x, plain) or torch.equal(x, plain.t()):
            absmax = (weight.scale * 448).expand(scale_shape(scaling, *x.shape))
        return quantize(x, scaling, format, absmax)

    def tensor(x: Tensor, average: Tensor | None, *settings):
        known = weight.scale * 448 if torch.equal(x, plain) else average
        return EAGER.quantize_tensor(x, known, *settings)

    def blocks(x: Tensor, straight: str, transposed: str, format: str, *settings):
        made = [
            by_the_scale(x, how, format) if how else quantize(x[:0, :0], "tensor") for how in (straight, transposed)
        ]
        (codes, scale), (turned, turned_scale) = made
        return codes, scale, turned.t().contiguous(), turned_scale, _vectors(made[0], x, *settings)[2]

    def operations(*_: Tensor):
        return EAGER._replace(
            quantize_rows=lambda x, format, sums, dtype: _vectors(by_the_scale(x, "row", format), x, sums, dtype),
            quantize_columns=lambda x, format, sums, dtype: _vectors(
                by_the_scale(x, "column", format), x, sums, dtype, turned=True
            ),
            quantize_tensor=tensor,
            quantize_blocks=blocks,
        )

    monkeypatch.setattr("narrowgauge.linear._function.operations", operations)
    wanted = pass_of(plan, plain)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def _vectors(scaled, x: Tensor, sums: bool, dtype: torch.dtype, turned: bool = False):
    codes = scaled.codes.t().contiguous() if turned else scaled.codes.contiguous()
    return codes, scaled.scale.contiguous(), x.sum(0, dtype=torch.float32).to(dtype) if sums else None


def test_the_codes_are_those_that_a_quantizer_would_make() -> None:
    weight = Float8Weight.of(numbers(48, 32) * 3.0)
    codes, scale = quantize(weight.dequantize(), "tensor", "e4m3", (weight.scale * 448).reshape(1, 1))
    assert torch.equal(codes.view(torch.uint8), weight.codes.view(torch.uint8))
    assert float(scale) == float(weight.scale)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_no_weight_is_quantized_and_none_is_saved_twice(plan: LinearPlan, monkeypatch) -> None:
    quantized: list[tuple[int, ...]] = []

    def watched(run):
        return lambda x, *rest: (quantized.append(tuple(x.shape)), run(x, *rest))[1]

    names = ("quantize_rows", "quantize_columns", "quantize_tensor", "quantize_blocks")
    operations = EAGER._replace(**{name: watched(getattr(EAGER, name)) for name in names})
    monkeypatch.setattr("narrowgauge.linear._function.operations", lambda *_: operations)
    saved: list[Tensor] = []
    weight = Float8Weight.of(numbers(48, 32)).requires_grad_()
    averages = torch.zeros(3) if plan.tensor_absmax == "average" else None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        y = linear(numbers(5, 32).requires_grad_(), weight, None, plan, averages)
    y.sum().backward()
    assert (48, 32) not in quantized
    shapes = [tuple(x.shape) for x in saved if not isinstance(x, Float8Weight)]
    assert (48, 32) not in shapes
    assert (32, 48) not in shapes


def test_converting_keeps_parameters_and_says_what_it_leaves() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(48, 32)
            self.one, self.two = nn.Linear(32, 48), nn.Linear(48, 32)
            self.tied, self.whole = nn.Linear(32, 48, bias=False), nn.Linear(32, 32)
            self.tied.weight = self.table.weight

    model = Net().to(torch.bfloat16)
    swap_linears(model, TENSORWISE_FP8, keep=("whole",))
    model.two.set_plan(SWITCHBACK)
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    kept = to_float8_weights(model)
    assert kept == {
        "two.weight": "its plan multiplies it in int8, not in e4m3",
        "tied.weight": "another module has it too, of class Embedding",
    }
    for name, p in model.named_parameters():
        assert p is before[name][0]
        assert isinstance(p, Float8Weight) == (name == "one.weight")
        assert ((p - before[name][1]).abs() <= 2.0**-4 * before[name][1].abs() + 2.0**-14).all()
    twin = copy.deepcopy(model)
    assert to_float8_weights(model) == kept  # once more changes nothing
    assert torch.equal(twin.one.weight.codes.float(), model.one.weight.codes.float())
    with pytest.raises(
        ValueError, match=r"model must have a linear layer with a float8 plan .* got none; two.weight"
    ):
        to_float8_weights(nn.ModuleDict({"two": model.two}))


def test_the_transposed_layer_of_gpt2_reads_codes_too() -> None:
    layer = nn.Module()
    layer.weight, layer.bias = nn.Parameter(numbers(32, 48) * 0.1), nn.Parameter(numbers(48))
    layer.__class__ = LowPrecisionConv1D
    layer.set_plan(TENSORWISE_FP8)
    twin = LowPrecisionLinear(32, 48, plan=TENSORWISE_FP8, dtype=torch.bfloat16)
    twin.load_state_dict({"weight": layer.weight.t().contiguous(), "bias": layer.bias})
    for one in (layer, twin):
        to_float8_weights(one)
        one(numbers(5, 32)).float().square().sum().backward()
    assert torch.equal(layer(numbers(5, 32)), twin(numbers(5, 32)))
    assert torch.equal(layer.weight.grad, twin.weight.grad.t())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_layer_gives_the_numbers_of_an_eager_one() -> None:
    layer = LowPrecisionLinear(32, 48, plan=TENSORWISE_FP8, dtype=torch.bfloat16)
    to_float8_weights(layer)
    twin, x = copy.deepcopy(layer), numbers(5, 32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), twin(x))
    compiled(x).float().square().sum().backward()
    twin(x).float().square().sum().backward()
    assert torch.equal(layer.weight.grad, twin.weight.grad)
    with torch.no_grad():
        for one in (layer, twin):
            one.weight.mul_(3)
    assert torch.equal(compiled(x), twin(x))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_layers_of_codes_compile_in_one_graph() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).bfloat16()
    swap_linears(model, TENSORWISE_FP8)
    to_float8_weights(model)
    x = numbers(5, 32)
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))
