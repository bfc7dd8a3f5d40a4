"""Held activations: the values stay, gradients have the codes' noise, bytes are counted in the graph."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.pytorch_utils import Conv1D

import narrowgauge as ng
from narrowgauge.linear import (
    SWITCHBACK,
    SWITCHBACK_M,
    LowPrecisionLinear,
    hold_activations,
    quantize,
    swap_linears,
)
from narrowgauge.linear._hold import _Held, _Kept, _kind, _seen

# torch's own, where dynamo traces an autograd function.
traced = pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be:DeprecationWarning")
TOKENS, WIDTH, HIDDEN = 32, 256, 640
CONFIG = LlamaConfig(
    hidden_size=WIDTH, intermediate_size=HIDDEN, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1,
    attn_implementation="sdpa",
)  # fmt: skip


def saved_bytes(output: Tensor, apart: list[Tensor]) -> int:
    """Bytes of all storages that the graph of a tensor holds, each counted once, but for those of some tensors."""
    known = {id(x.untyped_storage()) for x in apart}
    found: dict[int, Any] = {}
    todo, seen = [output.grad_fn], set()
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [further for further, _ in node.next_functions]
        for name in (name for name in dir(node) if name.startswith("_raw_saved")):
            raw = getattr(node, name)
            for one in raw if isinstance(raw, list | tuple) else [raw]:
                held = getattr(one, "data", None) if one is not None else None
                held = held.x if isinstance(held, _Kept) else held
                tensors = [held.rows.codes, held.rows.scale] if isinstance(held, _Held) else [held]
                for x in tensors:
                    if isinstance(x, Tensor) and id(x.untyped_storage()) not in known:
                        found[id(x.untyped_storage())] = x.untyped_storage()
    return sum(storage.nbytes() for storage in found.values())


def llama() -> tuple[nn.Module, list[Tensor], Callable[[nn.Module, Tensor], Tensor]]:
    embedded = LlamaRotaryEmbedding(CONFIG)(torch.empty(1, dtype=torch.bfloat16), torch.arange(TOKENS)[None])

    def run(block: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = block(x, attention_mask=None, position_embeddings=embedded)
        return y

    return LlamaDecoderLayer(CONFIG, 0).bfloat16(), list(embedded), run


def gpt2() -> tuple[nn.Module, list[Tensor], Callable[[nn.Module, Tensor], Tensor]]:
    config = GPT2Config(n_embd=WIDTH, n_head=4, n_layer=1, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)
    config._attn_implementation = "sdpa"

    def run(block: nn.Module, x: Tensor) -> Tensor:
        y = block(x)
        return y[0] if isinstance(y, tuple) else y

    return GPT2Block(config, 0).bfloat16(), [], run


class Attention(nn.Module):
    """As timm's."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class ViTBlock(nn.Module):
    """As timm's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


def vit() -> tuple[nn.Module, list[Tensor], Callable[[nn.Module, Tensor], Tensor]]:
    return ViTBlock().bfloat16(), [], lambda block, x: block(x)


# Bytes of a token, in bf16: as autograd saves, and held. Attention saves q, k, v, its output and 4 bytes a head.
def code(m: int) -> int:
    """Of m numbers in codes."""
    return m + 4 * -(-m // 128)


N, KV = WIDTH, WIDTH // 2
GROUPED = 2 * (2 * N + 2 * KV) + 16
EXPECTED = {
    # Of a norm its input in fp32, the normalized one and the root; of the MLP both factors, silu, the product.
    llama: (
        2 * (6 * N + 2 * N + 4) + GROUPED + 8 * HIDDEN,
        2 * (2 * N + 2 * code(N) + 4) + GROUPED + 4 * code(HIDDEN),
    ),
    # q, k and v are parts of one tensor; GELU by its formula saves 4 tensors, and c_proj's input is one more.
    gpt2: (2 * (4 * N + 4) + 8 * N + 16 + 5 * 8 * N, 2 * (2 * N + code(N) + 4) + 8 * N + 16 + 5 * code(4 * N)),
    vit: (2 * (4 * N + 4) + 8 * N + 16 + 16 * N, 2 * (2 * N + code(N) + 4) + 8 * N + 16 + 2 * code(4 * N)),
}


@pytest.mark.parametrize("make", EXPECTED, ids=lambda make: make.__name__)
def test_what_a_block_holds_is_counted(make: Any) -> None:
    torch.manual_seed(0)
    block, apart, run = make()
    x = torch.randn(1, TOKENS, WIDTH, dtype=torch.bfloat16)

    def once(hold: bool) -> tuple[int, Tensor, dict[str, Tensor]]:
        held = hold_activations(block) if hold else None
        given = x.clone().requires_grad_()
        y = run(block, given * 1)
        counted = saved_bytes(y, [*apart, *block.parameters()])
        y.float().square().sum().backward()
        gradients = {"input": given.grad, **{name: p.grad for name, p in block.named_parameters()}}
        block.zero_grad()
        if held is not None:
            held.undo()
        return counted, y, gradients

    counted, y, gradients = once(False)
    fewer, same, noisy = once(True)
    # But for single numbers, such as GELU's constants.
    assert 0 <= counted / TOKENS - EXPECTED[make][0] <= 2
    assert 0 <= fewer / TOKENS - EXPECTED[make][1] <= 2
    assert fewer <= (0.6 if make is llama else 0.71) * counted
    assert torch.equal(y, same)
    assert all(decibels(gradients[name], noisy[name]) > 28 for name in gradients)
    assert once(False)[0] == counted


def decibels(wanted: Any, got: Any) -> float:
    """Signal over noise."""
    signal, noise = wanted.detach().double(), (got.double() - wanted.double()).detach()
    return float(10 * torch.log10(signal.square().mean() / noise.square().mean().clamp_min(1e-300)))


def norm_of(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


@pytest.mark.parametrize("form", ["e4m3", "int8"])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_those_at_what_codes_stand_for(
    form: Any, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64: a norm's and an MLP's, eager and by what a compiler traces."""
    torch.manual_seed(0)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    norm, mlp = LlamaRMSNorm(WIDTH), LlamaMLP(CONFIG)
    hold_activations(norm, form)
    hold_activations(mlp, form)
    x = torch.randn(TOKENS, WIDTH)

    g = torch.randn(TOKENS, WIDTH)

    def run(module: nn.Module) -> Tensor:
        given = x.clone().requires_grad_()
        module(given).backward(g)
        assert given.grad is not None
        return given.grad

    def rounded(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        values = values.detach()
        held = quantize(values, "row128", form).dequantize() if dtype is None else values.to(dtype)
        return held.double().requires_grad_()

    grad = run(norm)  # in 16 bits, or as it is
    given, weight = rounded(x, torch.float32), norm.weight.detach().double().requires_grad_()
    wanted = torch.autograd.grad(norm_of(given, weight), (given, weight), g)
    assert (90 if compiled else 50) < decibels(wanted[0], grad) < (200 if compiled else 90)
    halves = rounded(norm(x), torch.float64 if compiled else torch.bfloat16)
    assert decibels((g.double() * halves).sum(0), norm.weight.grad) > 90

    run(mlp)
    w = {name: p.detach().double() for name, p in mlp.named_parameters()}
    gate, up = (rounded(F.linear(x, w[f"{name}_proj.weight"].float())) for name in ("gate", "up"))
    product = F.silu(gate) * up if compiled else rounded(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    assert decibels(g.double().t() @ product, mlp.down_proj.weight.grad) > 60
    # Eager, the up of silu's gradient and silu itself have codes of their own.
    back = torch.autograd.grad(F.silu(gate) * up, gate, g.double() @ w["down_proj.weight"])[0]
    assert decibels(back.t() @ rounded(x), mlp.gate_proj.weight.grad) > (60 if compiled else 28)


def test_the_noise_of_the_formats_is_that_of_the_page() -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 1024)

    def found(x: Tensor, form: Any) -> int:
        rest = torch.arange(1024) % 128 != 0
        return round(decibels(x[:, rest], quantize(x, "row128", form).dequantize()[:, rest]))

    assert [found(x, form) for form in ("e4m3", "int8")] == [32, 44]
    x[:, ::128] *= 50
    assert [found(x, form) for form in ("e4m3", "int8")] == [32, 19]


def test_what_several_save_is_held_once_and_let_go() -> None:
    q, k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    both = nn.ModuleList([q, k])
    hold_activations(both)
    x = torch.randn(4, WIDTH, requires_grad=True) + 0.0
    first, second = q(x), k(x.view(2, 2, WIDTH))
    codes = [node(y)._raw_saved_mat1.data.rows for y, node in ((first, linear_node), (second, linear_node))]
    assert codes[0] is codes[1]
    gone = weakref.ref(codes[0].codes)
    del codes, first, second
    assert gone() is None
    before = q(x)
    x.mul_(2)  # what was saved are codes of the values that were multiplied
    after = q(x)
    before.sum().backward()
    wanted = q.weight.grad
    q.weight.grad = None
    after.sum().backward()
    assert wanted is not None
    assert q.weight.grad is not None
    assert torch.equal(q.weight.grad, 2 * wanted)


def test_a_weight_that_changed_since_the_forward_pass_raises_as_in_torch() -> None:
    """As when a discriminator is stepped between a generator's forward and backward pass."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    hold_activations(model)
    loss = model(torch.randn(4, 64)).sum()
    with torch.no_grad():
        model[2].weight += 1
    with pytest.raises(
        RuntimeError, match=r"an inplace operation: .* \(64, 64\) is at version 2; expected version 1"
    ):
        loss.backward()


def test_a_graph_without_a_backward_pass_is_let_go() -> None:
    """Softmax saves its own output, here by the hook of the module around."""
    model, outputs = nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1), nn.Linear(64, 64)), []
    hold_activations(model)
    model[1].register_forward_hook(lambda module, given, output: outputs.append(weakref.ref(output)))
    assert model(torch.randn(4, 64)).requires_grad
    assert outputs[0]() is None


def test_a_buffer_that_is_written_in_every_step_leaves_nothing_behind() -> None:
    model, buffer = nn.Sequential(nn.Linear(64, 64)), torch.zeros(4, 64)
    hold_activations(model)
    for _ in range(3):
        model(buffer.add_(1)).sum().backward()
    assert not _seen[buffer.untyped_storage()]


@pytest.mark.parametrize("width", [64, 8])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_images_are_held_in_any_order_of_memory(
    width: int, channels_last: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    torch.manual_seed(0)
    order = torch.channels_last if channels_last else torch.contiguous_format
    image = torch.randn(2, 64, width, width).contiguous(memory_format=order)
    layer = nn.SiLU()
    hold_activations(layer)
    x = image.clone(memory_format=torch.preserve_format).requires_grad_()
    (found,) = torch.autograd.grad(layer(x).sum(), x)
    (wanted,) = torch.autograd.grad(F.silu(x).sum(), x)
    assert 35 < decibels(wanted, found) < 55
    if not compiled:
        output: Any = layer(x)
        saved = output.grad_fn._raw_saved_self.data
        assert saved.rows.codes.numel() == x.numel()
        assert saved.rows.codes.element_size() == 1


@pytest.mark.parametrize("form", ["e4m3", "int8"])
def test_activations_are_held_where_gradients_keep_the_precision_of_codes(form: Any) -> None:
    torch.manual_seed(0)
    given, held = 3 * torch.randn(256, 512), set()
    for name in nn.modules.activation.__all__:
        layer: nn.Module = getattr(nn, name)(*{"MultiheadAttention": (8, 1), "Threshold": (0.1, 0.0)}.get(name, ()))
        if _kind(layer) is None:
            continue
        x, wanted = given.clone().requires_grad_(), given.clone().requires_grad_()
        layer(wanted).square().sum().backward()
        if not hold_activations(nn.ModuleList([layer, nn.LayerNorm(1)]), form).kept:
            held.add(name)
            layer(x).square().sum().backward()
            assert decibels(wanted.grad, x.grad) > 25, name
    smooth = {"SiLU", "Mish", "ELU", "CELU", "GELU", "LogSigmoid", "Softplus", "Softsign"}
    assert held == smooth | ({"ReLU", "LeakyReLU", "SELU", "Tanhshrink"} if form == "e4m3" else set())


def linear_node(y: Tensor) -> Any:
    """The node of the matrix multiply of a linear layer's output."""
    node: Any = y.grad_fn
    while not hasattr(node, "_raw_saved_mat1"):
        node = node.next_functions[0][0]
    return node


def test_the_input_of_a_norm_is_let_go() -> None:
    norm = LlamaRMSNorm(WIDTH).bfloat16()
    hold_activations(norm)
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16)
    gone = weakref.ref(x.untyped_storage())
    y = norm(x)
    del x
    assert y.requires_grad
    assert gone() is None  # held in a copy of what the norm saves in fp32


@pytest.mark.parametrize("kind", ["linear", "conv1d", "planned"])
def test_weights_are_never_codes_under_autocast_either(kind: str) -> None:
    """The gradient of the input depends on the weight alone."""
    torch.manual_seed(0)
    layers = {"linear": nn.Linear(64, 96), "conv1d": Conv1D(96, 64), "planned": LowPrecisionLinear(64, 96)}
    layer = layers[kind]
    layer.weight.data.normal_()
    x = torch.randn(64, 64)

    def grad() -> Tensor:
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(given)
        y.float().square().sum().backward()
        assert given.grad is not None
        return given.grad

    as_saved = grad()
    weight = layer.weight.grad.clone()
    layer.zero_grad()
    hold_activations(layer)
    assert torch.equal(grad(), as_saved)
    assert 28 < decibels(weight, layer.weight.grad) < 40


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_weights_that_a_call_brings_are_never_codes(kind: str) -> None:
    torch.manual_seed(0)
    layer = {"linear": nn.Linear(64, 96), "conv1d": Conv1D(96, 64)}[kind]
    weight, x = torch.randn_like(layer.weight), torch.randn(8, 64, requires_grad=True)

    def grad() -> Tensor:
        y = torch.func.functional_call(layer, {"weight": weight.clone().requires_grad_()}, (x,))
        return torch.autograd.grad(y.square().sum(), x)[0]

    as_saved = grad()
    hold_activations(layer)
    assert torch.equal(grad(), as_saved)


@pytest.mark.parametrize("tokens", [63, 64, 256])  # as many as a weight has rows or columns
def test_what_is_held_does_not_depend_on_the_number_of_tokens(tokens: int) -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "q": nn.Linear(WIDTH, WIDTH), "k": nn.Linear(WIDTH, 64)})
    model = model.bfloat16()
    hold_activations(model)
    h = model["norm"](torch.randn(tokens, WIDTH, dtype=torch.bfloat16) * 1)
    counted = saved_bytes(model["q"](h).sum() + model["k"](h).sum(), [*model.parameters()])
    assert 0 <= counted / tokens - (2 * WIDTH + 4 + code(WIDTH)) < 1


@pytest.mark.parametrize(("act", "form"), [("tanh", "e4m3"), ("relu", "int8")])
def test_a_gated_product_holds_no_activation_that_is_left_alone(act: str, form: Any) -> None:
    torch.manual_seed(0)
    mlp = nn.ModuleDict({"mlp": LlamaMLP(LlamaConfig(hidden_size=WIDTH, intermediate_size=HIDDEN, hidden_act=act))})
    with torch.no_grad():
        mlp["mlp"].gate_proj.weight *= 20
    x, grads = torch.randn(TOKENS, WIDTH), []
    for hold in (False, True):
        if hold:
            held = hold_activations(mlp, form)
            assert [*held.kept] == ["mlp.act_fn"]
            assert "mlp" not in held.held
        mlp["mlp"](x).square().sum().backward()
        grads.append(mlp["mlp"].gate_proj.weight.grad)
        mlp.zero_grad()
    assert decibels(*grads) > 30


def test_hooks_around_decide() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU())
    x = torch.randn(8, 64, requires_grad=True)

    def grads() -> list[Tensor]:
        return list(torch.autograd.grad(checkpoint(model, x, use_reentrant=False).sum(), [x, *model.parameters()]))

    before = grads()
    held = hold_activations(model)
    assert all(map(torch.equal, before, grads()))
    noisy = torch.autograd.grad(model(x).sum(), [x])
    assert not torch.equal(noisy[0], before[0])
    with torch.no_grad():
        assert torch.equal(model(x), model(x.detach()))
    held.undo()
    assert torch.equal(torch.autograd.grad(model(x).sum(), [x])[0], before[0])


def test_what_is_held_and_why_not() -> None:
    model = nn.ModuleDict({"block": LlamaDecoderLayer(CONFIG, 0), "lm_head": nn.Linear(64, 64)})
    swap_linears(model["block"].mlp, SWITCHBACK_M, keep=("down_proj",))
    held = hold_activations(model, keep=("lm_head", "o_proj"))
    mlp = "block.mlp"
    assert held.kept == {
        "block.self_attn.o_proj": "fits 'o_proj' of keep",
        f"{mlp}.gate_proj": "its plan saves codes", f"{mlp}.up_proj": "its plan saves codes",
        "lm_head": "fits 'lm_head' of keep",
    }  # fmt: skip
    assert held.held[mlp] == "gated"
    assert held.held["block.input_layernorm"] == "norm"
    assert f"{mlp}.down_proj  linear" in str(held)
    assert set(hold_activations(model["block"].self_attn, keep=()).held) == {"o_proj"}
    twin = copy.deepcopy(model)
    assert [*map(type, twin.modules())] == [*map(type, pickle.loads(pickle.dumps(model)).modules())]
    assert twin["block"].mlp.gate_proj is not model["block"].mlp.gate_proj
    assert type(model["block"]).__name__ == "LlamaDecoderLayer"
    twin["block"].mlp.__class__ = LlamaMLP
    held.undo()
    assert type(model["block"].mlp) is LlamaMLP


def test_what_changed_outside_of_torch_is_not_taken_from_codes() -> None:
    """numpy writes to a batch's memory, and torch counts no version; an older graph holds the batch's codes."""
    model = nn.Sequential(nn.Linear(64, 64))
    hold_activations(model)
    memory = np.ones((40, 64), "float32")
    x = torch.from_numpy(memory)
    probe = model(x).mean()
    memory[:] = 0
    model(x).sum().backward()
    assert not model[0].weight.grad.any()
    probe.backward()
    assert model[0].weight.grad.any()


def test_slopes_that_jump_at_zero_are_not_held_in_int8() -> None:
    acts = {"0": nn.ELU(2.0), "1": nn.SELU(), "2": nn.ELU(), "3": nn.Tanhshrink(), "4": nn.GELU()}
    model = nn.Sequential(*acts.values())
    assert set(hold_activations(copy.deepcopy(model), "int8").held) == {"2", "4"}
    assert set(hold_activations(copy.deepcopy(model)).held) == acts.keys()


@traced
@pytest.mark.parametrize("repeatable", [True, False])
def test_hooks_of_a_gated_product_run_in_compiled_code_too(repeatable: bool) -> None:
    """Those that may run twice on a product that is held; others on one that is not."""
    torch.manual_seed(0)
    mlp, calls = LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=128)), []

    def scale(layer: Any, args: Any, output: Tensor) -> Tensor:
        calls.append(1)
        return output * layer.gamma

    scale.repeatable = repeatable  # type: ignore[attr-defined]
    mlp.down_proj.gamma = nn.Parameter(torch.full((64,), 0.5))
    mlp.down_proj.register_forward_hook(scale)
    x = torch.randn(40, 64, requires_grad=True)
    wanted = mlp(x)
    (exact,) = torch.autograd.grad(wanted.square().sum(), mlp.down_proj.gamma)
    hold_activations(mlp)
    torch._dynamo.reset()
    got = torch.compile(mlp, backend="aot_eager")(x)
    assert torch.equal(got, wanted)
    (grad,) = torch.autograd.grad(got.square().sum(), mlp.down_proj.gamma)
    assert decibels(exact, grad) > 30
    assert torch.equal(grad, exact) == (not repeatable)


@traced
def test_what_gives_another_thing_each_time_runs_once_in_compiled_code() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append("down")
            return super().forward(x)

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=64, intermediate_size=128)
    plain, noisy, hooked = LlamaMLP(config), LlamaMLP(config), LlamaMLP(config)
    noisy.down_proj = Noisy(128, 64, bias=False)
    hooked.act_fn.register_forward_hook(lambda layer, args, output: calls.append("act"))
    for mlp, wanted in ((plain, []), (noisy, ["down"]), (hooked, ["act"])):
        calls: list[str] = []
        hold_activations(mlp)
        torch._dynamo.reset()
        torch.compile(mlp, backend="aot_eager")(torch.randn(40, 64, requires_grad=True)).sum().backward()
        assert calls == wanted


def test_the_way_out_has_the_classes_of_torch() -> None:
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    swap_linears(model[2:], SWITCHBACK_M)
    hold_activations(model)
    optimizer = ng.optim.AdamW(model.parameters())
    model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert [*map(type, ng.to_torch(model, optimizer)[0])] == [nn.LayerNorm, nn.Linear, nn.Linear]
    assert type(model[0]) is not nn.LayerNorm


def test_what_cannot_be_held_is_refused() -> None:
    with pytest.raises(ValueError, match="format must be 'int8', 'e4m3' or 'e5m2', got 'fp8'"):
        hold_activations(nn.Linear(64, 64), "fp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep must be a list of names"):
        hold_activations(nn.Linear(64, 64), keep="lm_head")
    with pytest.raises(ValueError, match="norms, activations or linear layers to hold, got a Softmax with none"):
        hold_activations(nn.Softmax(-1))
    layer = nn.Linear(64, 64)
    held = hold_activations(layer)
    layer.__class__ = type("Sharded", (type(layer),), {})
    with pytest.raises(RuntimeError, match="Sharded must be the class that holding gave"):
        held.undo()


def test_a_held_layer_is_not_swapped_and_a_swapped_one_undone_after_it() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    report = swap_linears(model, SWITCHBACK, keep=("1",))
    held = hold_activations(model)
    for subclasses in (False, True):
        again = swap_linears(model, SWITCHBACK, subclasses=subclasses)
        assert again.kept["1"] == "its activations are held: undo that, swap, and hold them again"
    with pytest.raises(RuntimeError, match=r"^'0' must not hold its activations to be undone: first call"):
        report.undo()
    held.undo()
    report.undo()
    assert [*map(type, model)] == [nn.Linear, nn.Linear]


@traced
def test_what_is_held_may_be_changed_in_place_once_compiled() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64))
    x = torch.randn(4, 64)
    wanted = model(x)
    hold_activations(model)
    got = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(got, wanted)
    got.sum().backward()


@traced
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's
@pytest.mark.slow
def test_compiled_blocks_share_a_graph_that_saves_codes() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    _, apart, run = llama()
    blocks = [LlamaDecoderLayer(CONFIG, 0).bfloat16() for _ in range(2)]
    x = torch.randn(1, TOKENS, WIDTH, dtype=torch.bfloat16)

    def once() -> tuple[int, list[Tensor]]:
        found: dict[int, Tensor] = {}

        def pack(saved: Tensor) -> Tensor:
            found[id(saved.untyped_storage())] = saved
            return saved

        torch.compiler.reset()
        given = x.clone().requires_grad_()
        with torch._dynamo.config.patch(error_on_recompile=True):
            y = given * 1
            for block in blocks:
                block.compile(backend="aot_eager_decomp_partition", fullgraph=True)
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
                    y = run(block, y)
            y.float().square().sum().backward()
        known = {id(p.untyped_storage()) for block in blocks for p in block.parameters()}
        known |= {id(one.untyped_storage()) for one in apart}
        counted = sum(one.untyped_storage().nbytes() for key, one in found.items() if key not in known)
        grads = [given.grad, *(p.grad for block in blocks for p in block.parameters())]
        for block in blocks:
            block.zero_grad()
            block._compiled_call_impl = None
        return counted, grads

    counted, wanted = once()
    for block in blocks:
        hold_activations(block)
    fewer, got = once()
    assert fewer <= 0.6 * counted
    assert min(decibels(one, other) for one, other in zip(wanted, got, strict=True)) > 25
