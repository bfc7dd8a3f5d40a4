"""Rules by which a statement holds, and what a page says of results that there are not."""

import importlib
import itertools
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import _readings
import _unmeasured
import pytest
import render
import typer
from _readings import Reading

PAGES = {page.stem: page.read_text() for page in sorted(render.PAGES.glob("*.md"))}
MARKED = re.compile(r"<!-- (?:table: (\S+\.json) \S+|picture: (\w+)\.png [^>]+?) -->\n(.*?)<!-- end -->", re.DOTALL)


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
    assert _readings.behind(costs, spread, lost) is behind
    assert _readings.alike(costs, spread, lost) is alike
    # Where chance makes as much as there is to be seen, a cost beyond it is one all the same.
    assert _readings.alike(costs, spread, lost, tells=False) is (None if alike else alike)


def test_fewer_events_are_beyond_a_coin() -> None:
    """Against every way that coins can fall."""
    for less, more in itertools.product(range(7), repeat=2):
        fallen = list(itertools.product((0, 1), repeat=less + more))
        sure = [
            less + more > 0 and sum(sum(coins) >= count for coins in fallen) / len(fallen) < _readings.SURE
            for count in (more, less)
        ]
        assert _readings.fewer(less, more) is (True if sure[0] else False if sure[1] else None)
    assert _readings.fewer(1, 0) is None  # a single spike more is no finding of more
    assert _readings.fewer(5, 0) is False
    assert _readings.fewer(0, 4) is None
    assert _readings.fewer(0, 5) is True


def test_a_smaller_share_is_beyond_a_draw() -> None:
    """Against every way to draw the runs that have the event."""
    for of_less, of_more in ((4, 4), (3, 5)):
        for less, more in itertools.product(range(of_less + 1), range(of_more + 1)):
            runs = range(of_less + of_more)  # those of the other share come first
            drawn = list(itertools.combinations(runs, less + more))
            theirs = [sum(run < of_more for run in each) for each in drawn]
            as_many = sum(count >= more for count in theirs) / len(drawn)
            as_few = sum(count <= more for count in theirs) / len(drawn)
            sure = [less + more > 0 and chance < _readings.SURE for chance in (as_many, as_few)]
            expected = True if sure[0] else False if sure[1] else None
            assert _readings.rarer(less, of_less, more, of_more) is expected
    assert _readings.rarer(0, 4, 4, 4) is True
    assert _readings.rarer(4, 4, 0, 4) is False
    assert _readings.rarer(1, 4, 0, 4) is None


def test_what_has_not_been_run_has_no_reading(readings: Callable[[str], dict[str, list[str]]]) -> None:
    rows = [Reading("a", "Table 1", "1", "2", False), Reading("b", "Table 2", "1", "", True)]
    assert readings(_readings.table(rows)) == {"a": ["1", "2", "does not hold"], "b": ["1", "not run", ""]}


def test_what_is_missing_is_said_with_its_command() -> None:
    found = set()
    for study, text in PAGES.items():
        for table, picture, body in MARKED.findall(text):
            name = table.partition(",")[0] or f"{picture}.json"
            assert (render.measured(name) is None) == body.startswith(f"{_unmeasured.SAID}\n")
            if render.measured(name) is None:
                found.add(name)
                assert body == f"{_unmeasured.SAID}\n\n`{_unmeasured.command(study, name)}`\n"
    assert found == {name for name in _unmeasured.OPTIONS if render.measured(name) is None}


@pytest.mark.parametrize("name", sorted(_unmeasured.OPTIONS))
def test_a_command_is_one_that_its_study_takes(name: str) -> None:
    study = render.study_of(name)
    words = shlex.split(_unmeasured.command(study, name))
    assert words[:2] == ["python", f"studies/{study}.py"]
    app = typer.Typer()
    app.command()(importlib.import_module(study).main)
    with typer.main.get_command(app).make_context(study, words[2:]) as context:
        assert context.params["out"] == Path(f"studies/results/{name}")
        assert context.params["device"] == "cuda"


@pytest.mark.parametrize("mark", ["table: stability_x.json ways", "picture: stability_x.png words"])
def test_a_file_that_a_page_names_by_mistake(mark: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"results: got stability_x\.json, .* takes .*stability_h200"):
        render.rendered(f"<!-- {mark} -->\n<!-- end -->")


def test_a_table_that_there_is_not_is_a_mistake_before_it_is_measured() -> None:
    with pytest.raises(KeyError, match="no_table"):
        render.rendered("<!-- table: stability_h200.json no_table -->\n<!-- end -->")


def test_the_list_of_studies_says_which_are_not_measured() -> None:
    listed = (Path(render.__file__).parent / "README.md").read_text()
    for study in PAGES:
        rows = [line for line in listed.splitlines() if f"[docs/studies/{study}.md]" in line]
        measured = any(render.study_of(path.name) == study for path in render.RESULTS.glob("*.json"))
        assert rows, study
        assert all(("not measured yet" in row) != measured for row in rows), study
