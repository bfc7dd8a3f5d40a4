"""Tables said by rows and columns, pictures by series: what cells and lines are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from studies.shared import pictures, tables
from studies.shared.tables import table

ROWS = [{"name": "a", "bytes": {"total": 7.125}, "loss": None}, {"name": "b", "bytes": {"total": 16}, "loss": 1.25}]
RUNS: list[dict[str, Any]] = [
    {"row": "D", "seed": 1, "validation_loss": 2.0},
    {"row": "D", "seed": 0, "validation_loss": 1.0},
    {"row": "A", "seed": 0, "validation_loss": 1.5},
    {"row": "A", "seed": 1, "validation_loss": None},
    {"row": "A", "seed": 2, "failed": "no memory"},
]


def test_a_table_is_its_rows_and_columns(cells: Callable[[str], list[list[str]]]) -> None:
    drawn = table(
        ROWS,
        ("name", "name"),
        ("bytes", "bytes.total", ".2f"),
        ("loss", "loss", lambda loss: f"{loss:+.1f}"),
        ("twice", lambda row: 2 * row["bytes"]["total"], "g"),
        words=2,
        last=["*sum*", "", "", "1"],
    )
    head, marks, *_ = drawn.splitlines()
    assert (head, marks) == ("| name | bytes | loss | twice |", "| --- | --- | ---: | ---: |")
    assert cells(drawn) == [["a", "7.12", "", "14.25"], ["b", "16.00", "+1.2", "32"], ["*sum*", "", "", "1"]]


def test_columns_of_several_keys(cells: Callable[[str], list[list[str]]]) -> None:
    columns = tables.per("xy", "{}: ", ("key", lambda key, row: key), ("loss", lambda key, row: row["loss"], ".1f"))
    drawn = table(ROWS, ("name", "name"), *columns)
    assert drawn.splitlines()[0] == "| name | x: key | loss | y: key | loss |"
    assert cells(drawn) == [["a", "x", "", "y", ""], ["b", "x", "1.2", "y", "1.2"]]


def test_a_sentence_has_the_figures_of_the_results() -> None:
    results = {
        "environment": {"device": "H200", "torch": "2.11.0+cu130"},
        "training": {"batch": 2, "sequence": 1024},
    }
    assert (
        tables.fill_in(results, "{tokens:,} tokens, {who}; {machine}.", who="us")
        == "2,048 tokens, us; H200, torch 2.11.0.\n"
    )


def test_runs_are_compared_seed_by_seed() -> None:
    results = {"runs": RUNS}
    wide, narrow = (tables.runs_of(results, row=row) for row in "DA")
    assert [run["seed"] for run in wide] == [0, 1]
    assert [run["seed"] for run in narrow] == [0, 1]
    assert tables.apart(narrow, wide) == [0.5]
    assert tables.apart(wide, narrow) == [-0.5]


def test_means_and_their_ends() -> None:
    assert [tables.several(x) for x in ([], [0.5])] == ["", "+0.5000"]
    assert tables.several([0.5, -0.25]) == "+0.1250 (-0.2500 … +0.5000)"
    assert [tables.span(x) for x in ([], [3], [3, 3], [7, 3])] == ["", "3", "3", "3 to 7"]
    assert tables.span([1.01, 1.04], ".1f") == "1.0"
    assert tables.mean_of([None, 1.0, 2.0], ".1f") == "1.5"
    assert tables.mean_of([None], ".1f") == ""


@pytest.mark.parametrize(
    ("x", "shown"),
    [
        (0.0, "0"), (0.5, "0.500"), (123456, "123,000"), (0.00123456, "0.00123"), (1e-7, "1.00e-07"),
        (float("inf"), "inf"), (-2.5, "-2.50"), (1e12, "1.00e+12"),
    ],
)  # fmt: skip
def test_significant_digits(x: float, shown: str) -> None:
    assert tables.significant(x) == shown


def test_names_of_facts() -> None:
    assert tables.name_of("LLM.int8(), KQ norm") == "LLM_int8_KQ_norm"
    assert tables.place_of("A strict, 2") == "A_strict__2"
    assert tables.digits_of(0.999) == "999"
    assert tables.raised(-12) == "⁻¹²"


def test_what_was_left_out_is_told() -> None:
    results = {"runs": RUNS, "unfinished": [{}]}
    assert tables.left_out({"runs": [], "unfinished": []}) == "All runs were made."
    told = tables.left_out(results, lambda run: run["row"])
    assert told == "1 run was left out for want of time. A failed: no memory."
    machine = {"environment": {"device": "H200", "torch": "2.11.0+cu130"}}
    assert tables.machine(machine) == "H200, torch 2.11.0"


def test_ticks_and_legend_of_a_figure() -> None:
    figure, (left, right) = pictures.figure(4, 3, 1, 2)
    left.plot(*pictures.points([(1, 2.0), (2, None), (3, 4.0)]), **pictures.Line("a", "ink").style(label="a"))
    assert left.lines[0].get_xydata().tolist() == [[1, 2], [3, 4]]
    pictures.ticks(left.xaxis, [1, 2, 3], lambda value: f"<{value:g}>")
    assert [left.xaxis.get_major_formatter()(x) for x in left.get_xticks()] == ["<1>", "<2>", "<3>"]
    (dot,) = right.plot([], [], "o")
    pictures.below(figure, left, 2, (dot, "b"))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    assert pictures.numbers([1.0, None])[0] == 1.0
