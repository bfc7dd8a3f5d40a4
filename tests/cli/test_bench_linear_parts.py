"""What `narrowgauge bench linear` is made of: layers, what they hold, their noise, operations and times."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_bench import Machine

from narrowgauge.cli._bench import _times
from narrowgauge.cli._bench_linear import _layers, _memory, _noise, _operations, _passes, _speed
from narrowgauge.cli._bench_linear._layers import BASELINE, baseline, plan_layer
from narrowgauge.cli._bench_linear._sizes import Shape
from narrowgauge.linear import quantize

CPU, BF16 = torch.device("cpu"), torch.bfloat16


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the peer
@pytest.mark.parametrize("layer", _layers.peers(), ids=lambda layer: layer.name)
def test_every_peer_computes(layer: _layers.Layer) -> None:
    if layer.family not in _layers.peer_versions():
        pytest.skip(reason=f"needs {layer.family}, which is not installed")
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
