"""Models and adapters of other libraries, where they are installed: timm's ViT, open_clip's CLIP, peft's LoRA."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from libraries import library
from narrowgauge.linear import SWITCHBACK, LowPrecisionLinear, LowPrecisionMultiheadAttention, swap_linears

IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)
TOKENS = torch.arange(16).view(2, 8) % 12


def check(
    model: nn.Module, run: Callable[[], Tensor], swapped: list[str], kept: dict[str, str], **options: Any
) -> str:
    """Swap, forward, backward, state_dict, undo; the report in words."""
    state = copy.deepcopy(model.state_dict())
    before = run().detach()
    report = swap_linears(model, SWITCHBACK, **options)
    assert report.swapped == swapped
    assert report.kept == kept
    text = str(report)
    assert model.state_dict().keys() == state.keys()
    model.load_state_dict(state)
    after = run()
    assert 0 < float((after.detach() - before).norm() / before.norm()) < 0.1
    after.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad and p.dim() == 2)
    for name in swapped:
        module = model.get_submodule(name)
        assert isinstance(module, LowPrecisionLinear | LowPrecisionMultiheadAttention)
        assert module.get_parameter(module.WEIGHT).grad.any()
    report.undo()
    assert torch.equal(run(), before)
    return text


SIZES = {"img_size": 32, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 20}


def test_timms_vit() -> None:
    timm = library("timm")
    torch.manual_seed(0)
    model = timm.models.VisionTransformer(**SIZES).eval()
    layers = [f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
    check(model, lambda: model(IMAGES), layers, {"head": "named in keep: 'head'"}, keep=("head",))


@pytest.mark.parametrize(
    ("name", "options"),
    [("Eva", {}), ("Eva", {"qkv_fused": False}), ("Beit", {"qkv_bias": True}), ("Beit", {"qkv_bias": False})],
)
def test_a_layer_that_is_not_called_is_not_said_to_be_swapped(name: str, options: dict[str, bool]) -> None:
    """timm's BEiT and EVA multiply by the weight of `qkv` themselves where it has biases; all others are called."""
    timm = library("timm")
    model = getattr(timm.models, name)(**SIZES, **options).eval()
    report = swap_linears(model, SWITCHBACK, keep=())
    called: set[str] = set()
    for layer in (*report.swapped, *report.kept):
        model.get_submodule(layer).register_forward_hook(lambda *arguments, layer=layer: called.add(layer))
    model(IMAGES)
    assert called == set(report.swapped)
    assert len(called) + len(report.kept) >= 9
    assert set(report.kept.values()) <= {
        "its attention reads its weight, not its output (qkv_bias_separate=True would call it)"
    }
    if name == "Beit":
        assert bool(report.kept) == options["qkv_bias"]
        for block in model.blocks:
            block.attn.qkv_bias_separate = True
        report.undo()
        assert not swap_linears(model, SWITCHBACK, keep=()).kept


@pytest.mark.parametrize("name", ["VisionTransformer", "Eva"])
def test_timms_own_norms_are_ours(name: str) -> None:
    """A model made with norms of queries and keys, and one that got them: the same names, the same numbers."""
    timm = library("timm")
    torch.manual_seed(0)
    sizes = {**SIZES, "use_rot_pos_emb": True} if name == "Eva" else SIZES
    kind = getattr(timm.models, name)
    if "qk_norm" not in inspect.signature(kind).parameters:
        pytest.skip(f"timm {timm.__version__}'s {name} has no norms of queries and keys")
    made, bare = kind(**sizes, qk_norm=True).eval(), kind(**sizes).eval()
    added = ng.nn.add_qk_norm(bare)
    assert list(added.norms) == [f"blocks.{i}.attn.{part}" for i in (0, 1) for part in ("q_norm", "k_norm")]
    for p in made.parameters():
        nn.init.normal_(p, std=0.2)
    bare.load_state_dict(made.state_dict())
    assert torch.allclose(bare(IMAGES), made(IMAGES), atol=1e-5)
    bare(IMAGES).square().sum().backward()
    assert all(norm.weight.grad.any() for norm in added.norms.values())
    with pytest.raises(ValueError, match=r"got one at blocks\.0\.attn\.q_norm"):
        ng.nn.add_qk_norm(made)
    added.remove()
    again = kind(**sizes).eval()
    assert bare.state_dict().keys() == again.state_dict().keys()
    again.load_state_dict(bare.state_dict())
    assert torch.equal(bare(IMAGES), again(IMAGES))


def test_open_clips_clip() -> None:
    """Its blocks have nn.MultiheadAttention, which is swapped as a whole: all twelve parts of a block's width."""
    open_clip = library("open_clip")
    torch.manual_seed(0)
    vision = {"image_size": 32, "patch_size": 16, "width": 32, "layers": 2, "head_width": 8}
    text = {"context_length": 8, "vocab_size": 12, "width": 32, "heads": 4, "layers": 2}
    model = open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text).eval()
    blocks = [f"{tower}.resblocks.{i}" for tower in ("visual.transformer", "transformer") for i in (0, 1)]
    layers = [f"{block}.{part}" for block in blocks for part in ("attn", "attn.out_proj", "mlp.c_fc", "mlp.c_proj")]

    def run() -> Tensor:
        image, text, scale = model(IMAGES, TOKENS)
        return scale * image @ text.T

    assert "visual.transformer.resblocks.0.attn\n" in check(model, run, layers, {})
    with pytest.raises(ValueError, match=r"model must have attentions of.*, got CLIP"):
        ng.nn.add_qk_norm(model)


def test_open_clips_blocks_with_options() -> None:
    """Their attention is open_clip's own, which multiplies by a parameter: it stays, and the report says so."""
    open_clip = library("open_clip")
    torch.manual_seed(0)
    block = open_clip.transformer.CustomResidualAttentionBlock
    model = nn.Sequential(block(32, 4, scale_heads=True), block(32, 4)).eval()
    x = torch.linspace(-1, 1, 2 * 5 * 32).view(2, 5, 32)
    reason = "is a Attention, which multiplies by in_proj_weight without a layer"
    layers = [f"{i}.{part}" for i in (0, 1) for part in ("attn.out_proj", "mlp.c_fc", "mlp.c_proj")]
    text = check(model, lambda: model(x), layers, {"0.attn": reason, "1.attn": reason})
    assert f"0.attn  {reason}" in text
    before = model(x)
    added = ng.nn.add_qk_norm(model)
    assert list(added.norms) == [f"{i}.attn.{part}" for i in (0, 1) for part in ("ln_q", "ln_k")]
    made = nn.Sequential(block(32, 4, scale_heads=True, qk_norm=True), block(32, 4, qk_norm=True)).eval()
    made.load_state_dict(model.state_dict())
    assert torch.allclose(model(x), made(x), atol=1e-4)  # open_clip's eps is 1e-5
    added.remove()
    assert torch.equal(model(x), before)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.down = nn.Linear(32, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.q_proj(x)))


@pytest.mark.parametrize("first", ["swap", "peft"])
def test_peft_on_swapped_layers_and_swapping_under_peft(first: str) -> None:
    """The base layer computes by the plan and gets no weight gradient, the adapter stays as it is; both orders."""
    peft = library("peft")
    torch.manual_seed(0)
    model = Tiny()
    config = peft.LoraConfig(r=16, lora_alpha=16, target_modules=["q_proj"], init_lora_weights=False)
    if first == "swap":
        swap_linears(model, SWITCHBACK)
    adapted = peft.get_peft_model(model, config)
    if first == "peft":
        report = swap_linears(adapted, SWITCHBACK)
        assert [name.rpartition("model.")[2] for name in report.swapped] == ["q_proj.base_layer", "down"]
        assert {reason.split(":")[0] for reason in report.kept.values()} == {"named in keep"}
    base = adapted.base_model.model.q_proj.base_layer
    assert isinstance(base, LowPrecisionLinear)
    x = torch.randn(6, 32)
    adapter = adapted.base_model.model.q_proj
    a, b = adapter.lora_A["default"], adapter.lora_B["default"]
    assert type(a) is type(b) is nn.Linear
    assert torch.allclose(adapter(x), base(x) + b(a(x)), atol=1e-6)
    adapted(x).square().sum().backward()
    assert base.weight.grad is None
    assert a.weight.grad.any()
    assert b.weight.grad.any()
