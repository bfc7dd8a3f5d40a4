"""The filter that keeps layers which measured slower: what is measured, what is remembered, what is decided."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import narrowgauge as ng
from forked import run_ranks
from narrowgauge.linear import SWITCHBACK, LowPrecisionLinear, _tune, swap_linears

# Without a GPU's clock: seconds of nn.Linear are 1, seconds of a plan by what the test says.
Measured = list[_tune.LayerKind]


def kind_of(
    layer: nn.Module, tokens: int, plan: ng.linear.LinearPlan, transposed: bool = False, launched: bool = True
) -> _tune.LayerKind:
    return _tune.LayerKind.of(layer.weight, layer.bias, tokens, plan, transposed, launched)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "narrowgauge" / "speedups.json"


@pytest.fixture
def measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Measured:
    """A clock on which wide layers are faster by a plan and narrow ones slower; what it was asked for."""
    asked: Measured = []
    steps = _tune._steps

    def remember(kind: _tune.LayerKind):
        asked.append(kind)
        return steps(kind)

    def clock(one: Callable, other: Callable, device: torch.device) -> tuple[float, float]:
        one()
        other()
        kind = asked[-1]
        return 1.0, 0.8 if kind.in_features >= 64 else 1.25

    monkeypatch.setattr(_tune, "_steps", remember)
    monkeypatch.setattr(_tune, "alternating", clock)
    return asked


def model() -> nn.ModuleDict:
    return nn.ModuleDict({
        "wide": nn.Linear(64, 32),
        "same": nn.Linear(64, 32),
        "narrow": nn.Linear(32, 32),
        "frozen": nn.Linear(64, 32).requires_grad_(False),
        "bf16_": nn.Linear(64, 32, bias=False, dtype=torch.bfloat16),
        "small": nn.Linear(64, 8),
        "head": nn.Linear(64, 32),
    })  # fmt: skip


def test_layers_that_measured_slower_are_kept_and_say_so(measured: Measured, cache: Path) -> None:
    report = swap_linears(model(), SWITCHBACK)
    assert "narrow" in report.swapped
    assert (report.speedups, measured, cache.exists()) == ({}, [], False)  # nothing is measured unasked
    made, state = model(), torch.get_rng_state()
    report = swap_linears(made, SWITCHBACK, keep=("head",), tokens=16)
    assert report.swapped == ["wide", "same", "frozen", "bf16_"]
    assert report.kept == {
        "narrow": "measured 0.80x nn.Linear at 16 tokens",
        "small": "8 features, fewer than 16",
        "head": "named in keep: 'head'",
    }
    assert report.speedups == {"wide": 1.25, "same": 1.25, "narrow": 0.8, "frozen": 1.25, "bf16_": 1.25}
    assert "swapped: 4 (int8 real)\n  wide    1.25x nn.Linear\n  same    1.25x nn.Linear\n" in str(report)
    assert type(made["narrow"]) is nn.Linear
    assert isinstance(made["frozen"], LowPrecisionLinear)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in made.parameters())
    # One measurement a kind: alike are wide and same.
    assert [(k.in_features, k.bias, k.dtype, k.trained) for k in measured] == [
        (64, True, torch.float32, True), (32, True, torch.float32, True), (64, True, torch.float32, False),
        (64, False, torch.bfloat16, True),
    ]  # fmt: skip


def test_it_is_remembered_by_everything_that_it_depends_on(measured: Measured, cache: Path) -> None:
    def layer(**options) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 32, **options))

    swap_linears(layer(), SWITCHBACK, tokens=16)
    assert len(measured) == 1
    (records,) = json.loads(cache.read_text())["devices"].values()
    ((key, record),) = records.items()
    assert key.startswith(
        "16 tokens, 64 to 32, torch.float32, weight (out, in), bias, trained, autocast None, Linear"
    )
    assert record["speedup"] == 1.25
    assert (record["ms"], record["nn.Linear ms"]) == (800, 1000)
    swap_linears(layer(), SWITCHBACK, tokens=16)
    # A plan is what it does, not what it is called.
    swap_linears(layer(), ng.linear.LinearPlan(SWITCHBACK.output, SWITCHBACK.grad_input, name="MINE"), tokens=16)
    assert len(measured) == 1
    swap_linears(layer(), SWITCHBACK, tokens=17)
    swap_linears(layer(), ng.linear.SWITCHBACK_M, tokens=16)
    swap_linears(layer(bias=False), SWITCHBACK, tokens=16)
    swap_linears(layer(dtype=torch.bfloat16), SWITCHBACK, tokens=16)
    swap_linears(layer().requires_grad_(False), SWITCHBACK, tokens=16)
    with torch.autocast("cpu", torch.bfloat16):
        swap_linears(layer(), SWITCHBACK, tokens=16)
    assert measured[-1].autocast == torch.bfloat16
    assert len(measured) == 7
    for _ in range(2):
        swap_linears(layer(), SWITCHBACK, tokens=16, launched=False)
    assert [kind.launched for kind in measured] == [True] * 7 + [False]
    (records,) = json.loads(cache.read_text())["devices"].values()
    assert sum(key.endswith(", the device's time") for key in records) == 1


@pytest.mark.parametrize(
    "damage",
    ["", "[]", '{"version": 1, "devices": {"NAME": {"KEY": 3}}}',
     '{"version": 1, "devices": {"NAME": {"KEY": {"speedup": "2", "when": 1.0, "ms": 1.0}}}}',
     '{"version": 1, "devices": {"NAME": {"KEY": {"speedup": -2.0, "when": 1.0, "ms": 1.0}}}}',
     '{"version": 1, "devices": {"NAME": {"KEY": {"speedup": NaN, "when": 1.0, "ms": 1.0}}}}',
     '{"version": 1, "devices": {"NAME": {"KEY": {"speedup": 2.0, "ms": 1.0}}}}',
     '{"version": 1, "devices": {"NAME": {"KEY": {"speedup": 2.0, "when": 1.0}}}}'],
)  # fmt: skip
def test_a_damaged_memory_is_none(measured: Measured, cache: Path, damage: str) -> None:
    kind = kind_of(nn.Linear(64, 32), 16, SWITCHBACK)
    cache.parent.mkdir()
    name = _tune._name(torch.device("cpu")).replace("\\", "\\\\")
    cache.write_text(damage.replace("NAME", name).replace("KEY", kind.key))
    assert _tune.speedups([kind]) == {kind: 1.25}
    assert _tune.speedups([kind]) == {kind: 1.25}
    assert measured == [kind]


def test_kernels_that_were_tuned_since_are_measured_anew(
    measured: Measured, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU only: there is nothing to tune on a CPU."""
    kind = kind_of(nn.Linear(64, 32), 16, SWITCHBACK)
    _tune.speedups([kind])
    tuned = cache.parent / "multiplies.json"
    tuned.touch()
    os.utime(tuned, (2e9, 2e9))
    assert _tune._known(kind) == (1.25, 800.0)
    gpu = _tune.replace(kind, device=torch.device("cuda"))
    monkeypatch.setattr(_tune, "_name", lambda device: _name)
    (_name,) = json.loads(cache.read_text())["devices"]
    assert _tune._known(gpu) is None
    os.utime(tuned, (1e9, 1e9))
    assert _tune._known(gpu) == (1.25, 800.0)


def test_the_weight_of_a_conv1d_is_measured_as_it_lies(measured: Measured) -> None:
    conv = pytest.importorskip("transformers").pytorch_utils.Conv1D(32, 64)
    swap_linears(nn.Sequential(conv), SWITCHBACK, tokens=8)
    (kind,) = measured
    assert (kind.in_features, kind.out_features, kind.order) == (64, 32, "in, out")


def test_tokens_by_name(measured: Measured) -> None:
    made = nn.ModuleDict({name: nn.Sequential(nn.Linear(64, 32)) for name in ("visual", "text", "other")})
    report = swap_linears(made, SWITCHBACK, tokens={"visual": 48, "t*": 16})
    assert [kind.tokens for kind in measured] == [48, 16]
    assert report.swapped == ["visual.0", "text.0"]
    assert report.kept == {"other.0": "not measured: tokens has no name that fits"}
    with (
        pytest.warns(UserWarning, match="no module of the model is called 'vision'"),
        pytest.warns(UserWarning, match="was swapped; 'visual': not measured: tokens has no name that fits"),
    ):
        swap_linears(nn.ModuleDict({"visual": nn.Linear(16, 16)}), SWITCHBACK, tokens={"vision": 4})


@pytest.mark.parametrize("tokens", [0, {}, {"visual": 0}])
def test_what_are_no_tokens(tokens: object) -> None:
    with pytest.raises(ValueError, match=r"tokens must be an integer of at least 1.*, got .*"):
        swap_linears(model(), SWITCHBACK, tokens=tokens)
    made = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, device="meta"))
    with pytest.raises(ValueError, match=r"tokens must be None for a model on the meta device, got 4 and '1'"):
        swap_linears(made, SWITCHBACK, tokens=4)
    assert type(made[0]) is nn.Linear


def test_what_does_not_fit_into_memory_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> tuple[float, float]:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(_tune, "alternating", full)
    with pytest.warns(UserWarning, match="was swapped; '0': not measured: out of memory at 8 tokens"):
        report = swap_linears(nn.Sequential(nn.Linear(16, 16)), SWITCHBACK, tokens=8)
    assert report.kept == {"0": "not measured: out of memory at 8 tokens"}
    assert not cache.exists()


def test_what_is_slower_never_reads_as_even(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tune, "alternating", lambda *arguments: (0.9999, 1.0))
    report = swap_linears(nn.Sequential(nn.Linear(16, 16)), SWITCHBACK, tokens=8)
    assert report.kept == {"0": "measured 0.99x nn.Linear at 8 tokens"}
    monkeypatch.setattr(_tune, "alternating", lambda *arguments: (1.0, 1.0))
    assert swap_linears(nn.Sequential(nn.Linear(16, 24)), SWITCHBACK, tokens=8).swapped == ["0"]


@pytest.mark.usefixtures("one_thread")
def test_a_real_measurement_on_this_cpu(cache: Path) -> None:
    """Float8 is simulated here, many times slower than nn.Linear; without eight bits a plan is about even."""
    made = nn.Sequential(nn.Linear(64, 64))
    with torch.inference_mode():  # which has no backward pass
        report = swap_linears(made, ng.linear.TENSORWISE_FP8, tokens=256)
    assert report.swapped == []
    assert 0.0 < report.speedups["0"] < 0.8
    assert report.kept["0"].startswith("measured 0.")
    assert type(made[0]) is nn.Linear
    ((record,),) = (list(r.values()) for r in json.loads(cache.read_text())["devices"].values())
    assert record["ms"] > record["nn.Linear ms"] > 0
    kind = kind_of(nn.Linear(512, 512), 512, ng.linear.HIGH_PRECISION)
    assert 0.3 < _tune.speedups([kind])[kind] < 3.0


@pytest.mark.gpu
def test_the_devices_time_leaves_the_host_out(cache: Path) -> None:
    """A small layer is the host's; replayed it is faster than launched, for nn.Linear and by a plan."""
    layer = nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
    kinds = [kind_of(layer, 256, SWITCHBACK, launched=launched) for launched in (True, False)]
    _tune.speedups(kinds)
    (records,) = json.loads(cache.read_text())["devices"].values()
    launched, replayed = (records[kind.key] for kind in kinds)
    assert all(0 < replayed[name] < launched[name] for name in ("ms", "nn.Linear ms"))


@pytest.mark.gpu
def test_a_real_measurement_on_a_gpu(cache: Path) -> None:
    made = nn.Sequential(nn.Linear(64, 64), nn.Linear(8192, 8192)).to("cuda", torch.bfloat16)
    report = swap_linears(made, SWITCHBACK, tokens=8192)
    assert report.kept.keys() == {"0"}  # the time of its launches
    assert report.speedups["1"] >= 1.0


def on_a_rank(rank: int, world: int, folder: str) -> None:
    """Each rank has a clock of its own: the first finds the layer slow, the second fast."""
    os.environ["XDG_CACHE_HOME"] = f"{folder}/{rank}"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    _tune.alternating = lambda *arguments: (1.0, (2.0, 0.5)[rank])
    model = nn.ModuleDict({"shared": nn.Linear(16, 16), **({"own": nn.Linear(16, 32)} if rank else {})})
    report = swap_linears(model, SWITCHBACK, tokens=8)
    torch.save((report.swapped, report.speedups), f"{folder}/out{rank}")
    dist.destroy_process_group()


def test_ranks_of_a_process_group_decide_alike(tmp_path: Path) -> None:
    run_ranks(on_a_rank, 2, 2, str(tmp_path))
    assert torch.load(tmp_path / "out0") == ([], {"shared": 0.5})
    assert torch.load(tmp_path / "out1") == (["own"], {"shared": 0.5, "own": 2.0})


def test_a_name_in_keep_that_the_model_has_not_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"no module of the model is called 'heads', 'up_\*'; give a name") as seen:
        swap_linears(model(), SWITCHBACK, keep=("heads", "head", "up_*"))
    assert len(seen) == 1
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swap_linears(model(), SWITCHBACK)  # the default is no request
        swap_linears(model(), SWITCHBACK, keep=["head", "*row"])
        swap_linears(model(), SWITCHBACK, keep=("lm_head", "*.lora_*", "head"))  # nor is it with more


def test_the_clock_takes_the_best_of_rounds_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first round that compiles and a step that is disturbed now and then are not what a step takes."""
    now, order = [0.0], []

    def step(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            disturbed = len(order) % 9 == 8
            now[0] += 50.0 if len(order) < 2 else seconds * (10 if disturbed else 1)
            order.append(name)

        return run

    monkeypatch.setattr(_tune.time, "perf_counter", lambda: now[0])
    assert _tune.alternating(step("a", 1.0), step("b", 3.0), torch.device("cpu")) == pytest.approx((1.0, 3.0))
    assert "".join(order) == "ab" * 6
    # On a GPU steps in a row, which make up a round's time.
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    order.clear()
    _tune.alternating(step("a", 1e-3), step("b", 1.0), torch.device("cuda"))
    assert "a" * 15 in "".join(order)
    assert "bb" not in "".join(order)[8:]
