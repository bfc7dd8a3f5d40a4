"""`benchmarks/bench_layers.py`: memory, noise and operations of layers; going on with a results file."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import _layer_memory as _memory
import _layer_noise as _noise
import _layer_operations as _operations
import bench_layers
import pytest
import torch
from _resume import resumed

from narrowgauge.cli._bench import _linear
from narrowgauge.cli._bench._linear import BASELINE, Shape, baseline, plan_layer
from narrowgauge.cli._files import UsageError
from narrowgauge.linear import quantize

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SMALL = ("--device", "cpu", "--seconds", "0.001", "--quick")


def bench(*words: Any) -> int:
    return bench_layers.run(bench_layers.arguments([*SMALL, *map(str, words)]), "python benchmarks/bench_layers.py")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid, and layers to hold and to judge, that take no time."""
    sizes = ((16, 32, 48), (4, 8), 8, (64, 16), Shape(64, 64, 48))
    monkeypatch.setitem(bench_layers.SIZES, "cpu", sizes)


def test_a_run_goes_on_where_another_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "l.json"
    assert bench("--plans", "SWITCHBACK", "--sections", "memory,grid", "--json", out, "--resume") == 0
    first = json.loads(out.read_text())
    assert first["grid"].keys() == {"8x16", "8x32", "8x48"}
    assert first["grid"]["8x16"][BASELINE]["speedup"] == 1
    first["memory"]["an MLP"][BASELINE]["saving"] = 17.0  # a mark that measuring again would remove
    del first["memory"]["a block, q, k, v apart"]
    out.write_text(json.dumps(first))
    assert bench("--plans", "LLM_INT8", "--sections", "memory,noise,operations", "--json", out, "--resume") == 0
    both = json.loads(out.read_text())
    assert both["memory"]["an MLP"] == first["memory"]["an MLP"]
    assert both["memory"]["a block, q, k, v apart"].keys() == {BASELINE, "LLM_INT8 int8"}
    assert both["noise"]["normal"].keys() == {BASELINE, "LLM_INT8 int8"}
    assert both["operations"].keys() == {"8x16", "8x32", "8x48"}
    assert both["layers"].keys() == {BASELINE, "SWITCHBACK int8", "LLM_INT8 int8"}
    assert len(both["resumed"]) == 1
    assert "noise, outliers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sections", "speed"], "--sections must be among memory, noise, operations, grid"),
        (["--resume"], "--resume must be given with --json"),
        (["--plans", "SWITCH"], "--plans must be a name such as"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench(*words)
    assert message in capsys.readouterr().err


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
    layers = [baseline(), *(layer for layer in _linear.default_plans() if layer.name in HELD)]
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


def test_the_noise_is_that_of_the_codes() -> None:
    """The output's, worked out from the operands that were multiplied."""
    shape = Shape(64, 128, 32)
    rows = _noise.noise("normal", shape, [baseline(), plan_layer("SWITCHBACK")], torch.float32, CPU)
    fed = _linear.operands(shape, torch.float32, CPU)
    x, w = fed.x.detach(), fed.linear.weight.detach()
    exact = x.double() @ w.double().t() + fed.linear.bias.detach().double()
    codes = [quantize(x, "row", "int8"), quantize(w, "tensor", "int8")]
    left, right = (each.codes.double() * each.scale.double() for each in codes)
    error = left @ right.t() + fed.linear.bias.detach().double() - exact
    decibels = float(10 * torch.log10(exact.square().sum() / error.square().sum()))
    assert rows["SWITCHBACK int8"]["output"] == pytest.approx(decibels, abs=0.01)
    assert rows["SWITCHBACK int8"]["grad_weight"] > 100  # in float32, nothing quantized
    assert min(rows[BASELINE].values()) > 100


# Of a pass: multiplies, and what is quantized for them; the column sums for the bias come from the pass over G.
SEEN = {
    BASELINE: {"output", "grad_input", "grad_weight", "bias"},
    "HIGH_PRECISION": {"output", "grad_input", "grad_weight", "bias"},
    "SWITCHBACK int8": {"output", "grad_input", "grad_weight", "quantize X", "quantize W", "quantize G"},
    "SWITCHBACK_M e4m3": {
        "output", "grad_input", "grad_weight", "quantize X", "quantize W", "quantize G", "dequantize",
    },
    "LLM_INT8 int8": {"output", "grad_input", "grad_weight", "quantize X", "quantize W", "quantize G"},
}  # fmt: skip


def test_the_operations_of_layers_are_known_by_name() -> None:
    layers = [baseline(), *(layer for layer in _linear.default_plans() if layer.name in SEEN)]
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


@pytest.mark.parametrize("layer", [baseline(), *_linear.default_plans()], ids=lambda layer: layer.name)
def test_operations_alone_give_what_they_gave_in_the_pass(layer: _linear.Layer) -> None:
    """All sides equal, so that only what they end in tells gradients apart."""
    fed = _linear.operands(Shape(32, 32, 32), BF16, CPU)
    made = layer.made(fed.linear)
    with torch.no_grad():
        y = made(fed.x)
    grad_x, grad_w, _ = _linear.pass_of(made, fed)()
    alone = {name: run() for name, run in _operations.recorded(made, fed)}
    for name, wanted in (("output", y), ("grad_input", grad_x), ("grad_weight", grad_w)):
        assert torch.equal(alone[name].view_as(wanted), wanted), name


RESULTS = {
    "command": "narrowgauge bench linear --json x",
    "environment": {"torch": "2.13", "device": "H200"},
    "dtype": "bf16",
    "layers": {"nn.Linear": {"plan": "none"}},
    "shapes": {"8x8x8": {"nn.Linear": {"ms": 1.0}}},
}


def _with_other_values(value: Any) -> list[Any]:
    """A JSON value with one part of it replaced by another kind of value."""
    others = [None, 3, "x", [], {}, [1, {}], {"a": 1}]
    if not isinstance(value, dict):
        return others
    return [*others, *({**value, key: other} for key in value for other in _with_other_values(value[key]))]


def test_a_damaged_file_is_results_or_named(tmp_path: Path) -> None:
    path, text = tmp_path / "results.json", json.dumps(RESULTS)
    new = {**RESULTS, "command": "again", "environment": {"torch": "2.13"}}
    cut = [text[:at] for at in range(len(text))] + ["[" * 100_000, "\udcff", "NaN"]
    odd = map(json.dumps, _with_other_values(RESULTS | {"resumed": ["a"], "tuned": {"8x8x8": {}}}))
    for content in [*cut, *odd]:
        path.write_text(content, errors="surrogateescape")
        with contextlib.suppress(UsageError):
            found = resumed(path, new)
            json.dumps(found)
            assert found["resumed"][-1] == "again"
    for content in ("{}", '{"environment": {}, "dtype": "f", "layers": {}}'):
        path.write_text(content)
        with pytest.raises(UsageError, match=rf"--resume: {path} (is of dtype f|holds no results)"):
            resumed(path, RESULTS)


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [baseline(), *_linear.default_plans()], ids=lambda layer: layer.name)
def test_on_a_gpu(layer: _linear.Layer) -> None:
    device = torch.device("cuda")
    layers = [baseline()] if layer.name == BASELINE else [baseline(), layer]
    assert bench_layers.time_cell(128, 256, layers, BF16, device, 0.02)[layer.name]["ms"] > 0
    operations = _operations.time_operations(128, 256, layers, BF16, device, 0.02)[layer.name]
    assert operations["operations"].keys() >= {"output", "grad_input", "grad_weight"}
    held = _memory.memory("an MLP", 128, 1024, layers, BF16, device)
    assert held[BASELINE]["bytes_per_token_feature"] == pytest.approx(2)
    on_cpu = _memory.memory("an MLP", 128, 1024, layers, BF16, CPU)[layer.name]
    assert held[layer.name]["bytes_per_token_feature"] == pytest.approx(on_cpu["bytes_per_token_feature"], abs=0.01)
