"""Unscaling: exact by powers of two, bounded otherwise, tensor by tensor, across lists of mixed tensors."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.optim import SGD
from narrowgauge.scaling import DynamicLossScaler, StaticLossScaler, TensorLossScaler
from narrowgauge.scaling._unscale import clear, mark, nonfinite

FLOAT16 = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
BFLOAT16 = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def unscaled(grad: torch.Tensor, scale: float, kind=StaticLossScaler) -> torch.Tensor:
    """What `unscale_` makes of a gradient, in an optimizer of ours."""
    p = torch.nn.Parameter(torch.zeros_like(grad))
    p.grad = grad.clone()
    scaler = kind(init_scale=scale)
    scaler.scale(torch.ones(()))
    scaler.unscale_(SGD([("p", p)]))
    assert p.grad is not None
    return p.grad


@pytest.mark.parametrize("power", [-10, 0, 3, 16, 24])
def test_every_float16_gradient_unscales_exactly_into_float32(power: int) -> None:
    finite = FLOAT16[FLOAT16.isfinite()]
    grad = unscaled(finite, 2.0**power)
    assert grad.dtype is torch.float32
    assert torch.equal(grad.double() * 2.0**power, finite.double())
    # In its own format it would not have survived.
    if power == 16:
        assert torch.equal(finite / 2.0**power == 0, finite.abs() <= 2.0**-9)


@pytest.mark.parametrize("power", [3, 16, 24])
def test_every_bfloat16_gradient_unscales_exactly_above_its_smallest_normal(power: int) -> None:
    finite = BFLOAT16[BFLOAT16.isfinite()]
    grad = unscaled(finite, 2.0**power)
    assert grad.dtype is torch.bfloat16
    exact = finite.double() / 2.0**power
    normal = (exact.abs() >= 2.0**-126) | (exact == 0)
    assert torch.equal(grad[normal].double(), exact[normal])
    assert torch.equal(grad, exact.to(torch.bfloat16))  # below, it is rounded once


@given(st.integers(-60, 60), st.lists(st.floats(2.0**-60, 2.0**60, width=32), min_size=1, max_size=20))
def test_scaling_and_unscaling_float32_by_a_power_of_two_is_the_identity(power: int, values: list[float]) -> None:
    grad = torch.tensor(values)
    assert torch.equal(unscaled(grad * 2.0**power, 2.0**power), grad)


@given(st.floats(2.0**-20, 2.0**20, width=32), st.lists(st.floats(2.0**-60, 2.0**60, width=32), min_size=1))
def test_any_other_scale_rounds_twice_in_float32(scale: float, values: list[float]) -> None:
    grad = torch.tensor(values)
    exact = grad.double() / scale
    error = (unscaled(grad, scale).double() - exact).abs() / exact
    assert error.max() <= 2.0**-23
    narrow = unscaled(grad.bfloat16(), scale).double()
    exact = grad.bfloat16().double() / scale
    assert ((narrow - exact).abs() / exact).max() <= 2.0**-8 + 2.0**-22


def test_a_float16_gradient_is_refused_where_it_would_underflow_again() -> None:
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    p.grad = torch.ones_like(p)
    for kind in (DynamicLossScaler, StaticLossScaler, TensorLossScaler):
        scaler = kind()
        scaler.scale(torch.ones(()))
        with pytest.raises(ValueError, match=r"layer\.weight must be a float32 parameter.*got a float16 gradient"):
            scaler.step(torch.optim.SGD([("layer.weight", p)], lr=0.1))
        assert torch.equal(p.grad, torch.ones_like(p))


@pytest.mark.parametrize("kind", [StaticLossScaler, TensorLossScaler])
def test_a_float16_loss_is_refused_where_its_gradient_is_already_inf(kind) -> None:
    loss = torch.ones((), dtype=torch.float16, requires_grad=True)
    scaler = kind(init_scale=65536)
    for outputs in (loss, [loss.float(), (loss,)]):
        with pytest.raises(ValueError, match=r"outputs must be a float32 loss, got a float16 one"):
            scaler.scale(outputs)
    DynamicLossScaler().scale(loss).backward()  # finds its way down
    assert loss.grad.isinf()
    scaler.scale(loss.float())
    scaler.update(2.0**15)
    loss.grad = None
    scaler.scale(loss).backward()
    assert loss.grad == 2.0**15
    scaler.load_state_dict({**scaler.state_dict(), "scale": 65536.0})
    with pytest.raises(ValueError, match="the scale 65536"):
        scaler.scale(loss)
    scaler.update(torch.tensor(65536.0))  # not looked at
    assert scaler.scale(loss) == 65536.0


def test_float16_gradients_accumulate_and_go_on_after_having_been_widened() -> None:
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    optimizer, scaler = SGD([("p", p)], lr=1.0, weights="master"), StaticLossScaler(init_scale=1024.0)
    for keep_tensor in (True, False):
        for _ in range(2):  # two micro-batches
            scaler.scale(p.float().sum() * 2.0**-12).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(p.grad, torch.full((3,), 2.0**-11))
        optimizer.zero_grad(set_to_none=not keep_tensor)
    assert torch.equal(p, torch.full((3,), -(2.0**-10), dtype=torch.float16))


def test_a_list_of_mixed_tensors_is_flagged_tensor_by_tensor() -> None:
    values = [
        torch.ones(3),
        None,
        torch.tensor([1.0, math.inf], dtype=torch.float16),
        torch.full((4, 5), 65504.0, dtype=torch.float16),
        torch.empty(0),
        torch.tensor([[-math.inf]], dtype=torch.bfloat16),
        torch.tensor(math.nan),
        torch.tensor([3e38, -3e38]),
        torch.tensor([1e300], dtype=torch.float64),
        torch.tensor([1.0, math.nan]).expand(2, 2).t(),
    ]
    (flags,) = nonfinite(values).values()
    assert flags.tolist() == [False, False, True, False, False, True, True, False, False, True]
    clear([v.contiguous() if v is not None else None for v in values], {torch.device("cpu"): flags})
    assert nonfinite([None, None]) == {}


def test_clearing_and_marking_touch_the_flagged_alone() -> None:
    flags = {torch.device("cpu"): torch.tensor([False, True, True, True])}
    values = [torch.ones(2, 3), torch.ones(3, 2).t()[1:], torch.ones(3, dtype=torch.bfloat16), torch.empty(0)]
    clear(values, flags)
    assert [v.sum().item() for v in values] == [6, 0, 0, 0]
    mark(values, flags)
    assert [int(v.isnan().sum()) for v in values] == [0, 1, 1, 0]
    whole = torch.ones(3, 2)
    mark([whole.t()[1:], None], {torch.device("cpu"): torch.tensor([True, True])})
    assert whole.isnan().tolist() == [[False, True], [False, False], [False, False]]
