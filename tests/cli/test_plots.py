"""The figures: well-formed SVG that can share a page, bounded in size, and true to the data."""

from __future__ import annotations

import math
import re
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.image import imread

from narrowgauge.cli import _charts
from narrowgauge.cli._report import _compare_charts

FIGURES = (
    _compare_charts.loss,
    _compare_charts.edq,
    _compare_charts.lost_updates,
    _compare_charts.memory,
    _compare_charts.speed,
)


def make(
    names: tuple[str, ...] = ("fp32", "A", "D"), steps: int = 30, seeds: int = 1, **changes: Any
) -> dict[str, Any]:
    """What the figures read of results.json; `changes` go to every recipe."""
    generator = np.random.default_rng(0)

    def history() -> dict[str, list[Any]]:
        loss = 3 + 4 * np.exp(-np.arange(steps) / 8) + generator.normal(0, 0.05, steps)
        gauge = [None if step % 5 else 0.5 + 0.1 * generator.normal() for step in range(steps)]
        return {"step": list(range(1, steps + 1)), "loss": loss.tolist(), "edq": gauge, "lost_updates": gauge}

    recipe = {
        "diverged": False,
        "lost_updates": 0.4,
        "optimizer_ms": 4.2,
        "step_ms": 80.0,
        "bytes": {
            "planned": {"weights": 2.0, "gradients": 2.0, "states": 8.0, "total": 12.0},
            "measured": {"weights": 2.0, "gradients": 2.0, "states": 8.5, "total": 12.5},
        },
    } | changes
    runs = {n: [{"seed": s, "diverged": False, "history": history()} for s in range(seeds)] for n in names}
    return {"reference": "D", "recipes": {name: recipe | {"seeds": runs[name]} for name in names}}


def text(svg: str) -> str:
    return " ".join(ElementTree.fromstring(svg).itertext())


@pytest.mark.parametrize("figure", FIGURES)
def test_svg_stands_alone_and_clashes_with_no_other(figure: Any) -> None:
    results = make(seeds=2)
    root = ElementTree.fromstring(figure(results))
    ids = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids))
    assert all(name.startswith(f"{figure.__name__}-") for name in ids)
    referred = re.findall(r'(?:href="|url\()#([^")]+)', figure(results))
    assert set(referred) <= set(ids)
    assert "width" not in root.attrib
    assert not [element for element in root.iter() if element.tag.endswith(("style", "metadata"))]


@pytest.mark.parametrize("figure", FIGURES)
def test_colors_follow_the_page_and_drawing_repeats_to_the_letter_and_leaves_settings_alone(figure: Any) -> None:
    with matplotlib.rc_context():
        plain = str(figure(make()))
        matplotlib.rcParams["font.size"] = 3
        before = dict(matplotlib.rcParams)
        assert figure(make()) == plain
        assert dict(matplotlib.rcParams) == before
    assert set(re.findall(r"(?<!, )(#[0-9a-f]{6})\b(?=[;\"])", plain)) == set()
    variables = set(re.findall(r"var\(--([\w-]+), #", plain))
    assert {"ink", "muted"} <= variables <= set(_charts.PALETTE)


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize(
    "results",
    [
        make(("D",)),
        make(steps=1),
        make(steps=0),
        make(steps=1, seeds=3),
        make(optimizer_ms=None, step_ms=None, lost_updates=None),
        make() | {"reference": None},
        make(()),
    ],
    ids=["one recipe", "one step", "no step", "one step, seeds", "no times", "no reference", "no recipe"],
)
def test_edges(figure: Any, results: dict[str, Any]) -> None:
    ElementTree.fromstring(figure(results))


def test_nothing_measured_is_said() -> None:
    results = make(optimizer_ms=None)
    for recipe in results["recipes"].values():
        recipe["seeds"][0]["history"]["edq"] = [None] * 30
    assert "not measured" in text(_compare_charts.edq(results))
    assert text(_compare_charts.speed(results)).count("not measured") == 3


def test_names_and_values_of_bars_are_text() -> None:
    memory, speed = text(_compare_charts.memory(make())), text(_compare_charts.speed(make(step_ms=12345.6)))
    for name in ("fp32", "A", "D"):
        assert name in memory.split()
        assert name in speed.split()
    assert memory.split().count("12") >= 3
    assert "4.2" in speed
    assert "12,346" in speed


@pytest.mark.parametrize("name", ["$x$ & <b>", "\x1b[31mred", "精度", 'id="x" url(#y)'])
def test_any_name_can_be_drawn(name: str) -> None:
    drawn = text(_compare_charts.memory(make((name, "D"))))
    assert "".join(c if c.isprintable() else "�" for c in name) in drawn


def test_size_is_bounded_whatever_the_run_is_long() -> None:
    names = tuple(f"recipe-{i}" for i in range(14))
    results = make(names, steps=20_000, seeds=2) | {"reference": "recipe-0"}
    for recipe in results["recipes"].values():
        for seed in recipe["seeds"]:
            seed["history"]["edq"] = seed["history"]["loss"]
    assert len(_compare_charts.loss(results)) + 2 * len(_compare_charts.edq(results)) < 1_300_000


def test_thinning_keeps_ends_and_spikes() -> None:
    values = np.random.default_rng(1).normal(size=20_000)
    values[12_345], values[777] = 50.0, -50.0
    kept = _charts.extremes(values)
    assert {12_345, 777} <= set(kept.tolist())
    assert len(kept) <= 2 * _charts.STRETCHES
    few = _charts.thin(20_000)
    assert (few[0], few[-1], len(few)) == (0, 19_999, _charts.POINTS)
    for count in (0, 1, 2, _charts.POINTS + 1):
        assert len(_charts.thin(count)) == min(count, _charts.POINTS)


def test_smoothing_keeps_constants_and_straight_lines() -> None:
    assert _compare_charts.smooth(np.full(500, 2.5)) == pytest.approx(2.5)
    line = np.arange(500.0)
    # Centred wherever the window is whole or shrunk; only where its right side is cut off does it lag.
    assert _compare_charts.smooth(line)[:-12] == pytest.approx(line[:-12])
    assert np.all(np.abs(_compare_charts.smooth(line) - line) <= 12 / 2)
    values = np.random.default_rng(2).normal(size=(3, 400))
    assert _compare_charts.smooth(values)[1, 200] == pytest.approx(values[1, 190:211].mean())


def test_curves_take_the_steps_that_every_seed_has() -> None:
    recipe = make(steps=20, seeds=2)["recipes"]["A"]
    first, second = (seed["history"] for seed in recipe["seeds"])
    for key in first:
        second[key] = second[key][:7]
    first["loss"][3], second["loss"][4] = None, math.inf
    curves = _compare_charts.Curves.read(recipe, "loss")
    assert curves.steps.tolist() == [1, 2, 3, 6, 7]
    assert curves.values[1].tolist() == [second["loss"][i] for i in (0, 1, 2, 5, 6)]
    assert _compare_charts.Curves.read(recipe, "edq").steps.tolist() == [1, 6]


def test_differences_pair_seeds_by_their_number() -> None:
    steps, own = np.array([1.0, 2.0]), np.array([[1.0, 2.0], [5.0, 7.0]])
    ours = _compare_charts.Curves((0, 3), steps, own)
    theirs = _compare_charts.Curves((3, 9), np.array([2.0, 3.0]), np.array([[4.0, 0.0], [9.0, 9.0]]))
    difference = ours.minus(theirs)
    assert (difference.seeds, difference.steps.tolist(), difference.values.tolist()) == ((3,), [2.0], [[3.0]])
    assert ours.minus(_compare_charts.Curves((7,), steps, own[:1])).steps.tolist() == []


def test_a_diverged_recipe_does_not_set_the_scale() -> None:
    results = make()
    sound = text(_compare_charts.loss(results))
    diverged = results["recipes"]["A"]
    diverged["diverged"] = diverged["seeds"][0]["diverged"] = True
    diverged["seeds"][0]["history"]["loss"][20:] = [1e30] * 10
    numbers = [
        float(word.replace("−", "-")) for word in text(_compare_charts.loss(results)).split() if word[-1].isdigit()
    ]
    assert max(numbers) <= max(float(w.replace("−", "-")) for w in sound.split() if w[-1].isdigit())


@pytest.mark.parametrize("results", [make(seeds=2), make(("D",)), make(lost_updates=None) | {"reference": None}])
def test_picture_is_a_png_of_fitting_width(results: dict[str, Any], tmp_path: Any) -> None:
    path = tmp_path / "compare.png"
    _compare_charts.save_picture(results, path)
    height, width, _ = imread(path).shape
    assert width > 1200
    assert height < width
