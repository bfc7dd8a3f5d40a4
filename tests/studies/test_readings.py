"""Rules by which a statement of a paper holds: against every way that chance can fall."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from studies.shared import readings
from studies.shared.readings import Beside, Reading


@pytest.mark.parametrize(
    ("costs", "spread", "lost", "behind", "alike"),
    [
        ([0.3, 0.5], 0.3, False, True, False),
        ([0.1, 0.3], 0.3, False, None, True),
        ([-0.5], 0.3, False, False, False),
        ([0.1], 0.3, False, None, None),  # one seed that ends near may do so by chance
        ([1.0, -0.1], 0.3, False, None, False),  # ahead with one seed, behind with another
        ([0.0], None, False, None, None),
        ([], 0.3, False, None, None),
        ([], None, True, True, False),
    ],
)
def test_a_cost_is_held_against_a_spread(
    costs: list[float], spread: float | None, lost: bool, behind: bool | None, alike: bool | None
) -> None:
    assert readings.behind(costs, spread, lost) is behind
    assert readings.alike(costs, spread, lost) is alike
    # Where chance makes as much as there is to be seen, a cost beyond it is one all the same.
    assert readings.alike(costs, spread, lost, tells=False) is (None if alike else alike)


def test_fewer_events_are_beyond_a_coin() -> None:
    """Against every way that coins can fall."""
    for less, more in itertools.product(range(7), repeat=2):
        fallen = list(itertools.product((0, 1), repeat=less + more))
        sure = [
            less + more > 0 and sum(sum(coins) >= count for coins in fallen) / len(fallen) < readings.SURE
            for count in (more, less)
        ]
        assert readings.fewer(less, more) is (True if sure[0] else False if sure[1] else None)
    assert readings.fewer(1, 0) is None  # a single spike more is no finding of more
    assert readings.fewer(5, 0) is False
    assert readings.fewer(0, 4) is None
    assert readings.fewer(0, 5) is True


def test_a_smaller_share_is_beyond_a_draw() -> None:
    """Against every way to draw the runs that have the event."""
    for of_less, of_more in ((4, 4), (3, 5)):
        for less, more in itertools.product(range(of_less + 1), range(of_more + 1)):
            runs = range(of_less + of_more)  # those of the other share come first
            drawn = list(itertools.combinations(runs, less + more))
            theirs = [sum(run < of_more for run in each) for each in drawn]
            as_many = sum(count >= more for count in theirs) / len(drawn)
            as_few = sum(count <= more for count in theirs) / len(drawn)
            sure = [less + more > 0 and chance < readings.SURE for chance in (as_many, as_few)]
            expected = True if sure[0] else False if sure[1] else None
            assert readings.rarer(less, of_less, more, of_more) is expected
    assert readings.rarer(0, 4, 4, 4) is True
    assert readings.rarer(4, 4, 0, 4) is False
    assert readings.rarer(1, 4, 0, 4) is None


def test_what_has_not_been_run_has_no_reading(cells: Callable[[str], list[list[str]]]) -> None:
    rows = [Reading("a", "Table 1", "1", "2", False), Reading("b", "Table 2", "1", "", True)]
    assert cells(readings.table(rows)) == [
        ["a<br>Table 1", "1", "2", "does not hold"],
        ["b<br>Table 2", "1", "not run", ""],
    ]


def test_chance_is_the_scatter_of_seeds_about_their_own_means() -> None:
    assert readings.chance([[1.0, 3.0], [10.0, 14.0], [5.0]]) is None  # two degrees of freedom
    squares = [[1.0, 3.0], [10.0, 14.0], [0.0, 0.0, 3.0]]
    assert readings.chance(squares) == pytest.approx(math.sqrt((2 + 8 + 6) / 4))
    assert readings.margin(0.2, 4) == pytest.approx(readings.CERTAIN * 0.1)
    assert readings.margin(None, 4) is None
    assert readings.margin(0.2, 0) is None


def test_runs_beside_a_reference_are_those_of_a_seed() -> None:
    def run(row: str, seed: int, loss: float | None) -> dict[str, object]:
        return {"row": row, "seed": seed, "beta2": 0.9, "validation_loss": loss, "diverged": loss is None}

    runs = [run("D", 0, 1.0), run("D", 1, 2.0), run("A", 0, 1.5), run("A", 1, None), run("A", 2, 3.0)]
    found = Beside({"runs": runs, "rows": [{"name": "D"}, {"name": "A"}]}, "D", beta2=0.9)
    assert found.apart("A") == [0.5]
    assert found.lost("A") == 1
    assert found.margin(1) is None  # too few seeds
