"""What a step measures of itself, against the gauges' definitions and hand-made cases."""

import math

import pytest
import torch

from narrowgauge.gauges import effective_descent_quality, lost_updates
from narrowgauge.optim import AdamW, UpdateStats


def test_sums_agree_with_the_definitions_on_a_real_step() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter((1 + torch.rand(3000, generator=generator)).to(torch.bfloat16))
    optimizer = AdamW([("p", p)], 3e-3, weight_decay=0.0, weights="plain")
    optimizer.gauges = True
    p.grad = torch.randn(3000, generator=generator).to(torch.bfloat16)
    p.grad[:500] = 0
    before = p.detach().clone()
    optimizer.step()
    # The first step of Adam is lr * sign(gradient), up to epsilon.
    grad = p.grad.double()
    intended = -3e-3 * grad / (grad.abs() + 1e-8)
    effective = p.detach().double() - before.double()
    stats = optimizer.last_stats["p"]
    edq = float(effective_descent_quality(intended, effective) / intended.norm())
    assert stats.effective_descent_quality == pytest.approx(edq, rel=1e-5)
    assert stats.lost_updates == float(lost_updates(before, intended, p.detach()))
    assert 0 < stats.lost_updates < 1
    assert stats.visible_descent_quality == stats.effective_descent_quality
    assert stats.intended_nonzero == 2500


def test_totals_add_sums_not_ratios_and_nothing_intended_is_nan() -> None:
    one = UpdateStats(torch.tensor([4.0, 4, 4, 2, 0, 0], dtype=torch.float64))
    two = UpdateStats(torch.tensor([1.0, 0, 0, 8, 8, 8], dtype=torch.float64))
    total = UpdateStats.total([one, two])
    assert total.effective_descent_quality == 4 / 5
    assert total.lost_updates == 0.8
    assert math.isnan(UpdateStats(torch.zeros(6, dtype=torch.float64)).lost_updates)
    with pytest.raises(ValueError, match="stats must not be empty"):
        UpdateStats.total([])
    with pytest.raises(AttributeError):
        one.unknown  # noqa: B018
