"""`narrowgauge bench linear`: what it measures, what it writes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_bench import Machine

from narrowgauge.cli import main
from narrowgauge.cli._bench import _linear, _timing
from narrowgauge.cli._bench._linear import BASELINE, Shape, baseline, operands, pass_of, plan_layer, time_shape
from narrowgauge.linear import LowPrecisionLinear

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SMALL = ("--device", "cpu", "--seconds", "0.001", "--shapes", "8x32x48")


def bench(*arguments: Any) -> int:
    return main(["bench", "linear", *SMALL, *map(str, arguments)])


def test_shapes_are_printed_written_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "l.json"
    figure = out.with_suffix(".png")
    assert bench("--plans", "switchback,SWITCHBACK_M:e4m3", "--json", out, "--figure", figure) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines()[:-2])) <= 80
    assert "SWITCHBACK_M e4m3" in printed
    results = json.loads(out.read_text())
    assert results["command"].startswith("narrowgauge bench linear --device cpu")
    assert results["dtype"] == "bf16"
    assert results["environment"]["threads"] == str(torch.get_num_threads())
    names = [BASELINE, "SWITCHBACK int8", "SWITCHBACK_M e4m3"]
    assert list(results["layers"]) == names
    assert [results["layers"][name]["eight_bits"] for name in names] == [0, 2, 2]
    assert list(results["shapes"]["8x32x48"]) == names
    row = results["shapes"]["8x32x48"]["SWITCHBACK int8"]
    assert row["rounds"] >= 5
    assert row["path"] == "int8 real"
    assert row["first_seconds"] > 0
    assert "host_ms" not in row  # on a CPU it would be `ms` again
    assert results["shapes"]["8x32x48"][BASELINE]["speedup"] == 1
    assert figure.read_bytes()[:4] == b"\x89PNG"
    assert sorted(path.name for path in out.parent.iterdir()) == ["l.json", "l.png"]


def test_what_was_measured_outlives_what_ends_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "l.json"

    def cut_off(shape: Shape, *rest: Any) -> Any:
        if shape.tokens == 9:
            raise KeyboardInterrupt
        return time_shape(shape, *rest)

    monkeypatch.setattr(_linear, "time_shape", cut_off)
    assert bench("--plans", "SWITCHBACK", "--shapes", "8x32x48,9x32x48", "--json", out) == 130
    assert list(json.loads(out.read_text())["shapes"]) == ["8x32x48"]


def test_what_fails_is_a_result_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A layer, and the operands of all, for which there is too little memory."""

    def refuse(*arguments: Any) -> None:
        raise ValueError("no such layer\nand more")

    monkeypatch.setattr(LowPrecisionLinear, "from_linear", refuse)
    assert bench("--plans", "SWITCHBACK", "--json", tmp_path / "l.json") == 1
    assert "SWITCHBACK int8: failed: ValueError: no such layer" in capsys.readouterr().out
    rows = json.loads((tmp_path / "l.json").read_text())["shapes"]["8x32x48"]
    assert rows["SWITCHBACK int8"] == {"failed": "ValueError: no such layer"}
    assert rows[BASELINE]["speedup"] == 1
    monkeypatch.setattr(_linear, "operands", refuse)
    assert bench("--plans", "SWITCHBACK", "--json", tmp_path / "l.json") == 1
    rows = json.loads((tmp_path / "l.json").read_text())["shapes"]["8x32x48"]
    assert [row["failed"] for row in rows.values()] == ["ValueError: no such layer"] * 2


def test_tuning_is_done_once_for_multiplies_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def tune(*arguments: Any, dtype: torch.dtype, device: torch.device) -> dict[str, dict[str, float]]:
        asked.append((*arguments, dtype))
        if arguments[:3] == (1, 2, 3):
            raise RuntimeError("no kernels\nhere")
        return {"output": {"fast": 1.0, "slow": 2.0}, "grad_input": {}}

    monkeypatch.setattr(_linear, "tune", tune)
    plain, codes = plan_layer("SWITCHBACK"), plan_layer("SWITCHBACK_M")
    layers = [plain, codes, baseline(), plan_layer("HIGH_PRECISION")]
    found = _linear.tune_shape(Shape(8, 32, 48), layers, BF16, CPU)
    assert found.keys() == {"SWITCHBACK int8"}
    assert found["SWITCHBACK int8"].pop("seconds") >= 0
    assert found["SWITCHBACK int8"] == {"output": {"way": "fast", "ms": 1.0, "tried": 2}}
    assert asked == [(8, 32, 48, plain.plan, BF16)]
    assert _linear.tune_shape(Shape(1, 2, 3), [plain], BF16, CPU) == {
        "SWITCHBACK int8": {"failed": "RuntimeError: no kernels"}
    }
    with pytest.raises(ValueError, match="--tune: got it without a plan in eight bits"):
        _linear.refuse_tuning(torch.device("cuda"), [plan_layer("HIGH_PRECISION")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "8x0x8"], "--shapes must be tokens, input and output features such as 32768"),
        (["--shapes", ","], "--shapes must be tokens"),
        (["--plans", "SWITCH"], "--plans must be a name such as SWITCHBACK, SWITCHBACK_M,"),
        (["--plans", "SWITCHBACK:int8/e4m3"], "--plans 'SWITCHBACK:int8/e4m3': right_format must be"),
        (["--dtype", "e4m3"], "--dtype must be one of bf16, fp16, fp32, got 'e4m3'"),
        (["--seconds", "nan"], "--seconds must be a finite number above 0, got nan"),
        (["--tune"], "--tune must be given with a CUDA device"),
        (["--peers"], "--peers: none is installed of torchao, bitsandbytes"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_linear, "peer_versions", dict)
    assert bench(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"narrowgauge: {message}")


def test_plans_have_names() -> None:
    named = {
        "SWITCHBACK": "SWITCHBACK int8", "switchback_m:e4m3": "SWITCHBACK_M e4m3",
        "TENSORWISE_FP8:e4m3/e5m2": "TENSORWISE_FP8 e4m3/e5m2", "HIGH_PRECISION": "HIGH_PRECISION",
        "blockwise_fp8": "BLOCKWISE_FP8 e4m3", "BLOCKWISE_FP8:e4m3/e5m2": "BLOCKWISE_FP8 e4m3/e5m2",
    }  # fmt: skip
    for text, name in named.items():
        assert plan_layer(text).name == name
    both = plan_layer("TENSORWISE_FP8:e4m3/e5m2").plan
    assert both is not None
    assert [operand.format for operand in both.operands("grad_input") or ()] == ["e5m2", "e4m3"]
    names = [layer.name for layer in (baseline(), *_linear.default_plans(), *_linear.peers())]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("layer", [baseline(), *_linear.default_plans()], ids=lambda layer: layer.name)
def test_a_layer_computes_what_its_name_says_with_the_same_parameters(layer: _linear.Layer) -> None:
    fed = operands(Shape(8, 32, 16), BF16, CPU)
    made = layer.made(fed.linear)
    assert {id(p) for p in made.parameters()} == {id(p) for p in fed.linear.parameters()}
    assert getattr(made, "plan", None) == layer.plan
    gradients = pass_of(made, fed)()
    assert [g.shape for g in gradients] == [fed.x.shape, fed.linear.weight.shape, fed.linear.bias.shape]
    assert type(fed.linear) is torch.nn.Linear  # what others are made of stays as it is


@given(st.floats(1e-5, 2e-3), st.floats(1e-5, 2e-3), st.floats(1e-5, 2e-3))
def test_on_a_gpu_turns_show_the_slower_of_host_and_device(host: float, device: float, other: float) -> None:
    machine, fast = Machine(host, device, 1.0), Machine(0.0, other, 1.0)
    fast.__dict__ = machine.__dict__  # one clock

    def second() -> None:
        machine.free = max(machine.free, machine.now) + other

    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(perf_counter=lambda: machine.now)
        patch.setattr(_timing, "time", clock)
        patch.setattr(torch.cuda, "Event", machine.event)
        patch.setattr(torch.cuda, "synchronize", machine.synchronize)
        patch.setattr(torch.cuda, "current_stream", lambda device: None)
        found = _timing.take_turns({"a": machine.step, "b": second}, torch.device("cuda"), 0.05)
    assert found.ms("a") == pytest.approx(1e3 * max(host, device), rel=1e-6)
    assert found.ms("b") == pytest.approx(1e3 * other, rel=1e-6)
    assert found.host_ms("a") == pytest.approx(1e3 * host, rel=1e-6)
    assert found.speedup("b", "a") == pytest.approx(max(host, device) / other, rel=1e-6)
    assert len(found.seconds["a"]) == len(found.seconds["b"]) >= 5


def test_a_speed_up_is_that_of_neighbors() -> None:
    """A device that slows down to a tenth in the middle changes medians, but no ratio."""
    slow = [1.0, 1.0, 10.0, 10.0, 10.0]
    found = _timing.Turns({"a": [2 * s for s in slow], "b": slow}, {})
    assert found.speedup("b", "a") == 2
    assert found.ms("b") == 1e4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the peer
@pytest.mark.parametrize("layer", _linear.peers(), ids=lambda layer: layer.name)
def test_every_peer_computes(layer: _linear.Layer) -> None:
    if layer.family not in _linear.peer_versions():
        pytest.skip(reason=f"needs {layer.family}, which is not installed")
    rows = time_shape(Shape(64, 64, 128), [baseline(), layer], BF16, CPU, 0.001)
    assert rows[layer.name].get("ms", 0) > 0, rows


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [baseline(), *_linear.default_plans()], ids=lambda layer: layer.name)
def test_on_a_gpu(layer: _linear.Layer) -> None:
    layers = [baseline()] if layer.name == BASELINE else [baseline(), layer]
    row = time_shape(Shape(256, 128, 384), layers, BF16, torch.device("cuda"), 0.02)[layer.name]
    assert "graph_failed" not in row
    assert min(row["graph_ms"], row["host_ms"], row["first_seconds"]) > 0


@pytest.mark.gpu
def test_tuning_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out = tmp_path / "l.json"
    arguments = ["--device", "cuda", "--shapes", "256x128x384", "--plans", "SWITCHBACK,SWITCHBACK_M", "--tune"]
    assert main(["bench", "linear", *arguments, "--seconds", "0.01", "--json", str(out)]) == 0
    tuned = json.loads(out.read_text())["tuned"]["256x128x384"]
    assert tuned.keys() == {"SWITCHBACK int8"}  # the other multiplies alike
    assert tuned["SWITCHBACK int8"].keys() == {"output", "grad_input", "seconds"}
