"""`narrowgauge bench linear`: what it measures, what it writes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge.cli import main
from narrowgauge.cli._bench_linear import SECTIONS, _layers, _memory, _sizes, _speed, _tuning
from narrowgauge.cli._bench_linear._layers import BASELINE, baseline, plan_layer
from narrowgauge.cli._bench_linear._sizes import Shape
from narrowgauge.linear import LowPrecisionLinear

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SMALL = ("--device", "cpu", "--seconds", "0.001", "--shapes", "8x32x48")


def bench(*arguments: Any) -> int:
    return main(["bench", "linear", *SMALL, *map(str, arguments)])


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid, and layers to hold and to judge, that take no time."""
    sizes = _sizes.Sizes((), (16, 32, 48), (4, 8), 8, (64, 16), Shape(64, 64, 48))
    monkeypatch.setattr(_sizes, "_CPU", sizes)


@pytest.mark.usefixtures("tiny")
def test_all_sections_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "l.json"
    assert bench("--plans", "switchback,SWITCHBACK_M:e4m3", "--json", out) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "SWITCHBACK_M e4m3" in printed
    results = json.loads(out.read_text())
    assert results["command"].startswith("narrowgauge bench linear --device cpu")
    assert results["dtype"] == "bf16"
    assert results["environment"]["threads"] == str(torch.get_num_threads())
    names = [BASELINE, "SWITCHBACK int8", "SWITCHBACK_M e4m3"]
    assert list(results["layers"]) == names
    assert [results["layers"][name]["eight_bits"] for name in names] == [0, 2, 2]
    assert set(SECTIONS) <= results.keys()
    for section in SECTIONS:
        assert all(list(rows) == names for rows in results[section].values()), section
    row = results["shapes"]["8x32x48"]["SWITCHBACK int8"]
    assert row["rounds"] >= 5
    assert row["path"] == "int8 real"
    assert row["first_seconds"] > 0
    assert "host_ms" not in row  # on a CPU it would be `ms` again
    assert results["shapes"]["8x32x48"][BASELINE]["speedup"] == 1
    assert results["grid"].keys() == {f"{tokens}x{dim}" for tokens in (4, 8) for dim in (16, 32, 48)}
    assert results["operations"].keys() == {"8x16", "8x32", "8x48"}
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.usefixtures("tiny")
def test_fewer_with_quick_and_by_section(tmp_path: Path) -> None:
    out = tmp_path / "l.json"
    assert bench("--plans", "SWITCHBACK", "--quick", "--sections", "grid,operations", "--json", out) == 0
    results = json.loads(out.read_text())
    assert results["grid"].keys() == {"8x16", "8x32", "8x48"}
    assert not {"shapes", "memory", "noise"} & results.keys()


@pytest.mark.usefixtures("tiny")
def test_a_run_goes_on_where_another_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "l.json"
    assert bench("--plans", "SWITCHBACK", "--sections", "memory", "--json", out, "--resume") == 0
    first = json.loads(out.read_text())
    first["memory"]["an MLP"][BASELINE]["saving"] = 17.0  # a mark that measuring again would remove
    del first["memory"]["a block, q, k, v apart"]
    out.write_text(json.dumps(first))
    assert bench("--plans", "LLM_INT8", "--sections", "memory,noise", "--json", out, "--resume") == 0
    both = json.loads(out.read_text())
    assert both["memory"]["an MLP"] == first["memory"]["an MLP"]
    assert both["memory"]["a block, q, k, v apart"].keys() == {BASELINE, "LLM_INT8 int8"}
    assert both["noise"]["normal"].keys() == {BASELINE, "LLM_INT8 int8"}
    assert both["layers"].keys() == {BASELINE, "SWITCHBACK int8", "LLM_INT8 int8"}
    assert both["command"] == first["command"]
    assert len(both["resumed"]) == 1
    # Without --resume the file is written anew.
    assert bench("--plans", "LLM_INT8", "--sections", "noise", "--json", out) == 0
    assert "memory" not in json.loads(out.read_text())


@pytest.mark.usefixtures("tiny")
def test_what_was_measured_outlives_what_ends_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, measured = tmp_path / "l.json", []

    def cut_off(of: str, *rest: Any, **others: Any) -> Any:
        if measured:
            raise KeyboardInterrupt
        measured.append(of)
        return _memory.memory(of, *rest, **others)

    monkeypatch.setattr("narrowgauge.cli._bench_linear.memory", cut_off)
    assert bench("--plans", "SWITCHBACK", "--sections", "memory", "--json", out) == 130
    assert list(json.loads(out.read_text())["memory"]) == measured == ["an MLP"]


def test_what_fails_is_a_result_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*arguments: Any) -> None:
        raise ValueError("no such layer\nand more")

    monkeypatch.setattr(LowPrecisionLinear, "from_linear", refuse)
    assert bench("--plans", "SWITCHBACK", "--sections", "shapes", "--json", tmp_path / "l.json") == 1
    assert "SWITCHBACK int8: failed: ValueError: no such layer" in capsys.readouterr().out
    rows = json.loads((tmp_path / "l.json").read_text())["shapes"]["8x32x48"]
    assert rows["SWITCHBACK int8"] == {"failed": "ValueError: no such layer"}
    assert rows[BASELINE]["speedup"] == 1


def test_tuning_is_done_once_for_multiplies_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def tune(*arguments: Any, dtype: torch.dtype, device: torch.device) -> dict[str, dict[str, float]]:
        asked.append((*arguments, dtype))
        if arguments[:3] == (1, 2, 3):
            raise RuntimeError("no kernels\nhere")
        return {"output": {"fast": 1.0, "slow": 2.0}, "grad_input": {}}

    monkeypatch.setattr(_tuning, "tune", tune)
    results: dict[str, Any] = {}
    tuner = _tuning.Tuner(results, BF16, CPU)
    shape, plain, codes = Shape(8, 32, 48), plan_layer("SWITCHBACK"), plan_layer("SWITCHBACK_M")
    found = tuner.tune(shape, plain)
    assert found is not None
    assert found["output"] == {"way": "fast", "ms": 1.0, "tried": 2}
    assert found.keys() == {"output", "seconds"}
    for layer in (plain, codes, baseline(), plan_layer("HIGH_PRECISION")):
        assert tuner.tune(shape, layer) is None
    assert asked == [(8, 32, 48, plain.plan, BF16)]
    assert tuner.tune(shape, plan_layer("SWITCHBACK:e4m3")) is not None
    assert tuner.tune(Shape(1, 2, 3), plain) == {"failed": "RuntimeError: no kernels"}
    assert results["tuned"].keys() == {"8x32x48", "1x2x3"}
    with pytest.raises(ValueError, match="--tune: got it without a plan in eight bits"):
        _tuning.refuse_tuning(torch.device("cuda"), [plan_layer("HIGH_PRECISION")])


def test_too_little_memory_for_operands_is_a_result_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(_speed, "operands", full)
    assert bench("--plans", "SWITCHBACK", "--sections", "shapes", "--json", tmp_path / "l.json") == 1
    rows = json.loads((tmp_path / "l.json").read_text())["shapes"]["8x32x48"]
    assert {row["failed"] for row in rows.values()} == {"OutOfMemoryError: no room"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--shapes", "8x8"],
            "--shapes: got '8x8', takes tokens, input and output features such as 32768x1280x5120",
        ),
        (["--shapes", "8x0x8"], "--shapes: got '8x0x8', takes tokens"),
        (["--shapes", ","], "--shapes: got ',', takes tokens"),
        (["--plans", "SWITCH"], "--plans must be a name such as SWITCHBACK, SWITCHBACK_M,"),
        (["--plans", ","], "--plans must be a name such as"),
        (["--plans", "SWITCHBACK:e3m4"], "--plans 'SWITCHBACK:e3m4': format must be 'int8'"),
        (["--plans", "SWITCHBACK:int8/e4m3"], "--plans 'SWITCHBACK:int8/e4m3': right_format must be"),
        (["--plans", "SWITCHBACK:e4m3/"], "--plans must be a name"),
        (["--plans", "HIGH_PRECISION:int8"], "--plans must be a name"),
        (["--sections", "speed"], "--sections: got 'speed', takes shapes, memory, noise, operations, grid"),
        (["--sections", ","], "--sections: got ',', takes shapes"),
        (["--dtype", "e4m3"], "--dtype: got 'e4m3', takes bf16, fp16, fp32"),
        (["--device", "tpu"], "--device: got 'tpu'"),
        (["--seconds", "0"], "--seconds: got 0.0, takes a finite number above 0"),
        (["--seconds", "nan"], "--seconds: got nan, takes a finite number above 0"),
        (["--tune"], "--tune: got it with the device cpu, takes a CUDA device"),
        (["--resume"], "--resume: got it without --json, takes the results file to go on with"),
        (["--peers", "--sections", "grid"], "--peers: got it without the section shapes"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"narrowgauge: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "holds no results to go on with"),
        ("[", "holds no results to go on with"),
        (
            '{"environment": {"device": "a GPU"}, "dtype": "bf16", "layers": {}}',
            "is of device a GPU, this run is of",
        ),
        ('{"environment": {}, "dtype": "fp32", "layers": {}}', "is of dtype fp32, this run is of bf16"),
    ],
)
def test_results_of_another_kind_are_not_gone_on_with(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "l.json"
    out.write_text(text)
    assert bench("--json", out, "--resume", "--sections", "memory") == 2
    assert message in capsys.readouterr().err
    assert out.read_text() == text


def test_no_peer_at_all_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_layers, "peer_versions", dict)
    assert bench("--peers") == 2
    assert capsys.readouterr().err == "narrowgauge: --peers: none is installed of torchao, bitsandbytes\n"


@pytest.mark.gpu
def test_tuning_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out = tmp_path / "l.json"
    arguments = ["--device", "cuda", "--shapes", "256x128x384", "--plans", "SWITCHBACK,SWITCHBACK_M", "--tune"]
    assert (
        main(["bench", "linear", *arguments, "--sections", "shapes", "--seconds", "0.01", "--json", str(out)]) == 0
    )
    tuned = json.loads(out.read_text())["tuned"]["256x128x384"]
    assert tuned.keys() == {"SWITCHBACK int8"}  # the other multiplies alike
    assert tuned["SWITCHBACK int8"].keys() == {"output", "grad_input", "seconds"}
