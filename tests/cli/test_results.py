"""results.json: means, paired differences and what is honest to say about them."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from narrowgauge import recipes
from narrowgauge._files import set_aside
from narrowgauge.cli._results import REPORT, RESULTS, write_results
from narrowgauge.optim import UpdateStats
from narrowgauge.trainers import Run, Settings
from narrowgauge.trainers._compare_results import assemble, by_chance, may_be_chance, notes
from narrowgauge.trainers._compare_run import Timing
from narrowgauge.trainers._compare_table import legend, tables

FACTS = {
    "reference": "D", "settings": {"batch": 10, "sequence": 10}, "command": "narrowgauge compare",
    "measure": "validation_loss", "perplexity": True,
}  # fmt: skip


def results(runs: dict[str, list[Run]], timings: dict[str, Timing] | None = None, **facts: Any) -> dict[str, Any]:
    interrupted = facts.pop("interrupted", False)
    chosen = {name: recipes.parse(name) for name in runs}
    return assemble(chosen, runs, timings or {}, Settings(3), FACTS | facts, interrupted=interrupted)


def run(seed: int, loss: float | None, steps: int = 3) -> Run:
    sums = torch.tensor([4.0, 3.0, 2.0, 10.0, 4.0, 5.0], dtype=torch.float64)
    history = [5.0] * steps if loss is not None else [5.0] * (steps - 1) + [math.nan]
    return Run(
        seed, lr=1e-4, loss=history, stats={1: UpdateStats(sums)}, validation_loss=loss,
        diverged=loss is None, peak_memory=1000 + seed,
        measured_bytes={"weights": 2.0, "gradients": 2.0, "states": 4.0, "total": 8.0},
    )  # fmt: skip


def test_differences_are_paired_by_seed() -> None:
    runs = {
        "D": [run(0, 3.0), run(1, 4.0), run(2, 5.0)],
        "A": [run(0, 3.19), run(1, 4.2), run(2, 5.21)],
        "C": [run(0, 3.01), run(1, 3.99), run(2, 5.0)],
    }
    rows = results(runs)["recipes"]
    assert rows["D"]["difference"] is None
    assert rows["A"]["difference"]["mean"] == pytest.approx(0.2)
    assert rows["A"]["difference"]["spread"] == pytest.approx(0.01)
    assert not may_be_chance(rows["A"]["difference"])
    assert may_be_chance(rows["C"]["difference"])
    # Beyond chance, and yet less than what another seed makes of D.
    assert rows["A"]["difference"]["within_reference_spread"] is True
    assert rows["D"]["validation_loss"] == pytest.approx(4.0)
    assert rows["D"]["validation_loss_spread"] == pytest.approx(1.0)
    assert rows["D"]["perplexity"] == pytest.approx(math.exp(4.0))


@pytest.mark.parametrize("seeds", [2, 3, 5, 12, 30])
def test_recipes_that_are_equal_are_apart_in_one_comparison_of_twenty(seeds: int) -> None:
    differences = np.random.default_rng(0).standard_normal((100_000, seeds))
    means, spreads = differences.mean(1), differences.std(1, ddof=1)
    apart = np.mean([abs(m) > by_chance(s, seeds) for m, s in zip(means, spreads, strict=True)])
    assert abs(apart - 0.05) < 0.003


def test_one_seed_claims_no_spread_and_unfinished_seeds_are_not_paired() -> None:
    rows = results({"D": [run(0, 3.0)], "A": [run(0, 3.1)]})["recipes"]
    assert rows["A"]["difference"] == {
        "mean": pytest.approx(0.1),
        "spread": None,
        "within_reference_spread": None,
        "pairs": 1,
    }
    rows = results({"D": [run(0, 3.0), run(1, 3.0)], "A": [run(0, 3.1)]}, interrupted=True)["recipes"]
    assert rows["A"]["difference"]["pairs"] == 1
    assert rows["A"]["validation_loss_spread"] is None


def test_a_diverged_recipe_has_no_loss_and_the_others_have_theirs() -> None:
    found = results({"D": [run(0, 3.0)], "A": [run(0, None)]})
    row = found["recipes"]["A"]
    assert (row["diverged"], row["validation_loss"], row["perplexity"], row["difference"]) == (
        True,
        None,
        None,
        None,
    )
    assert row["seeds"][0]["completed_steps"] == 2
    assert row["seeds"][0]["history"]["loss"] == [5.0, 5.0, None]
    json.dumps(found, allow_nan=False)


def test_measures_are_medians_of_steps_and_ratios_of_sums() -> None:
    timing = Timing(optimizer=[0.001, 0.003, 0.002], step=[0.01, 0.03, 0.02, 0.04, 0.0])
    row = results({"D": [run(0, 3.0)]}, {"D": timing})["recipes"]["D"]
    assert (row["optimizer_ms"], row["step_ms"], row["tokens_per_second"]) == pytest.approx((2.0, 20.0, 5000.0))
    assert row["step_ms_quartiles"] == pytest.approx([10.0, 30.0])
    assert (row["edq"], row["edq_visible"]) == (0.75, 0.5)
    assert (row["lost_updates"], row["lost_visible_updates"]) == (0.4, 0.5)
    assert row["seeds"][0]["history"]["edq"] == [0.75, None, None]
    assert row["bytes_per_parameter"] == 16
    assert row["recipe"] == "master"


def test_times_whose_quartiles_overlap_are_marked() -> None:
    steps = {"D": [1.0, 2.0, 3.0], "A": [2.4, 3.0, 4.0], "B": [2.6, 3.0, 4.0], "C": []}
    timings = {name: Timing(found, found) for name, found in steps.items()}
    found = results({name: [run(0, 3.0)] for name in steps}, timings)
    assert found["recipes"]["A"]["step_ms_quartiles"] == pytest.approx([2700.0, 3500.0])
    overlaps = {name: row.get("step_overlaps") for name, row in found["recipes"].items()}
    assert overlaps == {"D": None, "A": False, "B": False, "C": None}
    timings["A"] = Timing([1.9, 2.0, 2.1], [1.9, 2.0, 2.1])
    found = results({name: [run(0, 3.0)] for name in steps}, timings)
    assert found["recipes"]["A"]["step_overlaps"] is True
    shown, words = tables(found, 200), legend(found, 200)
    rows = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert "2000 (1950–2050) ~" in rows["A"]
    assert "3000 (2800–3500)" in rows["B"]
    assert "~" not in rows["B"]
    assert rows["C"].split()[-2:] == ["–", "–"]
    assert "~ marks quartiles that overlap D's" in words


def test_without_validation_the_last_tenth_of_the_training_is_compared() -> None:
    one, other = (Run(0, loss=[9.0] * 18 + [loss, loss + 1]) for loss in (2.0, 3.0))
    found = results({"D": [one], "A": [other]}, measure="training_loss", perplexity=False)
    row = found["recipes"]["A"]
    assert (row["validation_loss"], row["training_loss"], row["perplexity"]) == (None, 3.5, None)
    assert row["difference"]["mean"] == 1.0
    assert tables(found, 200).splitlines()[0].split()[0] == "training"
    assert "there were no validation batches" in legend(found, 200)


def test_notes_say_where_recipes_are_not_treated_alike() -> None:
    def of(*names: str, **settings: Any) -> list[str]:
        return notes({name: recipes.parse(name) for name in names}, Settings(3, **settings))

    (note,) = of("D", "lion8bit", "A", lr=1e-4)
    assert note.startswith("The rules adamw and lion share the learning rate 0.0001,")
    assert note.endswith("as in lion8bit@lr=RATE.")
    assert of("D", "stable-adamw", lr=1e-4) == of("D", "lion8bit@lr=1e-5", lr=1e-4) == of("D", "A") == []
    assert of("D", "lion8bit") == ["No learning rate was given: each optimizer has its default, or its recipe's."]
    assert of("D", "lion8bit@lr=1", lr=1.0, options={"betas": (0.9, 0.95, 0.99)}) == [
        "D takes 2 betas, not 3: it has its optimizer's defaults.",
        "lion8bit@lr=1 takes 2 betas, not 3: it has its optimizer's defaults.",
    ]


def test_a_reference_that_did_not_run_is_none() -> None:
    found = results({"A": [run(0, 3.1)]}, interrupted=True)
    assert found["reference"] is None
    assert found["recipes"]["A"]["difference"] is None


def test_earlier_files_are_set_aside_never_lost(tmp_path) -> None:
    for number in range(3):
        set_aside(tmp_path, (RESULTS, REPORT))
        (tmp_path / "report.html").write_text(str(number))
        write_results({"number": number}, tmp_path)
    kept = sorted(json.loads(path.read_text())["number"] for path in tmp_path.glob("results*.json"))
    assert kept == [0, 1, 2]
    assert json.loads((tmp_path / "results.json").read_text()) == {"number": 2}
    assert sorted(path.read_text() for path in tmp_path.glob("report*.html")) == ["0", "1", "2"]
    assert not list(tmp_path.glob(".results*"))
