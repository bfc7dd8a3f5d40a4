"""Splitting a model into groups: each parameter in one, by what it is."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from libraries import library
from narrowgauge import recipes
from narrowgauge.distributed import CPUOffload
from narrowgauge.nn import StableEmbedding
from narrowgauge.optim import AdamW, AdamW8bit, split_decay, step_in_backward


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.stable = StableEmbedding(50, 16)
        self.norm = nn.LayerNorm(16)
        self.batch = nn.BatchNorm1d(16)
        self.rms = nn.RMSNorm(16)
        self.linear = nn.Linear(16, 16)
        self.conv = nn.Conv1d(4, 4, 3)
        self.gain = nn.Parameter(torch.ones(16))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight


def test_every_parameter_that_learns_is_in_one_group() -> None:
    model = Block()
    decayed, bare, embeddings = split_decay(model, 0.1, embeddings="fp32")
    names = [{name for name, _ in group["params"]} for group in (decayed, bare, embeddings)]
    assert names[0] == {"linear.weight", "conv.weight"}
    assert names[2] == {"embed.weight", "stable.weight"}
    assert names[1] == {
        "stable.norm.weight", "stable.norm.bias", "norm.weight", "norm.bias", "batch.weight", "batch.bias",
        "rms.weight", "linear.bias", "conv.bias", "gain",
    }  # fmt: skip
    assert [group["weight_decay"] for group in (decayed, bare, embeddings)] == [0.1, 0.0, 0.1]


def test_an_attentions_biases_do_not_decay() -> None:
    attention = nn.MultiheadAttention(16, 2, add_bias_kv=True)
    decayed, bare = split_decay(attention, 0.1)
    assert {name for name, _ in decayed["params"]} == {"in_proj_weight", "out_proj.weight"}
    assert {name for name, _ in bare["params"]} == {"in_proj_bias", "out_proj.bias", "bias_k", "bias_v"}


def test_an_optimizer_takes_the_groups_and_shows_them() -> None:
    model = nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 500))
    groups = split_decay(model, 0.1, embeddings="fp32")
    rows = {row.parameter: row.states for row in AdamW8bit(groups).describe().rows}
    assert rows == {"0.weight": "m:fp32 v:fp32", "1.weight": "m:log8 v:log8", "1.bias": "m:fp32 v:fp32"}


@pytest.mark.parametrize("recipe", ["adamw8bit", "adamw8bit-dynamic-split8", "lion8bit"])
def test_recipes_and_groups_keep_embeddings_alike(recipe: str) -> None:
    """One rule: as everything else is kept, in the bytes that a recipe states."""
    model = nn.Sequential(nn.Embedding(512, 64), nn.LayerNorm(64), nn.Linear(64, 512, bias=False))
    found = recipes.get(recipe)
    applied = found.apply(model, weight_decay=0.1)
    groups = split_decay(model, 0.1)
    split = found.optimizer(groups, weights=found.weights, states=found.states)
    by_recipe, by_groups = ({row.parameter: row for row in o.describe().rows} for o in (applied, split))
    assert by_recipe == by_groups
    assert by_recipe["0.weight"].states == by_recipe["2.weight"].states
    assert [len(group["params"]) for group in applied.param_groups] == [len(group["params"]) for group in groups]
    added = found.bytes_per_parameter() - 2 * found.dtype.itemsize
    assert by_recipe["0.weight"].bytes == pytest.approx(added * model[0].weight.numel(), rel=1e-6)


class Patches(nn.Module):
    """What timm's vision transformers declare: names of their own, one of which this size does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(1, 4, 16))
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(16, 1))

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed", "dist_token"}


def bare(groups: list[dict]) -> set[str]:
    """The names of the parameters that do not decay."""
    return {name for group in groups if group.get("weight_decay") == 0.0 for name, _ in group["params"]}


def test_what_a_model_names_does_not_decay() -> None:
    biases = {"blocks.0.bias", "blocks.1.bias"}
    assert bare(split_decay(Patches(), 0.1)) == {"pos_embed", *biases}
    inside = nn.ModuleDict({"visual": Patches()})  # as in open_clip
    assert bare(split_decay(inside, 0.1)) == {f"visual.{name}" for name in ("pos_embed", *biases)}


@pytest.mark.parametrize(
    ("no_decay", "more"),
    [("scale", {"scale"}), (["scale", "blocks.?.weight"], {"scale", "blocks.0.weight", "blocks.1.weight"})],
)
def test_what_a_user_names_does_not_decay(no_decay: str | list[str], more: set[str]) -> None:
    expected = {"pos_embed", "blocks.0.bias", "blocks.1.bias"} | more
    assert bare(split_decay(Patches(), 0.1, no_decay=no_decay)) == expected
    optimizer = recipes.get("adamw8bit-split8").apply(Patches(), weight_decay=0.1, no_decay=no_decay)
    assert {name for g in optimizer.param_groups if not g["weight_decay"] for name in g["param_names"]} == expected


def test_a_name_that_no_parameter_has_is_refused_before_the_model_is_cast() -> None:
    message = r"no_decay must name parameters of the model, got 'scales', which fits none"
    with pytest.raises(ValueError, match=message):
        split_decay(Patches(), 0.1, no_decay="scales")
    model = Patches()
    with pytest.raises(ValueError, match=message):
        recipes.get("bf16").apply(model, no_decay=["scales"])
    with pytest.raises(ValueError, match="no_decay must be left out with decay_all=True"):
        recipes.get("bf16").apply(model, no_decay="scale", decay_all=True)
    assert model.scale.dtype == torch.float32


def test_timms_models_name_theirs() -> None:
    model = library("timm").create_model("vit_tiny_patch16_224", depth=1, num_classes=2)
    assert {"cls_token", "pos_embed"} == model.no_weight_decay() & dict(model.named_parameters()).keys()
    assert {"cls_token", "pos_embed"} <= bare(split_decay(model, 0.1))
    assert "blocks.0.mlp.fc1.weight" not in bare(split_decay(model, 0.1))


def test_a_table_of_biases_does_not_decay() -> None:
    """T5's, whose module is named a bias: Trainer does not decay it either."""
    model = nn.ModuleDict({"relative_attention_bias": nn.Embedding(32, 4), "unbiased": nn.Linear(4, 4, bias=False)})
    decayed, bare = split_decay(model, 0.1)
    assert [name for name, _ in decayed["params"]] == ["unbiased.weight"]
    assert [name for name, _ in bare["params"]] == ["relative_attention_bias.weight"]


class _Quantized(nn.Module):
    def __init__(self, codes: nn.Parameter, adapter: nn.Parameter) -> None:
        super().__init__()
        self.codes, self.adapter = codes, adapter


def test_a_state_of_another_shape_is_refused_before_anything_moves() -> None:
    """Of an embedding that has grown, with its codes and without its scales."""
    first, old = torch.nn.Parameter(torch.ones(8)), torch.nn.Parameter(torch.ones(100, 64))
    optimizer = AdamW8bit([first, old])
    first.grad, old.grad = torch.ones(8), torch.ones(100, 64)
    optimizer.step()
    state = optimizer.state.pop(old)
    new = torch.nn.Parameter(torch.ones(110, 64))
    optimizer.param_groups[0]["params"][1] = new
    grown = {k: torch.cat([x, x.new_zeros(10, 64)]) if x.shape == old.shape else x for k, x in state.items()}
    optimizer.state[new] = grown
    first.grad, new.grad, before = torch.ones(8), torch.ones(110, 64), first.detach().clone()
    with pytest.raises(ValueError, match=r"0.1 must have a state for its shape, \(110, 64\), got another; delete"):
        optimizer.step()
    assert torch.equal(first, before)
    optimizer = AdamW8bit([("first", first)])
    optimizer.param_groups[0]["params"].append(new)
    with pytest.raises(ValueError, match=r"group 0 must have a name for each of its 2 parameters, got 1: give it"):
        optimizer.step()


class _Mixin:
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)


class _Mixed(_Mixin, AdamW):
    def __init__(self, *args: Any, tag: int = 1, **options: Any) -> None:
        super().__init__(*args, **options)


class _DefaultFirst(AdamW):
    def __init__(self, lr: float = 0.1, *args: Any, **options: Any) -> None:
        super().__init__(*args, lr=lr, **options)


class _Named(AdamW):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


def test_subclasses_show_the_arguments_that_they_pass_on() -> None:
    shown = [*inspect.signature(AdamW).parameters]
    assert [*inspect.signature(_Mixed).parameters] == [*shown[:6], "tag", *shown[6:]]
    assert [*inspect.signature(_Named).parameters] == shown
    _DefaultFirst(0.1, [torch.nn.Parameter(torch.ones(4))])  # no signature could show it
    with pytest.raises(TypeError, match="the nearest is 'betas'"):
        _Named([torch.nn.Parameter(torch.ones(4))], beta=(0.9, 0.99))


def test_frozen_float8_and_complex_numbers_are_left_alone() -> None:
    codes = torch.nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
    spectrum = torch.nn.Parameter(torch.ones(4, dtype=torch.complex64), requires_grad=False)
    weight = torch.nn.Parameter(torch.ones(4, 4))
    model = torch.nn.ParameterList([codes, spectrum, weight])
    AdamW8bit(model.named_parameters())
    recipes.get("adamw8bit-split8").apply(model)
    assert [p.dtype for p in model] == [torch.float8_e4m3fn, torch.complex64, torch.bfloat16]


def test_frozen_integers_are_left_alone_as_in_torch() -> None:
    """Codes of a quantized layer, beside which an adapter trains."""
    codes = torch.nn.Parameter(torch.ones(6, dtype=torch.int8), requires_grad=False)
    adapter = torch.nn.Parameter(torch.ones(6))
    theirs, ours = torch.optim.AdamW([codes, adapter], lr=0.1), AdamW([codes, adapter], lr=0.1)
    adapter.grad = torch.ones(6)
    theirs.step()
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    ours.step()
    assert ours.state.keys() == {adapter}
    assert ours.state_dict()["state"].keys() == ours.torch_state_dict()["state"].keys() == {1}
    assert len(ours.describe().rows) == 1
    assert pickle.loads(pickle.dumps(ours)).state_bytes() == ours.state_bytes()
    with pytest.raises(ValueError, match=r"p must be a parameter that can train, got a frozen one of torch\.int8"):
        ours.convert(codes, weights="plain")
    for make in (
        lambda: CPUOffload(AdamW, [codes, adapter]),
        lambda: step_in_backward(_Quantized(codes, adapter), AdamW),
    ):
        before = adapter.detach().clone()
        optimizer = make()
        (adapter**2).sum().backward()
        optimizer.step()
        assert not torch.equal(adapter, before)
        assert codes.sum() == 6
        adapter.grad = None
    wide = torch.nn.Parameter(torch.ones(6, dtype=torch.float64), requires_grad=False)  # might train later
    with pytest.raises(ValueError, match=r"params must be float32, bfloat16 or float16, got torch.float64 \(0.0\)"):
        AdamW([wide])
