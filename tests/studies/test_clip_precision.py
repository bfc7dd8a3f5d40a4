"""The study of CLIP's accuracy in 8 bits: its plan, its check, and what tables say of runs."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _clip_reading
import _clip_rows as rows
import _clip_tables as tables
import _pictures
import clip_precision as study
import pytest
import render
import typer
from _clip_rows import ADDED, ROWS, Task
from _clip_run import Trained
from PIL import Image
from typer.testing import CliRunner

from narrowgauge.linear import LLM_INT8, SWITCHBACK, TENSORWISE_FP8, named_plan

pytestmark = pytest.mark.usefixtures("one_thread")


def test_rows_are_the_papers_plans() -> None:
    plans = {row.name: named_plan(row.linear) for row in ROWS if row.linear != "none"}
    assert plans["LLM.int8()"] == LLM_INT8
    assert plans["SwitchBack int8"] == SWITCHBACK
    assert plans["SwitchBack float8"] == SWITCHBACK.with_format("e4m3")
    assert plans[rows.TENSORWISE] == TENSORWISE_FP8
    assert len(plans) == 6
    assert all(row.title for row in ROWS)


def test_what_is_added_is_in_the_settings() -> None:
    changed = {
        added.name: rows.settings_of(Task("clip-micro", "LLM.int8()", added.name, 0.5, 7), study.SETTINGS)
        for added in ADDED
    }
    for each in changed.values():
        assert (each.model, each.lr, each.seed, each.linear) == ("clip-micro", 0.5, 7, "LLM_INT8")
    assert (changed["nothing"].layer_scale, changed["layer scale"].layer_scale) == (None, 0.0)
    assert [each.kq_norm for each in changed.values()] == [False, False, True, False]
    assert [each.clip for each in changed.values()] == [0.0, 0.0, 0.0, 1.0]
    assert study.SETTINGS.autocast == "bf16"


def test_the_plan_begins_with_what_tells_most() -> None:
    tasks = study.plan(ROWS, ADDED, ["a", "b"], [1.0, 2.0], 3)
    assert len(set(tasks)) == len(tasks)
    # All rows with nothing and with norms on keys and queries, two rows with the two other additions.
    most = 2 * 7 + 2 * 2
    assert [task.row for task in tasks[:7]] == [row.name for row in ROWS]
    groups = [("a", 1.0, 0), ("a", 1.0, 1), ("a", 1.0, 2), ("b", 1.0, 0), ("a", 2.0, 0)]
    for number, group in enumerate(groups):
        some = tasks[number * most : (number + 1) * most]
        assert {(t.model, t.lr, t.seed) for t in some} == {group}
    rest = tasks[len(groups) * most :]
    assert {(t.model, t.lr, t.seed) for t in rest} == {("a", 1.0, 0)}
    assert {t.added for t in rest} == {"layer scale", "clipping"}
    assert len({(t.row, t.added) for t in tasks if (t.model, t.lr, t.seed) == ("a", 1.0, 0)}) == 7 * 4
    assert study.plan(ROWS[:1], ADDED[:1], ["a"], [1.0], 1) == [Task("a", "bf16", "nothing", 1.0, 0)]


def ended(losses: list[float]) -> Trained:
    return Trained(losses, {}, [], [], 1, "eager", 1.0, None, 1.0)


@pytest.mark.parametrize(
    ("losses", "how"),
    [
        ([4.0] * 20 + [1.0] * 40, None),
        ([4.0] * 20 + [1.0] * 40 + [1.4] * 40, None),
        ([4.0] * 20 + [1.0] * 40 + [1.6] * 40, "the loss ended more than 0.5 nats above its lowest"),
        ([4.0, 3.0, float("nan")], "the loss was not finite"),
        ([4.16] * 50, "the loss never left that of a guess"),
    ],
)
def test_how_runs_diverge(losses: list[float], how: str | None) -> None:
    assert study.diverged(ended(losses), batch=64) == how  # ln 64 = 4.159


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty shades with their names."""
    folder = tmp_path_factory.mktemp("shades")
    for name, count in (("train.csv", 32), ("validation.csv", 8)):
        with (folder / name).open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(("filepath", "title"))
            for n in range(count):
                place = f"{name[0]}{n}.png"
                Image.new("RGB", (36, 36), (8 * n, 255 - 8 * n, 30 * (n % 8))).save(folder / place)
                table.writerow((place, f"shade {n} of {name[0]}"))
    return folder


def called(*words: str) -> Any:
    app = typer.Typer()
    app.command()(study.main)
    return CliRunner().invoke(app, words)


def test_the_check(pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "clip_precision_check.json"
    words = ["--check", "--data", str(pictures), "--out", str(out), "--only", "bf16", "--only", "tensor*"]
    result = called(*words, "--added", "nothing", "--added", "layer*")
    assert result.exit_code == 0, result.output
    results = json.loads(out.read_text())
    assert [(run["row"], run["added"]) for run in results["runs"]] == [
        (row, added) for added in ("nothing", "layer scale") for row in ("bf16", rows.TENSORWISE)
    ]
    assert all(run["validation_loss"] > 0 and len(run["curve"]) == 4 for run in results["runs"])
    assert results["runs"][0]["validations"]["step"] == [0, 2, 4]
    assert len(results["runs"][0]["magnitudes"]["mean"][0]) == 2
    assert results["data"]["images"] == 32
    assert results["training"]["data"] == pictures.name
    assert str(tmp_path.parent) not in out.read_text()
    for table in tables.TABLES.values():
        assert table(results)
    _pictures.draw(tmp_path, tmp_path / "clip_precision_check.png")
    assert (tmp_path / "clip_precision_check.png").read_bytes().startswith(b"\x89PNG")
    again = called(*words, "--resume", "--added", "nothing", "--added", "layer*", "--added", "KQ*", "--dry")
    assert "6 runs of 4 steps of 16 pairs, 4 of them there" in again.output
    assert json.loads(out.read_text()) == results
    assert "bf16, layer scale, lr 0.002, seed 0, there" in again.output


def test_words_that_there_are_not(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = str(tmp_path / "x.json")
    assert "takes patterns of bf16" in " ".join(called("--out", out, "--only", "Z").output.split())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("_emoji.NAMES", tmp_path / "none.txt")
    missing = called("--check", "--out", out)
    assert missing.exit_code == 2
    assert "there is no emoji font to draw" in " ".join(missing.output.replace("│", " ").split())
    for words, complaint in (
        (("--data", str(pictures / "nothing.csv")), "--data"),
        (("--data", str(pictures), "--batch", "64"), "got 32 to train on, --batch 64"),
        (("--data", str(pictures), "--model", "clip-huge"), "--model takes one of"),
        (("--data", str(pictures), "--patch-dropout", "1"), "--patch-dropout: got 1.0"),
    ):
        refused = called("--check", "--out", out, *words)
        assert refused.exit_code == 2, refused.output
        assert complaint in " ".join(refused.output.replace("│", " ").split())


def test_what_is_given_goes_before_a_check() -> None:
    short = study.setting_of(True, {"steps": 8, "batch": None})
    assert (short.steps, short.warmup, short.batch, short.vocabulary) == (8, 2, 16, 300)
    assert study.setting_of(True, {"warmup": 0}).warmup == 0
    usual = study.setting_of(False, {"steps": None, "patch_dropout": 0.0})
    assert (usual.steps, usual.warmup, usual.patch_dropout) == (300, 75, 0.0)
    assert usual == study.replace(study.SETTINGS, patch_dropout=0.0)


ACCURACY = {"bf16": 0.40, "SwitchBack int8": 0.39, "LLM.int8()": 0.30, rows.TENSORWISE: 0.003}
LOSS = {"bf16": 1.0, "SwitchBack int8": 1.001, "LLM.int8()": 1.3, rows.TENSORWISE: 4.9}


# Differences of two rows with nothing, of three with KQ norm, three seeds each, change from seed to seed in one: by
# -0.02, 0 and 0.02.
MARGIN, STEADY = (3 * math.sqrt(2 * 0.02**2 / (count * 2)) / math.sqrt(3) for count in (2, 3))


def made_up(row: str, added: str, seed: int) -> dict[str, Any]:
    """Seeds are 0.1 nats and 2 points apart; float8 diverges with nothing, wavers about bf16 with something."""
    lost = row == rows.TENSORWISE and added == "nothing"
    own = "bf16" if row == rows.TENSORWISE and not lost else row
    wavers = own != row or (row == "SwitchBack int8" and added == "nothing")
    loss, accuracy = LOSS[own] + 0.1 * seed + (0.02 * (seed - 1) if wavers else 0.0), ACCURACY[own] + 0.02 * seed
    end = 2.0 if added == "layer scale" else 30.0
    return {
        "model": "clip-small", "row": row, "added": added, "lr": 0.002, "seed": seed, "validation_loss": loss,
        "training_loss": loss, "accuracy": accuracy, "accuracy_top5": accuracy,
        "diverged": "the loss was not finite" if lost else None, "rise": 0.0, "curve": [[10, 5.0], [20, loss]],
        "validations": {
            "step": [0, 20], "loss": [5.0, loss], "zero_shot_top1": [0.0, accuracy], "zero_shot_top5": [0.0, 1.0],
            "logit_scale": [14.3, 20.0],
        },
        "magnitudes": {
            "step": [0, 20], "mean": [[0.5, 0.6, 0.7], [1.0, 5.0, end]], "absmax": [[4.0] * 3, [9.0, 9.0, 99.0]],
        },
        "parameters": 30_000_000, "step_ms": 10.0, "peak_memory": 1, "seconds": 5.0,
    }  # fmt: skip


@pytest.fixture
def results() -> dict[str, Any]:
    cells = [(row, added) for added in ("nothing", "KQ norm") for row in LOSS]
    cells += [("bf16", "layer scale"), (rows.TENSORWISE, "layer scale")]
    return {
        "command": "python studies/clip_precision.py", "environment": {"device": "H200", "torch": "2.11.0+cu"},
        "training": {
            "model": "clip-small", "lr": 0.002, "seed": 0, "seeds": 3, "models": ["clip-small", "clip-deep"],
            "rates": [0.002], "steps": 300, "warmup": 75, "batch": 512, "patch_dropout": 0.5, "final_lr": 0.0,
            "beta2": 0.99, "weight_decay": 0.2, "recipe": "stable-adamw",
        },
        "data": {"source": "emoji", "images": 13332, "captions": 3333, "held_out": 322, "prompts": 322},
        "parameters": {"clip-small": 30_000_000},
        "rows": [{"name": row.name, "title": row.title} for row in ROWS if row.name in LOSS],
        "runs": [made_up(*cell, seed) for seed in (0, 1, 2) for cell in cells],
        "unfinished": [{}],
    }  # fmt: skip


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_tables_say_what_the_runs_say(results: dict[str, Any]) -> None:
    head, _, *body = cells(tables.figure_1(results))
    assert head[2:] == ["clip-small, lr 0.002: accuracy", "points", "loss − bf16"]
    assert body[0] == ["bf16", "", "42.0 (40.0 … 44.0)", "", ""]
    assert body[1][1:3] == ["−0.1", "41.0 (39.0 … 43.0)"]
    assert body[2][3:] == ["-10.0 (-10.0 … -10.0)", "+0.3000 (+0.3000 … +0.3000)"]
    assert body[3] == [rows.TENSORWISE, "diverges", "3 of 3 diverged", "", ""]
    assert body[4] == ["*3 standard errors of a difference*", "", "", "0.0", f"{MARGIN:.4f}"]
    _, _, *body = cells(tables.figure_2(results))
    assert body[0][1:] == ["diverges", "42.0 (40.0 … 44.0)", "3 of 3 diverged", ""]
    assert body[1][3:] == ["42.0 (40.0 … 44.0)", "+0.0000 (-0.0200 … +0.0200)"]
    assert body[2][3:] == ["42.0 (40.0 … 44.0)", "+0.0000 (-0.0200 … +0.0200)"]
    assert body[3] == ["clipping", "diverges", "", "", ""]
    _, _, *body = cells(tables.steady(results))
    assert body[2][3:] == ["-10.0 (-10.0 … -10.0)", "+0.3000 (+0.3000 … +0.3000)"]
    assert body[3][2:] == ["42.0 (40.0 … 44.0)", "+0.0 (+0.0 … +0.0)", "+0.0000 (-0.0200 … +0.0200)"]
    assert body[4][4] == f"{STEADY:.4f}"
    _, _, *body = cells(tables.grid(results))
    assert body[1][1:4] == ["41.0 (39.0 … 43.0)", "+0.0010 (-0.0190 … +0.0210)", ""]
    head, _, *body = cells(tables.magnitudes(results))
    assert body[0][4:] == ["0.500", "0.600", "0.700", "1.00", "5.00", "30.0", "99.0"]
    assert body[1][9] == "2.00"
    told = tables.origin(results)
    assert "1 runs were left out" in told
    assert "Of 30 runs 3 diverged: the loss was not finite." in told


def test_what_parts_from_bf16_and_what_does_not(results: dict[str, Any]) -> None:
    _, _, *body = cells(tables.separation(results))
    assert body[0][2:] == [f"LLM.int8(), {rows.TENSORWISE}", "SwitchBack int8", "none"]
    # Of layer scale there is one row beside bf16, which says too little of chance.
    assert [line[1:] for line in body[1:]] == [
        ["KQ norm", "LLM.int8()", f"SwitchBack int8, {rows.TENSORWISE}", "none"],
    ]
    place = tables.places(results)[0]
    assert tables.separated(results, place, "SwitchBackM int8", "nothing") is None
    # Just within and just beyond what chance makes.
    for factor, apart in ((0.99, False), (1.01, True)):
        for run in results["runs"]:
            if run["row"] == "LLM.int8()":
                run["validation_loss"] = LOSS["bf16"] + 0.1 * run["seed"] - factor * MARGIN
        assert tables.separated(results, place, "LLM.int8()", "nothing") is apart
    # Where accuracies part by chance as far as the paper's do by plan, an equal end is no finding.
    for run in results["runs"]:
        if run["row"] in ("LLM.int8()", "SwitchBack int8"):
            run["validation_loss"] = LOSS["bf16"] + 0.1 * run["seed"]
            run["accuracy"] += 0.1 * (run["seed"] - 1)
    assert tables.separated(results, place, "SwitchBack int8", "nothing") is None
    # Of one seed nothing is known of chance.
    alone = results | {"runs": [run for run in results["runs"] if run["seed"] == 0]}
    assert tables.separated(alone, place, "LLM.int8()", "nothing") is None
    assert tables.separated(alone, place, rows.TENSORWISE, "nothing") is None


def test_what_the_paper_says_is_read_from_the_runs(
    results: dict[str, Any], readings: Callable[[str], dict[str, list[str]]]
) -> None:
    found = readings(_clip_reading.reading(results))
    assert [found[f"{row} ends where bf16 does"][2] for row in ("SwitchBack int8", "SwitchBackM int8")] == [
        "holds",
        "",
    ]
    assert found["SwitchBack int8 ends where bf16 does, KQ norm added"][1:] == [
        f"loss +0.0010, {STEADY:.4f} to be sure; -1.0 points", "holds",
    ]  # fmt: skip
    assert found["LLM.int8() ends behind bf16"] == [
        "−5.9",
        f"loss +0.3000, {MARGIN:.4f} to be sure; -10.0 points",
        "holds",
    ]
    plain, scaled = (
        f"{rows.TENSORWISE}, {a} added, {b}" for a, b in (("nothing", "diverges"), ("layer scale", "trains"))
    )
    assert found[plain] == ["diverges", "3 of 3 diverged", "holds"]
    assert found[scaled][2] == "holds"
    assert found["Features of bf16 grow with depth"][2] == "holds"
    assert found["Layer scale from zero keeps them small"][1:] == ["last block 2 with it, 30 without", "holds"]
    # Some runs diverged and some did not; LLM.int8() is ahead; scales for each row are better.
    for run in results["runs"]:
        run["diverged"] = run["diverged"] if run["seed"] else None
        if run["row"] == "LLM.int8()":
            run["validation_loss"] -= 0.6
    results["rows"].append({"name": "SwitchBackQ int8", "title": ""})
    results["runs"] += [made_up("bf16", "nothing", seed) | {"row": "SwitchBackQ int8"} for seed in (0, 1, 2)]
    found = readings(_clip_reading.reading(results))
    assert found[plain][2] == "cannot tell"
    assert found["LLM.int8() ends behind bf16"][2] == "does not hold"
    gain = "SwitchBackQ int8 ends no better than SwitchBack int8"
    assert found[gain][2] == "holds"
    for run in results["runs"]:
        run["validation_loss"] -= 5.0 if run["row"] == "SwitchBackQ int8" else 0.0
    assert readings(_clip_reading.reading(results))[gain][2] == "does not hold"


def test_its_page(results: dict[str, Any], page_with: Callable[..., str]) -> None:
    drawn = page_with("clip_precision", {"clip_precision_h200.json": results})
    assert "Not measured yet" not in drawn
    assert "](clip_precision_h200.png)" in drawn


def test_a_run_that_ended_at_once_is_drawn(results: dict[str, Any], tmp_path: Path) -> None:
    lost = next(run for run in results["runs"] if run["row"] == rows.TENSORWISE)
    lost |= {"curve": [[3, None]], "validation_loss": None, "training_loss": None, "accuracy": None, "rise": None}
    lost["validations"] = {key: values[:1] for key, values in lost["validations"].items()}
    lost["magnitudes"] = {key: values[:1] for key, values in lost["magnitudes"].items()}
    (tmp_path / "clip_precision_x.json").write_text(json.dumps(results))
    _pictures.draw(tmp_path, tmp_path / "clip_precision_x.png")
    assert (tmp_path / "clip_precision_x.png").read_bytes().startswith(b"\x89PNG")
    assert "3 of 3 diverged" in tables.figure_1(results)
    assert tables.magnitudes(results)
    assert tables.facts(results)["diverged_tensor_wise_float8"] == "3 of 3"


def test_a_page_takes_tables_and_numbers(
    results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clip_precision_x.json").write_text(json.dumps(results))
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    render.results.cache_clear()
    number = "<!--=clip_precision_x.json points_LLM_int8-->?<!--/-->"
    drawn = render.rendered(f"<!-- table: clip_precision_x.json figure_2 -->\n<!-- end --> {number}")
    assert "3 of 3 diverged" in drawn
    assert "-->-10.0<!--/-->" in drawn
    named = tables.facts(results)
    assert named["apart_LLM_int8"] == "yes"
    assert named["apart_SwitchBack_int8"] == "no"
    assert named["last_bf16_layer_scale"] == "2.00"
    assert named["diverged_tensor_wise_float8"] == "3 of 3"
    assert "accuracy_tensor_wise_float8" not in named
    assert (named["margin"], named["margin_points"]) == (f"{MARGIN:.4f}", "0.0")
    assert named["margin_KQ_norm"] == f"{STEADY:.4f}"
