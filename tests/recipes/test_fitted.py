"""A fitted recipe trains each parameter as its choice says, and refuses a model that it was not fitted for."""

from __future__ import annotations

import copy
import math
import pickle
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fitted_recipes import LOG, MIXED, WIDE, choice, fitted, kept, layers
from narrowgauge import recipes
from narrowgauge.distributed import CPUOffload
from narrowgauge.linear import HIGH_PRECISION, LLM_INT8, SWITCHBACK, LowPrecisionLinear
from narrowgauge.optim import Lion
from narrowgauge.recipes import FittedRecipe
from narrowgauge.recipes._fitted import Kept

SIZES = {"0.weight": 16384, "2.weight": 16384, "0.bias": 256, "2.bias": 64}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def recipe(**more: Any) -> FittedRecipe:
    return fitted(
        choice(
            "0.weight", elements=16384, chosen=kept("split8", MIXED, 6.53, 0.03, 0.00071), reason="little noise"
        ),
        choice("*.weight", elements=16384, chosen=kept("master", WIDE, 16.0, 0.01, 0.00004), reason="much noise"),
        choice("0.bias", "2.bias", elements=320, chosen=kept("split", WIDE, 14.0)),
        **more,
    )


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.ones(4, 64, dtype=next(model.parameters()).dtype)
        (model(x).float() - 1).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("way", ["plain", "on the meta device", "around", "compiled"])
def test_each_parameter_is_kept_by_its_choice(way: str) -> None:
    model: Any = network() if way != "on the meta device" else network().to("meta")
    given = torch.compile(model) if way == "compiled" else model
    around: Any = partial(CPUOffload, transfer="step") if way == "around" else None
    optimizer = recipe().apply(given, lr=0.01, weight_decay=0.1, around=around, min_quantized_size=0)
    rows = {row.parameter.removeprefix("_orig_mod."): row for row in optimizer.describe().rows}
    assert {name: (row.weights, row.states, row.why.split(";")[0]) for name, row in rows.items()} == {
        "0.weight": ("split8", "m:log4 v:log8", "little noise"),
        "2.weight": ("master", "m:fp32 v:fp32", "much noise"),
        "0.bias": ("split", "m:fp32 v:fp32", "by hand"),
        "2.bias": ("split", "m:fp32 v:fp32", "by hand"),
    }
    assert [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups] == [
        (0.1, 2), (0.0, 2),
    ]  # fmt: skip
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    if way in ("plain", "around"):
        train(model, optimizer)


def test_its_bytes_are_those_that_it_keeps() -> None:
    made = recipe()
    model = network()
    optimizer = made.apply(model, lr=0.01, min_quantized_size=0)
    train(model, optimizer, 1)
    held = optimizer.state_bytes() - 12 * 4 + sum(2 * p.nbytes for p in model.parameters())
    elements = sum(SIZES.values())
    assert made.bytes_per_parameter() == pytest.approx(held / elements, rel=1e-3)
    assert made.bytes_per_parameter() == pytest.approx(made.bill().bytes, rel=1e-3)
    assert made.byte_breakdown()["weights"] == made.byte_breakdown()["gradients"] == 2.0
    assert made.low_bytes == pytest.approx((16384 * 1 + 16384 * 4 + 320 * 2) / elements)
    assert not made.has_strict_arithmetic
    words = [choice("*", elements=1, chosen=kept("expansion", {"m": "bf16", "v": "bf16"}))]
    assert fitted(*words).has_strict_arithmetic
    assert not fitted(*words, choice("x", elements=9, chosen=kept("split", WIDE))).has_strict_arithmetic


def test_one_choice_for_all_is_the_recipe_of_that_name() -> None:
    models = [network(), network()]
    for model, one in zip(
        models,
        (recipes.get("adamw8bit-split8"), fitted(choice("*", elements=1, chosen=kept("split8", LOG)))),
        strict=True,
    ):
        train(model, one.apply(model, lr=0.01, weight_decay=0.1))
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert a.equal(b)


def test_fp32_norms_are_plain_whatever_their_choice() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8))
    optimizer = fitted(choice("*", elements=1, chosen=kept("split8", LOG))).apply(model, keep_fp32="norms")
    found = {row.parameter: (row.dtype, row.weights) for row in optimizer.describe().rows}
    assert found["0.weight"] == ("bfloat16", "split8")
    assert {found[f"{i}.{name}"] for i in (1, 2) for name in ("weight", "bias")} == {("float32", "plain")}


def test_the_reason_survives_copies_and_checkpoints() -> None:
    model = network()
    optimizer = recipe().apply(model, lr=0.01)
    train(model, optimizer)
    reasons = {"0.weight": "little noise", "2.weight": "much noise", "0.bias": "by hand", "2.bias": "by hand"}

    def noted(optimizer: Any) -> dict[str, str]:
        return {row.parameter: row.why.split(";")[0] for row in optimizer.describe().rows}

    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert noted(copied) == reasons
    # Its own optimizer keeps its own reasons; one without has none afterwards.
    saved = optimizer.state_dict()
    other = fitted(*(replace(one, reason="another") for one in recipe().choices)).apply(model, lr=0.01)
    other.load_state_dict(saved)
    assert noted(other) == dict.fromkeys(reasons, "another")
    groups = [{"params": group["params"]} for group in optimizer.param_groups]
    bare = type(optimizer)(groups, lr=0.01)
    bare.load_state_dict(saved)
    assert not set(reasons.values()) & set(noted(bare).values())
    with pytest.warns(UserWarning, match="dropped 'weight.lo'"):
        exported = optimizer.torch_state_dict()
    assert not any("kept" in group for group in exported["param_groups"])


def test_layers_compute_by_their_plans() -> None:
    made = recipe(plans=(layers("0", plan=LLM_INT8), layers("*", plan=HIGH_PRECISION)))
    model = network()
    made.swap_layers(model)  # as before sharding
    train(model, made.apply(model, lr=0.01))
    assert isinstance(model[0], LowPrecisionLinear)
    assert model[0].plan == LLM_INT8
    assert type(model[2]) is nn.Linear
    attention = nn.MultiheadAttention(64, 2)
    own = fitted(choice("*", elements=1, chosen=kept("split8", LOG)), plans=(layers("", "out_proj"),))
    own.apply(attention)
    assert attention.out_proj.plan == SWITCHBACK


def test_each_layer_has_the_plan_of_the_last_recipe() -> None:
    model = network()

    def plans() -> list[Any]:
        return [getattr(model[place], "plan", None) for place in (0, 2)]

    recipe(plans=(layers("0", "2"),)).swap_layers(model)
    kind = type(model[0])
    recipe(plans=(layers("2"),)).apply(model, lr=0.01)
    assert plans() == [None, SWITCHBACK]
    assert type(model[0]) is nn.Linear
    recipe(plans=(layers("2", plan=LLM_INT8), layers("*"))).apply(model, lr=0.01)
    assert plans() == [SWITCHBACK, LLM_INT8]
    assert type(model[0]) is kind
    with pytest.raises(ValueError, match="got '1', which fits none"):
        recipe(plans=(layers("0", plan=LLM_INT8), layers("1"))).apply(model, lr=0.01)
    assert plans() == [SWITCHBACK, LLM_INT8]
    recipe().apply(model, lr=0.01)
    assert plans() == [None, None]


FITTED_FOR = "recipe 'by-hand' was fitted for GPT of {} parameters: fit again for this model"
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "a parameter of no choice": (
        nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 64), nn.PReLU()),
        fitted(choice("0.*", "2.*", elements=1, chosen=kept("split8", LOG))),
        "model must have parameters that some choice of the recipe names, got '1.weight'",
    ),
    "a choice of no parameter": (
        nn.Linear(4, 4), recipe(), "choices must name parameters of the model, got '0.weight', which fits none",
    ),
    "a layer of no model": (
        network(), recipe(plans=(layers("1"),)),
        "layers must name linear layers of the model, got '1', which fits none",
    ),
    "a layer with another plan": (
        nn.Sequential(LowPrecisionLinear.from_linear(nn.Linear(64, 64)), nn.ReLU(), nn.Linear(64, 64)),
        recipe(plans=(layers("2"), layers("0", plan=LLM_INT8))),
        "layers must name layers that can have a plan, got '0': has a plan already: SWITCHBACK: int8",
    ),
    "half an attention": (
        nn.MultiheadAttention(64, 2),
        fitted(choice("*", elements=1, chosen=kept("split8", LOG)), plans=(layers("out_proj"),)),
        "layers must name layers that can have a plan, got 'out_proj': nn.MultiheadAttention reads its weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_another_model_is_refused_and_left_alone(case: str) -> None:
    model, one, words = REFUSED[case]
    count = sum(p.numel() for p in model.parameters())
    one = replace(one, facts={"model": "GPT", "parameters": count})
    kinds = {name: type(layer) for name, layer in model.named_modules()}
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        one.apply(model, lr=0.01)
    assert str(refused.value).endswith(FITTED_FOR.format(count))
    assert "\n" not in str(refused.value)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {name: type(layer) for name, layer in model.named_modules()} == kinds


def test_a_model_of_another_size_is_warned_of() -> None:
    narrower = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    one = recipe(facts={"model": "GPT", "parameters": 33088})
    with pytest.warns(UserWarning, match=f"^model has 280 parameters, and {FITTED_FOR.format(33088)}$") as caught:
        one.apply(narrower, lr=0.01)
    assert [warning.filename for warning in caught] == [__file__]
    one.apply(network(), lr=0.01)


def test_its_repr_is_a_line() -> None:
    assert repr(recipe()) == "FittedRecipe('by-hand', \"a test's\", 11.29 bytes a parameter, choices: 3)"


def test_what_cannot_be_kept_is_refused_when_it_is_made() -> None:
    good = choice("*", elements=1, chosen=kept("split8", LOG))
    with pytest.raises(ValueError, match="choices must be one or more, got none"):
        fitted()
    with pytest.raises(ValueError, match=r"choices\[0\]\.chosen: weights must be 'plain', .*, got 'split7'"):
        fitted(replace(good, chosen=kept("split7", LOG)))
    with pytest.raises(ValueError, match=r"choices\[1\]\.wider: states must be .*, got 'log9'"):
        fitted(good, replace(good, wider=kept("split8", {"m": "log9", "v": "log8"})))
    with pytest.raises(ValueError, match=r"choices\[0\]\.chosen: states must name a storage for each of \['m'\]"):
        fitted(good, optimizer=Lion)
    with pytest.raises(ValueError, match=r"chosen: weights must be a storage for torch\.float32, got 'split8'"):
        replace(fitted(good), dtype=torch.float32)
    with pytest.raises(ValueError, match="weights must be left out: recipe 'by-hand' sets it"):
        fitted(good).apply(network(), weights="plain")


def test_the_memory_plan_counts_what_each_choice_keeps() -> None:
    uniform = fitted(choice("*", elements=1, chosen=kept("master", WIDE)))

    def squares(model: nn.Module, batch: int, sequence: int) -> torch.Tensor:
        return model(torch.empty(batch, 64, device="meta", dtype=torch.bfloat16)).square().mean()  # type: ignore[no-any-return]

    pairs = [recipes.plan_memory(network(), one, loss=squares) for one in ("master", uniform)]
    assert pairs[0].at_peak == pairs[1].at_peak
    refused = "^recipe must be one for any model with a number of parameters, got 'by-hand', which was fitted"
    with pytest.raises(ValueError, match=refused):
        recipes.plan_memory(10**9, uniform)
    with pytest.raises(
        ValueError, match=r"linear must be None with recipe 'by-hand', which has plans of layers, got"
    ):
        recipes.plan_memory(network(), recipe(plans=(layers("0"),)), linear="LLM_INT8")


def test_the_bill_has_neighbors_reasons_and_the_sum() -> None:
    wider = Kept("split8", LOG, 7.03, 0.004, 0.000123, 0.25)
    narrower = kept("plain", MIXED, 5.53, 0.9, math.inf)
    one = replace(recipe().choices[0], narrower=narrower, wider=wider, lost=(0.25, 0.875))
    made = fitted(one, *recipe().choices[1:], plans=(layers("0"),), facts={"limit": "6.5 bytes a parameter"})
    bill = made.bill()
    assert bill.noise == pytest.approx(math.sqrt((16384 * 0.03**2 + 16384 * 0.01**2) / 33088))
    assert bill.loss == pytest.approx(0.00071 + 0.00004)
    assert bill.ms is None
    assert bill.uniform() == {
        name: recipes.get(name).bytes_per_parameter() for name in ("adamw8bit-split8", "master")
    }
    page = str(bill)
    rows = {line.split()[0]: " ".join(line.split()) for line in reversed(page.splitlines()) if line}
    first = made.choices[0].parameters[0]
    others = "plain, log4 log8: 5.53 B, loss inf split8, log8: 7.03 B, loss 0.00012, 0.25 ms"
    assert rows[first] == f"{first} 16,384 split8, log4 log8 6.53 0.00071 3 % {others}"
    assert rows["0.bias"].startswith("0.bias 320 split, fp32 14.00 0 0 %")
    assert rows["in"] == f"in all 33,088 {bill.bytes:.2f} 0.00075 {100 * bill.noise:.3g} %"
    assert [rows[name].split()[1] for name in ("adamw8bit-split8", "master")] == ["7.03", "16.00"]
    assert "SWITCHBACK: int8  2 %" in page
    widest = max(map(len, page.splitlines()))
    assert bill.text(widest) == page
    assert bill.text(widest - 1) != page
    narrow = bill.text(1)
    assert "the next" not in narrow
    assert " ".join(narrow.splitlines()[5].split()) == f"{first} 16,384 split8, log4 log8 6.53 0.00071 3 %"
