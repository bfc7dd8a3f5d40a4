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

from narrowgauge.cli._plots import drawing

LR = 4e-3


def made_up(trial: Trial) -> dict[str, Any]:
    """32 bits: ln 16 and a seed's 0.1; 8 bits: 0.01 more; no layer norm: 0.2 more; linear and tensor-wise: a third
    is unstable."""
    loss = math.log(16) + 0.1 * trial.seed + 0.01 * (trial.codebook is not None) + 0.2 * (not trial.embedding.norm)
    bad = trial.codebook == "linear" and not trial.blocks and trial.eps == 1e-8
    found = {"validation_loss": None if bad else loss, "unstable": "diverged" if bad else None, "error": None}
    return {"trial": dataclasses.asdict(trial), "state_bytes": 4.0} | found


@pytest.fixture
def results() -> dict[str, Any]:
    return {"training": {"lr": LR}, "runs": [made_up(trial) for trial in planned.everything(LR)]}


def rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_ablation(results: dict[str, Any]) -> None:
    head, _, *body = rows(tables.ablation(results))
    assert len(body) == len(planned.ARMS)
    assert all(len(row) == len(head) for row in body)
    assert body[0][:3] == ["32-bit", "", "no"]
    assert body[1] == ["32-bit", "", "yes", "0 %", "16.3", "0 of 9", "16.0", "", ""]
    assert body[3][5:] == ["3 of 9", f"{16 * math.exp(0.01):.1f}", "+0.0100", "+0.0100"]
    assert body[2][6] == f"{16 * math.exp(0.21):.1f}"
    assert body[4][3:5] == ["", ""]  # not in the paper
    assert body[-1][:5] == ["8-bit, dynamic", "a block", "yes", "0 %", "16.4"]


def test_a_run_that_was_not_made_is_not_counted(results: dict[str, Any]) -> None:
    trials = planned.ablation(planned.ARMS[3], LR)
    gone = dataclasses.asdict(next(trial for trial in trials if trial.eps == 1e-8))
    for run in results["runs"]:
        if run["trial"] == gone:
            run.update(error="not begun: the time was up", unstable=None, validation_loss=None)
    assert rows(tables.ablation(results))[2 + 3][5] == "2 of 8"
    results["runs"] = [run for run in results["runs"] if run["trial"]["codebook"] is None]
    assert rows(tables.ablation(results))[2 + 3][5:] == ["0 of 0", "", "", ""]
    assert rows(tables.sensitivity(results))[2][4:] == ["", "", "", ""]


def test_the_sensitivity(results: dict[str, Any]) -> None:
    _, _, *body = rows(tables.sensitivity(results))
    assert len(body) == sum(map(len, planned.VARIED.values()))
    assert body[0] == ["learning rate", "0.001", "2.7726", "2.8726", "2.7826", "2.8826", "+0.0100", "+0.0100"]
    assert [row[1] for row in body if row[0] == "ε"] == ["10⁻⁸", "10⁻⁷", "10⁻⁶", "10⁻⁵"]
    # Its baseline is there four times, and counts once.
    assert len(tables.gaps(tables.Runs(results))) == len(body) - 3


def test_the_parts_of_the_embedding(results: dict[str, Any]) -> None:
    _, _, *body = rows(tables.components(results))
    assert [row[:3] for row in body[:2]] == [["no", "no", "no"], ["no", "no", "yes"]]
    assert body[0][6:] == ["", ""]
    assert body[-1][3] == "16.46, 16.47"
    assert body[-1][6:] == ["-0.2000", "0.0000"]
    assert float(body[-1][4]) == pytest.approx(16 * math.exp(0.11), abs=0.05)


def test_facts(results: dict[str, Any]) -> None:
    found = tables.facts(results)
    assert found["lr"] == "0.004"
    assert found["gap"] == found["gap_mean"] == "+0.0100"
    assert found["between_seeds"] == "0.100"
    assert found["effect_norm"] == "-0.2000 ± 0.0000"
    assert found["effect_wide"] == "+0.0000 ± 0.0000"
    assert found["unstable_linear_tensor_stable"] == "33 %"
    assert found["errors"] == "0"


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
