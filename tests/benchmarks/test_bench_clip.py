"""A step of CLIP by each plan: a tiny model on the CPU, and what its figures are made of."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _clip
import bench_clip
import pytest
import torch
from torch import nn

from narrowgauge.cli._bench._linear import Layer, baseline, peers, plan_layer
from narrowgauge.linear import LowPrecisionLinear

CPU = torch.device("cpu")
TINY = _clip.MODELS["tiny"]
# transformers' own, and what torch says of the profiler and of reading numbers out of a compiled graph
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return _clip.clip_model(TINY, patch_dropout=0.0, checkpointing=False).to(torch.bfloat16)


def test_the_check_reports_every_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--check", "--plans", "SWITCHBACK:int8,TENSORWISE_FP8", "--device", "cpu", "--json"]
    results = bench_clip.run(bench_clip.arguments([*words, str(tmp_path / "clip.json")]), "python bench_clip.py")
    assert json.loads((tmp_path / "clip.json").read_text()) == results
    found = results["models"]["tiny"]
    assert found["rows"].keys() == {"nn.Linear", "SWITCHBACK int8", "TENSORWISE_FP8 e4m3"}
    assert 0 < found["linear_share"] < 1
    for name, row in found["rows"].items():
        assert row["ms"] > 0, row
        assert row["steps"] == 2
        assert row["swapped"] == (0 if name == "nn.Linear" else 2 * 2 * 6)
    assert found["rows"]["nn.Linear"]["speedup"] == 1
    assert "SWITCHBACK int8" in capsys.readouterr().out
    # What the file has is not measured again.
    again = bench_clip.run(bench_clip.arguments([*words, str(tmp_path / "clip.json"), "--resume"]), "once more")
    assert again == results | {"resumed": ["once more"]}


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [[], ["--compile", "aot_eager"]], ids=["eager", "compiled"])
def test_steps_are_replayed_from_graphs(compiled: list[str]) -> None:
    words = ["--check", "--graph", "--plans", "SWITCHBACK:int8,TENSORWISE_FP8", "--device", "cuda", *compiled]
    found = bench_clip.run(bench_clip.arguments(words), "python bench_clip.py")["models"]["tiny"]
    assert found["settings"]["graph"]
    for row in found["rows"].values():
        assert "failed" not in row, row
        assert 0 < row["graph_ms"] < row["ms"]
    assert found["rows"]["nn.Linear"]["graph_speedup"] == 1
    assert found["recompiled"] == 0


@pytest.mark.slow
def test_blocks_of_a_tower_share_what_is_compiled() -> None:
    """A graph for each tower and side, though there are two blocks in a tower."""
    args = bench_clip.arguments(["--check", "--compile", "aot_eager", "--device", "cpu"])
    found = bench_clip.bench("tiny", [baseline(), plan_layer("SWITCHBACK:e4m3")], args, CPU)
    assert found["recompiled"] == 0
    assert [row["compiled_graphs"] for row in found["rows"].values()] == [2, 2]


def test_sides_step_the_same_parameters_and_leave_the_model_as_it_was(model: Any) -> None:
    before = {id(p) for p in model.parameters()}
    state = copy.deepcopy(model.state_dict())
    linears = [m for encoder in _clip.encoders(model) for m in encoder.modules() if isinstance(m, nn.Linear)]
    with bench_clip.swapped(model, plan_layer("SWITCHBACK")) as count:
        assert count == len(linears) == 24
        assert all(type(layer) is LowPrecisionLinear for layer in linears)
        assert type(model.visual_projection) is nn.Linear  # blocks only
        assert {id(p) for p in model.parameters()} == before
    assert all(type(layer) is nn.Linear for layer in linears)
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[name], state[name]) for name in state)


def test_the_filter_leaves_what_is_slower_at_a_towers_rows(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def speedups(kinds: Any) -> dict[Any, float]:
        asked.extend(kinds)
        return {kind: 2.0 if kind.tokens == 36 else 0.5 for kind in asked}

    monkeypatch.setattr("narrowgauge.linear._swap.speedups", speedups)
    # 16 patches of which half are dropped and a class token; texts of 12.
    rows = _clip.clip_rows(TINY, 4, 0.5)
    assert rows == (4 * 9, 4 * 12)
    for launched in (True, False):
        asked.clear()
        report = bench_clip.chosen(model, plan_layer("SWITCHBACK"), rows, launched)
        assert {kind.launched for kind in asked} == {launched}
        assert not any(type(m) is LowPrecisionLinear for m in model.modules())
    with bench_clip.swapped(model, plan_layer("SWITCHBACK"), report) as count:
        assert count == 12  # those of the images' tower
        assert not any(type(m) is LowPrecisionLinear for m in model.text_model.encoder.modules())
    assert bench_clip.chosen(model, plan_layer("SWITCHBACK"), None) is None
    assert bench_clip.chosen(model, baseline(), rows) is None


def test_a_peers_layers_are_put_in_place_and_taken_out(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(nn.Linear):
        pass

    def converted(self: Layer, linear: nn.Linear) -> nn.Module:
        made = Theirs(linear.in_features, linear.out_features, device="meta")
        made.weight, made.bias = linear.weight, linear.bias
        return made

    monkeypatch.setattr(Layer, "converted", converted)
    modules = list(model.modules())
    with bench_clip.swapped(model, peers()[0]) as count:
        assert count == 24
        assert sum(type(module) is Theirs for module in model.modules()) == 24
    assert all(one is other for one, other in zip(modules, model.modules(), strict=True))


# By hand: under checkpointing the output counts twice, so of four multiplies three and four are halved.
@pytest.mark.parametrize(
    ("layer", "share", "checkpointed", "wanted"),
    [
        (plan_layer("SWITCHBACK"), 1.0, True, 4 / 2.5),
        (plan_layer("SWITCHBACK"), 1.0, False, 3 / 2),
        (plan_layer("TENSORWISE_FP8"), 1.0, True, 2.0),
        (plan_layer("TENSORWISE_FP8"), 0.5, True, 1 / 0.75),
        (peers()[2], 1.0, False, 3 / 2),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_the_ceiling(layer: Layer, share: float, checkpointed: bool, wanted: float) -> None:
    assert bench_clip.ceiling(layer, share, checkpointed) == pytest.approx(wanted)


def test_the_share_of_linear_layers_is_that_of_their_multiplies() -> None:
    """Nearly all of a step that is one large multiply, none of one that has none."""
    x, other = torch.randn(1024, 1024), torch.randn(1 << 20)
    assert bench_clip.linear_share(lambda: x @ x, CPU) > 0.8
    assert bench_clip.linear_share(lambda: other.exp(), CPU) == 0


def test_the_share_on_a_gpu_is_that_of_kernels() -> None:
    """Kernels count once, though the operators and annotations that they belong to stand beside them."""
    cpu, cuda = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA

    def event(name: str, kind: Any, microseconds: float, annotation: bool = False) -> Any:
        return SimpleNamespace(
            name=name, device_type=kind, self_device_time_total=microseconds, is_user_annotation=annotation
        )

    events = [
        event("aten::linear", cpu, 0), event("aten::addmm", cpu, 30), event("gemm", cuda, 30),
        event("aten::mm", cpu, 20), event("gemm", cuda, 20), event("aten::bmm", cpu, 10), event("gemm", cuda, 10),
        event("triton_gelu", cuda, 40), event("Torch-Compiled Region", cuda, 90, True),
    ]  # fmt: skip
    assert bench_clip.share_of_multiplies(events, torch.device("cuda")) == 0.5


def test_the_models_are_open_clips() -> None:
    """Parameters as open_clip counts them; transformers' text tower has no difference in them."""
    millions = {"vit-b-16": 149.6, "vit-l-14": 427.6, "vit-h-14": 986.1}
    for name, wanted in millions.items():
        with torch.device("meta"):
            model = _clip.clip_model(_clip.MODELS[name], 0.5, True)
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(wanted, rel=1e-3), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--models", "vit-g"], "--models must be among vit-b-16, vit-l-14, vit-h-14"),
        (["--plans", "NONE"], "--plans must be a name such as"),
        (["--batch", "1"], "--batch must be at least 2, got 1"),
        (["--patch-dropout", "1"], "--patch-dropout must be from 0 to below 1, got 1.0"),
        (["--resume"], "--resume must be given with --json"),
        (["--graph", "--device", "cpu"], "--graph must be given with a CUDA device, got 'cpu'"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_clip.arguments(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
