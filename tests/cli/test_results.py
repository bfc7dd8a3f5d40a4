"""results.json: means, paired differences and what is honest to say about them."""

import json
import math

import pytest
import torch

from narrowgauge.cli._results import assemble, set_aside, write_results
from narrowgauge.optim import UpdateStats
from narrowgauge.trainers import Run

FACTS = {"reference": "D", "settings": {"block_size": 256}, "command": "narrowgauge compare"}


def run(seed: int, loss: float | None, steps: int = 3) -> Run:
    sums = torch.tensor([4.0, 3.0, 2.0, 10.0, 4.0, 5.0], dtype=torch.float64)
    history = [5.0] * steps if loss is not None else [5.0] * (steps - 1) + [math.nan]
    return Run(
        seed, tokens_per_step=100, loss=history, stats={1: UpdateStats(sums)}, validation_loss=loss,
        diverged=loss is None, optimizer_seconds=[0.001, 0.003, 0.002], step_seconds=[0.01, 0.03, 0.02],
        peak_memory=1000 + seed, measured_bytes={"weights": 2.0, "gradients": 2.0, "states": 4.0, "total": 8.0},
    )  # fmt: skip


def test_differences_are_paired_by_seed() -> None:
    runs = {
        "D": [run(0, 3.0), run(1, 4.0), run(2, 5.0)],
        "A": [run(0, 3.1), run(1, 4.2), run(2, 5.3)],
        "C": [run(0, 3.01), run(1, 3.99), run(2, 5.0)],
    }
    rows = assemble(runs, FACTS, interrupted=False)["recipes"]
    assert rows["D"]["difference"] is None
    assert rows["A"]["difference"]["mean"] == pytest.approx(0.2)
    assert rows["A"]["difference"]["spread"] == pytest.approx(0.1)
    assert rows["A"]["difference"]["within_spread"] is False
    assert rows["C"]["difference"]["within_spread"] is True
    # Beyond its own spread, and yet less than what another seed makes of D.
    assert rows["A"]["difference"]["within_reference_spread"] is True
    assert rows["D"]["validation_loss"] == pytest.approx(4.0)
    assert rows["D"]["validation_loss_spread"] == pytest.approx(1.0)
    assert rows["D"]["perplexity"] == pytest.approx(math.exp(4.0))


def test_one_seed_claims_no_spread_and_unfinished_seeds_are_not_paired() -> None:
    rows = assemble({"D": [run(0, 3.0)], "A": [run(0, 3.1)]}, FACTS, interrupted=False)["recipes"]
    assert rows["A"]["difference"] == {
        "mean": pytest.approx(0.1),
        "spread": None,
        "within_spread": None,
        "within_reference_spread": None,
        "pairs": 1,
    }
    rows = assemble({"D": [run(0, 3.0), run(1, 3.0)], "A": [run(0, 3.1)]}, FACTS, interrupted=True)["recipes"]
    assert rows["A"]["difference"]["pairs"] == 1
    assert rows["A"]["validation_loss_spread"] is None


def test_a_diverged_recipe_has_no_loss_and_the_others_have_theirs() -> None:
    results = assemble({"D": [run(0, 3.0)], "A": [run(0, None)]}, FACTS, interrupted=False)
    row = results["recipes"]["A"]
    assert (row["diverged"], row["validation_loss"], row["perplexity"], row["difference"]) == (
        True,
        None,
        None,
        None,
    )
    assert row["seeds"][0]["completed_steps"] == 2
    assert row["seeds"][0]["history"]["loss"] == [5.0, 5.0, None]
    json.dumps(results, allow_nan=False)


def test_measures_are_medians_of_steps_and_ratios_of_sums() -> None:
    row = assemble({"D": [run(0, 3.0)]}, FACTS, interrupted=False)["recipes"]["D"]
    assert (row["optimizer_ms"], row["step_ms"], row["tokens_per_second"]) == pytest.approx((2.0, 20.0, 5000.0))
    assert (row["edq"], row["edq_visible"]) == (0.75, 0.5)
    assert (row["lost_updates"], row["lost_visible_updates"]) == (0.4, 0.5)
    assert row["seeds"][0]["history"]["edq"] == [0.75, None, None]
    assert row["bytes_per_parameter"] == 16
    assert row["recipe"] == "master"


def test_a_reference_that_did_not_run_is_none() -> None:
    results = assemble({"A": [run(0, 3.1)]}, FACTS, interrupted=True)
    assert results["reference"] is None
    assert results["recipes"]["A"]["difference"] is None


def test_earlier_files_are_set_aside_never_lost(tmp_path) -> None:
    for number in range(3):
        set_aside(tmp_path)
        (tmp_path / "report.html").write_text(str(number))
        write_results({"number": number}, tmp_path)
    kept = sorted(json.loads(path.read_text())["number"] for path in tmp_path.glob("results*.json"))
    assert kept == [0, 1, 2]
    assert json.loads((tmp_path / "results.json").read_text()) == {"number": 2}
    assert sorted(path.read_text() for path in tmp_path.glob("report*.html")) == ["0", "1", "2"]
    assert not list(tmp_path.glob(".results*"))
