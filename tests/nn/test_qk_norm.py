"""Norms of queries and keys: attention by the equation, in float64, and models before, with and after them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.nn import HeadLayerNorm, add_qk_norm

transformers = pytest.importorskip("transformers")

DIM, HEADS, HEAD_DIM, TOKENS = 32, 4, 8, 6


def normed(heads: Tensor, norm: HeadLayerNorm) -> Tensor:
    """The equation of a layer norm over the last dimension, written out."""
    centered = heads - heads.mean(-1, keepdim=True)
    deviation = (centered.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return centered / deviation * norm.weight + norm.bias


def turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, (batch, heads, tokens, head_dim)."""
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat([-second, first], -1) * sin


def attended(q: Tensor, k: Tensor, v: Tensor, norms: list[HeadLayerNorm], causal: bool, rope=None) -> Tensor:
    """softmax(LN(q) LN(k)ᵀ / √head_dim) v of (batch, tokens, heads * head_dim), head by head."""
    q, k, v = (x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for x in (q, k, v))
    q, k = normed(q, norms[0]), normed(k, norms[1])
    if rope is not None:
        q, k = turned(q, *rope), turned(k, *rope)
    repeats = q.shape[1] // k.shape[1]  # grouped queries
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    logits = q @ k.transpose(-1, -2) / HEAD_DIM**0.5
    if causal:
        logits = logits.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf)
    return (logits.softmax(-1) @ v).transpose(1, 2).flatten(-2)


def attention(kind: str) -> tuple[nn.Module, dict, list[str]]:
    """An attention of transformers in float64, what it is called with, the names of its norms."""
    sizes = {"hidden_size": DIM, "num_attention_heads": HEADS, "attn_implementation": "sdpa"}
    models = transformers.models
    mask = torch.full((TOKENS, TOKENS), -torch.inf, dtype=torch.float64).triu(1)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=DIM, n_head=HEADS, attn_implementation="sdpa")
        module = models.gpt2.modeling_gpt2.GPT2Attention(config, layer_idx=0)
        return module, {"attention_mask": mask}, ["c_attn.q_norm", "c_attn.k_norm"]
    names = ["q_proj.q_norm", "k_proj.k_norm"]
    if kind == "llama":
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=2)
        module = models.llama.modeling_llama.LlamaAttention(config, layer_idx=0)
        rope = models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        angles = rope(torch.zeros(1, dtype=torch.float64), torch.arange(TOKENS)[None])
        return module, {"position_embeddings": angles, "attention_mask": mask}, names
    if kind == "vit":
        return models.vit.modeling_vit.ViTAttention(transformers.ViTConfig(**sizes)), {}, names
    if kind == "clip":
        return models.clip.modeling_clip.CLIPAttention(transformers.CLIPVisionConfig(**sizes)), {}, names
    names = ["query.q_norm", "key.k_norm"]
    if kind == "roberta":
        config = transformers.RobertaConfig(**sizes)
        return models.roberta.modeling_roberta.RobertaSelfAttention(config), {}, names
    return models.bert.modeling_bert.BertSelfAttention(transformers.BertConfig(**sizes)), {}, names


KINDS = ("gpt2", "llama", "vit", "clip", "bert", "roberta")


@pytest.mark.parametrize("kind", KINDS)
def test_attention_with_norms_is_the_equation(kind: str) -> None:
    torch.manual_seed(0)
    module, options, names = attention(kind)
    module = module.double().eval()
    x = torch.randn(2, TOKENS, DIM, dtype=torch.float64)
    added = add_qk_norm(module)
    assert list(added.norms) == names
    norms = list(added.norms.values())
    for norm in norms:  # so that gains and biases, and which of the two is whose, are seen
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    got = module(x, **options)[0]
    with torch.no_grad():
        bare = copy.deepcopy(module)
        for one in bare.modules():
            one._forward_hooks.clear()
        if kind == "gpt2":
            q, k, v = bare.c_attn(x).chunk(3, -1)
        elif kind in ("bert", "roberta"):
            q, k, v = bare.query(x), bare.key(x), bare.value(x)
        else:
            q, k, v = bare.q_proj(x), bare.k_proj(x), bare.v_proj(x)
        angles = options.get("position_embeddings")
        rope = None if angles is None else tuple(angle[:, None].double() for angle in angles)
        wanted = attended(q, k, v, norms, "attention_mask" in options, rope)
        out = {"gpt2": "c_proj", "llama": "o_proj", "vit": "o_proj", "clip": "out_proj"}.get(kind)
        wanted = wanted if out is None else getattr(bare, out)(wanted)
    assert torch.allclose(got, wanted, rtol=1e-9, atol=1e-11)
    got.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for norm in norms for p in norm.parameters())


def test_cross_attention_of_gpt2_and_bert() -> None:
    """Queries come from one layer and keys from another there; the values are left alone."""
    models = transformers.models
    config = transformers.GPT2Config(n_embd=DIM, n_head=HEADS, add_cross_attention=True)
    gpt2 = models.gpt2.modeling_gpt2.GPT2Attention(config, is_cross_attention=True, layer_idx=0)
    bert = models.bert.modeling_bert.BertCrossAttention(
        transformers.BertConfig(hidden_size=DIM, num_attention_heads=HEADS)
    )
    x = torch.randn(2, TOKENS, DIM)
    values = gpt2.c_attn(x).chunk(2, -1)[1]
    assert list(add_qk_norm(gpt2).norms) == ["q_attn.q_norm", "c_attn.k_norm"]
    assert list(add_qk_norm(bert).norms) == ["query.q_norm", "key.k_norm"]
    keys, kept = gpt2.c_attn(x).chunk(2, -1)
    assert torch.equal(kept, values)
    for heads in (keys, gpt2.q_attn(x), bert.query(x), bert.key(x)):
        heads = heads.unflatten(-1, (HEADS, HEAD_DIM))
        assert torch.allclose(heads.square().mean(-1), torch.ones(()), atol=1e-3)
        assert torch.allclose(heads.mean(-1), torch.zeros(()), atol=1e-6)


def test_logits_are_bounded_however_large_the_weights_are() -> None:
    module, _, _ = attention("clip")
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1e4)
    add_qk_norm(module)
    q, k = (
        layer(torch.randn(2, TOKENS, DIM)).unflatten(-1, (-1, HEAD_DIM)) for layer in (module.q_proj, module.k_proj)
    )
    logits = torch.einsum("bthd,bshd->bhts", q, k) / HEAD_DIM**0.5
    assert float(logits.detach().abs().max()) <= HEAD_DIM**0.5 * (1 + 1e-5)
    torch.compiler.reset()
    compiled, x = torch.compile(module.q_proj, fullgraph=True, backend="aot_eager"), torch.randn(2, TOKENS, DIM)
    assert torch.equal(compiled(x), module.q_proj(x))


def gpt2(**options) -> nn.Module:
    config = transformers.GPT2Config(n_layer=2, n_embd=DIM, n_head=HEADS, vocab_size=50, n_positions=16, **options)
    return transformers.GPT2LMHeadModel(config)


INPUT = torch.arange(12).view(2, 6)


def test_removed_they_leave_the_model_as_it_was_bit_for_bit() -> None:
    torch.manual_seed(0)
    model = gpt2().eval()
    before, keys = model(INPUT).logits.detach(), list(model.state_dict())
    added = add_qk_norm(model)
    gained = [f"{name}.{part}" for name in added.norms for part in ("weight", "bias")]
    assert set(model.state_dict()) - set(keys) == set(gained)
    assert len(gained) == 2 * 2 * 2
    assert not torch.equal(model(INPUT).logits, before)
    # A checkpoint goes to another model with norms, and a copy is as independent as its original.
    other = gpt2().eval()
    add_qk_norm(other)
    nn.init.normal_(next(iter(added.norms.values())).weight)
    other.load_state_dict(model.state_dict())
    for twin in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(INPUT).logits, model(INPUT).logits)
    with pytest.raises(ValueError, match=r"already, got one at transformer\.h\.0\.attn\.c_attn\.q_norm"):
        add_qk_norm(model)
    added.remove()
    added.remove()
    assert list(model.state_dict()) == keys
    assert torch.equal(model(INPUT).logits, before)
    assert len(add_qk_norm(model).norms) == 4


def test_it_goes_with_swapped_layers_in_either_order_and_with_layer_scale() -> None:
    torch.manual_seed(0)
    model = gpt2().eval()
    twin = copy.deepcopy(model)
    add_qk_norm(model)
    ng.linear.swap_linears(model, ng.linear.SWITCHBACK)
    ng.nn.add_layer_scale(model, init=0.5)
    ng.nn.add_layer_scale(twin, init=0.5)
    ng.linear.swap_linears(twin, ng.linear.SWITCHBACK)
    add_qk_norm(twin)
    assert torch.equal(model(INPUT).logits, twin(INPUT).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_queries_and_keys_keep_the_dtype_of_the_values(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, DIM)
    norm = HeadLayerNorm(HEAD_DIM, dtype=dtype)
    assert norm(x.to(dtype)).dtype == dtype
    model = gpt2().eval()
    add_qk_norm(model)
    wide = model(INPUT).logits
    with torch.autocast("cpu", torch.bfloat16):
        narrow = model(INPUT).logits
    assert float((wide - narrow).norm() / wide.norm()) < 0.02
    assert add_qk_norm(gpt2().to(dtype)).norms["transformer.h.0.attn.c_attn.q_norm"].weight.dtype == dtype


class Places(nn.Module):
    """As timm's attention has them."""

    def __init__(self, q_norm: nn.Module) -> None:
        super().__init__()
        self.head_dim = HEAD_DIM
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.q_norm, self.k_norm = q_norm, nn.Identity()


def test_places_are_filled_and_emptied_again() -> None:
    kind = type("Attention", (Places,), {})
    model = nn.ModuleDict({
        "attn": kind(nn.Identity()), "mha": nn.MultiheadAttention(DIM, HEADS), "pool": Places(nn.Identity())
    })  # fmt: skip
    identity = model["attn"].q_norm
    added = add_qk_norm(model, eps=1e-3)
    assert isinstance(model["attn"].q_norm, HeadLayerNorm)
    assert model["attn"].k_norm.eps == 1e-3
    assert model["attn"].k_norm is not model["attn"].q_norm
    assert str(added) == (
        "QK-norm: 2\n  attn.q_norm\n  attn.k_norm\n"
        "left: 2\n  mha   nn.MultiheadAttention shows neither queries nor keys\n"
        "  pool  is a Places, no attention of a block"
    )
    added.remove()
    assert model["attn"].q_norm is identity
    with pytest.raises(ValueError, match=r"must not have QK-norms already, got one at q_norm"):
        add_qk_norm(kind(nn.LayerNorm(HEAD_DIM)))


def test_what_it_does_not_take() -> None:
    with pytest.raises(ValueError, match=r"model must have attentions of GPT2Attention, LlamaAtt.*, got Linear"):
        add_qk_norm(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"eps must be a finite number above 0, got -1"):
        add_qk_norm(gpt2(), eps=-1)
