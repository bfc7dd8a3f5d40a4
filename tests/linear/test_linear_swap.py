"""Swapping the linear layers of models: which, what stays the same, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import narrowgauge as ng
from narrowgauge.linear import SWITCHBACK, LowPrecisionConv1D, LowPrecisionLinear, swap_linears

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(12).view(2, 6)
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
PIXELS = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=1, vocab_size=50))


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SIZES, vocab_size=50))


def vit() -> nn.Module:
    return transformers.ViTModel(transformers.ViTConfig(**SIZES, image_size=16, patch_size=8))


def clip() -> nn.Module:
    config = transformers.CLIPConfig(
        text_config={**SIZES, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
        vision_config={**SIZES, "image_size": 16, "patch_size": 8},
        projection_dim=32,
    )  # fmt: skip
    return transformers.CLIPModel(config)


def run(model: nn.Module) -> Tensor:
    """What the model says, as one tensor."""
    if isinstance(model, transformers.CLIPModel):
        return model(input_ids=TOKENS, pixel_values=PIXELS).logits_per_image
    out = model(PIXELS) if isinstance(model, transformers.ViTModel) else model(TOKENS)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


# Linear layers of a block, linear layers outside.
MODELS = {
    "gpt2": (gpt2, 4, 0),
    "llama": (llama, 7, 0),
    "bert": (bert, 6, 1),
    "vit": (vit, 6, 1),
    "clip": (clip, 12, 2),
}


@pytest.mark.parametrize(("make", "in_block", "outside"), MODELS.values(), ids=MODELS)
def test_the_models_of_transformers(make: Callable[[], nn.Module], in_block: int, outside: int) -> None:
    torch.manual_seed(0)
    model = make().eval()
    state = copy.deepcopy(model.state_dict())
    parameters = list(model.parameters())
    before = run(model).detach()
    report = swap_linears(model, SWITCHBACK)
    assert len(report.swapped) == 2 * in_block + outside
    assert all(isinstance(model.get_submodule(n), LowPrecisionLinear | LowPrecisionConv1D) for n in report.swapped)
    assert set(report.kept) == ({"lm_head"} if hasattr(model, "lm_head") else set())
    # The same parameters under the same names.
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert model.state_dict().keys() == state.keys()
    model.load_state_dict(state)
    after = run(model)
    assert not torch.equal(after, before)
    assert float((after.detach() - before).norm() / before.norm()) < 0.05
    after.square().mean().backward()
    used = [name for name in report.swapped if "pooler" not in name]
    assert all(model.get_submodule(name).weight.grad.any() for name in used)
    report.undo()
    assert torch.equal(run(model), before)
    assert not any(isinstance(m, LowPrecisionLinear | LowPrecisionConv1D) for m in model.modules())
    swap_linears(model, ng.linear.HIGH_PRECISION, keep=())
    assert torch.allclose(run(model), before, atol=1e-5)


def test_a_conv1d_is_the_linear_layer_of_the_transposed_weight() -> None:
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(24, 16)
    linear = nn.Linear(16, 24)
    linear.load_state_dict({"weight": layer.weight.detach().t(), "bias": layer.bias.detach()})
    model = nn.Sequential(layer)
    for plan in (SWITCHBACK, ng.linear.LLM_INT8, ng.linear.SWITCHBACK_M.with_format("e4m3")):
        report = swap_linears(model, plan)
        assert isinstance(layer, LowPrecisionConv1D)
        assert layer.weight.shape == (16, 24)
        wanted = LowPrecisionLinear.from_linear(linear, plan)
        for one in (layer, wanted):
            one.zero_grad()
            one(torch.linspace(-1, 1, 80).view(5, 16)).square().sum().backward()
        assert torch.equal(layer.weight.grad, wanted.weight.grad.t())
        assert torch.equal(layer.bias.grad, wanted.bias.grad)
        (gradient,) = torch.autograd.grad(layer(torch.ones(5, 16)).sum(), layer.weight)
        assert gradient.is_contiguous()  # autograd would copy another
        assert "nf=24, nx=16, plan=" in repr(layer)
        report.undo()
        assert type(layer) is Conv1D


def test_tied_weights_stay_tied_and_shared_modules_are_swapped_once() -> None:
    model = gpt2()
    assert swap_linears(model, SWITCHBACK, keep=()).swapped[-1] == "lm_head"
    assert model.lm_head.weight is model.transformer.wte.weight
    shared = nn.Linear(16, 16)
    twice = nn.Sequential(shared, nn.ReLU(), shared)
    report = swap_linears(twice, SWITCHBACK)
    assert report.swapped == ["0"]
    assert twice[0] is twice[2]
    assert isinstance(shared, LowPrecisionLinear)
    report.undo()
    assert type(shared) is nn.Linear
    # By any of its names it is kept.
    model = nn.ModuleDict({"first": shared, "second": shared, "other": nn.Linear(16, 16)})
    report = swap_linears(model, SWITCHBACK, keep=("second",))
    assert report.swapped == ["other"]
    assert report.kept == {"first": "named in keep: 'second'"}
    assert swap_linears(shared, SWITCHBACK).swapped == [""]  # a layer that is the model


def test_what_is_kept_has_a_reason() -> None:
    class Odd(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).relu()

    class Watched(nn.Linear):
        def __getattr__(self, name: str) -> Tensor:
            return super().__getattr__(name)

    model = nn.ModuleDict({
        "plain": nn.Linear(16, 16),
        "small": nn.Linear(16, 15),
        "odd": Odd(16, 16),
        "watched": Watched(16, 16),
        "lazy": nn.LazyLinear(16),
        "parametrized": nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
        "hooked": nn.utils.spectral_norm(nn.Linear(16, 16)),
        "pruned": prune.identity(nn.Linear(16, 16), "weight"),
        "planned": LowPrecisionLinear(16, 16, plan=ng.linear.LLM_INT8),
        "attention": nn.MultiheadAttention(16, 2, add_bias_kv=True),
        "patched": nn.Linear(16, 16),
        "head": nn.Sequential(nn.Linear(16, 16)),
        "other": nn.ModuleDict({"skip": nn.Linear(16, 16), "up_1": nn.Linear(16, 16)}),
    })  # fmt: skip
    model["patched"].forward = lambda x: x
    report = swap_linears(model, SWITCHBACK, keep=("head", "skip", "*.up_?"))
    assert report.swapped == ["plain"]
    assert report.kept == {
        "small": "15 features, fewer than 16",
        "odd": "is a Odd, whose class has a forward of its own (subclasses=True swaps it)",
        "watched": "is a Watched, whose class has a __getattr__ of its own",
        "lazy": "has no weight yet: run the model once before",
        "parametrized": "is parametrized: its weight is computed anew",
        "hooked": "is parametrized: its weight is computed anew",
        "pruned": "is parametrized: its weight is computed anew",
        "planned": "has a plan already: LLM_INT8: int8",
        "attention": "attends to keys that it adds (add_bias_kv, add_zero_attn)",
        "attention.out_proj": "nn.MultiheadAttention reads its weight, not its output",
        "patched": "has a forward of its own",
        "head.0": "named in keep: 'head'",
        "other.skip": "named in keep: 'skip'",
        "other.up_1": "named in keep: '*.up_?'",
    }
    text = str(report)
    assert "swapped: 1 (int8 real)\n  plain\n" in text
    assert "kept: 14\n  small               15 features, fewer than 16\n" in text
    report.undo()
    report.undo()
    assert model["planned"].plan == ng.linear.LLM_INT8
    report = swap_linears(model, SWITCHBACK, min_features=15, subclasses=True)
    assert report.swapped[:3] == ["plain", "small", "odd"]
    assert report.kept["patched"] == "has a forward of its own"


class Named(nn.Linear):
    """A subclass as frameworks have them: another constructor, methods and attributes, the same forward pass."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__(**sizes)
        self.label = "first"

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.5)
        nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, label={self.label}"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_subclass_that_computes_what_a_linear_layer_does_stays_what_it_was(tmp_path: Path) -> None:
    model = nn.Sequential(Named({"in_features": 16, "out_features": 32}), nn.Tanh(), nn.Linear(32, 16))
    layer, state, x = model[0], copy.deepcopy(model.state_dict()), torch.randn(4, 16)
    plan = ng.linear.TENSORWISE_FP8.with_moving_average()
    report = swap_linears(model, plan)
    assert (report.swapped, report.kept) == (["0", "2"], {})
    assert model[0] is layer
    assert isinstance(layer, Named)
    assert isinstance(layer, LowPrecisionLinear)
    assert repr(layer).startswith(
        "LowPrecisionNamed(in_features=16, out_features=32, bias=True, label=first, plan="
    )
    assert layer.forward.__func__ is LowPrecisionLinear.forward
    torch.save(model, tmp_path / "model.pt")
    copies = copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)
    for one in (model, *copies):
        assert type(one[0]) is type(layer)
        assert (one[0].label, one[0].plan) == ("first", plan)
        assert one.state_dict().keys() == state.keys()
        one.load_state_dict(state)
    assert torch.equal(copies[0](x), copies[1](x))
    layer.reset_parameters()
    assert bool((layer.weight == 0.5).all())
    twin = nn.Sequential(Named({"in_features": 16, "out_features": 32}))
    swap_linears(twin, SWITCHBACK)
    assert type(twin[0]) is type(layer)
    for plan in (SWITCHBACK, ng.linear.HIGH_PRECISION):
        twin[0].set_plan(plan)
        wanted = LowPrecisionLinear.from_linear(twin[0], plan)(x)
        assert torch.equal(torch.compile(twin, fullgraph=True, backend="eager")(x), wanted)
    report.undo()
    assert type(layer) is Named


def test_a_weight_that_an_attention_reads_by_itself_is_kept() -> None:
    """As timm's BEiT has it: no output of the layer, its weight and biases put together elsewhere."""
    model = nn.ModuleDict(
        {"attn": nn.ModuleDict({"qkv": nn.Linear(16, 48, bias=False), "proj": nn.Linear(16, 16)})}
    )
    assert swap_linears(model, SWITCHBACK).undo() is None
    model["attn"].q_bias = nn.Parameter(torch.zeros(16))
    report = swap_linears(model, SWITCHBACK)
    assert report.swapped == ["attn.proj"]
    assert list(report.kept) == ["attn.qkv"]
    assert report.kept["attn.qkv"].startswith("its attention reads its weight, not its output")
    report.undo()
    model["attn"].qkv_bias_separate = True
    assert swap_linears(model, SWITCHBACK).swapped == ["attn.qkv", "attn.proj"]


def test_what_it_does_not_take() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    for changed, message in (
        ({"plan": 8}, "plan must be a LinearPlan .*, got 8"),
        ({"plan": "int8"}, "plan must be a name such as SWITCHBACK, .*, got 'int8'"),
        ({"keep": "head"}, "keep must be a list of names .*, got 'head'"),
        ({"launched": False}, "launched must be True without tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            swap_linears(**({"model": model, "plan": SWITCHBACK} | changed))
    assert type(model[0]) is nn.Linear


def test_a_layer_keeps_attributes_that_a_plan_would_overwrite() -> None:
    class Routed(nn.Linear):
        @property
        def plan(self) -> str:
            return "mine"

    model = nn.ModuleDict({"plain": nn.Linear(16, 16), "routed": Routed(16, 16), "marked": nn.Linear(16, 16)})
    model["marked"].path = "mine"
    report = swap_linears(model, SWITCHBACK)
    assert report.swapped == ["plain"]
    assert report.kept == {
        "routed": "has an attribute 'plan' of its own, which a layer with a plan has too",
        "marked": "has an attribute 'path' of its own, which a layer with a plan has too",
    }
    assert (model["routed"].plan, model["marked"].path) == ("mine", "mine")


def test_swapping_nothing_warns_with_the_first_reason() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(16, 10), nn.Linear(10, 16))
    for given, why in ((model, r"'1': 10 features, fewer than 16"), (model[0], "it has none")):
        with pytest.warns(UserWarning, match=f"^swap_linears: no linear layer .* was swapped; {why}$") as caught:
            swap_linears(given, SWITCHBACK)
        assert len(caught) == 1
    assert list(swap_linears(model, SWITCHBACK, keep=("1", "2")).kept) == ["1", "2"]  # as it was told
    swap_linears(model, SWITCHBACK, min_features=1)
    assert len(swap_linears(model, SWITCHBACK).kept) == 2  # by the same plan already


def test_a_plan_by_its_name() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    report = swap_linears(model, "SWITCHBACK:e4m3")
    assert report.plan == model[0].plan == SWITCHBACK.with_format("e4m3")


def test_adapters_are_kept_unless_keep_says_otherwise() -> None:
    model = nn.ModuleDict({"q": nn.ModuleDict({"base_layer": nn.Linear(32, 32), "lora_A": nn.Linear(32, 16)})})
    report = swap_linears(model, SWITCHBACK)
    assert report.swapped == ["q.base_layer"]
    assert report.kept == {"q.lora_A": "named in keep: '*.lora_*'"}
    report.undo()
    assert swap_linears(model, SWITCHBACK, keep=("lm_head",)).swapped == ["q.base_layer", "q.lora_A"]


def test_hooks_optimizers_and_copies_go_on_working() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    optimizer = ng.optim.AdamW(model.named_parameters(), lr=1e-2)
    seen: list[torch.Size] = []
    model[0].register_forward_hook(lambda module, arguments, output: seen.append(output.shape))
    swap_linears(model, ng.linear.TENSORWISE_FP8.with_moving_average())
    twin = copy.deepcopy(model)
    x = torch.randn(4, 16)
    before = model[0].weight.detach().clone()
    model(x).square().sum().backward()
    optimizer.step()
    assert seen == [(4, 16)]
    assert not torch.equal(before, model[0].weight)
    assert torch.equal(twin[0].weight, before)


@pytest.mark.parametrize(("make", "in_block", "outside"), MODELS.values(), ids=MODELS)
def test_layer_scale_from_zero_takes_every_branch_away(make: Callable, in_block: int, outside: int) -> None:
    """Equation 3: with zeros a block adds nothing, with ones it is the block that it was."""
    torch.manual_seed(0)
    model = make().eval()
    keys = set(model.state_dict())
    before = run(model).detach()
    added = ng.nn.add_layer_scale(model)
    assert len(added.scales) == (8 if make is clip else 4)
    assert set(model.state_dict()) - keys == {f"{name}.layer_scale.gamma" for name in added.scales}
    swap_linears(model, ng.linear.TENSORWISE_FP8)
    assert not torch.equal(run(model), before)
    branches = []
    for name in added.scales:
        model.get_submodule(name).register_forward_hook(lambda module, arguments, output: branches.append(output))
    run(model)
    assert len(branches) == len(added.scales)
    assert not any(branch.any() for branch in branches)
    run(copy.deepcopy(model)).square().mean().backward()
    run(model).square().mean().backward()
    assert all(scale.gamma.grad.any() for scale in added.scales.values())
    swap_linears(model, SWITCHBACK)
    with pytest.raises(ValueError, match="must not have layer scales already"):
        ng.nn.add_layer_scale(model)
    assert str(added).startswith(f"layer scale: {len(added.scales)}\n  {next(iter(added.scales))}\n")
    added.remove()
    assert set(model.state_dict()) == keys


def test_layer_scale_of_ones_is_the_model_itself() -> None:
    for make, *_ in MODELS.values():
        model = make().eval()
        before = run(model).detach()
        added = ng.nn.add_layer_scale(model, init=1.0)
        assert torch.equal(run(model), before)
        added.remove()
        assert torch.equal(run(model), before)
    with pytest.raises(ValueError, match=r"model must have blocks of GPT2Block, LlamaDecoderLayer.*, got Linear"):
        ng.nn.add_layer_scale(nn.Linear(3, 3))


def test_a_layer_that_has_become_something_else_since_is_not_undone() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    report = swap_linears(model, SWITCHBACK)
    nn.utils.parametrizations.orthogonal(model[1])
    x, shown = torch.randn(4, 32), str(report)
    assert "swapped: 2 (int8 real)" in shown
    before = model(x)
    with pytest.raises(RuntimeError, match=r"'1' must be a LowPrecisionLinear to be undone, got a Parametrized"):
        report.undo()
    assert torch.equal(model(x), before)
    assert type(model[0]) is LowPrecisionLinear
    nn.utils.parametrize.remove_parametrizations(model[1], "weight")
    report.undo()
    assert type(model[0]) is type(model[1]) is nn.Linear
    report.undo()  # of nothing


def test_the_experts_of_a_mixture_are_kept_with_a_reason() -> None:
    class TinyExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(4, 32, 16))

    report = swap_linears(nn.ModuleDict({"router": nn.Linear(32, 32), "experts": TinyExperts()}), SWITCHBACK)
    assert report.swapped == ["router"]
    assert report.kept == {"experts.gate_up_proj": "is a parameter of a TinyExperts, without a layer"}
