"""`narrowgauge bench optimizers`: what it measures, what it writes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge.cli import main
from narrowgauge.cli._bench import _lists, _measure, _rows
from narrowgauge.cli._bench._lists import ParameterList, parameter_list
from narrowgauge.cli._bench._rows import Row

CPU = torch.device("cpu")


def bench(*arguments: Any) -> int:
    return main(["bench", "optimizers", "--device", "cpu", "--seconds", "0.001", *map(str, arguments)])


def row(name: str, device: str = "cpu") -> Row:
    return next(found for found in _rows.rows(torch.device(device)) if found.name == name)


def test_a_table_and_a_results_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "b.json"
    assert bench("--lists", "64x64,3", "--only", "adamw 8bit,fused", "--json", out) == 0
    printed = capsys.readouterr().out
    assert "AdamW 8bit, split8" in printed
    assert "torch AdamW fused, bf16" in printed
    assert "GB/s" in printed
    assert max(map(len, printed.splitlines())) <= 80
    results = json.loads(out.read_text())
    assert results["command"].startswith("narrowgauge bench optimizers --device cpu")
    assert results["copy_bytes_per_second"] > 1e8
    assert results["environment"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert row("bitsandbytes AdamW8bit").version() is None or "bitsandbytes" not in results["environment"]
    assert results["lists"].keys() == {"64x64", "3"}
    square = results["lists"]["64x64"]
    assert (square["tensors"], square["parameters"]) == (1, 4096)
    for figures in square["rows"].values():
        assert figures["steps"] >= 5
        assert figures["ms_per_1e9"] == pytest.approx(figures["ms"] * 1e9 / 4096)
        assert figures["share"] == pytest.approx(figures["limit_ms"] / figures["ms"])
        assert figures["first_step_seconds"] > 0
    assert not list(tmp_path.rglob("*.tmp"))


# What a step has to move, bytes a parameter: by hand.
MOVED = {
    "AdamW 8bit": 10.0625, "AdamW 8bit, skip": 12.0625, "AdamW 8bit, split8": 12.0625, "AdamW 8bit, split": 14.0625,
    "AdamW 8bit, expansion": 14.0625, "AdamW log8": 10.0625, "AdamW log8, split8": 12.0625, "AdamW fp8": 10.0625,
    "Collage-light": 18, "Collage-plus": 22, "AdamW fp32": 28, "torch AdamW fused, fp32": 28, "Lion 8bit": 8.03125,
}  # fmt: skip


@pytest.mark.parametrize("name", MOVED)
def test_the_bytes_that_a_step_moves(name: str) -> None:
    figures = _measure.measure(row(name), parameter_list("256x256"), CPU, 1e9, 1e-3)
    assert figures["moved_bytes"] == pytest.approx(MOVED[name], abs=1e-3)  # counters are a few bytes
    assert figures["limit_ms"] == pytest.approx(1e3 * MOVED[name] * 65536 / 1e9, rel=1e-3)


@pytest.mark.parametrize("found", _rows.rows(torch.device("cuda")), ids=lambda found: found.name)
def test_every_row_steps_or_says_why_not(found: Row) -> None:
    if "cpu" not in found.devices or found.family in ("torchao", "heavyball"):
        pytest.skip(f"{found.name} runs on GPUs only, or compiles for minutes")
    figures = _measure.measure(found, parameter_list("64x70"), CPU, 1e9, 1e-3)
    assert figures.get("ms", 0) > 0 or figures["failed"] == f"{found.family} is not installed"


def test_what_fails_is_a_result_of_its_own(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    broken = Row("broken", "nothing", torch.float32, "torch.optim", "AdamW", {"lr": -1.0})
    monkeypatch.setattr("narrowgauge.cli._bench.rows", lambda device: (broken, row("AdamW fp32")))
    assert bench("--lists", "8x8") == 1
    printed = capsys.readouterr().out
    assert "ValueError: Invalid learning rate" in printed
    assert "AdamW fp32" in printed


def test_the_lists_are_the_models() -> None:
    counts = {name: parameter_list(name).counts() for name in _lists._LISTS}
    assert counts["big"] == {"tensors": 16, "parameters": 2**30}
    assert counts["gpt2"]["parameters"] == 124_439_808
    assert counts["gpt2-medium"] == {"tensors": 292, "parameters": 354_823_168}
    assert counts["vit-huge"]["parameters"] == pytest.approx(631e6, rel=0.01)
    assert isinstance(parameter_list("5x6x7"), ParameterList)
    assert parameter_list("5x6x7").counts() == {"tensors": 1, "parameters": 210}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lists", "huge"], "--lists: got 'huge', takes big, matrix, gpt2, gpt2-medium, vit-huge, or a shape"),
        (["--only", "nothing"], "--only: got 'nothing', takes parts of AdamW 8bit,"),
        (["--device", "tpu"], "--device: got 'tpu'"),
        (["--device", "mps"], "--device: got 'mps', takes 'auto', 'cpu', 'cuda' or 'cuda:N'"),
        (["--seconds", "0"], "--seconds: got 0.0, takes a number above 0"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"narrowgauge: {message}")


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    device = torch.device("cuda")
    speed = _measure.copy_speed(device)
    figures = _measure.measure(
        row("torch AdamW fused, fp32", "cuda"), parameter_list("4096x4096"), device, speed, 0.1
    )
    assert speed > 1e11
    assert 0.01 < figures["share"] < 1.5
