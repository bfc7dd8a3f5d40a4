"""The optimizer study: rows keep what they say, runs of a seed begin alike, sweeps choose, the tables tell it."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _eight_bit_adam_plan as planned
import _glyphs
import _variants_reading
import _variants_rows as rows
import _variants_run
import _variants_tables as tables
import adam_variants as study
import pytest
import render
import torch
import typer
from _variants_run import Plan, Task
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def plan(training: Any) -> Plan:
    language = dataclasses.replace(study.CHECK.language, data=training.data, vocabulary=256, steps=12)
    return dataclasses.replace(study.CHECK, language=language, image_width=16, image_steps=3)


@pytest.fixture(scope="module")
def runs(plan: Plan) -> dict[str, Any]:
    adam = [row.name for row in rows.family("adam") if row.refusal("cpu") is None]
    return {name: _variants_run.run(Task("language", name, 2e-3, 0), plan) for name in adam}


def test_rows_of_a_family_begin_alike_and_keep_less(runs: dict[str, Any]) -> None:
    assert len({run["curve"][0][1] for run in runs.values()}) == 1
    assert runs["32-bit Adam"]["bytes"]["states"] == pytest.approx(8, rel=0.01)
    for narrow in ("8-bit Adam", "8-bit Adam, dynamic"):
        # The embedding, an eighth of this toy, keeps 32 bits.
        assert 2.0 < runs[narrow]["bytes"]["states"] < 3.5
        assert runs[narrow]["training_loss"] == pytest.approx(runs["32-bit Adam"]["training_loss"], abs=0.02)


def test_momentum_on_pictures_keeps_a_byte_or_four(plan: Plan) -> None:
    found = {
        name: _variants_run.run(Task("images", name, 0.1, 0), plan)
        for name in ("32-bit Momentum", "8-bit Momentum", "8-bit Momentum, dynamic")
    }
    sizes = [run["bytes"]["states"] for run in found.values()]
    assert sizes[0] == pytest.approx(4, rel=0.01)
    assert max(sizes[1:]) < 1.5
    assert all(0 <= run["accuracy"] <= 1 for run in found.values())


KEPT = {"8-bit Adam": "m:log8 v:log8", "8-bit AdaGrad": "v:log8", "8-bit Momentum": "m:log8"}


@pytest.mark.parametrize("name", [f"{name}{how}" for name in KEPT for how in ("", ", dynamic")])
def test_a_row_keeps_the_states_that_it_names(name: str) -> None:
    optimizer = rows.variant(name).make(
        torch.nn.Linear(64, 64, bias=False), {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "seed": 0}
    )
    kept = KEPT[name.removesuffix(", dynamic")]
    (row,) = optimizer.describe().rows
    assert row.states == (kept.replace("log8", "8bit") if name.endswith(", dynamic") else kept)


def test_every_other_row_trains_too(plan: Plan) -> None:
    for kind, name, lr in (("masked", "32-bit Adafactor", 0.1), ("language", "8-bit AdaGrad, dynamic", 0.02)):
        run = _variants_run.run(Task(kind, name, lr, 0), plan)
        assert run["curve"][-1][1] < run["curve"][0][1]


def test_what_is_not_installed_says_so(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="torchao is not installed"):
        _variants_run.run(Task("language", "torchao Adam8bit", 1e-3, 0), plan)
    monkeypatch.setattr(rows.importlib.util, "find_spec", lambda name: True)
    with pytest.raises(RuntimeError, match="it takes a GPU, this is cpu"):
        _variants_run.run(Task("language", "bitsandbytes Adam8bit", 1e-3, 0), plan)


def test_a_family_begins_with_32_bits_and_has_rates() -> None:
    for families in rows.FAMILIES.values():
        for family in families:
            assert rows.family(family)[0].name.startswith("32-bit")
            assert list(rows.RATES[family]) == sorted(rows.RATES[family])
    assert {row.family for row in rows.VARIANTS} == {f for families in rows.FAMILIES.values() for f in families}


def test_pictures_are_those_of_their_seed_and_fonts_are_apart() -> None:
    first, again, other = (next(_glyphs.Glyphs(_glyphs.TRAINED, 8, seed)) for seed in (0, 0, 1))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first[0], other[0])
    assert first[0].shape == (8, 1, _glyphs.SIZE, _glyphs.SIZE)
    assert set(_glyphs.TRAINED) & set(_glyphs.HELD_OUT) == set()


def test_pictures_do_not_depend_on_what_else_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fonts bring fribidi, with which Pillow finds another default for where characters are placed."""
    engines = []
    truetype = _glyphs.ImageFont.truetype

    def spy(*args: Any, layout_engine: Any = None) -> Any:
        engines.append(layout_engine)
        return truetype(*args, layout_engine=layout_engine)

    monkeypatch.setattr(_glyphs.ImageFont, "truetype", spy)
    _glyphs.bank.__wrapped__(_glyphs.TRAINED)
    assert set(engines) == {_glyphs.ImageFont.Layout.BASIC}


def test_characters_are_drawn_whole_and_differ() -> None:
    bank = _glyphs.bank(_glyphs.TRAINED + _glyphs.HELD_OUT)
    edges = torch.stack([bank[..., 0, :], bank[..., -1, :], bank[..., :, 0], bank[..., :, -1]])
    assert edges.max() == 0
    assert bank.amax((2, 3)).min() > 0.9
    flat = bank.flatten(2)
    apart = (flat[:, :, None] - flat[:, None]).abs().sum(-1) + 1e9 * torch.eye(len(_glyphs.CHARACTERS))
    assert apart.min() > 10


def test_a_network_learns_characters() -> None:
    model = _glyphs.network(0, width=8)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    images, labels = next(_glyphs.Glyphs(_glyphs.TRAINED, 32, 0))
    for _ in range(40):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        torch.autograd.backward(loss)
        optimizer.step()
    assert float(loss.detach()) < 1.0 < math.log(36)


def test_the_study_sweeps_chooses_and_goes_on(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out, few = tmp_path / "adam_variants_cpu.json", dataclasses.replace(plan, image_width=4)
    run = functools.partial(study.study, out, few, kinds=["images"], ablation_seeds=1)
    run(seeds=1)
    first = json.loads(out.read_text())
    assert first["unfinished"] == []
    losses = {r["lr"]: r["validation_loss"] for r in first["runs"] if r["row"] == "32-bit Momentum"}
    assert set(losses) == set(rows.RATES["momentum"])
    chosen = min(losses, key=losses.__getitem__)
    assert {r["lr"] for r in first["runs"] if r["row"].startswith("8-bit")} == {chosen}
    assert tables.rate_of(first, "images", "momentum") == chosen
    capsys.readouterr()
    run(seeds=2, resume=True)
    second = json.loads(out.read_text())
    assert [r for r in second["runs"] if r["seed"] == 0 and "failed" not in r] == [
        r for r in first["runs"] if "failed" not in r
    ]
    assert {r["seed"] for r in second["runs"]} == {0, 1}
    assert second["training"]["seeds"] == 2


def test_the_check_makes_every_kind_of_run(training: Any, tmp_path: Path, page_with: Callable[..., str]) -> None:
    app = typer.Typer()
    app.command()(study.main)
    out = tmp_path / "adam_variants_check.json"
    result = CliRunner().invoke(app, ["--check", "--data", str(training.data), "--out", str(out)])
    assert result.exit_code == 0, result.output
    results = json.loads(out.read_text())
    assert {run["kind"] for run in results["runs"]} == set(study.KINDS)
    arms = {run["row"] for run in results["runs"] if run["kind"] == "ablation"}
    assert arms == {_variants_run.name_of(arm) for arm in planned.ARMS}
    for table in tables.TABLES.values():
        assert table(results).strip()
    assert not [run for run in results["runs"] if "failed" in run and "not installed" not in run["failed"]]
    assert "Not measured yet" not in page_with("adam_variants", {"adam_variants_h200.json": results})


def test_a_task_that_there_is_not(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(study.main)
    result = CliRunner().invoke(app, ["--only", "audio", "--out", str(tmp_path / "x.json")])
    assert result.exit_code == 2
    assert "audio" in result.output


def made_up() -> list[dict[str, Any]]:
    """Adam: ln 8 at its best rate, 0.2 more with seed 1; in 8 bits 0.01 more. Linear codes hardly end well."""
    runs = []
    for lr, more in zip(rows.RATES["adam"], (0.3, 0.0, 0.2, 0.4), strict=True):
        for seed in (0, 1) if more == 0 else (0,):
            loss = math.log(8) + more + 0.2 * seed
            common = {"training_loss": 1.0, "diverged": False, "bytes": {"states": 8.0}, "step_ms": 5.0}
            base = {"kind": "language", "lr": lr, "seed": seed} | common
            runs.append(base | {"row": "32-bit Adam", "validation_loss": loss})
            if more == 0:
                runs.append(base | {"row": "8-bit Adam", "validation_loss": loss + 0.01, "bytes": {"states": 2.0}})
    runs.append(
        {"kind": "language", "row": "torchao Adam8bit", "lr": 2e-3, "seed": 0, "failed": "RuntimeError: no"}
    )
    for arm in planned.ARMS:
        for seed in (0, 1):
            bad = arm.codebook == "linear" and (seed == 0 or not arm.stable)
            found = {"unstable": "it diverged" if bad else None, "validation_loss": None if bad else math.log(4)}
            row = _variants_run.name_of(arm)
            runs.append({"kind": "ablation", "row": row, "lr": 8e-3, "seed": seed, "diverged": bad} | found)
    accuracy = {"32-bit Momentum": 0.8, "8-bit Momentum": 0.81}
    for row, share in accuracy.items():
        common = {"validation_loss": 1.0, "training_loss": 1.0, "bytes": {"states": 4.0}, "step_ms": 2.0}
        runs.append({"kind": "images", "row": row, "lr": 0.1, "seed": 0, "accuracy": share} | common)
    return runs


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_tables_say_what_the_runs_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = {"runs": made_up(), "training": {"seeds": 2, "vocabulary": 4096}}
    _, _, *body = cells(tables.language(results))
    middle = 4 * (1 + math.exp(0.2))
    assert body[0][2:] == [
        "9.0; Table 7: 16.7",
        f"{middle:.2f} (8.00 … {8 * math.exp(0.2):.2f})",
        "",
        "0.002",
        "8.00",
        "5.0",
    ]
    assert body[1][2] == "9.0; Table 7: 16.4"
    assert body[1][4:7] == ["+0.0100 (+0.0100 … +0.0100)", "0.002", "2.00"]
    assert [row[3] for row in body if row[0] == "torchao Adam8bit"] == ["no"]
    # A finite loss above that of a guess is nothing to take a mean with.
    left = next(run for run in results["runs"] if (run["row"], run["seed"]) == ("8-bit Adam", 1))
    kept, left["validation_loss"] = left["validation_loss"], 2500.0
    _, _, *worse = cells(tables.language(results))
    assert worse[1][3:5] == [f"{8 * math.exp(0.01):.2f}, 1 of 2 diverged", "+0.0100"]
    left["validation_loss"] = kept
    assert [row[2] for row in body if row[0] == "32-bit AdaGrad"] == ["Table 7: 19.4"]
    _, _, *body = cells(tables.images(results))
    assert body[1][2:5] == ["77.2", "81.00", "+1.00"]
    head, _, *body = cells(tables.ablation(results))
    assert head[4:] == ["lr 0.008: unstable", "perplexity"]
    assert body[0] == ["32-bit", "usual", "0 %", "16.7", "0 of 2", "4.000"]
    assert body[2][2:] == ["90 %", "253.0", "2 of 2", ""]
    assert body[5][2:] == ["", "", "1 of 2", "4.000"]
    assert cells(tables.sweep(results))[2][2:] == [
        "0.001: 2.3794",
        "0.002: 2.0794",
        "0.004: 2.2794",
        "0.008: 2.4794",
    ]
    (tmp_path / "adam_variants_x.json").write_text(json.dumps(results))
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    render.results.cache_clear()
    assert "-->+0.0100<!--/-->" in render.rendered("<!--=adam_variants_x.json language_8_bit_Adam-->?<!--/-->")


def test_what_the_paper_says_is_read_from_the_runs(readings: Callable[[str], dict[str, list[str]]]) -> None:
    results = {"runs": made_up(), "training": {"seeds": 2, "vocabulary": 4096}}
    nothing = readings(_variants_reading.reading(results | {"runs": []}))
    assert {tuple(cells[1:]) for cells in nothing.values()} == {("not run", "")}
    found = readings(_variants_reading.reading(results))
    same = "causal language model: `8-bit Adam` ends where `32-bit Adam` does"
    assert found[same] == [
        "perplexity 9.0 and 9.0, 1.5B",
        "loss +0.0100 (+0.0100 … +0.0100); its seeds 0.2000 apart",
        "holds",
    ]
    # Between seeds that lie far apart an equal end is no finding.
    for run in results["runs"]:
        if run["kind"] == "language" and run["seed"] == 1:
            run["validation_loss"] += 0.3
    far = readings(_variants_reading.reading(results))[same]
    assert far[1:] == ["loss +0.0100 (+0.0100 … +0.0100); its seeds 0.5000 apart", "cannot tell"]
    for run in results["runs"]:
        if run["row"] == "8-bit Adam":
            run["validation_loss"] += 0.6
    assert readings(_variants_reading.reading(results))[same][2] == "does not hold"
    for run in results["runs"]:
        if run["row"] == "8-bit Adam":
            run["validation_loss"] -= 0.6
    for run in results["runs"]:
        if run["kind"] == "language" and run["seed"] == 1:
            run["validation_loss"] -= 0.3
    assert found["masked language model: `32-bit Adafactor` ends behind `32-bit Adam`"][1:] == ["not run", ""]
    pictures = "characters in pictures: `8-bit Momentum` ends where `32-bit Momentum` does"
    assert found[pictures][1:] == ["accuracy +1.00; one seed", "cannot tell"]
    # Linear codes: unstable with the usual embedding, half of the runs with the stable one; dynamic ones never.
    unstable = {name: cells[1:] for name, cells in found.items() if "fewer" in name}
    assert unstable == {
        "Dynamic codes make fewer runs unstable than linear ones": ["0 of 8, 6 of 8", "holds"],
        "Blocks make fewer runs unstable, dynamic codes": ["0 of 4, 0 of 4", "cannot tell"],
        "The stable embedding makes fewer 8-bit runs unstable": ["2 of 8, 4 of 8", "cannot tell"],
    }
    for run in results["runs"]:
        if run["row"] == "8-bit Adam":
            run["validation_loss"] += 0.6
        if run["kind"] == "images":
            run["accuracy"] -= 0.5 * (run["row"] == "8-bit Momentum")
    results["runs"] += [run | {"seed": 1} for run in results["runs"] if run["kind"] == "images"]
    found = readings(_variants_reading.reading(results))
    assert found[same][2] == "does not hold"
    assert found[pictures][1] == "accuracy -49.00 (-49.00 … -49.00); its seeds 0.00 apart"
    assert found[pictures][2] == "does not hold"
