"""Fitting linear layers: the errors of their multiplies against an oracle, and which plan they get for them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import linear_oracle as oracle
from narrowgauge.linear import (
    HIGH_PRECISION,
    LLM_INT8,
    SWITCHBACK,
    SWITCHBACK_M,
    TENSORWISE_FP8,
    EightBit,
    LinearPlan,
    linear,
    swap_linears,
)
from narrowgauge.linear._plan import MULTIPLIES
from narrowgauge.linear._tune import Timed
from narrowgauge.recipes._fit import _layers
from narrowgauge.recipes._fit._layers import SCALINGS, cost, fit_layers, plans
from narrowgauge.recipes._fit._multiplies import LayerRecords, layer_errors
from narrowgauge.recipes._fitted import LayerChoice

FORMATS = ("int8", "e4m3", "e5m2")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers whose columns differ in size."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x * torch.linspace(0.5, 2.0, shape[-1])


def record(layer: nn.Module, x: Tensor, g: Tensor, **options: Any) -> LayerRecords:
    """One micro-batch of a model that is a single layer, called ``layer``."""
    with LayerRecords(nn.ModuleDict({"layer": layer}), **options) as records:
        layer(x).backward(g)
    return records


def layer_of(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(*weight.shape[::-1], bias=False)
    layer.weight.data = weight.clone()
    return layer


def wanted(found: np.ndarray, exact: np.ndarray, by_row: bool) -> float:
    """The error of a product, by its definition."""
    whole = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    rows = np.sort(np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1))
    return float(max(whole, rows[(len(rows) - 1) // 2]) if by_row else whole)


def multiply_errors(x: Tensor, weight: Tensor, g: Tensor, plan: LinearPlan) -> dict[str, float]:
    """The error of each multiply that a plan does on codes, dequantized ones too, measured by running the plan."""
    plan = replace(plan, arithmetic="simulated", tensor_absmax="step")
    flat, w, gradient = (each.detach().float().flatten(0, -2) for each in (x, weight, g))
    inputs = flat.clone().requires_grad_(), w.clone().requires_grad_()
    y = linear(*inputs, None, plan)
    found = (y.detach(), *torch.autograd.grad(y, inputs, gradient))
    flat, w, gradient = flat.double(), w.double(), gradient.double()
    exact = flat @ w.t(), gradient @ w, gradient.t() @ flat
    return {
        multiply: wanted(got.double().numpy(), right.numpy(), multiply == "output")
        for multiply, got, right in zip(MULTIPLIES, found, exact, strict=True)
        if getattr(plan, multiply) is not None or (plan.saved == "codes" and multiply != "output")
    }


def expected(multiply: str, how: EightBit, x: np.ndarray, w: np.ndarray, g: np.ndarray) -> float:
    left, right = {"output": (x, w), "grad_input": (g, w), "grad_weight": (g, x)}[multiply]
    codes = [
        oracle.code(m, s, f) for m, s, f in zip((left, right), (how.left, how.right), how.formats, strict=True)
    ]
    turned = {"output": (False, True), "grad_input": (False, False), "grad_weight": (True, False)}[multiply]
    one, two = (oracle.Coded(c.codes.T, c.scale.T) if t else c for c, t in zip(codes, turned, strict=True))
    exact = oracle.plain(left.T if turned[0] else left, right.T if turned[1] else right)
    return wanted(oracle.multiply(one, two).value, exact.value, multiply == "output")


WAYS = [
    (multiply, EightBit(*scalings, *formats))
    for multiply, choices in SCALINGS.items()
    for scalings in choices
    for formats in itertools.product(FORMATS, FORMATS)
    if "int8" not in formats or formats == ("int8", "int8")
]


def test_every_way_to_do_a_multiply_has_the_error_of_the_oracle() -> None:
    x, w, g = numbers(37, 23), numbers(19, 23, seed=1), numbers(37, 19, seed=2)
    x[5] *= 50
    ways: dict[Any, list[EightBit]] = {}
    for multiply, how in WAYS:
        ways.setdefault(multiply, []).append(how)
    records = record(layer_of(w), x, g)
    found = layer_errors(records.layers["layer"], ways)
    assert set(found) == set(WAYS)
    for multiply, how in WAYS:
        right = expected(multiply, how, *(t.numpy() for t in (x, w, g)))
        assert 0.001 < right < 1.5
        assert found[multiply, how] == pytest.approx(right, rel=1e-5), (multiply, how)
        by_layer = multiply_errors(x, w, g, LinearPlan(**{multiply: how}))
        assert by_layer == {multiply: pytest.approx(right, rel=1e-5)}, (multiply, how)


def test_a_product_of_saved_codes_has_their_error() -> None:
    x, w, g = numbers(4, 9, 23), numbers(19, 23, seed=1), numbers(4, 9, 19, seed=2)
    flat = [t.flatten(0, -2).numpy() for t in (x, w, g)]
    products = oracle.layer("SWITCHBACK_M", *flat, "int8", "int8")
    exact = [oracle.plain(a, b).value for a, b in ((flat[0], flat[1].T), (flat[2], flat[1]), (flat[2].T, flat[0]))]
    right = [wanted(p.value, e, i == 0) for i, (p, e) in enumerate(zip(products, exact, strict=True))]
    assert list(multiply_errors(x, w, g, SWITCHBACK_M).values()) == pytest.approx(right, rel=1e-5)
    assert list(multiply_errors(x, w, g, SWITCHBACK)) == ["output", "grad_input"]
    assert multiply_errors(x, w, g, HIGH_PRECISION) == {}


@pytest.mark.parametrize("plan", [LLM_INT8, TENSORWISE_FP8.with_format("e4m3", "e5m2").with_moving_average()])
def test_powers_of_two_change_no_error(plan: LinearPlan) -> None:
    x, w, g = numbers(33, 16), numbers(24, 16, seed=1), numbers(33, 24, seed=2)
    found = multiply_errors(x, w, g, plan)
    assert len(found) == 3
    assert multiply_errors(x * 2.0**20, w * 2.0**-9, g * 2.0**-40, plan) == found
    # Of a layer in bf16, whose tensors are the same numbers.
    lower = [t.bfloat16() for t in (x, w, g)]
    assert multiply_errors(*lower, plan) == multiply_errors(*(t.float() for t in lower), plan)


# Samples


def test_a_sample_of_rows_and_results_has_the_error_of_the_whole() -> None:
    x, w, g = numbers(2000, 200), numbers(300, 200, seed=1), numbers(2000, 300, seed=2)
    ways: Any = {name: [EightBit(*s, "int8") for s in scalings] for name, scalings in SCALINGS.items()}
    (layer,) = record(layer_of(w), x, g, rows=125).layers.values()
    (sample,) = layer.records
    assert (sample.x.shape, sample.g.shape, sample.tokens) == ((125, 200), (125, 300), 2000)
    found = layer_errors(layer, ways)
    for multiply, hows in ways.items():
        for how in hows:
            # A sum over tokens of which a sixteenth is here; the terms are independent.
            whole = multiply_errors(x, w, g, LinearPlan(**{multiply: how}))[multiply]
            assert found[multiply, how] == pytest.approx(whole, rel=0.05), (multiply, how)


def test_scales_of_a_sample_are_those_of_all_rows() -> None:
    x, w, g = numbers(1000, 32), numbers(32, 32, seed=1), numbers(1000, 32, seed=2)
    x[1] *= 64  # which is not in the sample
    (layer,) = record(layer_of(w), x, g, rows=50).layers.values()
    assert layer.records[0].x.abs().max() < x[1].abs().max() / 4
    tensor, vectors = EightBit("tensor", "tensor"), EightBit("column", "column")
    found = layer_errors(layer, {"output": [tensor], "grad_weight": [tensor, vectors]})
    whole = multiply_errors(x, w, g, LinearPlan(output=tensor))["output"]
    assert whole > 0.5
    assert found["output", tensor] == pytest.approx(whole, rel=0.1)
    # The row is most of the whole sum: without it the error is larger.
    for how in (tensor, vectors):
        assert found["grad_weight", how] > 2 * multiply_errors(x, w, g, LinearPlan(grad_weight=how))["grad_weight"]


# What is recorded


class Odd(nn.Module):
    """Layers that are called twice, by keyword, in a checkpoint, never; a frozen one; an attention."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.twice, self.named, self.inside, self.never = (nn.Linear(16, 16) for _ in range(4))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.lm_head, self.small = nn.Linear(16, 32), nn.Linear(32, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(x)).relu_()
        x = self.frozen(self.named(input=x))
        if self.reentrant is None:
            x = self.inside(x)
        else:
            x = checkpoint(self.inside, x, use_reentrant=self.reentrant)
        return self.small(self.lm_head(self.attention(x, x, x)[0]))


def odd(reentrant: bool | None = None) -> Odd:
    torch.manual_seed(0)
    return Odd(reentrant)


def batches(count: int) -> list[Tensor]:
    return [numbers(3, 8, 16, seed=seed) for seed in range(count)]


def test_recording_changes_no_bit_and_leaves_nothing() -> None:
    plain, model = odd(), odd()
    with LayerRecords(model) as records:
        for x in batches(2):
            for each in (plain, model):
                each(x).square().sum().backward()
        kept = model(batches(1)[0])
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad), name
    assert not any(module._forward_hooks for module in model.modules())
    before = len(records.layers["twice"].records)
    kept.sum().backward()
    model(batches(1)[0]).sum().backward()
    assert len(records.layers["twice"].records) == before == 4


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of checkpoints in the validation
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_calls_and_micro_batches_are_recorded_as_they_were(reentrant: bool | None) -> None:
    model = odd(reentrant)
    inputs: list[Tensor] = []
    model.named.register_forward_hook(lambda layer, args, output: inputs.append(output.detach()))
    with LayerRecords(model, batches=2) as records:
        with torch.no_grad():
            model(batches(1)[0])  # validation
        for x in batches(3):
            model(x).square().sum().backward()
    assert {name: len(one.records) for name, one in records.layers.items()} == {
        "twice": 4, "named": 2, "inside": 2, "never": 0, "frozen": 2,
    }  # fmt: skip
    for got, x in zip(records.layers["frozen"].records, inputs[1:3], strict=True):
        assert torch.equal(got.x, x.reshape(24, 16))
        assert got.tokens == 24
    assert list(records.kept) == ["attention", "attention.out_proj", "lm_head", "small"]


def test_the_gradient_is_that_of_the_layers_own_output() -> None:
    """Also if the output is then changed in place, or by another hook."""
    x, g = numbers(2, 9, 16), numbers(2, 9, 24, seed=2)
    model = chain(nn.Linear(16, 24), nn.ReLU(inplace=True))
    model[0].register_forward_hook(lambda layer, args, output: output * 4)
    with LayerRecords(model) as records:
        y = model(x)
        y.backward(g)
    (got,) = records.layers["0"].records
    assert torch.equal(got.g, (4 * g * (y > 0)).flatten(0, 1))
    assert torch.equal(got.g_absmax, got.g.abs().amax(0, keepdim=True))


def test_records_are_of_the_dtype_that_the_layer_computes_in() -> None:
    x, w, g = numbers(20, 16), numbers(24, 16, seed=1), numbers(20, 24, seed=2).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        records = record(layer_of(w), x, g)
    (got,) = records.layers["layer"].records
    assert (got.x.dtype, got.g.dtype) == (torch.bfloat16, torch.bfloat16)
    how = EightBit("row", "row")
    found = layer_errors(records.layers["layer"], {"output": [how]})
    by_layer = multiply_errors(x.bfloat16(), w.bfloat16(), g, LinearPlan(how))
    assert found["output", how] == pytest.approx(by_layer["output"], rel=1e-6)


def test_a_conv1d_is_measured_as_the_layer_that_it_is() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D(24, 16)
    x, g = numbers(20, 16), numbers(20, 24, seed=2)
    found = layer_errors(record(conv1d, x, g).layers["layer"], {"grad_input": [EightBit("row", "column")]})
    plan = LinearPlan(grad_input=EightBit("row", "column"))
    by_layer = multiply_errors(x, conv1d.weight.t(), g, plan)
    assert list(found.values()) == pytest.approx(list(by_layer.values()), rel=1e-6)


# Which plan


def test_plans_are_ordered_by_cost() -> None:
    order = plans(["e4m3", "int8", "e4m3/e5m2"])
    # 4 x 4 x 3 ways less the empty one; without a gradient in eight bits e5m2 is in none of them.
    assert len(order) == len(set(order)) == 3 * 47 - 3 + 1
    assert [order[0], order[-1]] == [TENSORWISE_FP8, HIGH_PRECISION]
    assert [plan.name for plan in order[:3]] == ["TENSORWISE_FP8"] * 3
    assert order[1] == TENSORWISE_FP8.with_format("int8")
    assert order[2] == TENSORWISE_FP8.with_format("e4m3", "e5m2")
    assert [*map(cost, order)] == sorted(map(cost, order))
    assert {"SWITCHBACK", "SWITCHBACK_Q", "LLM_INT8", "FITTED"} < {plan.name for plan in order}
    for wrong in ("int8", [], ["int9"], ["int8/e4m3"]):
        with pytest.raises(ValueError, match="format"):
            plans(wrong)


def fit(model: nn.Module, x: Tensor, noise: float | dict[str, float], **options: Any) -> tuple[LayerChoice, ...]:
    """Choices for a model with the same noise for all gradients, or those given."""
    with LayerRecords(model) as records:
        y = model(x)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(3)))
    every = noise if isinstance(noise, dict) else {name: noise for name, _ in model.named_parameters()}
    return fit_layers(records, every, **{"formats": ["int8"], "tolerance": 0.03, **options})


def chain(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*layers)


def test_large_rows_need_scales_of_rows_and_large_features_are_lost_by_both() -> None:
    plain = numbers(256, 64)
    rows, features = plain.clone(), plain.clone()
    rows[::50] *= 100
    features[:, 3] *= 100
    (choice,) = fit(chain(nn.Linear(64, 64)), plain, 1.0)
    assert choice.chosen.plan == TENSORWISE_FP8.with_format("int8")
    assert choice.narrower is None
    (choice,) = fit(chain(nn.Linear(64, 64)), rows, 1.0)
    assert choice.chosen.plan.output == EightBit("row", "tensor")
    assert choice.chosen.plan.grad_input == EightBit("tensor", "tensor")
    # The large rows are most of the sum over rows, and have codes with a scale for each column.
    assert choice.chosen.plan.grad_weight == EightBit("column", "column")
    assert choice.narrower is not None
    assert choice.narrower.share > 0.03 >= choice.chosen.share
    # One feature is most of the result, and the error of the others is small beside it. So it goes through.
    model = chain(nn.Linear(64, 64))
    model[0].weight.data[:, 3] = 0  # unless it is not used
    (choice,) = fit(model, features, 1.0)
    assert choice.chosen.plan.output is None


def test_a_choice_has_its_figures_and_its_neighbors() -> None:
    model, x = chain(nn.Linear(64, 64)), numbers(256, 64)
    # Between the errors of a tensor's scale and a row's.
    (loose,) = fit(model, x, 3.1)
    assert loose.reason.startswith("int8: errors of output 1.")
    assert loose.reason.endswith("; allowed is 9.3 %, 3 % of the gradient's noise of 310 %")
    errors = loose.chosen.noise
    assert loose.chosen.share == pytest.approx(max(errors.values()) / 3.1)
    (choice,) = fit(model, x, errors["output"] * 0.99 / 0.03)
    assert choice.chosen.plan.output == EightBit("row", "tensor")
    assert choice.narrower is not None
    assert choice.wider is not None
    assert choice.wider.plan != choice.chosen.plan
    assert cost(choice.narrower.plan) < cost(choice.chosen.plan) < cost(choice.wider.plan)
    assert "output" in choice.reason
    (none,) = fit(model, x, 1e-3)
    assert (none.chosen.plan, none.chosen.noise, none.chosen.share) == (HIGH_PRECISION, {}, 0.0)
    assert none.wider is None
    assert none.narrower is not None
    assert len(none.narrower.noise) == 1
    assert none.reason.startswith("high precision: in int8 an error of ")


def test_no_noise_makes_a_large_error_right() -> None:
    x = numbers(256, 64)
    x[::50] *= 100
    (choice,) = fit(chain(nn.Linear(64, 64)), x, 1000.0)
    assert choice.chosen.plan.output == EightBit("row", "tensor")
    assert max(choice.chosen.noise.values()) <= 0.1
    assert choice.reason.endswith("; allowed is 10 %")
    (choice,) = fit(chain(nn.Linear(64, 64)), x * math.inf, 1.0)
    assert choice.chosen.plan.output is None


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList(nn.ModuleDict({"fc": nn.Linear(64, 64), "out": nn.Linear(64, 64)}) for _ in range(4))
        self.large = 2
        self.spare = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.h):
            y = nn.functional.layer_norm(block["out"](block["fc"](x)), (64,))
            scale = torch.ones(len(y), 1)
            scale[::50] = 100.0 if i + 1 == self.large else 1.0
            x = y * scale
        return x


def test_layers_are_chosen_one_by_one_and_shown_together() -> None:
    model = Blocks()
    noise = {name: 1.0 for name, _ in model.named_parameters()} | {"h.3.out.weight": math.nan}
    del noise["h.1.out.weight"]
    choices = fit(model, numbers(256, 64), noise)
    found = {choice.layers: choice for choice in choices}
    fc, large, unknown = ("h.0.fc", "h.1.fc", "h.3.fc"), ("h.2.fc",), ("h.1.out",)
    assert found[fc].count == 3
    assert found[large].chosen.plan.output == EightBit("row", "tensor")
    assert found[fc].chosen.plan.output == EightBit("tensor", "tensor")
    assert found[unknown].reason == "not measured: the gradient of h.1.out.weight is not known"
    assert found[("h.3.out",)].reason.endswith("noise of the gradient of h.3.out.weight is nan")
    assert found[("spare",)].reason == "8 features, fewer than 16"
    # The figures of a group are those of its worst layer.
    alone = [fit(model, numbers(256, 64), {f"{name}.weight": 1.0}) for name in fc]
    shares = [
        next(c for c in each if c.layers == (name,)).chosen.share for each, name in zip(alone, fc, strict=True)
    ]
    assert found[fc].chosen.share == max(shares) > min(shares)
    # A pattern fits the layers of its choice and no others.
    model.large = 9
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    choices = fit(model, numbers(256, 64), 1.0)
    assert {choice.layers for choice in choices} == {("h.*.fc",), ("h.*.out",), ("spare",)}
    for choice in choices:
        assert sum(fnmatchcase(name, pattern) for name in names for pattern in choice.layers) == choice.count


def test_what_is_not_measured_stays_in_high_precision_and_says_why() -> None:
    choices = fit(odd(), batches(1)[0], {"twice.weight": 1.0, "named.weight": 1.0, "inside.weight": 1.0})
    reasons = {name: choice.reason for choice in choices for name in choice.layers}
    report = swap_linears(odd(), SWITCHBACK)
    assert set(reasons) == {*report.swapped, *report.kept}
    assert reasons["never"] == "not measured: no batch reached it and came back with a gradient"
    assert reasons["frozen"] == "not measured: the gradient of frozen.weight is not known"
    assert reasons["lm_head"] == report.kept["lm_head"]
    assert "its projections are one weight" in reasons["attention"]
    plain = [choice for choice in choices if not choice.chosen.noise]
    assert all(choice.chosen.plan == HIGH_PRECISION and choice.chosen.ms is None for choice in plain)


# By time


def test_eight_bits_are_taken_where_they_measured_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def times(kinds: Any) -> dict[Any, Timed]:
        asked.append(list(kinds))
        speedup = {"int8": 1.25, "e4m3": 2.0}
        return {
            kind: Timed(speedup[kind.plan.formats[0]] if kind.in_features == 64 else 0.799, 4.0)
            for kind in asked[-1]
            if kind.out_features != 48
        }

    monkeypatch.setattr(_layers, "times", times)
    model = chain(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(32, 48), nn.Linear(48, 16))
    model[4].weight.data[:] = 1e-3
    noise = {"0.weight": 3.0, "1.weight": 0.5, "2.weight": 3.0, "3.weight": 3.0, "4.weight": 3.0}
    choices = fit(model, numbers(128, 64), noise, formats=["int8", "e4m3"], timed=True)
    found = {name: choice for choice in choices for name in choice.layers}
    assert len(asked) == 2  # the same number of times on every rank
    assert {kind.tokens for kinds in asked for kind in kinds} == {128}
    both = found["0"]
    assert both is found["2"]
    assert (both.chosen.plan, both.chosen.ms) == (TENSORWISE_FP8, 8.0)
    assert both.wider is not None
    assert both.wider.ms == 8.0
    assert found["1"].chosen.plan.formats == ("int8",)  # e4m3 is not allowed there
    assert found["1"].chosen.ms == 4.0
    memory = found["3"]
    assert (memory.chosen.plan, memory.chosen.ms) == (HIGH_PRECISION, None)
    assert memory.reason == "high precision: not measured: out of memory at 128 tokens"
    slow = found["4"]
    assert (slow.chosen.plan, slow.chosen.ms) == (HIGH_PRECISION, pytest.approx(4.0 * 0.799))
    assert slow.reason.startswith("high precision: int8 measured 0.79x nn.Linear at 128 tokens")
    assert slow.narrower is not None
    assert slow.narrower.ms == 4.0
    asked.clear()
    fit(model, numbers(128, 64), noise, timed=True)
    assert {kind.tokens for kind in asked[0]} == {128}


def test_without_time_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_layers, "times", None)
    (choice,) = fit(chain(nn.Linear(64, 64)), numbers(64, 64), 1.0)
    assert choice.chosen.ms is None
    for wrong, match in (({"tolerance": 0.0}, "tolerance"), ({"timed": 1}, "timed")):
        with pytest.raises(ValueError, match=match):
            fit(chain(nn.Linear(64, 64)), numbers(64, 64), 1.0, **wrong)
