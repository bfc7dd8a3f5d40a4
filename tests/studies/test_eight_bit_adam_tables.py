"""The 8-bit study's tables say what the runs say: on made-up runs whose medians and differences are known."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import _eight_bit_adam_picture as picture
import _eight_bit_adam_plan as planned
import _eight_bit_adam_tables as tables
import pytest
from _eight_bit_adam import Trial

from narrowgauge.cli._charts import drawing

LR = 4e-3


def made_up(trial: Trial) -> dict[str, Any]:
    """32 bits: ln 16 and a seed's 0.1; 8 bits: 0.01 more; no layer norm: 0.2 more; linear and tensor-wise, with a
    zero for v: a third is unstable. A nudge adds a thousandth. Training loss is half of it all."""
    loss = math.log(16) + 0.1 * trial.seed + 0.01 * (trial.codebook is not None) + 0.2 * (not trial.embedding.norm)
    loss += 0.001 * trial.nudge
    bad = trial.codebook == "linear" and not trial.blocks and trial.eps == 1e-8
    bad = bad and "v" in trial.narrow and trial.zero
    why = f"the loss of step {17 + 3 * trial.embedding.norm} is not finite" if bad else None
    found = {"validation_loss": None if bad else loss, "training_loss": loss / 2, "unstable": why, "error": None}
    lost = 0.25 if trial.codebook == "linear" else 0.0
    return {
        "trial": dataclasses.asdict(trial),
        "state_bytes": 4.0,
        "lost": lost if trial.codebook else None,
    } | found


@pytest.fixture
def results() -> dict[str, Any]:
    return {"training": {"lr": LR}, "runs": [made_up(trial) for trial in planned.everything(LR)]}


def rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_ablation(results: dict[str, Any]) -> None:
    head, _, *body = rows(tables.ablation(results))
    assert len(body) == len(planned.ARMS)
    assert all(len(row) == len(head) for row in body)
    assert body[0][:2] == ["32-bit", "no"]
    assert body[1] == ["32-bit", "yes", "0 %", "16.3", "0 of 9", "16.0", "", "", ""]
    assert body[3][4:] == ["3 of 9", f"{16 * math.exp(0.01):.1f}", "+0.010 ± 0.000", "+0.005 ± 0.000", "25 %"]
    assert body[2][5] == f"{16 * math.exp(0.21):.1f}"
    assert body[4][2:4] == ["", ""]  # not in the paper
    assert body[-1][:4] == ["dynamic, blocks", "yes", "0 %", "16.4"]


def test_the_causes(results: dict[str, Any]) -> None:
    _, _, *body = rows(tables.causes(results))
    assert [row[1] for row in body] == ["3 of 9", "0 of 9", "3 of 9", "0 of 9"]
    assert {row[4] for row in body} == {"0 of 9"}
    assert {row[2] for row in body} == {f"{16 * math.exp(0.01):.1f}"}


def test_the_repeats(results: dict[str, Any]) -> None:
    _, _, *body = rows(tables.repeats(results))
    assert body[1][:4] == ["1", "2.8746 ± 0.0016", "2.8846 ± 0.0016", "+0.0100"]
    assert body[0][4:] == ["1.3873 ± 0.0008", "1.3923 ± 0.0008", "+0.0050"]


def test_a_run_that_was_not_made_is_not_counted(results: dict[str, Any]) -> None:
    trials = planned.ablation(planned.ARMS[3], LR)
    gone = dataclasses.asdict(next(trial for trial in trials if trial.eps == 1e-8))
    for run in results["runs"]:
        if run["trial"] == gone:
            run.update(error="not begun: the time was up", unstable=None, validation_loss=None)
    assert rows(tables.ablation(results))[2 + 3][4] == "2 of 8"
    results["runs"] = [run for run in results["runs"] if run["trial"]["codebook"] is None]
    assert rows(tables.ablation(results))[2 + 3][4:] == ["0 of 0", "", "", "", ""]
    assert rows(tables.sensitivity(results))[2][3:] == ["", "", "", "", ""]


def test_the_sensitivity(results: dict[str, Any]) -> None:
    _, _, *body = rows(tables.sensitivity(results))
    assert len(body) == sum(map(len, planned.VARIED.values()))
    assert body[0] == ["learning rate", "0.001", "2.8226", "2.8326", *["+0.0100"] * 2, *["+0.0050"] * 2]
    assert [row[1] for row in body if row[0] == "ε"] == ["10⁻⁸", "10⁻⁷", "10⁻⁶", "10⁻⁵"]
    # Its baseline is there four times, and counts once.
    assert len(tables.gaps(tables.Runs(results))) == 2 * (len(body) - 3)


def test_the_parts_of_the_embedding(results: dict[str, Any]) -> None:
    _, _, *body = rows(tables.components(results))
    assert [row[:3] for row in body[:2]] == [["no", "no", "no"], ["no", "no", "yes"]]
    assert body[0][5:] == ["", ""]
    assert body[-1][3] == "16.46, 16.47"
    assert body[-1][5:] == ["-0.200 ± 0.000", "-0.100 ± 0.000"]
    assert float(body[-1][4]) == pytest.approx(16 * math.exp(0.11), abs=0.05)


def test_facts(results: dict[str, Any]) -> None:
    found = tables.facts(results)
    assert found["lr"] == "0.004"
    assert found["gap"] == "+0.010 ± 0.000"
    assert found["gap_training"] == found["close"] == "+0.005 ± 0.000"
    assert (found["pairs"], found["close_pairs"]) == ("28", "24")
    assert found["effect_norm"] == found["effect_both"] == "-0.200 ± 0.000"
    assert found["effect_wide"] == found["effect_xavier"] == "+0.000 ± 0.000"
    assert found["stable_dynamic_block"] == "-0.200 ± 0.000"
    assert found["unstable"] == found["not_finite"] == "9"  # of two arms, and of v alone: three each
    assert (found["first_step"], found["last_step"]) == ("17", "20")


def test_the_picture_is_drawn_with_gaps_too(results: dict[str, Any], tmp_path: Path) -> None:
    for run in results["runs"][7:40:3]:
        run.update(unstable="diverged", validation_loss=None)
    with drawing():
        picture.sensitivity(results).savefig(tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("value", "said"), [(0.004, "0.004"), (0.995, "0.995"), (1e-7, "10⁻⁷"), (3e-6, "3 · 10⁻⁶"), (5e-4, "0.0005")]
)
def test_hyperparameters_are_written_out(value: float, said: str) -> None:
    assert tables.number(value) == said
