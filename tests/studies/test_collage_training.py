"""Collage's tables: runs of a column see the same, gauges tell options apart, a study goes on where it ended."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _collage_reading
import _collage_rows as rows
import _collage_tables as tables
import _language_run
import _pictures
import collage_training as study
import pytest
import render
import typer
from _language_run import Setting
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def setting(training: Any) -> Setting:
    return Setting(
        training.data, model="micro", vocabulary=256, sequence=32, batch=4, steps=30, warmup=4, gauge_every=5,
        windows=8, lr=1e-4,
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(setting: Setting) -> dict[str, Any]:
    names = ("D", "A", "B", "split", "adamw8bit-split8", "A strict")
    return {name: _language_run.train(rows.row(name).optimizer, setting, 0.999, 0) for name in names}


def test_runs_of_a_seed_begin_alike_and_part(runs: dict[str, Any]) -> None:
    assert len({run["curve"][0][1] for run in runs.values()}) == 1
    assert len({str(run["curve"]) for run in runs.values()}) == len(runs)  # a last loss can be two runs' by chance


def test_gauges_see_what_an_option_loses(runs: dict[str, Any]) -> None:
    last = {name: {key: run["gauges"][key][-1] for key in run["gauges"]} for name, run in runs.items()}
    assert last["D"]["step"] == 30
    assert runs["D"]["gauges"]["step"] == [2, 5, 10, 15, 20, 25, 30]
    for exact in ("D", "split"):
        assert last[exact]["edq"] == pytest.approx(1.0, abs=1e-3)
        assert last[exact]["lost"] < 0.01 < last[exact]["visible_lost"]
    assert last["A"]["lost"] > 0.3
    assert last["A"]["lost"] == last["A"]["visible_lost"]
    assert abs(last["B"]["edq"] - 1) < 0.01 < abs(last["A"]["edq"] - 1)


def test_bytes_are_those_of_the_tensors(runs: dict[str, Any]) -> None:
    for name, run in runs.items():
        assert run["bytes"]["total"] == pytest.approx(rows.row(name).recipe.bytes_per_parameter(), rel=0.03)
    assert runs["D"]["peak_memory"] is None


def test_every_row_has_a_name_of_its_own_and_its_bytes() -> None:
    names = [row.name for row in rows.ROWS]
    assert len(set(names)) == len(names)
    assert {"A", "B", "C", "D", "D-MW", "kahan", "stochastic", "split", "split8"} <= set(names)
    assert rows.row("plain + 8 bits").recipe.bytes_per_parameter() < 6.1
    assert [row.name for row in rows.ROWS if row.arithmetic == "strict"] == [
        "A strict", "B strict", "C strict", "kahan strict",
    ]  # fmt: skip


def test_the_plan_has_first_seeds_first_and_extra_rows_once() -> None:
    tasks = study.plan(rows.ROWS, [0.999, 0.95], 3)
    assert len(set(tasks)) == len(tasks)
    paper, beside, extra = ([row.name for row in rows.ROWS if row.tier == tier] for tier in range(3))
    assert sorted(t.row for t in tasks if (t.beta2, t.seed) == (0.999, 0)) == sorted([*paper, *beside, *extra])
    assert [t.row for t in tasks if (t.beta2, t.seed) == (0.95, 0)] == paper
    assert {t.row for t in tasks if t.seed == 1} == {*paper, *beside}
    assert {(t.row, t.beta2) for t in tasks if t.seed == 2} == {(name, b) for name in paper for b in (0.999, 0.95)}
    assert [t.row for t in tasks[-len(extra) :]] == extra
    once = study.plan(rows.ROWS, [0.999], 1)
    assert sorted(t.row for t in once) == sorted(row.name for row in rows.ROWS)


def small(setting: Setting, **changes: Any) -> Setting:
    return dataclasses.replace(setting, **{"steps": 4, "gauge_every": 2, "windows": 4, **changes})


def test_a_study_goes_on_where_it_ended(setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out, few = tmp_path / "collage_training_cpu.json", small(setting)
    study.study(out, study.chosen(["D"]), few, betas=[0.999], seeds=1)
    first = json.loads(out.read_text())
    assert [(r["row"], r["beta2"], r["seed"]) for r in first["runs"]] == [("D", 0.999, 0)]
    study.study(out, study.chosen(["A", "D"]), few, betas=[0.999, 0.95], seeds=1, resume=True)
    second = json.loads(out.read_text())
    assert second["runs"][0] == first["runs"][0]
    assert [(r["row"], r["beta2"]) for r in second["runs"]] == [
        ("D", 0.999), ("A", 0.999), ("D", 0.95), ("A", 0.95),
    ]  # fmt: skip
    assert [row["name"] for row in second["rows"]] == ["D", "A"]
    assert second["training"]["betas"] == [0.999, 0.95]
    assert second["unfinished"] == []
    capsys.readouterr()
    study.study(out, study.chosen(["D"]), few, betas=[0.999], seeds=2, resume=True)
    assert "2 runs of 4 steps of 4 x 32 tokens, 1 of them there" in capsys.readouterr().out
    third = json.loads(out.read_text())
    assert [row["name"] for row in third["rows"]] == ["D", "A"]
    assert third["training"]["seeds"] == 2


def test_a_study_of_other_settings_is_not_continued(setting: Setting, tmp_path: Path) -> None:
    out = tmp_path / "collage_training_cpu.json"
    study.study(out, study.chosen(["D"]), small(setting), betas=[0.999], seeds=1)
    with pytest.raises(typer.BadParameter, match=r"--resume: got lr 0.001, takes 0.0001"):
        study.study(out, study.chosen(["D"]), small(setting, lr=1e-3), betas=[0.999], seeds=1, resume=True)


def test_no_run_is_begun_that_would_not_end_in_time(
    setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "collage_training_cpu.json"
    study.study(out, study.chosen(["D"]), small(setting), betas=[0.999], seeds=1, seconds=0)
    assert "1 runs are left for another call with --resume" in capsys.readouterr().out
    results = json.loads(out.read_text())
    assert (results["runs"], results["unfinished"]) == ([], [{"row": "D", "beta2": 0.999, "seed": 0}])


def test_a_dry_run_trains_nothing(setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "collage_training_cpu.json"
    study.study(out, study.chosen(["A"]), small(setting), betas=[0.999], dry=True)
    assert "A, beta2 0.999, seed 0" in capsys.readouterr().out
    assert not out.exists()


def test_a_run_that_cannot_be_made_is_told_and_made_again(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, few = tmp_path / "collage_training_cpu.json", small(setting)
    train = _language_run.train

    def broken(make, setting, beta2, seed):
        if setting.steps == few.steps and make.__self__.name == "A":
            raise RuntimeError("CUDA out of memory\nand more")
        return train(make, setting, beta2, seed)

    monkeypatch.setattr(_language_run, "train", broken)
    study.study(out, study.chosen(["D", "A"]), few, betas=[0.999], seeds=1)
    results = json.loads(out.read_text())
    assert [run.get("failed") for run in results["runs"]] == [None, "RuntimeError: CUDA out of memory"]
    assert "A failed: RuntimeError" in tables.origin(results)
    monkeypatch.setattr(_language_run, "train", train)
    study.study(out, study.chosen(["D", "A"]), few, betas=[0.999], seeds=1, resume=True)
    assert [run.get("failed") for run in json.loads(out.read_text())["runs"]] == [None, None]


def test_names_that_there_are_not() -> None:
    with pytest.raises(typer.BadParameter, match="--only: got Z, takes patterns of D, A, B"):
        study.chosen(["Z"])


@pytest.mark.parametrize("model", ["micro", "bert-micro"])
def test_the_check(model: str, training: Any, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(study.main)
    out = tmp_path / "collage_training_check.json"
    words = ["--check", "--model", model, "--data", str(training.data), "--out", str(out), "--only", "[DA]"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    results = json.loads(out.read_text())
    assert results["training"]["model"] == model
    assert len(results["runs"]) == 2
    assert all(run["validation_loss"] > 0 for run in results["runs"])
    assert results["data"]["source"] == training.data.name
    for table in tables.TABLES.values():
        assert table(results)
    _pictures.draw(tmp_path, tmp_path / "collage_training_check.png")
    assert (tmp_path / "collage_training_check.png").read_bytes().startswith(b"\x89PNG")


LEVEL = {"D": 0.0, "A": 0.4, "C": 0.001}
WAVERS = (0.0, 0.001, -0.001, 0.002, -0.002)  # C, by seed
MARGIN = 3 * math.sqrt(10 / 4) * 0.001


def made_up(name: str, beta2: float, seed: int) -> dict[str, Any]:
    """Validation ln 10, half the seed and what an option costs more; training is that less ln 2."""
    loss = math.log(10) + 0.5 * seed + LEVEL[name] + (WAVERS[seed] if name == "C" else 0.0)
    quality = 0.25 if name == "A" else 1.0
    return {
        "row": name, "beta2": beta2, "seed": seed, "validation_loss": loss, "training_loss": loss - math.log(2),
        "diverged": False, "curve": [[10, 9.0], [20, loss]],
        "gauges": {"step": [2, 10], "edq": [0.9, quality], "visible_edq": [0.9, 0.9], "lost": [0.5, 1 - quality],
                   "visible_lost": [0.5, 0.5]},
        "bytes": {"total": 16.0}, "peak_memory": 3e9, "step_ms": 20.0 if name == "D" else 16.0, "seconds": 7.0,
    }  # fmt: skip


@pytest.fixture
def results() -> dict[str, Any]:
    made = [made_up(name, beta2, seed) for name in ("D", "C") for beta2 in (0.999, 0.95) for seed in range(5)]
    return {
        "command": "python studies/collage_training.py", "environment": {"device": "H200", "torch": "2.11.0+cu"},
        "training": Setting().plain() | {"seed": 0, "seeds": 2, "betas": [0.999, 0.95]},
        "data": {"source": "text", "train_tokens": 1000, "validation_tokens": 100, "shared_lines": 0.05},
        "parameters": 124_000_000,
        "rows": [{"name": n, "title": f"row {n}", "tier": 0, "bytes": 16.0} for n in ("D", "A", "C")],
        "runs": [*made, made_up("A", 0.999, 0)],
        "unfinished": [{"row": "A", "beta2": 0.95, "seed": 0}],
    }  # fmt: skip


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_tables_say_what_the_runs_say(results: dict[str, Any]) -> None:
    head, _, *body = cells(tables.perplexity(results))
    assert head[3:] == ["β2 0.95: paper", "here", "β2 0.999: paper", "here"]
    assert body[0][3:] == ["13.87 / 15.03", "5.00 / 10.00", "14.01 / 15.03", "5.00 / 10.00"]
    worse = f"{5 * math.exp(0.4):.2f} / {10 * math.exp(0.4):.2f}"
    assert body[1][3:] == ["14.73 / 15.64", "", "17.29 / 18.17", worse]
    _, _, *body = cells(tables.losses(results))
    assert body[0] == ["`A`", "", "+0.4000"]
    assert body[1][1:] == ["+0.0010 (-0.0010 … +0.0030)"] * 2
    assert body[2][1:] == [f"{MARGIN:.4f}"] * 2
    _, _, *body = cells(tables.updates(results))
    assert body[1] == ["`A`", "", "", "", "0.2500", "75 %", "50 %"]
    _, _, *body = cells(tables.cost(results))
    assert body[1] == ["`A`", "16.00", "16.00", "3.00"]
    assert "1 runs were left out" in tables.origin(results)


def test_a_run_that_diverged_is_told(results: dict[str, Any]) -> None:
    for run in results["runs"]:
        if (run["row"], run["beta2"], run["seed"]) in (("C", 0.95, 1), ("A", 0.999, 0)):
            run |= {"validation_loss": None, "training_loss": None, "diverged": True}
    _, _, *body = cells(tables.perplexity(results))
    assert body[1][6] == "diverged"
    assert body[2][4] == f"{5 * math.exp(0.001):.2f} / {10 * math.exp(0.001):.2f}"
    assert tables.differences(results, "C", 0.95) == pytest.approx([0.001, 0.0, 0.003, -0.001])
    assert "*Diverged: A with β2 0.999 and seed 0, C with β2 0.95 and seed 1.*" in tables.losses(results)


def test_a_page_takes_tables_and_numbers(
    results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "collage_training_x.json").write_text(json.dumps(results))
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    render.results.cache_clear()
    number = "<!--=collage_training_x.json edq_A_999-->?<!--/-->"
    page = f"<!-- table: collage_training_x.json losses -->\n<!-- end --> {number}"
    drawn = render.rendered(page)
    assert "+0.4000" in drawn
    assert "-->0.250<!--/-->" in drawn
    assert {"loss_A_999", "margin_95", "lost_C_95"} <= tables.facts(results).keys()


def test_what_the_paper_says_is_read_from_the_runs(
    results: dict[str, Any], readings: Callable[[str], dict[str, list[str]]]
) -> None:
    nothing = readings(_collage_reading.reading(results | {"runs": []}))
    assert {tuple(cells[1:]) for cells in nothing.values()} == {("not run", "")}
    found = readings(_collage_reading.reading(results))
    assert found["`C` ends where D does, β2 0.999"] == [
        "perplexity 15.18, D 15.03: loss +0.0099",
        f"+0.0010 (-0.0010 … +0.0030); {MARGIN / math.sqrt(5):.4f} to be sure",
        "holds",
    ]
    assert found["`A` ends behind D, β2 0.999"][1:] == [f"+0.4000; {MARGIN:.4f} to be sure", "holds"]
    assert found["`A` ends behind D, β2 0.95"][1:] == ["not run", ""]
    assert found["`A` loses most of its updates"][1:] == ["75 %", "holds"]
    # What chance makes is not behind, nor, where it is as much as the paper takes for behind, an equal end.
    for factor, verdict in ((1.5, "does not hold"), (0.5, "holds")):
        for run in results["runs"]:
            if run["row"] == "C":
                run["validation_loss"] = made_up("C", 0.999, run["seed"])["validation_loss"]
                run["validation_loss"] += factor * MARGIN / math.sqrt(5) - 0.001
        found = readings(_collage_reading.reading(results))
        assert found["`C` ends where D does, β2 0.999"][2] == verdict
    for run in results["runs"]:
        if run["row"] == "C":
            run["validation_loss"] += 20 * WAVERS[run["seed"]]
    found = readings(_collage_reading.reading(results))
    assert found["`C` ends where D does, β2 0.999"][2] == "cannot tell"
    few = results | {"runs": [run for run in results["runs"] if run["seed"] < 2]}
    found = readings(_collage_reading.reading(few))
    assert found["`A` ends behind D, β2 0.999"][1:] == ["+0.4000; too few seeds to be sure", "cannot tell"]
    quality = "Descent quality of `A` is below `B`'s, that below `C`'s, and that is D's"
    assert found[quality][1:] == ["not run", ""]
    middle = made_up("D", 0.999, 0) | {"row": "B"}
    results["rows"].append({"name": "B", "title": "B", "tier": 0, "bytes": 10.0})
    results["runs"].append(middle)
    assert readings(_collage_reading.reading(results))[quality][2] == "does not hold"
    middle["gauges"] = middle["gauges"] | {"edq": [0.9, 0.9]}
    assert readings(_collage_reading.reading(results))[quality][2] == "holds"
    for run in results["runs"]:
        if run["row"] == "C":
            run |= {"validation_loss": None, "diverged": True}
    found = readings(_collage_reading.reading(results))
    assert found["`C` ends where D does, β2 0.999"][1:] == ["5 of 5 diverged", "does not hold"]


def test_its_page(results: dict[str, Any], page_with: Callable[..., str]) -> None:
    masked = results | {"training": results["training"] | {"model": "bert"}}
    drawn = page_with(
        "collage_training", {"collage_training_h200.json": results, "collage_training_bert_h200.json": masked}
    )
    assert "Not measured yet" not in drawn
    assert "](collage_training_bert_h200.png)" in drawn
    assert "perplexity 6.23, D 5.26: loss +0.1692" in drawn
