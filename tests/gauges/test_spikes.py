"""Spikes: the paper's heuristics by hand, against a slow reading of their definition, and one value at a time."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.gauges import LossSpikes, RmsSpikes, Spike, find_rms_spikes, find_spikes


def flat(count: int, level: float = 1.0, noise: float = 0.01) -> list[float]:
    """Losses that alternate around a level: mean `level`, standard deviation `noise`."""
    return [level + noise * (-1) ** step for step in range(count)]


def deviating(losses: list[float], steps: list[int], deviations: float, warmup: int, window: int) -> list[int]:
    """The definition, value by value, with numpy's mean and standard deviation in float64."""
    found = []
    for place, (step, loss) in enumerate(zip(steps, losses, strict=True)):
        past = [value for value in losses[:place] if math.isfinite(value)][-window:]
        if len(past) < window or step <= warmup:
            continue
        if math.isnan(loss) or loss == math.inf or loss > np.mean(past) + deviations * np.std(past):
            found.append(step)
    return found


def events(steps: list[int], merge: int, needs: int) -> list[int]:
    """The definition: the earliest step with enough deviations in `merge` steps from it on, then on from there."""
    found: list[int] = []
    for step in steps:
        if found and step < found[-1] + merge:
            continue
        if sum(step <= other < step + merge for other in steps) >= needs:
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("levels", "found"),
    [
        ({1150: 1.5, 1154: 1.5}, [1150]),
        ({1150: 1.5}, []),
        ({1150: 1.5, 1159: 1.5}, [1150]),  # the first step and nine more
        ({1150: 1.5, 1160: 1.5}, []),
        ({1150: 1.0321, 1151: 1.1}, [1150]),  # 3.2 standard deviations above the mean
        ({1150: 1.0319, 1151: 1.1}, []),
        ({1150: 0.5, 1151: 0.5}, []),
        ({999: 1.5, 1000: 1.5, 1201: 1.5, 1202: 1.5}, [1201]),  # the first 1000 steps are not judged
    ],
)
def test_the_papers_figures_are_the_defaults(levels: dict[int, float], found: list[int]) -> None:
    losses = flat(1300)
    for step, level in levels.items():
        losses[step - 1] = level
    assert find_spikes(losses) == found


@pytest.mark.parametrize("window", [10, 50, 100, 400])
def test_a_lasting_jump_is_taken_for_normal_within_a_share_of_the_window(window: int) -> None:
    losses = [*flat(600, noise=1e-9), *flat(600, level=3.0, noise=1e-9)]
    found = find_spikes(losses, warmup=0, window=window, needs=1, merge=1)
    assert found == list(range(601, 601 + math.floor(window / (1 + 3.2**2)) + 1))
    if window <= 100:
        assert find_spikes(losses, warmup=0, window=window, needs=1) == [601]


@given(level=st.floats(1e-6, 1e6))
def test_a_constant_loss_is_no_spike(level: float) -> None:
    assert find_spikes([level] * 120, warmup=0, needs=1, window=50) == []


def test_a_loss_that_is_no_number_deviates_and_leaves_no_trace() -> None:
    losses = flat(300)
    losses[149] = math.nan
    losses[150] = math.inf
    assert find_spikes(losses, warmup=100) == [150]
    losses[150] = -math.inf
    assert find_spikes(losses, warmup=100) == []
    losses[199] = losses[201] = 1.1
    assert find_spikes(losses, warmup=100) == [200]


def test_huge_losses_leave_nothing_behind_once_they_are_out_of_the_window() -> None:
    losses = flat(400)
    losses[149] = 1.7e308
    losses[299] = losses[300] = 1.1
    assert find_spikes(losses, warmup=100) == [300]


runs = st.lists(
    st.one_of(st.floats(0.5, 1.5), st.floats(1.0, 50.0), st.sampled_from([math.nan, math.inf])),
    min_size=0,
    max_size=120,
)


@given(
    losses=runs,
    gaps=st.lists(st.integers(1, 4), min_size=120, max_size=120),
    deviations=st.sampled_from([0.5, 1.0, 3.2]),
    warmup=st.integers(0, 60),
    merge=st.integers(3, 12),
    window=st.integers(2, 30),
    needs=st.integers(1, 3),
)
@settings(max_examples=80)
def test_losses_are_judged_as_the_definition_reads(
    losses: list[float], gaps: list[int], deviations: float, warmup: int, merge: int, window: int, needs: int
) -> None:
    steps = np.cumsum(gaps)[: len(losses)].tolist()
    expected = events(deviating(losses, steps, deviations, warmup, window), merge, needs)
    assert find_spikes(losses, deviations, warmup, merge, window, needs, steps) == expected


@given(losses=runs, merge=st.integers(3, 12), needs=st.integers(1, 3))
@settings(max_examples=50)
def test_an_alarm_knows_at_each_step_what_the_losses_so_far_say(
    losses: list[float], merge: int, needs: int
) -> None:
    alarm = LossSpikes(1.0, 10, merge, 8, needs)
    raised: list[Spike] = []
    for step, loss in enumerate(losses, start=1):
        spike = alarm.add(loss)
        if spike is not None:
            assert spike.seen == step < spike.step + merge
            raised.append(spike)
        assert [spike.step for spike in raised] == find_spikes(losses[:step], 1.0, 10, merge, 8, needs)
    for spike in raised:
        assert not spike.value <= spike.threshold
        assert spike.value == losses[spike.step - 1] or math.isnan(losses[spike.step - 1])


@given(
    values=st.lists(st.floats(0.0, 4.0), max_size=100),
    warmup=st.integers(0, 20),
    merge=st.integers(1, 12),
)
@settings(max_examples=50)
def test_rms_spikes_are_known_at_once(values: list[float], warmup: int, merge: int) -> None:
    above = [step for step, value in enumerate(values, start=1) if value >= 2.3 and step > warmup]
    assert find_rms_spikes(values, warmup=warmup, merge=merge) == events(above, merge, 1)
    alarm = RmsSpikes(warmup=warmup, merge=merge)
    raised = [spike for spike in map(alarm.add, values) if spike is not None]
    assert [spike.step for spike in raised] == find_rms_spikes(values, warmup=warmup, merge=merge)
    assert all(spike.seen == spike.step and spike.value == values[spike.step - 1] for spike in raised)


def test_rms_spikes_by_hand() -> None:
    values = [1.0] * 40
    values[19] = 2.3
    values[24] = 5.0
    values[29] = 2.2999
    values[31] = math.inf
    values[35] = math.nan
    assert find_rms_spikes(values, warmup=0) == [20, 32]
    assert find_rms_spikes(values, warmup=20) == [25]
    assert find_rms_spikes([3.0] * 25, warmup=0) == [1, 11, 21]  # it stays high: one every ten steps
    assert find_rms_spikes([1.0, 3.0], warmup=1000, steps=[990, 1010]) == [1010]


def test_what_is_rare_is_rare() -> None:
    """Of normal noise a step deviates with probability 7e-4, so that two in ten steps come once in 2e5 steps."""
    losses = np.random.default_rng(0).normal(2.0, 0.1, 20_000).tolist()
    alone = find_spikes(losses, needs=1, merge=1)
    assert 5 <= len(alone) <= 45
    assert len(find_spikes(losses)) <= 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deviations": 0.0}, r"deviations must be a finite number above 0, got 0\.0"),
        ({"needs": 1.5}, r"needs must be an integer of at least 1, got 1\.5"),
        ({"needs": 11}, "needs must be at most merge=10"),
        ({"steps": [1]}, "steps must have one step for each of the 2 losses, got 1"),
        ({"steps": [2, 2]}, "step must rise, got 2 after 2"),
    ],
)
def test_what_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_spikes([1.0, 1.0], **options)
