"""`LowPrecisionLinear` in nn.Linear's place."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.linear import LinearPlan, LowPrecisionLinear, linear

AVERAGED = ng.linear.TENSORWISE_FP8.with_moving_average()
PLANS = {
    "SWITCHBACK": ng.linear.SWITCHBACK,
    "SWITCHBACK_M e4m3": ng.linear.SWITCHBACK_M.with_format("e4m3"),
    "SWITCHBACK_Q": ng.linear.SWITCHBACK_Q,
    "LLM_INT8": ng.linear.LLM_INT8,
    "averaged": AVERAGED,
    "HIGH_PRECISION": ng.linear.HIGH_PRECISION,
}
COMPILED = (
    "SWITCHBACK_M e4m3",
    "LLM_INT8",
    "averaged",
)  # one that saves codes, one that does not, one with buffers
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


def test_it_is_an_nn_linear_to_whoever_asks() -> None:
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
    with pytest.raises(ValueError, match=r"plan must be a LinearPlan.*, got 'int8'"):
        LowPrecisionLinear(3, 4, plan="int8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_high_precision_plan_is_nn_linear_bit_for_bit(dtype: torch.dtype) -> None:
    layer = LowPrecisionLinear(33, 17, plan=ng.linear.HIGH_PRECISION, dtype=dtype)
    plain = nn.Linear(33, 17, dtype=dtype)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(5, 3, 33).to(dtype)
    assert same(grads(layer, x), grads(plain, x))


@plans
@pytest.mark.parametrize("leading", [(), (1,), (0,), (2, 0, 3), (2, 3, 4)], ids=str)
def test_any_leading_dimensions(plan: LinearPlan, leading: tuple[int, ...]) -> None:
    layer = LowPrecisionLinear(19, 7, plan=plan)
    x = torch.randn(*leading, 19)
    y, grad_x, grad_w, grad_b = grads(layer, x)
    assert y.shape == (*leading, 7)
    if plan.tensor_absmax == "average":
        layer.set_plan(plan)  # forgets the averages
    flat = grads(layer, x.reshape(-1, 19))
    for one, other in zip((y, grad_x, grad_w, grad_b), flat, strict=True):
        assert torch.equal(one.reshape(other.shape), other)
    if 0 in leading:
        assert not grad_w.any()
        assert not grad_b.any()


@plans
@pytest.mark.parametrize("leading", [(), (6,), (2, 3)], ids=str)
def test_its_output_may_be_changed_in_place(plan: LinearPlan, leading: tuple[int, ...]) -> None:
    layer = LowPrecisionLinear(16, 24, plan=plan)
    x = torch.randn(*leading, 16)
    wanted = grads(layer, x, lambda x: torch.relu(layer(x)))
    if plan.tensor_absmax == "average":
        layer.set_plan(plan)  # forgets the averages
    assert same(grads(layer, x, lambda x: layer(x).relu_()), wanted)


@plans
def test_the_bias_gradient_is_the_sum_of_the_outputs(plan: LinearPlan) -> None:
    layer = LowPrecisionLinear(16, 24, plan=plan)
    y, *_, grad_b = grads(layer, torch.randn(50, 16))
    assert torch.allclose(grad_b, torch.linspace(-1, 1, y.numel()).view(y.shape).sum(0), atol=1e-5)


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

    class Products(TorchDispatchMode):
        """Shapes of what is multiplied."""

        def __init__(self) -> None:
            super().__init__()
            self.shapes: list[tuple[int, ...]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if any(word in str(func) for word in ("mm.", "multiply_codes")):
                self.shapes.append(tuple(out.shape))
            return out

    model = Beside()
    with Products() as products:
        grads(model, torch.randn(5, 16))
    products.shapes.remove((24, 2))  # the gradients of the adapter
    products.shapes.remove((2, 16))
    assert products.shapes.count((5, 24)) == 2  # the outputs of the layer and of the adapter
    assert products.shapes.count((5, 16)) == 2
    assert (24, 16) not in products.shapes  # the weight gradient
    assert model.base.weight.grad is None
    assert model.base.bias.grad is None
    assert model.down.weight.grad.any()


@plans
@pytest.mark.parametrize("reentrant", [False, True])
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


@pytest.mark.slow
@traced
@pytest.mark.filterwarnings("ignore:.*script_method. is deprecated:DeprecationWarning")  # inductor's own
@plans
def test_inductor_gives_the_same_too(plan: LinearPlan) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    layer = LowPrecisionLinear(32, 24, plan=plan)
    twin = copy.deepcopy(layer)
    x = torch.randn(6, 32)
    for one, other in zip(grads(layer, x), grads(twin, x, torch.compile(twin, fullgraph=True)), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@plans
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_go_on_as_the_layer_does(plan: LinearPlan, copied) -> None:
    layer = LowPrecisionLinear(16, 24, plan=plan)
    grads(layer, torch.randn(5, 16))
    twin, x = copied(layer), torch.randn(5, 16) * 3
    assert twin.plan == plan
    assert same(grads(layer, x), grads(twin, x))


def test_averages_are_the_modules_and_move_with_its_backward_passes() -> None:
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
    assert "absmax_averages" not in layer.state_dict()
    layer.set_plan(ng.linear.SWITCHBACK)
    assert not list(layer.buffers())


def test_a_small_model_learns_with_every_plan() -> None:
    """Losses after 60 steps beside those of nn.Linear."""
    losses = {}
    for name, plan in PLANS.items():
        torch.manual_seed(0)
        model = nn.Sequential(
            LowPrecisionLinear(16, 64, plan=plan), nn.GELU(), LowPrecisionLinear(64, 4, plan=plan)
        )
        x = torch.randn(128, 16)
        target = x[:, :4] * x[:, 4:8]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(60):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
        losses[name] = float(loss.detach())
    assert losses["HIGH_PRECISION"] < 0.1
    assert all(abs(loss - losses["HIGH_PRECISION"]) < 0.02 for loss in losses.values()), losses


def test_the_function_takes_views() -> None:
    x, w = torch.randn(6, 4, 10).transpose(0, 1)[..., ::2], torch.randn(5, 8).t()
    assert torch.equal(
        linear(x, w, None, ng.linear.SWITCHBACK), linear(x.contiguous(), w.contiguous(), None, ng.linear.SWITCHBACK)
    )


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


def test_averages_begin_where_a_state_dict_is_assigned() -> None:
    layer = nn.Sequential(LowPrecisionLinear(32, 16, plan=AVERAGED, device="meta"))
    layer.load_state_dict(nn.Sequential(nn.Linear(32, 16)).state_dict(), assign=True)
    assert torch.equal(layer[0].averages, torch.zeros(3))
    layer(torch.randn(4, 32)).sum().backward()
    assert (layer[0].averages > 0).all()
    before = layer[0].averages.clone()
    layer.load_state_dict(nn.Sequential(nn.Linear(32, 16)).state_dict(), assign=True)
    assert torch.equal(layer[0].averages, before)  # as without `assign`


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


def test_the_decay_is_not_parsed_in_the_backward_pass() -> None:
    """The text is for compilers: an eager backward pass uses the number."""
    plan = ng.linear.TENSORWISE_FP8.with_moving_average(0.75)
    object.__setattr__(plan, "_decay", "not a number")
    layer = LowPrecisionLinear(4, 2, plan=plan)
    for size in (1.0, 2.0):
        layer(torch.full((3, 4), size)).sum().backward()
    assert layer.averages[0] == 0.75 * 1.0 + 0.25 * 2.0
