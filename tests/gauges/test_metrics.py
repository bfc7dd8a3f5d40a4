"""Effective descent quality, lost updates and RMS_t, by hand and by their properties."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.gauges import effective_descent_quality, lost_updates, relative_descent_quality, rms_ratio
from narrowgauge.optim import AdamW, UpdateStats


def test_descent_quality_is_the_projection_on_the_intended_direction() -> None:
    update = torch.tensor([3.0, 4.0])
    assert float(effective_descent_quality(update, update)) == 5.0
    assert float(effective_descent_quality(update, torch.tensor([0.0, 4.0]))) == pytest.approx(16 / 5)
    assert float(effective_descent_quality(update, torch.tensor([-4.0, 3.0]))) == 0.0
    assert float(effective_descent_quality(update, -update)) == -5.0
    assert float(effective_descent_quality(torch.zeros(2), torch.ones(2))) == 0.0


def test_updates_that_are_zero_by_right_are_not_lost() -> None:
    before = torch.tensor([1.0, 200.0, 1.0, 5.0], dtype=torch.bfloat16)
    update = torch.tensor([0.5, 0.1, 0.0, -1.0])
    after = (before.float() + update).to(torch.bfloat16)
    assert float(lost_updates(before, update, after)) == pytest.approx(1 / 3)
    assert float(lost_updates(before, torch.zeros(4), before)) == 0.0


def test_the_relative_form_is_one_if_nothing_is_lost() -> None:
    update = torch.tensor([3.0, 4.0])
    assert float(relative_descent_quality(update, update)) == 1.0
    assert float(relative_descent_quality(update, torch.tensor([0.0, 4.0]))) == pytest.approx(16 / 25)
    assert float(relative_descent_quality(1e-20 * update, -1e-20 * update)) == pytest.approx(-1.0)
    assert math.isnan(float(relative_descent_quality(torch.zeros(2), torch.ones(2))))


def test_functions_and_the_sums_of_a_step_agree() -> None:
    generator = torch.Generator().manual_seed(1)
    before = torch.randn(500, generator=generator).bfloat16()
    update = torch.randn(500, generator=generator) * 1e-3
    update[:5] = torch.tensor([0.0, -0.0, math.nan, 1.0, 1.0])
    before[3:5] = torch.tensor([math.inf, math.nan])
    after = (before.float() + update).bfloat16()
    kept = before.double(), before.double()
    stats = UpdateStats.measure(update, kept, (after.double(), after.double()))
    assert float(lost_updates(before, update, after)) == pytest.approx(stats.lost_updates)
    fine = slice(5, None)
    stats = UpdateStats.measure(update[fine], (kept[0][fine],) * 2, (after.double()[fine],) * 2)
    effective = (after.double() - before.double())[fine]
    assert float(relative_descent_quality(update[fine], effective)) == pytest.approx(
        stats.effective_descent_quality, rel=1e-12
    )


def test_rms_ratio_by_hand() -> None:
    grad, second = torch.tensor([3.0, 0.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 4.0, 0.0])
    assert float(rms_ratio(grad, second, eps=0.5)) == pytest.approx(math.sqrt((9 + 0 + 1 / 4 + 1 / 0.25) / 4))
    assert float(rms_ratio(grad, grad.square().clamp_min(1e-9))) == pytest.approx(math.sqrt(3 / 4))
    assert float(rms_ratio(torch.zeros(3), torch.zeros(3), eps=0.0)) == 0.0
    assert math.isfinite(float(rms_ratio(torch.full((2,), 3e38), torch.zeros(2))))
    assert math.isnan(float(rms_ratio(torch.zeros(0), torch.zeros(0))))


@given(
    grads=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30),
    beta2=st.sampled_from([0.9, 0.99, 0.999]),
)
def test_rms_ratio_has_a_bound(grads: list[float], beta2: float) -> None:
    """u counts g with a share of 1 - beta2 at least."""
    u, power = 0.0, 1.0
    for g in grads:
        u, power = beta2 * u + (1 - beta2) * g * g, power * beta2
    ratio = rms_ratio(torch.tensor([grads[-1]]).double(), torch.tensor([u / (1 - power)]).double())
    assert float(ratio) <= (1 - beta2) ** -0.5 * (1 + 1e-9)


def test_rms_ratio_does_not_depend_on_the_unit_of_the_gradient() -> None:
    grad, second = torch.randn(2, 100, generator=torch.Generator().manual_seed(0)).abs()
    here = rms_ratio(grad, second, eps=1e-3)
    torch.testing.assert_close(rms_ratio(grad * 2.0**20, second * 2.0**40, eps=1e-3 * 2.0**20), here)


def test_rms_ratio_is_the_rms_of_the_optimizer() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(50))
    optimizer = AdamW([("weight", weight)], lr=1e-3, eps=1e-6)
    optimizer.gauges = True
    second = torch.zeros(50, dtype=torch.float64)
    for step in range(1, 8):
        weight.grad = torch.randn(50) * (30.0 if step == 7 else 1.0)
        optimizer.step()
        second = 0.999 * second + 0.001 * weight.grad.double().square()
        expected = rms_ratio(weight.grad, second / (1 - 0.999**step))
        assert optimizer.last_stats["weight"].rms == pytest.approx(float(expected), rel=1e-5)
    # The moment counts the last gradient with 1/7, and the other six are 30 times smaller.
    assert optimizer.last_stats["weight"].rms == pytest.approx(math.sqrt(7), rel=0.2)


def test_shapes_that_torch_would_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match=r"second_moment must have shape \(2,\), got \(1,\)"):
        rms_ratio(torch.ones(2), torch.ones(1))
    with pytest.raises(ValueError, match=r"eps must be at least 0 and finite, got -1\.0"):
        rms_ratio(torch.ones(2), torch.ones(2), eps=-1.0)
