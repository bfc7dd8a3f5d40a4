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
from narrowgauge.cli._bench import _times
from narrowgauge.cli._bench_linear import (
    SECTIONS,
    _layers,
    _memory,
    _noise,
    _operations,
    _passes,
    _sizes,
    _speed,
    _tuning,
)
from narrowgauge.cli._bench_linear._layers import BASELINE, baseline, plan_layer
from narrowgauge.cli._bench_linear._sizes import Shape
from narrowgauge.linear import LowPrecisionLinear, quantize

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


def test_plans_have_names() -> None:
    named = {
        "SWITCHBACK": "SWITCHBACK int8", "switchback_m:e4m3": "SWITCHBACK_M e4m3",
        "TENSORWISE_FP8:e4m3/e5m2": "TENSORWISE_FP8 e4m3/e5m2", "HIGH_PRECISION": "HIGH_PRECISION",
    }  # fmt: skip
    for text, name in named.items():
        assert plan_layer(text).name == name
    both = plan_layer("TENSORWISE_FP8:e4m3/e5m2").plan
    assert both is not None
    assert [operand.format for operand in both.operands("grad_input") or ()] == ["e5m2", "e4m3"]
    names = [layer.name for layer in (baseline(), *_layers.default_plans(), *_layers.peers())]
    assert len(set(names)) == len(names)
    assert {layer.name for layer in _layers.grid_plans()} <= set(names)


@pytest.mark.parametrize("layer", [baseline(), *_layers.default_plans()], ids=lambda layer: layer.name)
def test_a_layer_computes_what_its_name_says_with_the_same_parameters(layer: _layers.Layer) -> None:
    fed = _passes.operands(Shape(8, 32, 16), BF16, CPU)
    made = layer.made(fed.linear)
    assert {id(p) for p in made.parameters()} == {id(p) for p in fed.linear.parameters()}
    assert getattr(made, "plan", None) == layer.plan
    gradients = _passes.pass_of(made, fed)()
    assert [g.shape for g in gradients] == [fed.x.shape, fed.linear.weight.shape, fed.linear.bias.shape]
    assert type(fed.linear) is torch.nn.Linear  # what others are made of stays as it is


# By hand, for bf16: the input is kept in 2 bytes, or in a code and 4 bytes of scale a row; codes of the weight
# where the forward pass makes those of the backward pass in one go, or where nothing but codes is kept.
DIM = 32
HELD = {
    BASELINE: (2.0, 0.0), "HIGH_PRECISION": (2.0, 0.0), "SWITCHBACK int8": (2.0, 1.0),
    "SWITCHBACK_Q int8": (2.0, 0.0),
    "LLM_INT8 int8": (2.0, 0.0), "SWITCHBACK_M int8": (1.0, 1.0), "SWITCHBACK_M e4m3": (1.0, 1.0),
    "TENSORWISE_FP8 e4m3": (1.0, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("of", _memory.MODELS)
def test_what_layers_hold(of: str) -> None:
    layers = [baseline(), *(layer for layer in _layers.default_plans() if layer.name in HELD)]
    rows = _memory.memory(of, DIM, 64, layers, BF16, CPU)
    assert rows.keys() == HELD.keys()
    model = _memory.MODELS[of]
    features = DIM * sum(inputs for inputs, _ in model)
    # An input that three layers read is held once by those that keep it, by each of those that keep codes.
    kept_codes = DIM * sum(inputs * len(outputs) for inputs, outputs in model)
    layers_in_all = sum(len(outputs) for _, outputs in model)
    weights = DIM * DIM * sum(inputs * sum(outputs) for inputs, outputs in model)
    for name, (of_token, of_weight) in HELD.items():
        row = rows[name]
        scales = 4.0 * layers_in_all if name.startswith("SWITCHBACK_M") else 0.0
        wanted = (of_token * (kept_codes if of_token == 1 else features) + scales) / features
        assert row["bytes_per_token_feature"] == pytest.approx(wanted), name
        # One float32 of scale a weight or input at most beside the codes.
        assert row["bytes_per_weight"] == pytest.approx(of_weight, abs=8.5 * layers_in_all / weights), name
        assert row["saving"] == pytest.approx(1 - wanted / 2)


def test_switchback_m_saves_what_is_promised() -> None:
    """At least 45 % of what the linear layers of a block hold, at a width of CLIP's."""
    rows = _memory.memory(
        "a block, q, k, v as one layer", 256, 32, [baseline(), plan_layer("SWITCHBACK_M")], BF16, CPU
    )
    assert rows["SWITCHBACK_M int8"]["saving"] >= 0.45


def test_the_noise_is_that_of_the_codes() -> None:
    """The output's, worked out from the operands that were multiplied."""
    shape = Shape(64, 128, 32)
    rows = _noise.noise("normal", shape, [baseline(), plan_layer("SWITCHBACK")], torch.float32, CPU)
    fed = _passes.operands(shape, torch.float32, CPU)
    x, w = fed.x.detach(), fed.linear.weight.detach()
    exact = x.double() @ w.double().t() + fed.linear.bias.detach().double()
    codes = [quantize(x, "row", "int8"), quantize(w, "tensor", "int8")]
    left, right = (each.codes.double() * each.scale.double() for each in codes)
    error = left @ right.t() + fed.linear.bias.detach().double() - exact
    decibels = float(10 * torch.log10(exact.square().sum() / error.square().sum()))
    assert rows["SWITCHBACK int8"]["output"] == pytest.approx(decibels, abs=0.01)
    assert rows["SWITCHBACK int8"]["grad_weight"] > 100  # in float32, nothing quantized
    assert min(rows[BASELINE].values()) > 100


def test_outliers_are_harder_for_integers() -> None:
    shape, layers = Shape(256, 256, 128), [plan_layer("SWITCHBACK"), plan_layer("SWITCHBACK:e4m3")]
    normal, outliers = (_noise.noise(of, shape, layers, BF16, CPU) for of in _noise.INPUTS)
    integers, floats = (layer.name for layer in layers)
    assert normal[integers]["output"] > normal[floats]["output"] + 6
    assert outliers[integers]["output"] < normal[integers]["output"] - 6
    assert abs(outliers[floats]["output"] - normal[floats]["output"]) < 3


# Of a pass: multiplies, and what is quantized for them; the column sums for the bias come from the pass over G.
SEEN = {
    BASELINE: {"output", "grad_input", "grad_weight", "bias"},
    "HIGH_PRECISION": {"output", "grad_input", "grad_weight", "bias"},
    "SWITCHBACK int8": {"output", "grad_input", "grad_weight", "quantize X", "quantize W", "quantize G", "bias"},
    "SWITCHBACK_M e4m3": {
        "output", "grad_input", "grad_weight", "quantize X", "quantize W", "quantize G", "bias", "dequantize",
    },
    "LLM_INT8 int8": {"output", "grad_input", "grad_weight", "quantize X", "quantize W", "quantize G", "bias"},
}  # fmt: skip


def test_the_operations_of_layers_are_known_by_name() -> None:
    layers = [baseline(), *(layer for layer in _layers.default_plans() if layer.name in SEEN)]
    rows = _operations.time_operations(32, 16, layers, BF16, CPU, 0.001)
    assert rows.keys() == SEEN.keys()
    for name, wanted in SEEN.items():
        row = rows[name]
        assert set(row["operations"]) == wanted, name
        assert all(ms > 0 for ms in row["operations"].values())
        assert row["ms"] == pytest.approx(sum(row["operations"].values()))
        narrow = sum(row["operations"].get(of, 0) for of in _operations.NARROW)
        assert row["quantize_share"] == pytest.approx(narrow / row["ms"])
        assert list(row["operations"]) == [of for of in _operations.OPERATIONS if of in wanted]


@pytest.mark.parametrize("layer", [baseline(), *_layers.default_plans()], ids=lambda layer: layer.name)
def test_operations_alone_give_what_they_gave_in_the_pass(layer: _layers.Layer) -> None:
    """All sides equal, so that only what they end in tells gradients apart."""
    fed = _passes.operands(Shape(32, 32, 32), BF16, CPU)
    made = layer.made(fed.linear)
    with torch.no_grad():
        y = made(fed.x)
    grad_x, grad_w, _ = _passes.pass_of(made, fed)()
    alone = {name: run() for name, run in _operations.recorded(made, fed)}
    for name, wanted in (("output", y), ("grad_input", grad_x), ("grad_weight", grad_w)):
        assert torch.equal(alone[name].view_as(wanted), wanted), name


@given(st.floats(1e-5, 2e-3), st.floats(1e-5, 2e-3), st.floats(1e-5, 2e-3))
def test_on_a_gpu_turns_show_the_slower_of_host_and_device(host: float, device: float, other: float) -> None:
    machine, fast = Machine(host, device, 1.0), Machine(0.0, other, 1.0)
    fast.__dict__ = machine.__dict__  # one clock

    def second() -> None:
        machine.free = max(machine.free, machine.now) + other

    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(perf_counter=lambda: machine.now)
        for module in (_times, _passes):
            patch.setattr(module, "time", clock)
        patch.setattr(torch.cuda, "Event", machine.event)
        patch.setattr(torch.cuda, "synchronize", machine.synchronize)
        patch.setattr(torch.cuda, "current_stream", lambda device: None)
        found = _passes.take_turns({"a": machine.step, "b": second}, torch.device("cuda"), 0.05)
    assert found.ms("a") == pytest.approx(1e3 * max(host, device), rel=1e-6)
    assert found.ms("b") == pytest.approx(1e3 * other, rel=1e-6)
    assert found.host_ms("a") == pytest.approx(1e3 * host, rel=1e-6)
    assert found.speedup("b", "a") == pytest.approx(max(host, device) / other, rel=1e-6)
    assert len(found.seconds["a"]) == len(found.seconds["b"]) >= 5


def test_a_speed_up_is_that_of_neighbours() -> None:
    """A device that slows down to a tenth in the middle changes medians, but no ratio."""
    slow = [1.0, 1.0, 10.0, 10.0, 10.0]
    found = _passes.Timed({"a": [2 * s for s in slow], "b": slow}, {})
    assert found.speedup("b", "a") == 2
    assert found.ms("b") == 1e4


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
        (["--plans", "SWITCH"], "--plans: got 'SWITCH', takes names such as SWITCHBACK, SWITCHBACK_M,"),
        (["--plans", ","], "--plans: got ',', takes names such as"),
        (["--plans", "SWITCHBACK:e3m4"], "--plans: got 'SWITCHBACK:e3m4': format: got 'e3m4', takes 'int8'"),
        (["--plans", "SWITCHBACK:int8/e4m3"], "--plans: got 'SWITCHBACK:int8/e4m3': right_format: got"),
        (["--plans", "SWITCHBACK:e4m3/"], "--plans: got 'SWITCHBACK:e4m3/', takes names"),
        (["--plans", "HIGH_PRECISION:int8"], "--plans: got 'HIGH_PRECISION:int8', takes names"),
        (["--sections", "speed"], "--sections: got 'speed', takes shapes, memory, noise, operations, grid"),
        (["--sections", ","], "--sections: got ',', takes shapes"),
        (["--dtype", "e4m3"], "--dtype: got 'e4m3', takes bf16, fp16, fp32"),
        (["--device", "tpu"], "--device: got 'tpu'"),
        (["--seconds", "0"], "--seconds: got 0.0, takes a number above 0"),
        (["--seconds", "nan"], "--seconds: got nan, takes a number above 0"),
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
    monkeypatch.setattr(_layers, "peer_version", lambda: None)
    assert bench("--peers") == 2
    assert capsys.readouterr().err == "narrowgauge: --peers: none is installed of torchao\n"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the peer
@pytest.mark.parametrize("layer", _layers.peers(), ids=lambda layer: layer.name)
def test_every_peer_computes(layer: _layers.Layer) -> None:
    if _layers.peer_version() is None:
        pytest.skip("torchao is not installed")
    rows = _speed.time_shape(Shape(64, 64, 128), [baseline(), layer], BF16, CPU, 0.001)
    assert rows[layer.name].get("ms", 0) > 0, rows


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [baseline(), *_layers.default_plans()], ids=lambda layer: layer.name)
def test_on_a_gpu(layer: _layers.Layer) -> None:
    device = torch.device("cuda")
    layers = [baseline()] if layer.name == BASELINE else [baseline(), layer]
    row = _speed.time_shape(Shape(256, 128, 384), layers, BF16, device, 0.02)[layer.name]
    assert "graph_failed" not in row
    assert row["graph_ms"] > 0
    assert 0 < row["host_ms"] < 1e3 * row["first_seconds"]
    assert _speed.time_cell(128, 256, layers, BF16, device, 0.02)[layer.name]["ms"] > 0
    operations = _operations.time_operations(128, 256, layers, BF16, device, 0.02)[layer.name]
    assert operations["operations"].keys() >= {"output", "grad_input", "grad_weight"}
    held = _memory.memory("an MLP", 128, 1024, layers, BF16, device)
    assert held[BASELINE]["bytes_per_token_feature"] == pytest.approx(2)
    on_cpu = _memory.memory("an MLP", 128, 1024, layers, BF16, CPU)[layer.name]
    assert held[layer.name]["bytes_per_token_feature"] == pytest.approx(on_cpu["bytes_per_token_feature"], abs=0.01)


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
