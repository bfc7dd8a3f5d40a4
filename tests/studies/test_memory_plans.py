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


@pytest.mark.slow
def test_results_are_what_is_planned_now(results: dict[str, Any]) -> None:
    assert results["table_8"] == [json.loads(json.dumps(study.table_8(in_flight=count))) for count in (1, 2)]
    small = study.table_12(("GPT-125M",))["GPT-125M"]
    assert small["parameters"] == 162_250_752
    close = {"rel": 2e-3}  # libraries' versions save a little more or less
    assert small["peak"] == pytest.approx(results["table_12"]["GPT-125M"]["peak"], **close)
    for adam, recipe in study.ADAMS.items():
        (planned,) = [t["peak"]["RoBERTa-base"][adam] for t in results["table_2"] if t["sequence"] == 512]
        assert study.finetuning_plan("RoBERTa-base", recipe, 512).peak == pytest.approx(planned, **close)


def test_models_have_the_sizes_of_the_papers(results: dict[str, Any]) -> None:
    sizes = {
        "RoBERTa-base": 110, "RoBERTa-large": 355, "MT5-small": 300, "MT5-base": 580, "MT5-large": 1200,
        "GPT-2-medium": 762, "GPT-2-large": 1500,
    }  # fmt: skip
    for name, count in results["table_2"][0]["parameters"].items():
        assert count / 1e6 == pytest.approx(sizes[name], rel=0.04 if name != "RoBERTa-base" else 0.15)


def test_the_sentences_are_the_tables(results: dict[str, Any]) -> None:
    bold = len(re.findall(r"\*\*\w+\*\*", memory_tables.collage_8(results)))
    assert bold == 5  # all of them with two in flight
    assert "five cells change" in PAGE
    (at_512,) = [t for t in results["table_2"] if t["sequence"] == 512]
    assert memory_tables.eight_bit(results | {"table_2": [at_512]}).count("**MT5-large**") == 1
    assert f"MT5-large takes {at_512['peak']['MT5-large']['32-bit Adam'] / study.GIB:.1f} GiB" in PAGE
    for t in results["table_2"]:
        assert [found["8-bit Adam"] for found in t["largest"]] == [row[3] for row in study.TABLE_2]
    less = {
        name: {letter: (found["peak"][letter] - found["peak"]["D"]) / study.GIB for letter in "ABC"}
        for name, found in results["table_12"].items()
    }
    for name, limit in (("GPT-2.7B", 0.03), ("GPT-6.7B", 0.03), ("GPT-1.3B", 0.06)):
        assert less[name] == pytest.approx({letter: study.TABLE_12[name][letter] for letter in "ABC"}, rel=limit)
    llama = study.TABLE_12["OpenLLaMA-7B"]
    more = {letter: llama[letter] / less["OpenLLaMA-7B"][letter] for letter in "ABC"}
    assert more == pytest.approx(dict.fromkeys("ABC", 1.306), abs=0.005)
    assert results["table_12"]["OpenLLaMA-7B"]["parameters"] * 1.306 == pytest.approx(8.8e9, abs=0.05e9)
    assert results["table_12"]["GPT-125M"]["peak"]["D"] / study.GIB == pytest.approx(4.4, rel=0.1)
