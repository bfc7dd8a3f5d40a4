"""`LowPrecisionLinear` in nn.Linear's place."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.linear import LinearPlan, LowPrecisionLinear, linear
from pairwise import by_pairs

AVERAGED = ng.linear.TENSORWISE_FP8.with_moving_average()
PLANS = {
    "SWITCHBACK": ng.linear.SWITCHBACK,
    "SWITCHBACK_M e4m3": ng.linear.SWITCHBACK_M.with_format("e4m3"),
    "SWITCHBACK_Q": ng.linear.SWITCHBACK_Q,
    "LLM_INT8": ng.linear.LLM_INT8,
    "averaged": AVERAGED,
    "BLOCKWISE_FP8": ng.linear.BLOCKWISE_FP8,
    "BLOCKWISE_FP8 input": replace(ng.linear.BLOCKWISE_FP8, saved="input"),
    "HIGH_PRECISION": ng.linear.HIGH_PRECISION,
}
COMPILED = (
    "SWITCHBACK_M e4m3",
    "LLM_INT8",
    "averaged",
    "BLOCKWISE_FP8",
)  # saves codes, does not, has buffers, blocks
plans = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)

# Torch's own, while it traces an autograd function.
traced = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def grads(layer: nn.Module, x: Tensor, run=None) -> list[Tensor]:
    """Output and all gradients of a weighted sum of it."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = (layer if run is None else run)(x)
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_it_is_an_nn_linear() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(20, 12, dtype=torch.bfloat16)
    torch.manual_seed(0)
    layer = LowPrecisionLinear(20, 12, dtype=torch.bfloat16, plan=AVERAGED)
    assert isinstance(layer, nn.Linear)
    assert layer.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), plain.parameters(), strict=True))
    plain.load_state_dict(layer.state_dict())
    layer.load_state_dict(plain.state_dict())
    made = LowPrecisionLinear.from_linear(plain, ng.linear.HIGH_PRECISION)
    assert made.weight is plain.weight
    assert made.bias is plain.bias
    assert LowPrecisionLinear.from_linear(nn.Linear(3, 4, bias=False)).bias is None
    with pytest.raises(ValueError, match=r"layer must be a torch.nn.Linear, got Conv1d"):
        LowPrecisionLinear.from_linear(nn.Conv1d(3, 4, 1))
    assert repr(made) == (
        "LowPrecisionLinear(in_features=20, out_features=12, bias=True, plan='HIGH_PRECISION: high precision')"
    )
    assert (layer.path, made.path) == ("e4m3 simulated", "high precision")
    assert LowPrecisionLinear(3, 4).path == "int8 real"
    assert LowPrecisionLinear(3, 4, plan=ng.linear.SWITCHBACK.simulated()).path == "int8 simulated"
    layer.set_plan("SWITCHBACK:e4m3")
    assert layer.plan == ng.linear.SWITCHBACK.with_format("e4m3")
    assert LowPrecisionLinear(3, 4, plan="LLM_INT8").plan == ng.linear.LLM_INT8
    with pytest.raises(ValueError, match=r"plan must be a name such as SWITCHBACK.*, got 'int8'"):
        LowPrecisionLinear(3, 4, plan="int8")
    with pytest.raises(ValueError, match=r"plan must be a LinearPlan.*, got 8"):
        layer.set_plan(8)


def test_a_layer_whose_parameters_are_computed_is_refused() -> None:
    layers = (
        nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), prune.identity(nn.Linear(16, 16), "weight"),
        prune.identity(nn.Linear(16, 16), "bias"),
    )  # fmt: skip
    for layer in layers:
        with pytest.raises(ValueError, match=r"layer must have parameters of its own, got a .* computed anew$"):
            LowPrecisionLinear.from_linear(layer)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_the_rows_of_a_nested_tensor_are_computed_together(layout: torch.layout) -> None:
    layer, rows = LowPrecisionLinear(32, 16, plan=ng.linear.TENSORWISE_FP8), torch.randn(8, 32)
    wanted = grads(layer, rows)[2:]
    x = torch.nested.nested_tensor([rows[:3], rows[3:]], layout=layout)
    y = layer(x)
    assert y.layout == layout
    assert torch.equal(torch.cat(list(y.unbind())), layer(rows))
    layer.zero_grad()
    weights = torch.linspace(-1, 1, 8 * 16).view(8, 16)
    (torch.cat(list(y.unbind())) * weights).sum().backward()
    assert same([p.grad for p in layer.parameters()], wanted)
    if layout == torch.jagged:
        assert (y + y).shape == (x[..., :16] + y).shape  # raggedness is the input's
        heads = torch.nested.nested_tensor([torch.randn(3, 4, 32), torch.randn(5, 4, 32)], layout=layout)
        for other in (heads.transpose(1, 2), heads.transpose(1, 2).contiguous()):
            with pytest.raises(ValueError, match=r"input must be contiguous if it is nested"):
                layer(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_high_precision_plan_is_nn_linear_bit_for_bit(dtype: torch.dtype) -> None:
    layer = LowPrecisionLinear(33, 17, plan=ng.linear.HIGH_PRECISION, dtype=dtype)
    plain = nn.Linear(33, 17, dtype=dtype)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(5, 3, 33).to(dtype)
    assert same(grads(layer, x), grads(plain, x))


@by_pairs(plan=PLANS, leading=[(), (1,), (0,), (2, 0, 3), (2, 3, 4)])
def test_any_leading_dimensions_and_changes_in_place(plan: LinearPlan, leading: tuple[int, ...]) -> None:
    layer = LowPrecisionLinear(19, 7, plan=plan)
    x = torch.randn(*leading, 19)

    def fresh(x: Tensor, run=None) -> list[Tensor]:
        layer.set_plan(plan)  # forgets the averages
        return grads(layer, x, run)

    found = fresh(x)
    assert found[0].shape == (*leading, 7)
    for one, other in zip(found, fresh(x.reshape(-1, 19)), strict=True):
        assert torch.equal(one.reshape(other.shape), other)
    if 0 in leading:
        assert not found[2].any()
    positions = torch.linspace(-1, 1, found[0].numel()).view(found[0].shape)
    assert torch.allclose(found[3], positions.reshape(-1, 7).sum(0), atol=1e-5)
    assert same(fresh(x, lambda x: layer(x).relu_()), fresh(x, lambda x: torch.relu(layer(x))))


@plans
def test_under_autocast_it_computes_in_autocasts_dtype(plan: LinearPlan) -> None:
    layer = LowPrecisionLinear(16, 24, plan=plan)
    x = torch.randn(8, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert {x.grad.dtype, layer.weight.grad.dtype, layer.bias.grad.dtype} == {torch.float32}
    narrow = copy.deepcopy(layer).bfloat16()
    narrow.set_plan(plan)
    z = narrow(x.detach().bfloat16())
    assert torch.equal(y, z)
    z.float().square().sum().backward()
    assert torch.equal(layer.weight.grad, narrow.weight.grad.float())


@plans
def test_frozen_weights_and_what_is_put_on_top(plan: LinearPlan) -> None:
    """As LoRA does: the layer's own parameters frozen, two small ones beside it."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = LowPrecisionLinear(16, 24, plan=plan).requires_grad_(False)
            self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 24, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    shapes: list[tuple[int, ...]] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if any(word in str(func) for word in ("mm.", "multiply_codes")):
                shapes.append(tuple(out.shape))
            return out

    model = Beside()
    with Products():
        grads(model, torch.randn(5, 16))
    # The outputs of the layer and of the adapter, the gradients of their inputs and of the adapter: no (24, 16).
    assert sorted(shapes) == sorted([(5, 24), (5, 2), (5, 24), (5, 16), (5, 2), (5, 16), (24, 2), (2, 16)])
    assert model.base.weight.grad is None
    assert model.base.bias.grad is None
    assert model.down.weight.grad.any()


@by_pairs(plan=PLANS, reentrant=[False, True])
def test_gradient_checkpointing_changes_nothing(plan: LinearPlan, reentrant: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(LowPrecisionLinear(16, 32, plan=plan), nn.GELU(), LowPrecisionLinear(32, 16, plan=plan))
    twin = copy.deepcopy(model)
    for _ in range(3):
        x = torch.randn(6, 16)
        again = grads(twin, x, lambda x: checkpoint(twin, x, use_reentrant=reentrant))
        assert same(grads(model, x), again)


@traced
@pytest.mark.parametrize(
    "plan",
    [pytest.param(p, marks=[] if n in COMPILED else pytest.mark.slow, id=n) for n, p in PLANS.items()],
)
def test_compiled_as_one_graph_it_is_the_same(plan: LinearPlan) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(LowPrecisionLinear(16, 24, plan=plan), nn.ReLU(), LowPrecisionLinear(24, 9, plan=plan))
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        x = torch.randn(6, 16)
        assert same(grads(model, x), grads(twin, x, compiled))
        assert [b.tolist() for b in model.buffers()] == [b.tolist() for b in twin.buffers()]


@traced
def test_blocks_compile_for_any_number_of_tokens() -> None:
    """One graph for dynamic lengths: no loop over blocks is unrolled."""
    torch.compiler.reset()
    layer = LowPrecisionLinear(200, 136, plan=ng.linear.BLOCKWISE_FP8)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.compiler.set_stance("default"), torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (130, 300):
            x = torch.randn(tokens, 200)
            assert same(grads(layer, x), grads(twin, x, compiled))
            with torch.autocast("cpu", torch.bfloat16):
                again = grads(layer, x, lambda x: checkpoint(layer, x, use_reentrant=False))
                assert again[0].dtype == torch.bfloat16
                assert same(grads(layer, x), again)


@pytest.mark.slow
@traced
@pytest.mark.filterwarnings("ignore:.*script_method. is deprecated:DeprecationWarning")  # inductor's own
@plans
def test_inductor_gives_the_same_too(plan: LinearPlan) -> None:
    torch.compiler.reset()
    layer, x = LowPrecisionLinear(32, 24, plan=plan), torch.randn(6, 32)
    twin = copy.deepcopy(layer)
    for one, other in zip(grads(layer, x), grads(twin, x, torch.compile(twin, fullgraph=True)), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@plans
def test_copies_go_on_as_the_layer_does(plan: LinearPlan) -> None:
    layer = LowPrecisionLinear(16, 24, plan=plan)
    grads(layer, torch.randn(5, 16))
    copies, x = (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))), torch.randn(5, 16) * 3
    wanted = grads(layer, x)
    for twin in copies:
        assert twin.plan == plan
        assert same(wanted, grads(twin, x))


def test_averages_move_with_backward_passes_alone() -> None:
    layer = LowPrecisionLinear(16, 24, plan=AVERAGED)
    (averages,) = layer.buffers()
    layer(torch.ones(3, 16)).sum()
    assert not averages.any()
    grads(layer, torch.full((3, 16), 4.0))
    assert averages[0] == 4
    layer.eval()
    with torch.no_grad():
        layer(torch.full((3, 16), 100.0))
    assert averages[0] == 4
    layer.set_plan(ng.linear.SWITCHBACK)
    assert not list(layer.buffers())


def test_the_function_takes_views() -> None:
    x, w = torch.randn(6, 4, 10).transpose(0, 1)[..., ::2], torch.randn(5, 8).t()
    wanted = linear(x.contiguous(), w.contiguous(), None, ng.linear.SWITCHBACK)
    assert torch.equal(linear(x, w, None, ng.linear.SWITCHBACK), wanted)


REFUSED: list[tuple[dict, str]] = [
    ({"plan": "SWITCHBACK"}, "plan must be a LinearPlan .*, got 'SWITCHBACK'"),
    ({"input": torch.zeros(4, 32, dtype=torch.int64)}, "input must have a float dtype, got torch.int64"),
    ({"input": torch.zeros(4, 31)}, r"input must have shape \(\.\.\., 32\), got shape \(4, 31\)"),
    ({"input": torch.zeros(4, 32, device="meta")}, "input must be on the weight's device, cpu, got meta"),
    ({"weight": torch.zeros(32)}, r"weight must have shape \(out_features, in_features\), got shape \(32,\)"),
    ({"bias": torch.zeros(15)}, r"bias must have shape \(16,\) .*, got shape \(15,\) on cpu"),
    ({"bias": torch.zeros(16, device="meta")}, r"bias must have shape \(16,\) .*, got shape \(16,\) on meta"),
    ({"averages": torch.zeros(2)}, "averages must .*, got shape"),
    ({"averages": None}, "averages must .*, got None with 'average'"),
    ({"plan": ng.linear.TENSORWISE_FP8}, "averages must .*, got a tensor with 'step'"),
]


def test_tensors_that_do_not_match_are_refused() -> None:
    """Kernels take addresses: they would read beyond the end."""
    given = {"input": torch.randn(4, 32), "weight": torch.randn(16, 32), "bias": torch.randn(16)}
    given |= {"plan": AVERAGED, "averages": torch.zeros(3)}
    assert linear(**given).shape == (4, 16)
    for changed, message in REFUSED:
        for autocast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast), pytest.raises(ValueError, match=message):
                linear(**(given | changed))
    with pytest.raises(
        ValueError, match=r"input must have the weight's dtype torch\.bfloat16 .*, got torch\.float32"
    ):
        linear(**(given | {"weight": torch.zeros(16, 32).bfloat16()}))


def test_averages_stay_float32_and_begin_at_zero_where_a_layer_gets_its_memory() -> None:
    layer = LowPrecisionLinear(32, 16, plan=AVERAGED)
    layer(torch.randn(4, 32)).sum().backward()
    before = layer.averages.clone()
    assert (before > 0).all()
    for convert in (nn.Module.half, nn.Module.double, nn.Module.bfloat16):
        assert convert(nn.Sequential(layer))[0].weight.dtype != torch.float32
        assert layer.averages.dtype == torch.float32
        assert torch.equal(layer.averages, before)
    layer = nn.Sequential(LowPrecisionLinear(32, 16, plan=AVERAGED, device="meta")).bfloat16()
    layer.to_empty(device="cpu")
    assert torch.equal(layer[0].averages, torch.zeros(3))
    assert dict(layer.named_buffers())["0.absmax_averages"] is layer[0].averages
    assert "0.absmax_averages" not in layer.state_dict()
    # By a state_dict that is assigned too, and another one leaves them as they are.
    layer = nn.Sequential(LowPrecisionLinear(32, 16, plan=AVERAGED, device="meta"))
    state = nn.Sequential(nn.Linear(32, 16)).state_dict()
    layer.load_state_dict(state, assign=True)
    assert torch.equal(layer[0].averages, torch.zeros(3))
    layer(torch.randn(4, 32)).sum().backward()
    before = layer[0].averages.clone()
    assert (before > 0).all()
    layer.load_state_dict(state, assign=True)
    assert torch.equal(layer[0].averages, before)


@traced
@pytest.mark.parametrize("decay", [0.9, pytest.param(0.5, marks=pytest.mark.slow)])
def test_compiled_with_dynamic_shapes_averages_move_as_they_do(decay: float) -> None:
    torch._dynamo.reset()
    plan = ng.linear.TENSORWISE_FP8.with_moving_average(decay)
    layer = nn.Sequential(LowPrecisionLinear(32, 48, plan=plan), nn.GELU(), LowPrecisionLinear(48, 32, plan=plan))
    twin = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (4, 7, 2):
        x = torch.randn(rows, 3, 32)
        assert all(map(torch.allclose, grads(layer, x, compiled), grads(twin, x)))
    assert all(map(torch.allclose, layer.buffers(), twin.buffers()))
