"""The page: it says what the numbers say, needs nothing from outside, and lets nothing in that it did not make."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import pytest
from html_page import Page

from narrowgauge.cli import _charts
from narrowgauge.cli._report import _compare_page

LOSSES = {"fp32": 3.0400, "A": 3.1912, "C": 3.0421, "D": 3.0412}


def make(
    losses: Mapping[str, float | None] = LOSSES, spread: float | None = None, seeds: int = 1
) -> dict[str, Any]:
    """A whole results.json: a loss of None is a recipe that diverged."""
    return {
        "schema": 1, "narrowgauge": "0.1.0", "created": "2026-11-21T08:00:00Z", "interrupted": False,
        "command": "narrowgauge compare --out runs/a&b",
        "environment": {"python": "3.11.7", "device": "2-core CPU <AMD>"},
        "settings": {"recipes": list(losses), "lr": 3e-4, "steps": 200, "seeds": seeds, "compile": False},
        "data": {"source": "a folder", "bytes": 31520499, "split": None},
        "model": {"preset": "micro", "parameters": 940800},
        "reference": "D" if "D" in losses else None,
        "recipes": {name: recipe(name, loss, losses.get("D"), spread, seeds) for name, loss in losses.items()},
    }  # fmt: skip


def recipe(
    name: str, loss: float | None, reference: float | None, spread: float | None, seeds: int
) -> dict[str, Any]:
    states = {"A": 4.0, "C": 8.0}.get(name, 12.0)
    planned = {"weights": 2.0, "gradients": 2.0, "states": states, "total": 4.0 + states}
    mean = None if name == "D" or loss is None or reference is None else loss - reference
    run = {"validation_loss": loss, "diverged": loss is None, "completed_steps": 200}
    history = {
        "step": [1, 2, 3],
        "loss": [7.0, 6.0, 5.0],
        "edq": [None, 0.5, None],
        "lost_updates": [0.1, 0.2, 0.3],
    }
    return {
        "recipe": "bf16" if name == "A" else name, "title": f"what {name} is",
        "validation_loss": loss, "perplexity": loss and math.exp(loss), "diverged": loss is None,
        "difference": None if mean is None else {"mean": mean, "spread": spread, "pairs": seeds},
        "bytes_per_parameter": planned["total"],
        "bytes": {"planned": planned, "measured": planned | {"total": 16.25}},
        "peak_memory_bytes": 123456789, "optimizer_ms": 4.25, "step_ms": 80.5, "tokens_per_second": 2e4,
        "edq": 0.5012 if name == "A" else 0.9996, "lost_updates": 0.4234 if name == "A" else 0.0002,
        "seeds": [run | {"seed": seed, "history": history} for seed in range(seeds)],
    }  # fmt: skip


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave pictures out of the pages of tests that read the text: drawing them takes most of the time."""
    monkeypatch.setattr(_charts, "_to_svg", lambda figure, name, title: f'<svg aria-label="{escape(title)}"></svg>')


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(results: dict[str, Any]) -> tuple[Page, str]:
        path = tmp_path / "report.html"
        _compare_page.write_report(json.loads(json.dumps(results)), path)
        source = path.read_text(encoding="utf-8")
        return Page(source), source

    return write


def test_every_recipe_and_number_is_shown(write: Any) -> None:
    page, _ = write(make())
    assert page.row("A") == [
        "A", "what A isbf16", "3.1912", "24.32", "+0.15000 ± ?", "8measured 16.25", "117.7 MiB",
        "4.25", "80.5", "50.1", "42.3",
    ]  # fmt: skip
    assert page.row("D")[4] == "reference"
    assert page.row("fp32")[4] == "−0.00120 ± ?"
    assert page.row("C")[-1] == "<0.1"
    assert len({len(row) for row in page.rows}) == 1
    for fact in ("0.0003", "31,520,499", "940,800", "3.11.7", "2-core CPU <AMD>", "compare --out runs/a&b", "no"):
        assert fact in page.text


@pytest.mark.usefixtures("undrawn")
def test_summary_with_one_seed_claims_no_spread(write: Any) -> None:
    text = write(make())[0].text
    assert "was trained for 200 steps under 4 recipes, with one seed." in text
    assert "D, the reference, reached a validation loss of 3.0412." in text
    assert "Against it, A ended higher by 0.15000 and C by 0.00090; fp32 ended lower by 0.00120." in text
    assert "With one seed, no spread is known" in text
    assert "A lost 42.3 % of its updates; no other lost more than 0.1 %." in text
    assert "D keeps 16 bytes per parameter, A 8 (50 % less) and C 12 (25 % less)." in text


@pytest.mark.usefixtures("undrawn")
def test_summary_with_seeds_tells_what_is_within_the_spread(write: Any) -> None:
    page, _ = write(make(spread=0.01, seeds=3))
    assert "Against it, A ended higher by 0.15000 ± 0.01000." in page.text
    assert "By the spread over the seeds these may differ by chance: fp32 and C." in page.text
    assert "no spread is known" not in page.text
    assert page.row("C")[4] == "+0.00090 ± 0.01000may be chance"


@pytest.mark.usefixtures("undrawn")
def test_summary_of_many_recipes_names_the_extremes(write: Any) -> None:
    losses = {f"r{i}": 3 + 0.01 * i for i in range(1, 14)} | {"D": 3.0}
    text = write(make(losses))[0].text
    assert "Against it, r13 ended higher by 0.13000, r12 by 0.12000, r11 by 0.11000 and r10 by 0.10000" in text
    assert "the other 9 differ by at most 0.09000." in text


def test_diverged_recipe(write: Any) -> None:
    page, _ = write(make(LOSSES | {"A": None}, seeds=2))
    assert page.row("A")[2:5] == ["diverged2 of 2 seeds", "—", "—"]
    assert "A diverged, and has no loss to compare." in page.text
    assert page.row("C")[2] == "3.0421"
    page, _ = write(make(LOSSES | {"D": None}))
    assert "D, the reference, has no loss, so no differences are given." in page.text
    assert page.row("A")[4] == "—"


@pytest.mark.usefixtures("undrawn")
def test_interrupted_run_says_so_and_what_is_missing(write: Any) -> None:
    assert "interrupted" not in write(make())[0].text
    results = make(seeds=2) | {"interrupted": True}
    results["settings"] |= {"recipes": [*LOSSES, "split8"], "seeds": 3}
    text = write(results)[0].text
    assert "This run was interrupted." in text
    assert "Missing: split8, fp32 (1 of 3 seeds), A (1 of 3 seeds)" in text


@pytest.mark.parametrize("hostile", ["<script>alert(1)</script>{{ 7*7 }}", '"><img src=x onerror=alert(1)>a&amp;b'])
def test_everything_is_escaped(hostile: str, write: Any) -> None:
    results = make({hostile: 3.0, "D": 3.1})
    results["recipes"][hostile] |= {"title": hostile, "recipe": hostile}
    results |= {"command": hostile, "narrowgauge": hostile, "interrupted": True, "reference": hostile}
    results["settings"] = {hostile: [hostile]}
    page, source = write(results)
    assert not [tag for tag, _, _ in page.attributes if tag in ("script", "img")]
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "<script" not in source
    assert page.text.count(hostile) > 8


def test_page_needs_nothing_from_outside(write: Any) -> None:
    page, source = write(make(seeds=2))
    for tag, name, value in page.attributes:
        if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
            assert value.startswith("#"), (tag, name, value)
    assert all(target.startswith("#") for target in re.findall(r"url\(\s*['\"]?([^)]*)", source))
    assert "@import" not in source
    assert set(re.findall(r"https?://[^\"'\s<]*", source)) <= {"http://www.w3.org/2000/svg"}
    ids = Counter(value for _, name, value in page.attributes if name == "id")
    assert max(ids.values()) == 1
    defined = Counter(re.findall(r"(?<![\w(-])--([\w-]+):", source))
    assert set(re.findall(r"var\(--([\w-]+)", source)) <= set(defined)
    assert all(defined[name] == 2 for name in defined), "light and dark"


def test_edges(write: Any) -> None:
    nothing = make()
    for each in nothing["recipes"].values():
        unknown = ("validation_loss", "perplexity", "difference", "peak_memory_bytes", "optimizer_ms", "step_ms")
        each |= dict.fromkeys((*unknown, "tokens_per_second", "edq", "lost_updates"))
        each["bytes"]["measured"] = None
        for seed in each["seeds"]:
            seed["history"] = {"step": [1], "loss": [None], "edq": [None], "lost_updates": [None]}
    page, _ = write(nothing | {"reference": None})
    assert page.row("A")[2:] == ["—", "—", "—", "8", "—", "—", "—", "—", "—"]
    assert "No recipe served as reference" in page.text

    page, _ = write(make({"C": 3.0}))
    assert "under one recipe, C, with one seed." in page.text
    assert "No recipe served" not in page.text


@pytest.mark.usefixtures("undrawn")
def test_writing_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    _compare_page.write_report(make(), path)
    old = path.read_text(encoding="utf-8")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        _compare_page.write_report(make({"C": 3.0}), path)
    assert path.read_text(encoding="utf-8") == old
    assert list(tmp_path.iterdir()) == [path]
