"""What a recipe leaves in fp32: buffers, batch norms, and the layers that `keep_fp32` names."""

from __future__ import annotations

import copy
import dataclasses
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from narrowgauge import recipes
from narrowgauge.linear import LowPrecisionLinear, hold_activations, swap_linears


class GainNorm(nn.Module):
    """A norm as transformers writes them: a gain in fp32 would make everything after it fp32."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), GainNorm(64), nn.Linear(64, 64),
        nn.GroupNorm(4, 64), nn.Linear(64, 64),
    )  # fmt: skip


def test_another_recipe_takes_away_what_the_first_one_added() -> None:
    """Plans and norms in fp32 that a recipe gave; plans of the user's own stay."""
    layered = dataclasses.replace(recipes.get("adamw8bit-split8"), name="layered", linear="SWITCHBACK:int8")
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64))
    own = swap_linears(model[3], "LLM_INT8", keep=()).plan
    x = torch.randn(8, 64)
    layered.apply(model, lr=1e-3, keep_fp32="norms")
    planned = [module for module in model if isinstance(module, LowPrecisionLinear)]
    layered.apply(model, lr=1e-3, keep_fp32="norms")  # again: nothing changes
    assert (
        [module for module in model if isinstance(module, LowPrecisionLinear)] == planned == [*model[::2], model[3]]
    )
    assert model(x.bfloat16()).dtype == torch.bfloat16

    copied = copy.deepcopy(model)
    hold_activations(copied[2:])
    with pytest.raises(ValueError, match="first undo what was applied to it since"):
        recipes.get("bf16").apply(copied, lr=1e-3)
    assert isinstance(copied[0], LowPrecisionLinear)  # all or none
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        recipes.get(name).apply(model, lr=1e-3)
        assert {type(module) for module in model[:3]} == {nn.Linear, nn.LayerNorm}
        assert model[3].plan == own
        assert model(x.to(dtype)).dtype == model[1].weight.dtype == dtype
    made = nn.functional.layer_norm(
        nn.functional.linear(x, model[0].weight, model[0].bias), (64,), *model[1].parameters()
    )
    torch.testing.assert_close(model[:3](x), nn.functional.linear(made, *model[2].parameters()), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["fp32", "adamw8bit-split8"])
def test_another_recipe_keeps_all_bits_of_float8_weights(name: str) -> None:
    float8 = dataclasses.replace(
        recipes.get("adamw8bit-split8"), name="float8", weights="fp8split8", linear="TENSORWISE_FP8"
    )
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    first = float8.apply(model, lr=1e-3)
    model(torch.randn(8, 64).bfloat16()).square().mean().backward()
    first.step()
    whole = [first.full_weights()[layer.weight] for layer in model]
    assert not torch.equal(model[0].weight.dequantize(), whole[0].bfloat16())  # the low byte counts
    again = recipes.get(name)
    second = again.apply(model, lr=1e-3)
    assert [type(layer.weight) for layer in model] == [nn.Parameter] * 2
    assert all(torch.equal(layer.weight, w.to(again.dtype)) for layer, w in zip(model, whole, strict=True))
    model(torch.randn(8, 64, dtype=again.dtype)).square().mean().backward()
    with pytest.warns(
        UserWarning, match="step: 2 parameters lose the low words that another optimizer keeps of them"
    ):
        second.step()  # those of the biases
    second.step()


def test_running_statistics_are_those_of_fp32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    optimizer = recipes.get("adamw8bit-split8").apply(model, lr=1e-2)
    norm = model[1]
    assert {t.dtype for t in (norm.weight, norm.bias, norm.running_mean, norm.running_var)} == {torch.float32}
    assert model[0].weight.dtype == torch.bfloat16
    x = torch.randn(4, 3, 12, 12).bfloat16()
    variance = torch.ones(8, dtype=torch.float64)
    for _ in range(20):
        seen = model[0](x).double()
        variance = 0.9 * variance + 0.1 * seen.transpose(0, 1).flatten(1).var(1)
        model(x).square().mean().backward()
    torch.testing.assert_close(norm.running_var.double(), variance, rtol=1e-4, atol=0)
    before = norm.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(norm.weight, before)
    rows = {row.parameter: row for row in optimizer.describe().rows}
    assert (rows["1.weight"].weights, rows["1.weight"].dtype) == ("plain", "float32")
    assert (rows["0.weight"].weights, rows["0.weight"].dtype) == ("split8", "bfloat16")
    assert model.eval()(x).dtype == torch.bfloat16


def test_running_statistics_that_were_cast_before_are_said_once_by_name() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8)).bfloat16()

    words = r"^model: the running statistics of '1' and 1 more are in torch.bfloat16, .*; make the model in float32"
    with pytest.warns(UserWarning, match=words) as said:
        recipes.get("adamw8bit-split8").apply(model())
    assert len(said) == 1
    assert said[0].filename == __file__
    with pytest.warns(UserWarning, match="of '1' are in torch.bfloat16"):
        recipes.get("bf16").apply(model()[:2])
    wide = model()
    recipes.get("adamw8bit").apply(wide)  # a recipe in float32 widens them, so it says nothing
    assert wide[1].running_var.dtype == torch.float32
    recipes.get("bf16").apply(nn.Sequential(nn.BatchNorm1d(8, track_running_stats=False)).bfloat16())


@pytest.mark.parametrize("name", ["bf16", "adamw8bit-split8", "collage-plus"])
def test_norms_in_fp32_run_between_linear_layers_in_bf16(name: str) -> None:
    model = network()
    norms = {f"{i}.{kind}" for i in (1, 3, 5) for kind in ("weight", "bias")} - {"3.bias"}
    optimizer = recipes.get(name).apply(model, lr=1e-2, weight_decay=0.1, keep_fp32="norms")
    assert {n for n, p in model.named_parameters() if p.dtype == torch.float32} == norms
    seen: dict[str, Tensor] = {}
    for place in ("1", "3", "5"):
        model.get_submodule(place).register_forward_hook(lambda m, a, y, place=place: seen.update({place: y}))
    y = model(torch.randn(8, 64).bfloat16())
    assert {t.dtype for t in (y, *seen.values())} == {torch.bfloat16}
    y.float().square().mean().backward()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer.step()
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters())
    for group in optimizer.param_groups:
        if norms & set(group["param_names"]):
            assert group["weight_decay"] == 0.0


def test_a_kept_layer_computes_as_it_would_in_fp32() -> None:
    torch.manual_seed(0)
    kept = nn.Sequential(nn.LayerNorm(64))
    with torch.no_grad():
        kept[0].weight.normal_()
    reference = copy.deepcopy(kept)
    recipes.get("bf16").apply(kept, keep_fp32=["0.*"])
    x = torch.randn(8, 64).bfloat16()
    assert torch.equal(kept(x), reference(x.float()).bfloat16())
    assert kept(x.float()).dtype == torch.float32  # so a model that is widened later goes on in fp32
    assert torch.equal(kept(x.float()), reference(x.float()))


def test_a_copy_and_a_pickle_run_too_and_applying_twice_is_applying_once() -> None:
    model = network()
    for _ in range(2):
        recipes.get("adamw8bit-split8").apply(model, keep_fp32="norms")
    assert len(model[1]._forward_hooks) == len(model[1]._forward_pre_hooks) == 1
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    x = torch.randn(8, 64).bfloat16()
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), model(x))


def test_a_recipe_in_fp32_has_nothing_to_keep() -> None:
    model = network()
    recipes.get("fp32").apply(model, keep_fp32="norms")
    assert not any(module._forward_hooks for module in model.modules())


def test_memory_plans_know_kept_layers() -> None:
    def loss(model: nn.Module, batch: int, sequence: int) -> Tensor:
        return model(torch.empty(batch * sequence, 64, dtype=torch.bfloat16, device="meta")).float().mean()

    def planned(**options: Any) -> Any:
        return recipes.plan_memory(network(), "bf16", sequence=8, loss=loss, **options)

    assert planned(keep_fp32="norms").saved > planned().saved  # their inputs in fp32


class Bare(nn.Module):
    """A parameter beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(64))
        self.embed = nn.Embedding(10, 64)
        self.head = nn.Linear(64, 10)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("norm.weight", "keep_fp32 must name parameters of the model, got 'norm.weight', which fits none"),
        (
            ["head.weight"],
            "must name all parameters of a layer or none, got some of the layer 'head' without 'bias'",
        ),
        (
            "token",
            "must name all parameters of a layer or none, got some of the model itself without 'embed.weight'",
        ),
        ("embed.*", "must name layers that take floats, got the embedding 'embed'"),
    ],
)
def test_what_would_not_run_is_refused_before_the_model_is_cast(keep: Any, message: str) -> None:
    model = Bare()
    with pytest.raises(ValueError, match=message):
        recipes.get("bf16").apply(model, keep_fp32=keep)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["bf16", "adamw8bit-split8", "fp32"])
def test_a_complex_parameter_is_refused_before_the_model_is_cast(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    model.phase = nn.Parameter(torch.randn(3, dtype=torch.cfloat))
    with pytest.raises(ValueError, match=r"float dtypes, got torch.complex64 \(phase\): freeze it$"):
        recipes.get(name).apply(model)
    assert {p.dtype for p in model.parameters()} == {torch.float64, torch.complex64}
    model.phase.requires_grad_(False)
    optimizer = recipes.get(name).apply(model)
    dtype = recipes.get(name).dtype
    assert [t.dtype for t in model[1].state_dict().values()] == [torch.float32] * 4 + [torch.int64]
    model(torch.randn(8, 4).to(dtype)).float().square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("packed", [False, True])
def test_a_kept_recurrent_layer_takes_states_and_packed_sequences(packed: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.LSTM(8, 8), nn.Linear(8, 8)])
    exact = copy.deepcopy(model[0])
    recipes.get("adamw8bit-split8").apply(model, keep_fp32="0.*")
    x, states = torch.randn(3, 2, 8).bfloat16(), (torch.zeros(1, 2, 8).bfloat16(),) * 2
    given = nn.utils.rnn.pack_padded_sequence(x, [3, 2]) if packed else x
    wide = nn.utils.rnn.pack_padded_sequence(x.float(), [3, 2]) if packed else x.float()
    for more, more_wide in (((), ()), ((states,), (tuple(s.float() for s in states),))):
        (y, kept), (wanted, wanted_kept) = model[0](given, *more), exact(wide, *more_wide)
        found = [y.data, *kept]
        assert {t.dtype for t in found} == {torch.bfloat16}
        for t, of in zip(found, [wanted.data, *wanted_kept], strict=True):
            assert torch.equal(t, of.bfloat16())


class Positioned(nn.Module):
    """A layer that takes tables of positions, in fp32, beside its input; or a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, tables: Any, x: Tensor | None = None) -> Any:
        if isinstance(tables, dict):
            return {"x": tables["x"] * self.weight}
        return (x * tables[0] + tables[1]) * self.weight


def test_the_result_of_a_kept_layer_has_the_dtype_of_its_input() -> None:
    model, x = nn.ModuleDict({"one": Positioned(), "two": nn.Linear(8, 8)}), torch.randn(4, 8).bfloat16()
    recipes.get("adamw8bit-split8").apply(model, keep_fp32="one.*")
    tables = torch.ones(8), torch.zeros(8)
    for y in (model["one"](tables, x), model["one"](tables, x=x), model["one"]({"x": x})["x"]):
        assert y.dtype == torch.bfloat16
        model["two"](y)


class Counting(nn.BatchNorm1d):
    def __init__(self, track: bool) -> None:
        super().__init__(4, track_running_stats=track)
        self.register_buffer("seen", torch.tensor(2.0**30 + 1, dtype=torch.float64))


@pytest.mark.parametrize("track", [True, False])
def test_buffers_that_are_no_statistics_keep_their_precision(track: bool) -> None:
    model = nn.Sequential(Counting(track))
    recipes.get("adamw8bit-split8").apply(model)
    assert model[0].seen.dtype == torch.float64
    assert model[0].seen == 2**30 + 1


def test_a_lazy_model_is_named() -> None:
    model = nn.Sequential(nn.LazyLinear(32), nn.LazyLinear(4))
    with pytest.raises(
        ValueError, match=r"^model must have been called once: 0.weight of a lazy module has no shape"
    ):
        recipes.get("adamw8bit-split8").apply(model)


def test_parameters_in_place_of_a_model_are_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be .*Module, got generator"):
        recipes.get("adamw8bit-split8").apply(nn.Linear(2, 2).parameters())  # type: ignore[call-overload]


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_spectral_norms_take_the_dtype_of_their_weight(norm: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(norm(nn.Linear(16, 8)), nn.BatchNorm1d(8))
    plain = copy.deepcopy(model[0]).bfloat16()
    recipes.get("adamw8bit-split8").apply(model, lr=1e-3)
    x = torch.randn(4, 16).bfloat16()
    assert torch.equal(model[0](x), plain(x))
    assert model[1].running_var.dtype == torch.float32
    mixed = nn.Sequential(norm(nn.Linear(16, 8)), norm(nn.Linear(8, 8)))
    recipes.get("adamw8bit-split8").apply(mixed, lr=1e-3, keep_fp32="0.*")
    assert mixed(x).dtype == torch.bfloat16
