"""A step of a language model by each side: a tiny model on the CPU, and what its figures are made of."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _language
import bench_language
import pytest
import torch
from torch import nn

from narrowgauge.cli._bench._linear import BASELINE, baseline, plan_layer
from narrowgauge.trainers import load_corpus, tokenize

CPU = torch.device("cpu")
TINY = _language.MODELS["tiny"]
# transformers' own, and what torch says of the profiler
pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_check_reports_every_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times, noise and losses; what the file has is not measured again."""
    text = tmp_path / "a.txt"
    text.write_text("one line of a text after another, " * 400)
    found = load_corpus(text)
    monkeypatch.setattr(bench_language, "text_of", lambda *a: (found, tokenize(found, 256, cache=tmp_path)))
    file = tmp_path / "language.json"
    words = ["--check", "--plans", "SWITCHBACK:e4m3", "--peers", "transformer_engine current", "--device", "cpu"]
    args = bench_language.arguments([*words, "--curves", "3", "--json", str(file)])
    results = bench_language.run(args)
    assert json.loads(file.read_text()) == results
    engine, fused = "transformer_engine current", ", torch AdamW fused"
    rows = results["models"]["tiny"]["rows"]
    assert list(rows) == [BASELINE, "SWITCHBACK e4m3", engine, BASELINE + fused, f"SWITCHBACK e4m3{fused}"]
    assert "transformer_engine" in rows[engine]["failed"]
    for name, row in [(name, row) for name, row in rows.items() if name != engine]:
        assert row["swapped"] == (0 if row["layer"] == BASELINE else 2 * 7), name
        low, high = row["speedup_range"]
        assert 0 < low <= row["speedup"] <= high
        assert row["tokens_per_second"] == pytest.approx(32e3 / row["ms"])
    assert rows[BASELINE]["speedup"] == 1
    outliers = results["noise"]["tiny"]["outliers"]
    assert min(outliers[BASELINE].values()) > 50 > min(outliers["SWITCHBACK e4m3"].values()) > 25
    curves = results["curves"]["tiny"]
    assert set(curves) == {BASELINE, "SWITCHBACK e4m3", f"{BASELINE}, other weights"}
    assert len({one["end"] for one in curves.values()}) == 3
    assert all(one["steps"] == 3 and 4 < one["end"] < 7 for one in curves.values())
    args.resume = True
    assert bench_language.run(args) == results | {"resumed": [results["command"]]}
    assert "losses of tiny, SWITCHBACK e4m3" in capsys.readouterr().out


@pytest.mark.slow
def test_blocks_share_what_is_compiled() -> None:
    """A graph for each side beside that of the head, though there are two blocks; a turn compiles nothing.

    A side that cannot be compiled has none, and leaves the others' as they are.
    """

    class Untraceable(_language.EagerLayer):
        def converted(self, linear: nn.Linear) -> nn.Module:
            return linear

    words = ["--check", "--compile", "blocks", "--backend", "aot_eager", "--device", "cpu"]
    layers = [baseline(), Untraceable("theirs", "", 3, peer="theirs"), plan_layer("SWITCHBACK:e4m3")]
    args = bench_language.arguments(words)
    args.layers, found = layers, {}
    bench_language.bench(TINY, args, found, lambda: None)
    assert [row["compiled_graphs"] for row in found["rows"].values()] == [2, 0, 1, 0, 0]
    assert [row["recompiled"] for row in found["rows"].values()] == [0] * 5


def test_first_steps_that_take_too_long_are_a_sides_result() -> None:
    waits = [0.0, 30.0]  # seconds of the first step of each side
    args = bench_language.arguments(["--check", "--patience", "1", "--rounds", "1", "--device", "cpu"])

    def step() -> None:
        if waits:
            time.sleep(waits.pop(0))

    model = _language.language_model(TINY, CPU)
    *_, rows = bench_language.in_turns(model, [baseline(), plan_layer("SWITCHBACK:e4m3")], step, args)
    assert rows["SWITCHBACK e4m3"] == {"failed": "TimeoutError: the first steps must take at most 1 s"}
    assert rows[BASELINE]["rounds"] == 1


def test_a_run_that_is_cut_off_keeps_its_rounds() -> None:
    """What was not timed to its end is timed again."""
    args = bench_language.arguments(
        ["--check", "--plans", "", "--rounds", "3", "--device", "cpu", "--fused", "none"]
    )
    args.layers, found, rounds = args.layers[:1], {}, []

    def keep() -> None:
        rounds.append(found["rows"][BASELINE]["rounds"])
        if rounds == [1, 2]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench_language.bench(TINY, args, found, keep)
    assert found["timed"] == []
    bench_language.bench(TINY, args, found, keep)
    assert rounds == [1, 2, 1, 2, 3, 3, 3]
    assert found["timed"] == [bench_language.OURS]


def test_the_models_are_those_whose_names_they_have() -> None:
    """Parameters of LLaMA's blocks by hand, and of GPT-2 large, whose transposed layers became `nn.Linear`."""
    meta = torch.device("meta")
    block = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    counts = [
        sum(p.numel() for p in _language.language_model(_language.MODELS["llama-8b"], meta, blocks).parameters())
        for blocks in (1, 2)
    ]
    assert counts == [block + 2 * 32000 * 4096 + 4096, 2 * block + 2 * 32000 * 4096 + 4096]
    model: Any = _language.language_model(_language.MODELS["gpt2-large"], meta)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(774, rel=1e-3)
    linears = [m for block in _language.blocks_of(model) for m in block.modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 36 * 4


def test_gpt_2_computes_the_same_with_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = _language.Sizes(1, 1, 96, 384, 4, 4, 8, 256, "micro")
    windows = _language.windows_of(sizes, 16, CPU)
    with monkeypatch.context() as patch:
        patch.setattr(_language, "_transposed", lambda own: own)
        before = _language.loss_of(_language.language_model(sizes, CPU), "none")(windows)
    assert torch.equal(_language.loss_of(_language.language_model(sizes, CPU), "none")(windows), before)


def test_the_devices_work_is_that_of_kernels() -> None:
    """Of one name they are added; operators of the host and annotations do not count."""
    cpu, cuda = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    events = [
        SimpleNamespace(name=name, device_type=kind, self_device_time_total=time, is_user_annotation=annotation)
        for name, kind, time, annotation in (
            ("norm", cuda, 500, False), ("gemm", cuda, 2000, False), ("gemm", cuda, 1000, False),
            ("aten::mm", cpu, 3000, False), ("Torch-Compiled Region", cuda, 3500, True),
        )
    ]  # fmt: skip
    assert list(_language.by_kernel(events).items()) == [("gemm", 3.0), ("norm", 0.5)]


def test_transformer_engines_layers_have_the_same_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in for the library: weights are shared, and each pass is within its autocast."""
    inside: list[Any] = []

    class Theirs(nn.Linear):
        def __init__(self, inputs: int, outputs: int, bias: bool, params_dtype: torch.dtype, device: str) -> None:
            super().__init__(inputs, outputs, bias, device=device, dtype=params_dtype)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert inside == [(True, "by blocks")]
            return super().forward(x)

    @contextlib.contextmanager
    def fp8_autocast(enabled: bool, fp8_recipe: Any) -> Any:
        inside.append((enabled, fp8_recipe))
        yield
        inside.pop()

    library = SimpleNamespace(Linear=Theirs, fp8_autocast=fp8_autocast)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", library)
    recipes = SimpleNamespace(Float8BlockScaling=lambda: "by blocks")
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", recipes)
    layer = next(each for each in _language.other_layers() if each.recipe == "Float8BlockScaling")
    own, x = nn.Linear(32, 16), torch.randn(4, 32)
    made = layer.converted(own)
    assert torch.equal(made(x), own(x))
    assert not inside
    assert {id(p) for p in made.parameters()} == {id(p) for p in own.parameters()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--models", "llama-2b"], "--models must be among llama-1b, llama-8b, gpt2-large"),
        (
            ["--models", "llama-1b", "--tokens", "3000"],
            "--tokens must be a multiple of 2048 for llama-1b, got 3000",
        ),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--resume"], "--resume must be given with --json"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_language.arguments(words)
    assert message in capsys.readouterr().err
