"""Throughput and peaks: what is measured is a step, what does not fit is a result, tables follow from two times."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _pictures
import _throughput_reading
import _throughput_tables as tables
import collage_throughput as study
import pytest
import render
import torch
import typer
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("throughput") / "collage_throughput_check.json"
    app = typer.Typer()
    app.command()(study.main)
    result = CliRunner().invoke(app, ["--check", "--out", str(out)])
    assert result.exit_code == 0, result.output
    return json.loads(out.read_text())


def test_the_check_measures_every_row(checked: dict[str, Any]) -> None:
    assert [run["row"] for run in checked["runs"]] == [row.name for row in study.ROWS]
    for run in checked["runs"]:
        assert 0 < run["forward_backward_ms"] < run["step_ms"]
        assert run["optimizer_ms"] > 0
        assert run["out_of_memory"] is False
        assert (run["planned"] is None) == run["row"].startswith("torch")
    for table in tables.TABLES.values():
        assert table(checked).strip()


def test_a_plan_holds_a_row_s_bytes(checked: dict[str, Any]) -> None:
    """Weights, states and low words of the plan are the bytes that the row says, but for its gradients."""
    for run, row in zip(checked["runs"], study.ROWS, strict=True):
        if run["planned"] is not None and "8bit" not in row.name:  # of a toy whose small tensors keep 32 bits
            held = sum(run["planned_parts"][name] for name in ("weights", "states", "low words"))
            exact = run["parameters"] * (study.bytes_of(row) - row.dtype.itemsize)
            assert (
                exact <= held < 1.06 * exact
            )  # the allocator's blocks have 512 bytes, as the toy's biases have not


def test_what_a_row_trains_is_what_it_says() -> None:
    for row in study.ROWS:
        model = torch.nn.Linear(64, 65).to(row.dtype)
        optimizer = row.optimizer(model)
        assert {p.dtype for p in model.parameters()} == {row.dtype}
        assert isinstance(optimizer, torch.optim.Optimizer)
    assert {study.bytes_of(row) for row in study.ROWS if row.recipe is None} == {8.0, 16.0}


def test_what_does_not_fit_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(study, "_steps", full)
    found = study.measure(study.Task(study.TOY, "D"), device="cpu", batch=1, sequence=8, steps=1)
    assert found["out_of_memory"] is True
    assert found["planned"] > 0
    monkeypatch.setattr(study, "_steps", lambda *_: (_ for _ in ()).throw(RuntimeError("another")))
    with pytest.raises(RuntimeError, match="another"):
        study.measure(study.Task(study.TOY, "D"), device="cpu", batch=1, sequence=8, steps=1)


def test_small_models_come_first() -> None:
    tasks = study.plan(study.MODELS, study.ROWS[:2])
    assert [task.kind for task in tasks[:3]] == ["GPT-125M", "GPT-125M", "GPT-1.3B"]
    assert len(tasks) == 2 * len(study.MODELS)


@pytest.mark.parametrize(("words", "said"), [(["--model", "GPT-5"], "GPT-5"), (["--only", "Z"], "Z")])
def test_names_that_there_are_not(words: list[str], said: str, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(study.main)
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "x.json")])
    assert result.exit_code == 2
    assert said in result.output


def made_up() -> dict[str, Any]:
    """D: 100 ms and 50 ms; C: 100 ms and 20 ms, 3 GB less; A does not fit."""
    common = {"kind": "GPT-6.7B", "out_of_memory": False}
    runs = [
        common
        | {"row": "D", "forward_backward_ms": 100.0, "optimizer_ms": 50.0, "peak_memory": 10e9, "planned": 9e9},
        common
        | {"row": "C", "forward_backward_ms": 100.0, "optimizer_ms": 20.0, "peak_memory": 7e9, "planned": 7e9},
        {"kind": "GPT-6.7B", "row": "A", "out_of_memory": True, "planned": 200e9},
    ]
    return {
        "runs": runs, "unfinished": [{"kind": "GPT-6.7B", "row": "B"}], "device_memory": 150e9,
        "rows": [{"name": n, "title": n, "bytes": 12.0} for n in ("D", "C", "A", "B")],
        "training": {"batch": 1, "sequence": 2048, "steps": 7},
        "environment": {"device": "H200", "torch": "2.11.0+cu130"},
        "command": "python studies/collage_throughput.py",
    }  # fmt: skip


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_tables_say_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = made_up()
    _, _, *body = cells(tables.speed(results))
    assert body[1][2:] == ["3.57×", "1.25×", f"{1650 / 1620:.2f}×"]
    assert body[2][2:] == ["3.82×", "does not fit", "does not fit"]
    assert body[3][2:] == ["3.74×", "", ""]
    _, _, *body = cells(tables.milliseconds(results))
    assert body[0] == ["D", "100.0", "50.00", f"{2048 / 0.15:,.0f}"]
    _, _, *body = cells(tables.memory(results))
    assert body[0][1:] == ["9.00", "10.00", "", ""]
    assert body[1][1:] == ["7.00", "7.00", "3.00", "27.6"]  # 25.7 GiB
    assert body[2][1:3] == ["200.00", "does not fit"]
    assert tables.facts(results)["plan_error"] == "10.0 %"
    assert "1 measurements were left out" in tables.origin(results)
    for run in results["runs"]:
        run["parameters"] = 6_700_000_000
    (tmp_path / "collage_throughput_x.json").write_text(json.dumps(results))
    _pictures.draw(tmp_path, tmp_path / "collage_throughput_x.png")
    assert (tmp_path / "collage_throughput_x.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    render.results.cache_clear()
    assert "-->1.25<!--/-->" in render.rendered("<!--=collage_throughput_x.json speed_C_GPT_6_7B-->?<!--/-->")


def test_a_host_that_was_busy_during_one_option_does_not_count() -> None:
    results = made_up()
    before = tables.speed_up(results, "GPT-6.7B", "C")
    assert tables.shared_pass(results, "GPT-6.7B") == 100.0
    results["runs"][1]["forward_backward_ms"] = 140.0
    assert tables.speed_up(results, "GPT-6.7B", "C") == before == 150 / 120
    autocast = results["runs"][1] | {"row": "torch fused, fp32", "optimizer_ms": 60.0}
    results["runs"].append(autocast)
    results["rows"].append({"name": "torch fused, fp32", "title": "t", "bytes": 16.0})
    assert tables.speed_up(results, "GPT-6.7B", "torch fused, fp32") == pytest.approx(150 / 200)
    assert tables.speed_up(results, "GPT-6.7B", "torch fused, fp32", 16) == pytest.approx(1650 / 2300)


def test_what_the_paper_says_is_read_from_what_was_measured(
    page_with: Callable[..., str], readings: Callable[[str], dict[str, list[str]]]
) -> None:
    """D takes 150 ms at every size, the optimizer less the more of it an option leaves out."""
    results = made_up()
    drawn = page_with("collage_throughput", {"collage_throughput_h200.json": results})
    assert "Not measured yet" not in drawn
    assert "](collage_throughput_h200.png)" in drawn
    nothing = readings(_throughput_reading.reading(results | {"runs": []}))
    assert {tuple(cells[1:]) for cells in nothing.values()} == {("not run", "")}
    faster, grows = "`C` is faster than D at every size", "The larger the model, the more `C` gains"
    found = readings(_throughput_reading.reading(results))
    assert found[faster] == ["1.67× to 3.57×", "1.25×, 1 of 4 models", "cannot tell"]
    assert found["A plan is within 5 % of the peak"][1:] == ["off by 10.0 % at most, 2 plans", "does not hold"]
    results["runs"] = [
        {
            "kind": model, "row": row, "out_of_memory": False, "forward_backward_ms": 100.0,
            "optimizer_ms": 50.0 - step * gain, "peak_memory": 1e9 * (10 - gain), "planned": 1e9 * (10 - gain),
        }
        for step, model in enumerate(("GPT-1.3B", "GPT-2.7B", "GPT-6.7B"), start=1)
        for gain, row in enumerate("DCBA")
    ]  # fmt: skip
    found = readings(_throughput_reading.reading(results))
    ratios = [150 / (150 - step) for step in (1, 2, 3)]
    assert found[faster][1:] == [f"{ratios[0]:.2f}× to {ratios[2]:.2f}×, 3 of 4 models", "does not hold"]
    assert found[grows][2] == "does not hold"
    for run in results["runs"]:
        run["optimizer_ms"] -= 10 * (50.0 - run["optimizer_ms"])
    found = readings(_throughput_reading.reading(results))
    assert (found[faster][2], found[grows][2]) == ("holds", "holds")
    order = "Peaks rise from `A` to `B`, `C` and D, at every size"
    assert found[order][1:] == ["3 of 3 models", "holds"]
    assert found["`C` saves memory against D, GPT-6.7B"][1] == "1.0 GB"
    results["runs"][0]["peak_memory"] = 8.5e9
    found = readings(_throughput_reading.reading(results))
    assert found[order][1:] == ["2 of 3 models", "does not hold"]
