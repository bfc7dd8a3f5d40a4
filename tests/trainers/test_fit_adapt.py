"""`train --adapt`: storages become wider where they lose, and a run that stops goes on as if it had not."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import CPU, Silent, assert_it_goes_on, records, run, weights
from parallel_runs import Trainings

from narrowgauge.cli._report._run_page import write_run_report
from narrowgauge.gauges import read_records
from narrowgauge.trainers import SettingsError, TrainSettings, fit

pytestmark = pytest.mark.usefixtures("surroundings")

# With six steps: the third measurement is at step 3, where the run that stops stops.
STALLING: dict[str, Any] = {"recipe": "bf16", "lr": 1e-4, "adapt": True, "gauges_every": 1}


def test_a_run_that_stops_after_a_conversion_goes_on_as_if_it_had_not(small: TrainSettings, tmp_path: Path) -> None:
    assert_it_goes_on(small, tmp_path, {}, **STALLING)
    lines = [record for record in records(tmp_path / "halves") if "adapted" in record]
    assert {record["step"] for record in lines} >= {3}
    assert "weights plain -> split8: " in lines[0]["adapted"]
    found = [r for r in read_records(tmp_path / "halves" / "gauges.jsonl") if r["kind"] == "adapted"]
    assert [(r["step"], r["name"]) for r in found] == [
        (r["step"], r["adapted"].partition(":")[0]) for r in lines
    ]  # fmt: skip
    page = tmp_path / "run.html"
    write_run_report(read_records(tmp_path / "halves"), page, "run")
    assert f"{len(found)} changes of precision while training." in page.read_text()
    assert found[0]["name"] in page.read_text()
    with pytest.raises(SettingsError, match=r"--adapt must be given to go on from .* widened \d+ of its"):
        fit(replace(small, **STALLING | {"adapt": False, "out": tmp_path / "halves", "steps": 8}), CPU, Silent())


def test_a_run_without_crossings_is_the_run_without_adapt(small: TrainSettings, tmp_path: Path) -> None:
    options: dict[str, Any] = {"recipe": "adamw8bit-split8", "linear": "SWITCHBACK", "gauges_every": 1}
    losses = [run(small, tmp_path / f"{adapt}", adapt=adapt, **options) for adapt in (True, False)]
    assert losses[0] == losses[1]
    a, b = weights(tmp_path / "True"), weights(tmp_path / "False")
    assert all(torch.equal(a[name], b[name]) for name in a)
    gauged = [
        [{**record, "seconds": 0} for record in read_records(tmp_path / f"{adapt}")[1:]] for adapt in (True, False)
    ]
    assert gauged[0] == gauged[1]
    assert {"update", "step"} <= {record["kind"] for record in gauged[0]}


def test_a_run_may_begin_to_adapt_where_it_goes_on(small: TrainSettings, tmp_path: Path) -> None:
    options = {**STALLING, "schedule": "constant"}
    run(small, tmp_path, **options | {"adapt": False, "steps": 2})
    run(small, tmp_path, **options)
    assert {record["step"] for record in records(tmp_path) if "adapted" in record} == {5}


@pytest.mark.slow
def test_two_processes_decide_alike_and_as_one(trainings: Trainings, small: TrainSettings, tmp_path: Path) -> None:
    """Each holds half of every tensor. The run stops after its conversions, and goes on."""
    run(small, tmp_path / "one", **STALLING)
    out = tmp_path / "two"
    for number, stops in enumerate(({0: 3, 1: 3}, None)):
        given = asdict(replace(small, out=out, parallel="fsdp", **STALLING))
        answers = trainings(given, tmp_path / f"answers{number}", stops=stops)
        assert all(not isinstance(answer, str) for answer in answers), answers
    one, two = (
        {(r["step"], r["adapted"].partition(" of ")[0]) for r in records(folder) if "adapted" in r}
        for folder in (tmp_path / "one", out)
    )
    assert {step for step, _ in two} >= {3}
    assert {line.partition(":")[0] for _, line in two} == {line.partition(":")[0] for _, line in one}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gauges_every": 0}, "--gauges-every must be at least 1 with --adapt, which acts on what they measure"),
        ({"offload": "states"}, "--offload must be none with --adapt, got 'states'"),
        ({"compile": True, "linear": "SWITCHBACK"}, "--linear must be none with --adapt and --compile"),
        ({"parallel": "fsdp", "linear": "SWITCHBACK"}, "--linear must be none with --adapt and --parallel fsdp"),
        ({"adapt_tolerance": 0.0}, "--adapt-tolerance must be a number above 0, got 0.0"),
    ],
)
def test_what_cannot_adapt_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        TrainSettings(**{"adapt": True, **options})
