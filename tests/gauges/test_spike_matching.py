"""Matches of spikes: by hand, and their probability by enumeration and by simulation."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.gauges import SpikeMatch, match_spikes


def test_a_loss_spike_follows_by_one_to_eight_steps() -> None:
    match = match_spikes([100, 200], [100, 101, 108, 109, 199, 205])
    assert match.pairs == ((100, None), (101, 100), (108, 100), (109, None), (199, None), (205, 200))
    assert (match.followed, match.loss_spikes) == (3, 6)
    assert match_spikes([100], [100], least=0).pairs == ((100, 100),)
    assert match_spikes([100], [103], least=4).followed == 0


def test_the_nearest_before_it_is_the_one_it_follows() -> None:
    assert match_spikes([107, 100, 108], [108]).pairs == ((108, 107),)
    assert match_spikes([100, 105], [108], least=4).pairs == ((108, 100),)


def test_without_the_steps_there_is_no_probability() -> None:
    match = match_spikes([100], [101])
    assert match.followed == 1
    assert math.isnan(match.chance)
    assert math.isnan(match.probability)


def test_chance_is_the_share_of_the_steps_within_reach() -> None:
    match = match_spikes([10, 12, 95], [11], judged=range(1, 101))
    assert match.covered == 10 + 5  # 11 to 20, and 96 to 100
    assert match.chance == 0.15
    assert match.probability == pytest.approx(0.15)
    assert match_spikes([5], [15], judged=range(10, 20)).covered == 4


def test_the_papers_figures() -> None:
    """76 RMS spikes in five runs of 19,000 steps: below 1% for one, and 14 of 15 are no coincidence."""
    rms = [20 * place for place in range(60, 136)]
    losses = [step + 3 for step in rms[:14]] + [90_000]
    match = match_spikes(rms, losses, judged=range(1001, 96_001))
    assert match.followed == 14
    assert match.chance == pytest.approx(76 * 8 / 95_000)
    assert match.chance < 0.01
    assert match.probability < 1e-29


@given(
    last=st.integers(1, 9),
    rms=st.sets(st.integers(1, 12), max_size=3),
    losses=st.sets(st.integers(1, 9), max_size=4),
    least=st.integers(0, 3),
    reach=st.integers(0, 3),
)
@settings(max_examples=80)
def test_the_probability_is_that_of_all_sets_of_steps(
    last: int, rms: set[int], losses: set[int], least: int, reach: int
) -> None:
    judged = range(1, last + 1)
    given_losses = sorted(step for step in losses if step <= last)
    match = match_spikes(sorted(rms), given_losses, least, least + reach, judged)
    sets = list(itertools.combinations(judged, len(given_losses)))
    followed = [
        sum(any(least <= step - before <= least + reach for before in rms) for step in chosen) for chosen in sets
    ]
    expected = sum(count >= match.followed for count in followed) / len(sets)
    assert match.followed == sum(
        any(least <= step - before <= least + reach for before in rms) for step in given_losses
    )
    assert match.probability == pytest.approx(expected, rel=1e-12)


def test_runs_are_added() -> None:
    runs = [match_spikes([50], [52], judged=range(11, 101)), match_spikes([20], [60], judged=range(11, 111))]
    total = SpikeMatch.total(runs)
    assert (total.followed, total.loss_spikes, total.covered, total.steps) == (1, 2, 16, 190)
    assert total.probability == pytest.approx(1 - math.comb(174, 2) / math.comb(190, 2))
    assert math.isnan(SpikeMatch.total([*runs, match_spikes([1], [2])]).probability)


def test_nothing_to_match() -> None:
    match = match_spikes([], [], judged=range(1, 11))
    assert (match.followed, match.chance, match.probability) == (0, 0.0, 1.0)
    assert match_spikes([], [3], judged=range(1, 11)).probability == 1.0


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="most must be at least least=3, got 2"):
        match_spikes([1], [2], least=3, most=2)
    with pytest.raises(ValueError, match="loss_spikes must be different steps"):
        match_spikes([1], [2, 2])
    with pytest.raises(ValueError, match=r"loss_spikes must be in judged=range\(1, 11\), got 12"):
        match_spikes([1], [12], judged=range(1, 11))
