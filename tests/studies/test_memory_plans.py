"""Which model fits: committed results are what the study plans, and the page says no more than they do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from narrowgauge import recipes
from studies.memory_plans import page as memory_tables
from studies.memory_plans import run as study

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "studies" / "memory_plans.md").read_text()


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return json.loads((ROOT / "studies" / "memory_plans" / "results" / "memory_plans.json").read_text())


def test_the_papers_bytes_are_the_recipes() -> None:
    found = {letter: recipes.get(letter).bytes_per_parameter() for letter in study.LETTERS}
    assert found == study.PAPER_BYTES
    assert {letter: recipes.get(letter).name for letter in study.LETTERS} == study.NAMES


def test_results_are_what_is_planned_now(results: dict[str, Any]) -> None:
    assert results["table_8"] == [json.loads(json.dumps(study.table_8(in_flight=count))) for count in (1, 2)]
    small = study.table_12(("GPT-125M",))["GPT-125M"]
    assert small["parameters"] == 162_250_752
    for letter, peak in results["table_12"]["GPT-125M"]["peak"].items():
        assert small["peak"][letter] == pytest.approx(
            peak, rel=2e-3
        )  # libraries' versions save a little more or less
    for adam, recipe in study.ADAMS.items():
        (planned,) = [t["peak"]["RoBERTa-base"][adam] for t in results["table_2"] if t["sequence"] == 512]
        assert study.finetuning_plan("RoBERTa-base", recipe, 512).peak == pytest.approx(planned, rel=2e-3)


def test_models_have_the_sizes_of_the_papers(results: dict[str, Any]) -> None:
    sizes = {
        "RoBERTa-base": 110, "RoBERTa-large": 355, "MT5-small": 300, "MT5-base": 580, "MT5-large": 1200,
        "GPT-2-medium": 762, "GPT-2-large": 1500,
    }  # fmt: skip
    for name, count in results["table_2"][0]["parameters"].items():
        assert count / 1e6 == pytest.approx(sizes[name], rel=0.04 if name != "RoBERTa-base" else 0.15)


def test_the_sentences_are_the_tables(results: dict[str, Any]) -> None:
    one, two = (
        sum(
            fits != said
            for letter in study.LETTERS
            for fits, said in zip(found["fits"][letter], study.TABLE_8[letter], strict=True)
        )
        for found in results["table_8"]
    )
    assert (one, two) == (0, 5)
    assert "five cells change" in PAGE
    (at_512,) = [t for t in results["table_2"] if t["sequence"] == 512]
    off = [
        (adam, size)
        for (size, _, *paper), found in zip(study.TABLE_2, at_512["largest"], strict=True)
        for adam, said in zip(study.ADAMS, paper, strict=True)
        if found[adam] != said
    ]
    assert off == [("32-bit Adam", 24)]
    assert f"MT5-large takes {at_512['peak']['MT5-large']['32-bit Adam'] / study.GIB:.1f} GiB" in PAGE
    for t in results["table_2"]:
        assert [found["8-bit Adam"] for found in t["largest"]] == [row[3] for row in study.TABLE_2]
    for name, limit in (("GPT-2.7B", 0.03), ("GPT-6.7B", 0.03), ("GPT-1.3B", 0.06)):
        peak = results["table_12"][name]["peak"]
        for letter in "ABC":
            less = (peak[letter] - peak["D"]) / study.GIB
            assert less == pytest.approx(study.TABLE_12[name][letter], rel=limit), (name, letter)
    peak = results["table_12"]["OpenLLaMA-7B"]["peak"]
    more = {
        letter: study.TABLE_12["OpenLLaMA-7B"][letter] * study.GIB / (peak[letter] - peak["D"]) for letter in "ABC"
    }
    assert more == pytest.approx(dict.fromkeys("ABC", 1.306), abs=0.005)
    assert results["table_12"]["OpenLLaMA-7B"]["parameters"] * 1.306 == pytest.approx(8.8e9, abs=0.05e9)
    assert results["table_12"]["GPT-125M"]["peak"]["D"] / study.GIB == pytest.approx(4.4, rel=0.1)


def test_a_cell_that_differs_is_bold(results: dict[str, Any]) -> None:
    assert len(re.findall(r"\*\*\w+\*\*", memory_tables.collage_8(results))) == 5
    assert "**MT5-large**" in memory_tables.eight_bit(results)
