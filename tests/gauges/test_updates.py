"""Effective descent quality and lost updates, by hand."""

import pytest
import torch

from narrowgauge.gauges import effective_descent_quality, lost_updates


def test_descent_quality_is_the_projection_on_the_intended_direction() -> None:
    update = torch.tensor([3.0, 4.0])
    assert float(effective_descent_quality(update, update)) == 5.0
    assert float(effective_descent_quality(update, torch.tensor([0.0, 4.0]))) == pytest.approx(16 / 5)
    assert float(effective_descent_quality(update, torch.tensor([-4.0, 3.0]))) == 0.0
    assert float(effective_descent_quality(update, -update)) == -5.0
    assert float(effective_descent_quality(torch.zeros(2), torch.ones(2))) == 0.0


def test_it_scales_with_the_effective_update_only() -> None:
    generator = torch.Generator().manual_seed(0)
    update, effective = torch.randn(2, 100, generator=generator)
    base = effective_descent_quality(update, effective)
    torch.testing.assert_close(effective_descent_quality(update * 7, effective), base)
    torch.testing.assert_close(effective_descent_quality(update, effective * 7), base * 7)


def test_updates_that_are_zero_by_right_are_not_lost() -> None:
    before = torch.tensor([1.0, 200.0, 1.0, 5.0], dtype=torch.bfloat16)
    update = torch.tensor([0.5, 0.1, 0.0, -1.0])
    after = (before.float() + update).to(torch.bfloat16)
    assert float(lost_updates(before, update, after)) == pytest.approx(1 / 3)
    assert float(lost_updates(before, torch.zeros(4), before)) == 0.0


def test_shapes_are_checked_by_name() -> None:
    with pytest.raises(ValueError, match=r"effective_update: got shape \(3,\), takes \(2,\)"):
        effective_descent_quality(torch.ones(2), torch.ones(3))
    with pytest.raises(ValueError, match=r"after: got shape \(3,\), takes \(2,\)"):
        lost_updates(torch.ones(2), torch.ones(2), torch.ones(3))
