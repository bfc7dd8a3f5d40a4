"""`nn.MultiheadAttention` by a plan: torch's own, argument for argument, but for the multiplies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.linear import LowPrecisionLinear, LowPrecisionMultiheadAttention, linear, swap_linears
from pairwise import by_pairs

DIM, HEADS, BATCH, TOKENS, KEYS = 32, 4, 3, 6, 5


def swapped(module: nn.MultiheadAttention, plan=ng.linear.HIGH_PRECISION) -> nn.MultiheadAttention:
    twin = copy.deepcopy(module)
    assert swap_linears(twin, plan).swapped == ["", "out_proj"]
    assert isinstance(twin, LowPrecisionMultiheadAttention)
    assert isinstance(twin.out_proj, LowPrecisionLinear)
    return twin


def inputs(same: str, batch_first: bool, batched: bool) -> list[Tensor]:
    """Queries, keys and values: one tensor, two, or three."""
    torch.manual_seed(1)

    def made(tokens: int) -> Tensor:
        x = torch.randn(BATCH, tokens, DIM)
        return x[0] if not batched else x if batch_first else x.transpose(0, 1)

    query = made(TOKENS)
    key = query if same == "all" else made(KEYS)
    return [query, key, made(KEYS) if same == "none" else key]


def masks(kind: str, keys: int, batched: bool) -> dict[str, Tensor]:
    attention = torch.randn(TOKENS, keys)
    padding = torch.zeros(BATCH, keys, dtype=torch.bool)
    padding[:, -1] = True
    padding[1, -2] = True
    padding = padding if batched else padding[0]
    found = {
        "none": {},
        "float": {"attn_mask": attention},
        "bool": {"attn_mask": attention > 1.0},
        "heads": {"attn_mask": torch.randn(HEADS * (BATCH if batched else 1), TOKENS, keys)},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": attention > 1.0, "key_padding_mask": padding},
        "both, floats": {"attn_mask": attention, "key_padding_mask": padding.float() * -3},
    }
    return found[kind]


MASKS = ("none", "float", "bool", "heads", "padding", "both", "both, floats")


@by_pairs(
    mask=MASKS, same=["all", "keys", "none"], bias=[True, False], batch_first=[True, False], batched=[True, False]
)
def test_in_high_precision_it_is_torchs(mask: str, same: str, bias: bool, batch_first: bool, batched: bool) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(DIM, HEADS, bias=bias, batch_first=batch_first)
    twin = swapped(module)
    q, k, v = inputs(same, batch_first, batched)
    options = masks(mask, TOKENS if same == "all" else KEYS, batched)
    for weights in ({"need_weights": False}, {}, {"average_attn_weights": False}):
        wanted = module(q, k, v, **options, **weights)
        got = twin(q, k, v, **options, **weights)
        assert got[0].shape == wanted[0].shape
        assert torch.allclose(got[0], wanted[0], atol=1e-6)
        if weights.get("need_weights", True):
            assert got[1].shape == wanted[1].shape
            assert torch.allclose(got[1], wanted[1], atol=1e-6)
        else:
            assert got[1] is wanted[1] is None
    for one in (module, twin):
        one(q, k, v, **options)[0].square().sum().backward()
    for p, other in zip(twin.parameters(), module.parameters(), strict=True):
        assert torch.allclose(p.grad, other.grad, atol=1e-4)


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_is_that_of_training(need_weights: bool) -> None:
    torch.manual_seed(0)
    twin = swapped(nn.MultiheadAttention(DIM, HEADS, dropout=0.5, batch_first=True))
    x = torch.randn(BATCH, TOKENS, DIM)
    assert not torch.equal(*(twin(x, x, x, need_weights=need_weights)[0] for _ in range(2)))
    twin.eval()
    assert torch.equal(*(twin(x, x, x, need_weights=need_weights)[0] for _ in range(2)))
    twin.train()
    weights = twin(x, x, x, average_attn_weights=False)[1]
    assert 0.3 < float((weights == 0).float().mean()) < 0.7
    # What is kept is twice as much.
    assert float(weights.sum(-1).mean().detach()) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    "plan", [ng.linear.SWITCHBACK, ng.linear.LLM_INT8, ng.linear.SWITCHBACK_M], ids=lambda plan: plan.name
)
def test_projections_follow_the_plan(plan: ng.linear.LinearPlan) -> None:
    """All three by one multiply where the inputs are one tensor, else by the rows of the weight."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
    nn.init.normal_(module.in_proj_bias)
    twin = swapped(module, plan)
    w, b = module.in_proj_weight, module.in_proj_bias
    seen: list[Tensor] = []
    twin.out_proj.register_forward_pre_hook(lambda layer, arguments: seen.append(arguments[0]))

    def attended(*projections: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in projections)
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).flatten(-2)

    q, k, v = inputs("none", True, True)
    twin(q, q, q, need_weights=False)
    assert torch.equal(seen.pop(), attended(*linear(q, w, b, plan).chunk(3, -1)))
    twin(q, k, k, need_weights=False)
    both = linear(k, w[DIM:], b[DIM:], plan).chunk(2, -1)
    assert torch.equal(seen.pop(), attended(linear(q, w[:DIM], b[:DIM], plan), *both))
    twin(q, k, v, need_weights=False)
    each = (linear(x, w[i : i + DIM], b[i : i + DIM], plan) for i, x in ((0, q), (DIM, k), (2 * DIM, v)))
    assert torch.equal(seen.pop(), attended(*each))


def test_averages_are_of_each_projection() -> None:
    twin = swapped(nn.MultiheadAttention(DIM, HEADS), ng.linear.TENSORWISE_FP8.with_moving_average())
    q, k, v = inputs("none", False, True)
    for arguments, rows in (((q, q, q), [0]), ((q, k, k), [0, 1]), ((q, k, v), [0, 1, 2])):
        twin.set_plan(twin.plan)
        (averages,) = (b for b in twin.buffers(recurse=False))
        twin(*arguments)[0].square().sum().backward()
        assert averages.any(1).nonzero().flatten().tolist() == rows
        assert averages[rows[-1], 0] == arguments[rows[-1]].abs().max()
    assert "absmax_averages" not in twin.state_dict()


def test_it_is_swapped_and_undone_with_the_same_parameters() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(DIM, HEADS, 64, dropout=0.0, batch_first=True)
    state, x = copy.deepcopy(model.state_dict()), torch.randn(BATCH, TOKENS, DIM)
    before = model(x).detach()
    report = swap_linears(model, ng.linear.SWITCHBACK)
    assert report.swapped == ["self_attn", "self_attn.out_proj", "linear1", "linear2"]
    assert report.kept == {}
    assert "swapped: 4 (int8 real)" in str(report)
    assert "plan='SWITCHBACK: int8'" in repr(model.self_attn)
    model.load_state_dict(state)
    after = model(x)
    assert 0 < float((after.detach() - before).norm() / before.norm()) < 0.05
    after.square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), after)
    again = swap_linears(model, ng.linear.SWITCHBACK)
    assert again.swapped == []
    assert again.kept["self_attn"] == "has a plan already: SWITCHBACK: int8"
    report.undo()
    assert type(model.self_attn) is nn.MultiheadAttention
    assert torch.equal(model(x), before)


def test_what_is_kept_of_attentions() -> None:
    class Own(nn.MultiheadAttention):
        pass

    packed = nn.ModuleDict({"out_proj": nn.Linear(DIM, DIM)})
    packed.in_proj_weight = nn.Parameter(torch.zeros(3 * DIM, DIM))
    model = nn.ModuleDict({
        "own": Own(DIM, HEADS),
        "sizes": nn.MultiheadAttention(DIM, HEADS, kdim=16),
        "zero": nn.MultiheadAttention(DIM, HEADS, add_zero_attn=True),
        "small": nn.MultiheadAttention(8, 2),
        "inner": nn.MultiheadAttention(DIM, HEADS),
        "packed": packed,
    })  # fmt: skip
    report = swap_linears(model, ng.linear.SWITCHBACK, keep=("inner.out_proj",))
    read = "nn.MultiheadAttention reads its weight, not its output"
    assert report.swapped == ["inner", "packed.out_proj"]
    assert report.kept == {
        "own": "is a Own, which multiplies by in_proj_weight without a layer",
        "own.out_proj": read,
        "sizes": "has projections of different sizes (kdim, vdim)",
        "sizes.out_proj": read,
        "zero": "attends to keys that it adds (add_bias_kv, add_zero_attn)",
        "zero.out_proj": read,
        "small": "8 features, fewer than 16",
        "small.out_proj": "8 features, fewer than 16",
        "inner.out_proj": "named in keep: 'inner.out_proj'",
        "packed": "is a ModuleDict, which multiplies by in_proj_weight without a layer",
    }
    x = torch.randn(BATCH, TOKENS, DIM)
    assert torch.isfinite(model["inner"](x, x, x)[0]).all()


# Torch's own, while it traces an autograd function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_autocast_and_one_graph() -> None:
    torch.compiler.reset()
    twin = swapped(nn.MultiheadAttention(DIM, HEADS, batch_first=True), ng.linear.HIGH_PRECISION)
    module = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
    module.load_state_dict(twin.state_dict())
    x, mask = torch.randn(BATCH, TOKENS, DIM), torch.ones(TOKENS, TOKENS).triu(1).bool()
    with torch.autocast("cpu", torch.bfloat16):
        got, wanted = (m(x, x, x, attn_mask=mask, need_weights=False)[0] for m in (twin, module))
    assert got.dtype == wanted.dtype == torch.bfloat16
    assert torch.allclose(got.float(), wanted.float(), atol=0.02)
    narrow = swapped(module, ng.linear.SWITCHBACK)
    compiled = torch.compile(narrow, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, x, x, attn_mask=mask)[0], narrow(x, x, x, attn_mask=mask)[0])


def test_a_hint_needs_its_mask() -> None:
    twin = swapped(nn.MultiheadAttention(DIM, HEADS, batch_first=True))
    x = torch.randn(BATCH, TOKENS, DIM)
    with pytest.raises(RuntimeError, match=r"is_causal must be False without an attn_mask, got True"):
        twin(x, x, x, is_causal=True)
    causal = torch.ones(TOKENS, TOKENS).triu(1).bool()
    hinted = twin(x, x, x, attn_mask=causal, is_causal=True)[0]
    assert torch.equal(hinted, twin(x, x, x, attn_mask=causal)[0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_nested_tensors_go_where_torch_takes_them() -> None:
    """An encoder in evaluation makes them of a padding mask, and a hook keeps its layers from their fast path."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, HEADS, 64, batch_first=True), 2).eval()
    padding = torch.zeros(2, TOKENS, dtype=torch.bool)
    padding[0, 3:] = True
    x = torch.randn(2, TOKENS, DIM)
    encoder.layers[1].register_forward_hook(lambda *given: None)
    with torch.no_grad():
        wanted = encoder(x, src_key_padding_mask=padding)
        swap_linears(encoder, ng.linear.HIGH_PRECISION)
        assert torch.allclose(encoder(x, src_key_padding_mask=padding), wanted, atol=1e-5)
    nested = torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
    with pytest.raises(AssertionError, match="does not support NestedTensor outside of its fast path"):
        encoder.layers[0].self_attn(nested, nested, nested)


WRONG_MASKS = {
    "bytes": ("attn_mask", torch.ones(TOKENS, TOKENS, dtype=torch.uint8)),
    "too few rows": ("attn_mask", torch.zeros(1, TOKENS)),
    "no heads": ("attn_mask", torch.zeros(BATCH, TOKENS, TOKENS)),
    "integers": ("key_padding_mask", torch.zeros(BATCH, TOKENS, dtype=torch.int64)),
    "turned": ("key_padding_mask", torch.zeros(TOKENS, BATCH, dtype=torch.bool)),
}


@pytest.mark.parametrize(("name", "mask"), WRONG_MASKS.values(), ids=WRONG_MASKS)
def test_masks_that_torch_refuses_are_refused(name: str, mask: Tensor) -> None:
    module = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
    x = torch.randn(BATCH, TOKENS, DIM)
    with pytest.raises((AssertionError, RuntimeError)):
        module(x, x, x, **{name: mask})
    with pytest.raises(ValueError, match=f"{name} must be bool or float of shape .*, got {mask.dtype} of shape"):
        swapped(module)(x, x, x, **{name: mask})


def test_logits_that_are_finite_once_scaled_are_finite_in_float16() -> None:
    module = nn.MultiheadAttention(64, 1, bias=False, batch_first=True).half()
    with torch.no_grad():
        module.in_proj_weight[:128] = torch.eye(64).repeat(2, 1)
    x = torch.full((1, 3, 64), 50.0, dtype=torch.float16)  # 64 * 50 * 50 is more than float16 has
    wanted, got = module(x, x, x), swapped(module)(x, x, x)
    assert torch.equal(got[1], wanted[1])
    assert torch.allclose(got[0], wanted[0], rtol=1e-2)
