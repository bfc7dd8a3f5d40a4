"""Percentile clipping: the norm that is let through is that of the percentile of those seen."""

import math

import pytest
import torch

from narrowgauge.optim import SGD, AdamW
from narrowgauge.optim._clip_gradients import clip_to_percentile, new_history


@pytest.mark.parametrize("percentile", [5, 50, 90, 99.5])
def test_a_gradient_is_no_longer_than_the_percentile_of_the_last_hundred(percentile: float) -> None:
    generator = torch.Generator().manual_seed(0)
    history, seen = new_history(torch.device("cpu")), []
    for step in range(1, 251):
        grad = torch.randn(20, generator=generator) * (1 + step % 7)
        clipped, history = clip_to_percentile(grad, history, percentile)
        seen.append(float(grad.double().norm()))
        last = sorted(seen[-100:])
        limit = last[max(1, math.ceil(len(last) * percentile / 100)) - 1]
        assert float(clipped.double().norm()) == pytest.approx(min(seen[-1], limit), rel=1e-6)
        assert torch.allclose(clipped / clipped.norm(), grad / grad.norm(), atol=1e-6)


def test_an_outlier_is_cut_to_what_came_before() -> None:
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = SGD([p], lr=1.0, percentile_clipping=90)
    for step in range(20):
        p.grad = torch.full((4,), 1e6 if step == 15 else 1.0)
        before = p.detach().clone()
        optimizer.step()
        assert torch.allclose(before - p.detach(), torch.ones(4), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_outlier_in_a_narrow_format_is_cut_to_what_came_before(dtype: torch.dtype) -> None:
    history = new_history(torch.device("cpu"))
    for _ in range(20):
        _, history = clip_to_percentile(torch.full((100,), 1e-4, dtype=dtype), history, 50)
    clipped, _ = clip_to_percentile(torch.full((100,), 1e4, dtype=dtype), history, 50)
    assert float(clipped.norm()) == pytest.approx(1e-3, rel=5e-3)


def test_off_by_default_and_bit_identical_at_100() -> None:
    ends = []
    for options in ({}, {"percentile_clipping": 100}):
        p = torch.nn.Parameter(torch.ones(50))
        optimizer = AdamW([p], **options)
        for step in range(5):
            p.grad = torch.arange(50.0) * (step + 1)
            optimizer.step()
        assert "grad_norms" not in optimizer.state[p]
        ends.append(p.detach())
    assert torch.equal(*ends)


@pytest.mark.parametrize("nonfinite", ["skip", "propagate"])
def test_a_gradient_that_is_not_finite_spoils_no_later_one(nonfinite: str) -> None:
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = SGD([p], lr=1.0, percentile_clipping=50, nonfinite=nonfinite)
    for step in range(10):
        p.grad = torch.ones(4)
        if step == 4:
            p.grad[0] = torch.inf
        optimizer.step()
    if nonfinite == "skip":
        assert torch.equal(p.detach(), torch.full((4,), -9.0))
    assert torch.equal(p.detach()[1:] <= -9.0 + 1e-5, torch.ones(3, dtype=torch.bool))


def test_gradients_of_zero_are_no_gradients() -> None:
    """A parameter that is seldom used (a rare expert, a rare token) goes on moving when it is."""
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = SGD([p], lr=1.0, percentile_clipping=50)
    for step in range(300):
        p.grad = torch.full((4,), 1.0 if step % 10 == 5 else 0.0)
        optimizer.step()
    assert torch.equal(p.detach(), torch.full((4,), -30.0))


def test_a_gradient_that_is_not_finite_stays_in_its_element() -> None:
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = SGD([p], lr=1.0, percentile_clipping=50, nonfinite="propagate")
    for bad in (None, torch.inf, torch.nan, None):
        p.grad = torch.ones(4)
        if bad is not None:
            p.grad[0] = bad
        history = optimizer.state[p].get("grad_norms", torch.zeros(1)).clone()
        optimizer.step()
        assert torch.equal(history, optimizer.state[p]["grad_norms"]) == (bad is not None)
    assert torch.equal(p.detach()[1:], torch.full((3,), -4.0))
    assert not torch.isfinite(p[0])


def test_a_norm_beyond_float32_is_clipped() -> None:
    history = new_history(torch.device("cpu"))
    for _ in range(3):
        _, history = clip_to_percentile(torch.ones(100), history, 50)
    clipped, history = clip_to_percentile(torch.full((100,), 3e38), history, 50)
    assert float(clipped.norm()) == pytest.approx(90, rel=0.2)
    assert torch.isfinite(history).sum() == 4


def test_the_history_is_saved_and_bad_percentiles_are_refused() -> None:
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = AdamW([p], percentile_clipping=80)
    p.grad = torch.ones(4)
    optimizer.step()
    other = AdamW([torch.nn.Parameter(torch.zeros(4))], percentile_clipping=80)
    other.load_state_dict(optimizer.state_dict())
    history = next(iter(other.state.values()))["grad_norms"]
    assert torch.equal(history, optimizer.state[p]["grad_norms"])
    for bad in (0, 101, -5):
        with pytest.raises(ValueError, match="percentile_clipping: got"):
            AdamW([p], percentile_clipping=bad)
