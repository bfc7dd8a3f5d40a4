"""Training with compressed gradients: ranks do one training, tables compare seed with seed, and all of it runs."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import _compressed_rows as rows
import _compressed_tables as tables
import _language_run
import _pictures
import compressed_training as study
import pytest
import render
import torch.distributed as dist
import typer
from _compressed_run import Plan, Task
from typer.testing import CliRunner

from forked import START

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
]
NAMES = ["fp32", "2 nearest", "4 feedback", "bf16", "default"]


@pytest.fixture(scope="module")
def plan(training: Any) -> Plan:
    setting = replace(study.CHECK.language, data=training.data, vocabulary=256, sequence=16, steps=6)
    return replace(study.CHECK, language=setting)


@pytest.fixture(scope="module")
def file(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some runs of one seed, through the command."""
    out = tmp_path_factory.mktemp("results") / "compressed_training_x.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "START", START)
        patch.setattr(study, "CHECK", plan)
        app = typer.Typer()
        app.command()(study.main)
        words = ["--check", "--data", str(plan.language.data), "--out", str(out)]
        result = CliRunner().invoke(app, words + [word for name in NAMES for word in ("--only", name)])
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture(scope="module")
def results(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def of(results: dict[str, Any], optimizer: str, row: str) -> dict[str, Any]:
    (found,) = tables.runs_of(results, optimizer, row)
    return found


def test_the_check_makes_all_runs(results: dict[str, Any]) -> None:
    made = [(run["optimizer"], run["row"]) for run in results["runs"]]
    names = [row.name for row in rows.ROWS if row.name in NAMES]
    assert made == [(optimizer, name) for optimizer in rows.OPTIMIZERS for name in names]
    assert all(math.isfinite(run["validation_loss"]) for run in results["runs"])
    assert not results["unfinished"]


@pytest.mark.parametrize("optimizer", rows.OPTIMIZERS)
def test_ranks_train_as_one_process_with_the_whole_batch(
    optimizer: str, plan: Plan, results: dict[str, Any]
) -> None:
    """Uncompressed, to rounding; and what bf16 loses is little beside what two bits do."""
    setting = plan.setting(optimizer)
    model = _language_run.start(setting, 0)
    taken = rows.make(optimizer, model, setting.lr, setting.weight_decay)
    data, losses = _language_run.task_of(setting, 0), []
    for number in range(1, setting.steps + 1):
        _language_run.set_rate(taken, setting.rate(number))
        taken.zero_grad()
        loss = data.loss(model, data.draw())
        loss.backward()
        taken.step()
        losses.append(loss.item())
    exact = of(results, optimizer, "fp32")
    assert [loss for _, loss in exact["curve"]] == pytest.approx(losses, rel=2e-5)
    assert exact["validation_loss"] == pytest.approx(_language_run.evaluate(model, data, setting), rel=2e-5)
    (coarse,), (rounded,) = (tables.apart(results, optimizer, row) for row in ("2 nearest", "bf16"))
    assert abs(rounded) < 0.1 * abs(coarse)


def test_bytes_and_memory(results: dict[str, Any]) -> None:
    """Of micro's parameters, all but vectors and small ones are compressed."""
    size = results["parameters"]
    shares = {row: of(results, "SGD", row)["share"] for row in NAMES}
    assert (shares["fp32"], shares["bf16"]) == (1, 0.5)
    assert shares["2 nearest"] == shares["4 feedback"]  # two codes a byte is the least that a wire takes
    assert 1 / 8 < shares["4 feedback"] < 0.15
    assert 1 / 4 < shares["default"] < 0.28
    memory = {row: of(results, "SGD", row)["memory_bytes"] for row in NAMES}
    assert memory["fp32"] == memory["2 nearest"] == 0
    assert 0.95 * 4 * size < memory["default"] < 4 * size


def test_the_plan_has_a_seed_of_everything_before_the_next() -> None:
    tasks = study.plan_of(["fp32", "8 nearest"], 2)
    assert len(set(tasks)) == len(tasks) == 8
    assert {task.seed for task in tasks[:4]} == {0}
    assert tasks[0] == Task("SGD", "fp32", 0)


def test_each_width_has_a_biased_an_unbiased_and_an_error_fed_row() -> None:
    kinds = {
        (row.options["bits"], row.options["rounding"], row.options["error_feedback"])
        for row in rows.ROWS
        if row.options
    }
    three = (("nearest", False), ("stochastic", False), ("nearest", True))
    assert kinds == {(bits, *kind) for bits in (8, 4, 2) for kind in three}
    assert {row.options["codebook"] for row in rows.ROWS if row.options} == {"linear"}


def made_up(**ends: list[float | None]) -> dict[str, Any]:
    """Results of SGD alone, with these losses by seed."""
    runs = [
        {
            "optimizer": "SGD", "row": row.replace("_", " ").strip(), "seed": seed, "validation_loss": loss,
            "diverged": loss is None, "share": 0.25, "memory_bytes": 0, "seconds": 1.0,
            "curve": [[step, 5.0] for step in range(1, 13)],
        }
        for row, losses in ends.items()
        for seed, loss in reversed(list(enumerate(losses)))
    ]  # fmt: skip
    training = Plan().plain() | {"seed": 0, "seeds": 2}
    listed = [{"name": row.name, "title": row.title} for row in rows.ROWS]
    data = {"source": "a text", "train_tokens": 1000}
    environment = {"device": "a CPU", "torch": "2.13.0+cpu"}
    return {
        "command": "python studies/compressed_training.py", "training": training, "rows": listed, "runs": runs,
        "data": data, "environment": environment, "parameters": 10, "unfinished": [],
    }  # fmt: skip


def test_seeds_are_compared_with_themselves() -> None:
    found = made_up(
        fp32=[5.0, 6.0], bf16=[5.01, 5.98], **{
            "8 nearest": [5.02, 6.01], "4 nearest": [5.03, 6.1], "2 nearest": [5.5, None],
            "4 feedback": [4.9, 5.9], "4 stochastic": [5.05, 5.95],
        },
    )  # fmt: skip
    assert tables.apart(found, "SGD", "4 nearest") == pytest.approx([0.03, 0.1])
    assert tables.drift(found, "SGD") == pytest.approx(0.02)
    said = {row: tables.verdict(found, "SGD", row) for row in ("8 nearest", "4 nearest", "2 nearest", "4 feedback")}
    assert [*said.values()] == [tables.NEAR, tables.BEHIND, tables.BEHIND, tables.BEFORE]
    assert tables.verdict(found, "SGD", "4 stochastic") == tables.UNCLEAR
    table = tables.losses(found)
    assert "+0.0650 (+0.0300 … +0.1000)" in table
    assert "1 of 2 diverged" in table
    assert tables.facts(found)["sgd_4_nearest"] == "+0.0650"
    assert tables.facts(found)["drift_sgd"] == "0.0200"
    assert "All runs were made." in tables.origin(found)


def test_the_page_holds_for_what_is_committed() -> None:
    """Sentences of the page that no table says: each would be wrong, were the results others."""
    committed = json.loads((Path(study.__file__).parent / "results" / "compressed_training_cpu.json").read_text())
    assert not committed["unfinished"]
    assert not any(run["diverged"] for run in committed["runs"])

    def lost(row: str, optimizer: str = "SGD") -> list[float]:
        return tables.apart(committed, optimizer, row)

    for bits in (4, 2):
        fed, biased = lost(f"{bits} feedback"), lost(f"{bits} nearest")
        assert all(abs(mine) < abs(theirs) for mine, theirs in zip(fed, biased, strict=True))
        assert statistics.fmean(map(abs, fed)) < 0.25 * statistics.fmean(biased)
    for one, other in (("2 stochastic", "2 feedback"), ("4 nearest", "4 stochastic")):
        assert len({a < b for a, b in zip(lost(one), lost(other), strict=True)}) == 2
    distances = (map(abs, lost(f"8 {kind}")) for kind in ("feedback", "stochastic", "nearest"))
    assert all(fed < unbiased < biased for fed, unbiased, biased in zip(*distances, strict=True))
    by_adam = (lost(f"2 {kind}", "AdamW") for kind in ("stochastic", "nearest", "feedback"))
    assert all(unbiased < biased < fed for unbiased, biased, fed in zip(*by_adam, strict=True))
    for kind in ("stochastic", "feedback"):
        assert min(lost(f"4 {kind}", "AdamW")) < 0 < max(lost(f"4 {kind}", "AdamW"))
    said = {optimizer: tables.verdict(committed, optimizer, "default") for optimizer in rows.OPTIMIZERS}
    assert said == dict.fromkeys(rows.OPTIMIZERS, tables.NEAR)


def test_tables_of_a_study_that_has_no_runs_yet() -> None:
    empty = made_up()
    assert all(isinstance(table(empty), str) for table in tables.TABLES.values())
    assert tables.facts(empty)["runs"] == "0"


def test_it_is_drawn(file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "compressed_training_x.png"
    _pictures.draw(file.parent, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert render.study_of(file.name) == "compressed_training"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "3 bits"], "takes patterns of fp32, 8 nearest"),
        (["--batch", "3"], "takes a multiple of 2, the ranks"),
        (["--device", "tpu"], "takes cpu or cuda"),
    ],
)
def test_what_it_does_not_take(words: list[str], message: str, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(study.main)
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "x.json"), *words], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.output


def test_its_page(page_with: Callable[..., str]) -> None:
    """Its sentences are of every row, so it is drawn from a study that has them all."""
    committed = json.loads((Path(study.__file__).parent / "results" / "compressed_training_cpu.json").read_text())
    drawn = page_with("compressed_training", {"compressed_training_h200.json": committed})
    assert "Not measured yet" not in drawn
    assert "](compressed_training_h200.png)" in drawn


def test_no_run_begins_that_would_not_end_in_time(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "START", START)
    study.study(tmp_path / "x.json", plan, NAMES, 1, seconds=0.0)
    found = json.loads((tmp_path / "x.json").read_text())
    assert not found["runs"]
    assert len(found["unfinished"]) == 2 * len(NAMES)


def test_it_goes_on_where_it_ended(plan: Plan, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is made again is the same, bit for bit, whatever the ranks did before it."""
    monkeypatch.setattr(study, "START", START)
    out, found = tmp_path / "compressed_training_x.json", json.loads(file.read_text())
    lacking = found["runs"].pop(2)
    out.write_text(json.dumps(found))
    study.study(out, plan, NAMES, 1, resume=True)
    again = json.loads(out.read_text())["runs"][-1]
    names = ("optimizer", "row", "validation_loss", "curve", "bytes_sent", "memory_bytes")
    assert [again[name] for name in names] == [lacking[name] for name in names]
