"""RMS_t from a sample of a parameter is that of the sampled elements, however moments are kept."""

from typing import Any

import pytest
import torch

from narrowgauge import optim
from narrowgauge.optim import _sampled_ratios
from narrowgauge.optim._sampled_ratios import ratio_sums
from narrowgauge.optim._update import squared_ratios

STATES = ("fp32", "bf16", "expansion", "8bit", "fp8", "4bit", "log8", "log4")


def stepped(shape: tuple[int, ...], **options: Any) -> tuple[Any, torch.Tensor]:
    """An optimizer after two steps, and a parameter with its third gradient."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(shape, dtype=torch.bfloat16))
    optimizer = optim.AdamW([p], 1e-3, min_quantized_size=64, **options)
    for _ in range(3):
        if p.grad is not None:
            optimizer.step()
        p.grad = torch.randn_like(p) * torch.randn_like(p).exp()
    return optimizer, p


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("weights", ["plain", "split8", "expansion"])
@pytest.mark.parametrize(
    ("shape", "block"), [((300, 301), 256), ((65_537,), 100), ((64, 512), 1024), ((200, 200), 33)]
)
def test_blocks_are_taken_with_what_is_kept_of_them(
    states: str, weights: str, shape: tuple[int, ...], block: int
) -> None:
    optimizer, p = stepped(shape, states=states, weights=weights, block_size=block)
    group, state, plan = optimizer.param_groups[0], optimizer.state[p], optimizer._plan(p)
    whole = squared_ratios(plan, p, p.grad, state, group, 3)
    assert whole is not None
    n = p.numel()
    block = block if block % 2 == 0 else 2 * block  # two elements can share a byte
    blocks, share = n // block, min(16, n // _sampled_ratios.LEAST)
    in_blocks = whole.reshape(-1)[: blocks * block].view(blocks, block)
    for turn in (0, 1, share + 3):
        sums = ratio_sums(plan, p, p.grad, state, group, 3, turn)
        assert sums is not None
        wanted = in_blocks[turn % share :: share].mean(dtype=torch.float64)
        assert float(sums[1]) == n
        assert float(sums[0]) == pytest.approx(float(wanted) * n, rel=1e-9)


def test_short_parameters_are_taken_whole_and_rules_without_second_moment_have_none() -> None:
    optimizer, p = stepped((50, 100), states="8bit", weights="plain")
    group, state, plan = optimizer.param_groups[0], optimizer.state[p], optimizer._plan(p)
    whole = squared_ratios(plan, p, p.grad, state, group, 3)
    sums = ratio_sums(plan, p, p.grad, state, group, 3, 7)
    assert whole is not None
    assert sums is not None
    assert sums.tolist() == [pytest.approx(float(whole.sum(dtype=torch.float64)), rel=1e-6), 5000.0]
    lion = optim.Lion([p], 1e-3)
    lion.measure_ratios([p], 0)
    lion.step()
    assert lion.ratios() == {}


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}, {"percentile_clipping": 5}, {"maximize": True}])
def test_a_step_that_measures_ratios_is_the_same_step(options: dict[str, Any]) -> None:
    for states in ("fp32", "8bit"):
        (plain, p), (asked, q), (measured, r) = (
            stepped((64, 128), states=states, weights="split8", **options) for _ in range(3)
        )
        asked.measure_ratios([q], 0)
        measured.gauges = True
        for optimizer in (plain, asked, measured):
            optimizer.step()
        assert torch.equal(p, q)
        for key, word in plain.state[p].items():
            assert torch.equal(word, asked.state[q][key]), key
        assert len(asked.last_stats) == 0
        ((owner, sums),) = asked.ratios().items()
        (stats,) = measured.last_stats.values()
        assert owner is q
        torch.testing.assert_close(sums, stats.sums[-2:], rtol=1e-9, atol=0)
        assert asked.ratios() == {}  # once
        assert torch.equal(p, r)


def test_a_skipped_step_has_zeros() -> None:
    optimizer, p = stepped((64, 128), weights="plain")
    assert p.grad is not None
    p.grad[0, 0] = torch.nan
    optimizer.measure_ratios([p], 0)
    optimizer.step()
    assert optimizer.ratios()[p].tolist() == [0.0, 0.0]
