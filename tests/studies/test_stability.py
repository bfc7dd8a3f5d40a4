"""Stability: RMS_t is what the optimizer saw, spikes are found and counted, plans share their runs."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import _clip_run
import _pictures
import _stability_reading
import _stability_tables as tables
import pytest
import render
import stability as study
import torch
import typer
from _stability_run import CLIPPED, EPS, PLAIN, SCHEDULED, STABLE, Plan, Task, Watched, after, optimizer_of, run
from torch import nn
from typer.testing import CliRunner

from narrowgauge.gauges import rms_ratio

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def plan(squares: Path) -> Plan:
    return replace(study.CHECK, settings=replace(study.CHECK.settings, data=squares, vocabulary=280))


def task_of(plan: Plan, row: str = PLAIN.name, beta2: float = 0.999, signal: float = 1.0) -> Task:
    return Task(row, plan.settings.model, plan.settings.lr, plan.settings.batch, beta2, signal, 0)


class OneEach(nn.Module):
    """Parameters under the names that are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(8, 8))


@pytest.mark.parametrize("way", [PLAIN, STABLE, SCHEDULED[1]], ids=lambda way: way.name)
def test_rms_is_of_gradients_over_the_debiased_second_moment(way: Any) -> None:
    """Against moments kept in float64, of gradients that grow."""
    model, beta2, steps = OneEach(), 0.9, 6
    options = {"lr": 1e-3, "betas": (0.9, beta2), "eps": EPS, "weight_decay": 0.0}
    optimizer, watched = optimizer_of(way, model, options), Watched(way, beta2)
    generator = torch.Generator().manual_seed(0)
    v = torch.zeros(8, 8, dtype=torch.float64)
    for step in range(1, steps + 1):
        g = torch.randn(8, 8, generator=generator) * 2.0**step
        model.p.grad = g.clone()
        optimizer.step()
        decay = 1 - step**-way.schedule if way.schedule is not None else beta2
        v = decay * v + (1 - decay) * g.double().square()
        debiased = v if way.schedule is not None else v / (1 - beta2**step)
        exact = (g.double().square() / debiased.clamp(min=EPS**2)).mean().sqrt()
        watched._step += 1
        correction = 1.0 if way.schedule is not None else 1 - beta2**step
        torch.testing.assert_close(watched._rms(model.p, optimizer, correction).double(), exact, rtol=1e-4, atol=0)


def test_clipping_is_seen_by_rms_and_by_the_weights(plan: Plan) -> None:
    plain, clipped = (run(task_of(plan, name), plan) for name in (PLAIN.name, CLIPPED.name))
    assert plain["losses"][0] == clipped["losses"][0]
    assert plain["losses"] != clipped["losses"]
    # At the first step g^2 is all of the second moment, clipped or not: where it is above eps.
    assert plain["rms_t"]["patches"][0] == pytest.approx(1.0, abs=1e-3)
    assert clipped["rms_t"]["patches"][0] == pytest.approx(1.0, abs=1e-3)


def test_a_share_of_the_gradient_is_not_seen_until_it_ends(plan: Plan) -> None:
    """A power of two, so that nothing is rounded by it; eps is far below the gradients."""
    whole, part = (run(task_of(plan, signal=share), plan) for share in (1.0, 1 / 16))
    switched = plan.switched
    before = slice(0, switched - 1)
    assert part["losses"][:switched] == pytest.approx(whole["losses"][:switched], rel=1e-3)
    assert part["rms_t"]["patches"][before] == pytest.approx(whole["rms_t"]["patches"][before], rel=0.02)
    # g^2 / mean(g^2) over 7 steps, 6 of which had a 256th of the square: at most the root of 7.
    now = [made["rms_t"]["patches"][switched - 1] for made in (whole, part)]
    assert 2 * now[0] < now[1] <= math.sqrt(7) * 1.01
    assert part["rms_t"]["middle"][switched - 1] == pytest.approx(whole["rms_t"]["middle"][switched - 1], rel=0.05)


def trained(losses: list[float], rms: list[float]) -> _clip_run.Trained:
    scalars = {"patches": rms, "middle": [1.0] * len(rms)}
    return _clip_run.Trained(losses, scalars, [], [], 1, "eager", 1.0, None, 1.0)


def test_what_a_switch_does_is_told_from_the_steps_around_it() -> None:
    losses = [2.0] * 90 + [2.5] + [2.0] * 9 + [2.0, 3.0] + [2.0] * 48
    found = after(trained(losses, [1.0] * 100 + [7.0] + [1.0] * 49), 101)
    assert found is not None
    assert found["rms"] == {"patches": 7.0, "middle": 1.0}
    assert found["rise"] == pytest.approx(3.0 - (49 * 2 + 2.5) / 50)
    assert found["quiet"] == pytest.approx(0.5)
    assert after(trained(losses[:110], [1.0] * 110), 101) is None


def test_kinds_share_the_runs_of_the_base() -> None:
    plan = Plan()
    tasks = study.plan_of(study.KINDS, plan, 2)
    assert len(set(tasks)) == len(tasks)
    assert {t.seed for t in tasks[: len(tasks) // 2]} == {0}
    again = {t for t in tasks if t.seed == 1}
    assert again == {t for kind in study.REPEATED for t in study.tasks_of(kind, plan, 1)}
    rates = study.tasks_of("rates", plan, 0)
    assert plan.settings.lr not in {t.lr for t in rates}
    assert {t.beta2 for t in rates} == {study.LONG, study.SHORT}
    assert {t.model for t in study.tasks_of("sizes", plan, 0)} == {"clip-deep", "clip-mini"}
    assert {t.signal for t in study.tasks_of("shift", plan, 0)} == {study.DIM}
    schedules = [t for t in study.tasks_of("ways", plan, 0) if "t^" in t.row]
    assert [t.beta2 for t in schedules] == [float(f"{1 - 600**-x:.3g}") for x in (0.45, 0.5, 0.65)]


def test_a_study_goes_on_where_it_ended(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "stability_x.json"
    study.study(out, plan, kinds=["shift"], seeds=1)
    found = json.loads(out.read_text())
    assert len(found["runs"]) == len(study.SHIFTED)
    lacking = found["runs"].pop()
    out.write_text(json.dumps(found))
    capsys.readouterr()
    study.study(out, plan, kinds=["shift"], seeds=1, resume=True)
    assert capsys.readouterr().out.count("validation") == 1
    assert json.loads(out.read_text())["runs"][-1]["losses"] == lacking["losses"]
    with pytest.raises(typer.BadParameter, match="--resume: got switched"):
        study.study(out, replace(plan, switch=0.9), resume=True)


def test_the_check(plan: Plan, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(study.main)
    out = tmp_path / "stability_check.json"
    words = ["--check", "--data", str(plan.settings.data), "--out", str(out), "--only", "shift", "--steps", "10"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    results = json.loads(out.read_text())
    assert [r["diverged"] for r in results["runs"]] == [False] * 4
    for table in tables.TABLES.values():
        assert isinstance(table(results), str)
    _pictures.draw(tmp_path, tmp_path / "stability_check.png")
    assert (tmp_path / "stability_check.png").read_bytes().startswith(b"\x89PNG")


def test_kinds_that_there_are_not() -> None:
    with pytest.raises(typer.BadParameter, match="--only: got x, takes patterns of shift, ways"):
        study.chosen(["x"])


def made_up(row: str, beta2: float, seed: int, **other: Any) -> dict[str, Any]:
    """AdamW with the long memory spikes at step 205, 4 steps after RMS_t of the patches, and at 400."""
    bad = (row, beta2) == ("AdamW", 0.999)
    run = asdict(Task(row, "clip-small", 2e-3, 512, beta2, 1.0, seed)) | {
        "validation_loss": 2.0 + bad, "accuracy": 0.25 - 0.05 * bad, "training_loss": 1.5, "diverged": False,
        "steps_made": 600, "loss_spikes": [205, 400] if bad else [], "seconds": 1.0,
        "rms_spikes": {"patches": [201] if bad else [], "middle": [300] if bad else [], "tokens": []},
        "rms": {name: {"mean": 1.0, "max": 4.0 if bad else 1.5} for name in tables.TENSORS},
    }  # fmt: skip
    return run | other


@pytest.fixture
def results() -> dict[str, Any]:
    runs = [
        made_up(row, beta2, seed) for row in ("AdamW", "StableAdamW") for beta2 in (0.999, 0.95) for seed in (0, 1)
    ]
    diverged = {
        "validation_loss": None,
        "accuracy": None,
        "training_loss": None,
        "diverged": True,
        "steps_made": 50,
    }
    runs += [made_up("AdamW", 0.999, 0, lr=4e-3, loss_spikes=[], **diverged), made_up("AdamW", 0.95, 0, lr=4e-3)]
    moved = {"rms": {"patches": 9.0, "middle": 1.1}, "rise": 0.6, "quiet": 0.1}
    runs += [made_up("StableAdamW", 0.999, 0, signal=0.0625, loss_spikes=[305], after=moved)]
    return {
        "command": "python studies/stability.py", "environment": {"device": "H200", "torch": "2.11.0+cu"},
        "training": Plan().plain() | {"seed": 0, "seeds": 2}, "data": {"held_out": 322},
        "parameters": {"clip-small": 29_000_000, "clip-mini": 4_000_000, "clip-deep": 50_000_000},
        "rows": [{"name": "AdamW"}, {"name": "StableAdamW"}], "runs": runs,
        "unfinished": [{"row": "AdamW"}],
    }  # fmt: skip


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_tables_say_what_the_runs_say(results: dict[str, Any]) -> None:
    _, _, *body = cells(tables.ways(results))
    assert body[0] == ["AdamW", "0.999", "2, 2", "1, 1", "1.00", "4.0", "1.500", "20.0 (20.0 … 20.0) %"]
    assert body[2][:3] == ["StableAdamW", "0.999", "0, 0"]
    _, _, *body = cells(tables.rates(results))
    assert body[0] == ["0.002", "2, 2", "4.0", "20.0 (20.0 … 20.0) %", "0, 0", "1.5", "25.0 (25.0 … 25.0) %"]
    assert body[1][:2] == ["0.004", "0; 1 of 1 diverged"]
    _, _, *body = cells(tables.shift(results))
    assert body[0][:7] == ["StableAdamW", "0.999", "9.0", "1.1", "1 of 1", "+0.60", "+0.10"]
    assert "1 runs were left out" in tables.origin(results)


def test_loss_spikes_are_matched_over_all_runs_of_adamw(results: dict[str, Any]) -> None:
    _, _, patches, middle, _ = cells(tables.matches(results))
    assert patches[3] == "2 of 4"
    assert middle[3] == "0 of 4"
    # Two runs with 8 steps in reach, four with 500 to judge; the diverged one ended before.
    steps = 5 * 500
    assert tables.match(tables.unclipped(results), results, "patches").chance == pytest.approx(16 / steps)
    ways = [math.comb(16, j) * math.comb(steps - 16, 4 - j) for j in range(2, 5)]
    found = tables.match(tables.unclipped(results), results, "patches")
    assert found.probability == pytest.approx(sum(ways) / math.comb(steps, 4))


def test_a_page_takes_numbers(results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stability_x.json").write_text(json.dumps(results))
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    render.results.cache_clear()
    drawn = render.rendered("<!--=stability_x.json followed_patches-->?<!--/-->")
    render.results.cache_clear()
    assert "-->2 of 4<!--/-->" in drawn
    assert tables.facts(results)["rise_StableAdamW_999"] == "+0.60"


def test_what_the_paper_says_is_read_from_the_runs(
    results: dict[str, Any], readings: Callable[[str], dict[str, list[str]]]
) -> None:
    nothing = readings(_stability_reading.reading(results | {"runs": []}))
    assert {tuple(cells[1:]) for cells in nothing.values()} == {("not run", "")}
    found = readings(_stability_reading.reading(results))
    assert found["The larger the learning rate, the more spikes a run, β2 0.999"][1:] == [
        "2 (0.002), 0, diverged (0.004)",
        "holds",
    ]
    assert found["The larger the model, the more spikes a run, β2 0.999"][1:] == ["not run", ""]
    fewer = "A shorter memory spikes less: β2 0.95, 0.999"
    assert found[fewer][1:] == ["0 spikes, 4; 2 pairs of runs", "cannot tell"]
    follow = "Loss spikes follow RMS spikes of the patch embedding"
    assert found[follow] == ["28 of 30, by chance 1 %", "2 of 4; chance of as many 0.00023", "holds"]
    middle = "Loss spikes do not follow RMS spikes of a layer in the middle"
    assert found[middle][1:] == ["0 of 4; chance of as many 1", "cannot tell"]
    shifted = "The loss of StableAdamW, β2 0.999, does not jump when the signal of the patch embedding grows"
    assert found[shifted][1:] == ["1 of 1 runs; loss +0.60, just before +0.10", "does not hold"]
    (dimmed,) = [made for made in results["runs"] if made["signal"] != 1]
    dimmed["loss_spikes"] = []  # the heuristic sees nothing
    assert readings(_stability_reading.reading(results))[shifted][2] == "does not hold"
    dimmed["after"]["quiet"] = -0.25  # as much of either sign
    assert readings(_stability_reading.reading(results))[shifted][1:] == [
        "0 of 1 runs; loss +0.60, just before -0.25",
        "holds",
    ]
    assert found["RMS_t of the patch embedding passes 2.3 with the long memory alone, first setting"][2] == "holds"
    for made in results["runs"]:
        if (made["row"], made["beta2"]) == ("AdamW", 0.999):
            made["loss_spikes"] = [205, 300, 400]
    found = readings(_stability_reading.reading(results))
    assert found[fewer][1:] == ["0 spikes, 6; 2 pairs of runs", "holds"]
    assert found[middle][2] == "holds"


def test_more_spikes_are_more_than_chance_makes(
    results: dict[str, Any], readings: Callable[[str], dict[str, list[str]]]
) -> None:
    """With every value of what is varied, over the seeds that the first and the last have."""
    statement = "The larger the learning rate, the more spikes a run, β2 0.999"
    results["runs"] = [made for made in results["runs"] if made["lr"] == 2e-3]
    for made in results["runs"]:
        made["loss_spikes"] = []
    results["runs"] += (between := [made_up("AdamW", 0.999, 0, lr=4e-3, loss_spikes=[])])
    results["runs"] += (last := [made_up("AdamW", 0.999, 0, lr=8e-3)])
    unsure = "cannot tell"
    for spikes, middle, verdict in ((1, 0, unsure), (4, 1, unsure), (5, 1, "holds"), (5, 6, unsure)):
        last[0]["loss_spikes"], between[0]["loss_spikes"] = [*range(200, 200 + spikes)], [*range(200, 200 + middle)]
        assert readings(_stability_reading.reading(results))[statement][2] == verdict
    first = next(r for r in results["runs"] if (r["row"], r["beta2"], r["seed"]) == ("AdamW", 0.999, 0))
    first["loss_spikes"], last[0]["loss_spikes"] = [*range(200, 205)], []
    assert readings(_stability_reading.reading(results))[statement][2] == "does not hold"


def test_accuracies_are_read_by_how_many_pictures_there_are(
    results: dict[str, Any], readings: Callable[[str], dict[str, list[str]]]
) -> None:
    shares = {("AdamW", 0.95): 0.30, ("AdamW", 0.999): 0.20, ("StableAdamW", 0.95): 0.45}
    for made in results["runs"]:
        made["accuracy"] = shares.get((made["row"], made["beta2"]), 0.25)
    clipped = [made_up("AdamW, clipped to 1", 0.99, seed, accuracy=0.30) for seed in (0, 1)]
    rising = [made_up("AdamW, β2 = 1 − t^−0.5", 0.959, seed, accuracy=0.31) for seed in (0, 1)]
    results["runs"] += [*clipped, *rising]
    results["rows"] += [{"name": made["row"]} for made in (clipped[0], rising[0])]
    ahead = "StableAdamW ends with more accuracy than clipping and AdamW, each with its best β2"
    rises = "A β2 that rises ends with no more accuracy than the best fixed one"
    found = readings(_stability_reading.reading(results))
    assert found[ahead][1:] == ["StableAdamW 45.0 %, AdamW, clipped to 1 30.0 %, AdamW 30.0 %", "holds"]
    assert found[rises][1:] == ["31.0 %, fixed 30.0 %", "cannot tell"]
    results["data"]["held_out"] = 20
    assert readings(_stability_reading.reading(results))[ahead][2] == "cannot tell"
    results["data"]["held_out"] = 322
    # Seeds that end apart by more than counting does say how far chance goes, whichever row's they are.
    for made in rising:
        made["accuracy"] += 0.2 * (made["seed"] - 0.5)
    assert tables.facts(results)["margin_accuracy"] == "12"  # 200 (0.02 / 6)^0.5
    assert readings(_stability_reading.reading(results))[ahead][2] == "holds"
    for made in rising:
        made["accuracy"] += 0.4 * (made["seed"] - 0.5)
    assert readings(_stability_reading.reading(results))[ahead][2] == "cannot tell"
    for made in rising:
        made["accuracy"] = 0.31
    single = results | {"runs": [made for made in results["runs"] if made["seed"] == 0]}
    assert readings(_stability_reading.reading(single))[ahead][2] == "cannot tell"
    results["data"]["held_out"] = 100_000
    assert readings(_stability_reading.reading(results))[rises][2] == "does not hold"
    for made in rising:
        made["accuracy"] = 0.29
    assert readings(_stability_reading.reading(results))[rises][2] == "holds"


def test_its_page(results: dict[str, Any], page_with: Callable[..., str]) -> None:
    drawn = page_with("stability", {"stability_h200.json": results})
    assert "Not measured yet" not in drawn
    assert "](stability_h200.png)" in drawn
    assert "| AdamW | 0.999 | 2, 2 |" in drawn


def test_rms_of_a_gradient_that_is_the_moment_is_one() -> None:
    g = torch.randn(50, generator=torch.Generator().manual_seed(3))
    assert float(rms_ratio(g, g.square(), EPS)) == pytest.approx(1.0, rel=1e-6)
