"""Training for real, small: each option does what it says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import CPU, Silent, captured, run, weights
from torch.optim.optimizer import register_optimizer_step_pre_hook

from narrowgauge.scaling import LossScaler
from narrowgauge.trainers import _fit
from narrowgauge.trainers._build import build_parts
from narrowgauge.trainers._flops import flops_per_token, named_peak
from narrowgauge.trainers._models import build_model, parameter_count
from narrowgauge.trainers._run_folder import HISTORY, read_history
from narrowgauge.trainers._settings import TrainSettings

pytestmark = pytest.mark.usefixtures("surroundings")


def test_dividing_a_step_changes_roundings_alone(small: TrainSettings, tmp_path: Path) -> None:
    whole, parts = (run(small, tmp_path / str(n), accumulate=n) for n in (1, 4))
    assert parts == pytest.approx(whole, rel=1e-4)
    assert parts != whole


def test_a_scale_of_a_power_of_two_changes_nothing(
    small: TrainSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(small, tmp_path / "none")
    scale, seen = LossScaler.scale, []
    for name in ("dynamic", "static", "tensor"):
        monkeypatch.setattr(
            torch.amp.GradScaler, "scale", lambda self, loss, of=scale: seen.append(loss) or of(self, loss)
        )
        assert run(small, tmp_path / name, scaler=name) == plain
    assert len(seen) == 18


def test_recomputing_blocks_changes_nothing(
    small: TrainSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    forward, calls = GPT2MLP.forward, []
    monkeypatch.setattr(GPT2MLP, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    plain = run(small, tmp_path / "plain")
    once = len(calls)
    assert run(small, tmp_path / "again", gradient_checkpointing=True) == plain
    assert len(calls) - once == once + 2 * small.steps  # two blocks, once more a step


@pytest.mark.slow
def test_compiled_it_learns_the_same(small: TrainSettings, tmp_path: Path) -> None:
    plain = run(small, tmp_path / "plain")
    with captured() as graphs:
        compiled = run(small, tmp_path / "compiled", compile=True, gauges_every=2)
    assert compiled == pytest.approx(plain, rel=1e-5)
    assert graphs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
def test_compiled_for_real_it_learns_the_same(small: TrainSettings, tmp_path: Path) -> None:
    plain = run(small, tmp_path / "plain")
    assert run(small, tmp_path / "compiled", compile=True) == pytest.approx(plain, rel=1e-4)


def test_attention_and_autocast_reach_the_model(small: TrainSettings, tmp_path: Path) -> None:
    plain = run(small, tmp_path / "plain")
    eager = run(small, tmp_path / "eager", attention="eager")
    assert eager == pytest.approx(plain, rel=1e-4)
    parts = build_parts(replace(small, attention="eager"), 256, CPU)
    assert parts.model.config._attn_implementation == "eager"
    assert build_parts(small, 256, CPU).model.config._attn_implementation == "sdpa"
    narrow = run(small, tmp_path / "bf16", autocast="bf16")
    assert narrow == pytest.approx(plain, rel=0.02)
    assert narrow != plain
    assert {w.dtype for w in weights(tmp_path / "bf16").values()} == {torch.float32}


def test_a_plan_takes_all_layers_but_the_head(small: TrainSettings, tmp_path: Path) -> None:
    for model, layers in (("micro", 8), ("llama-micro", 14), ("bert-micro", 12), ("roberta-micro", 12)):
        parts = build_parts(replace(small, model=model, linear="TENSORWISE_FP8:e4m3/e5m2"), 256, CPU)
        planned = {n: m.plan for n, m in parts.model.named_modules() if getattr(m, "plan", None) is not None}
        assert len(planned) == layers
        assert not any(name.startswith(("lm_head", "cls")) for name in planned)
        assert {plan.formats for plan in planned.values()} == {("e4m3", "e5m2")}
    names = ("none", "SWITCHBACK", "BLOCKWISE_FP8")
    plain, *planned_losses = (run(small, tmp_path / name, linear=name) for name in names)
    for losses in planned_losses:
        assert losses == pytest.approx(plain, rel=0.05)


def test_the_optimizer_is_given_what_was_asked(small: TrainSettings) -> None:
    changes = {"beta1": 0.8, "beta2": 0.97, "weight_decay": 0.2, "clip": 0.5, "eps": 1e-6, "beta2_schedule": 0.7}
    groups = build_parts(replace(small, seed=7, **changes), 256, CPU).optimizer.param_groups  # type: ignore[arg-type]
    assert [group["weight_decay"] for group in groups] == [0.2, 0.0]
    for group in groups:
        assert (group["betas"], group["eps"], group["beta2_schedule"]) == ((0.8, 0.97), 1e-6, 0.7)
        assert (group["max_grad_norm"], group["seed"]) == (0.5, 7)
    (group,) = build_parts(replace(small, clip=0.0, decay_all=True), 256, CPU).optimizer.param_groups
    assert (group["max_grad_norm"], group["weight_decay"]) == (None, 0.1)


def test_the_rate_follows_the_schedule(small: TrainSettings, tmp_path: Path) -> None:
    rates: list[float] = []

    def told(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        rates.extend({group["lr"] for group in optimizer.param_groups})

    handle = register_optimizer_step_pre_hook(told)
    run(small, tmp_path, schedule="linear", final_lr=0.0)
    handle.remove()
    assert rates == pytest.approx([0.005, 0.01, 0.0075, 0.005, 0.0025, 0.0])
    assert [r["lr"] for r in read_history(tmp_path / HISTORY) if "lr" in r] == pytest.approx(rates)


def test_validation_comes_as_often_as_asked_and_moves_nothing(small: TrainSettings, tmp_path: Path) -> None:
    often, seldom = run(small, tmp_path / "a", validate_every=1), run(small, tmp_path / "b", validate_every=0)
    assert often == seldom
    found = {
        name: [r["step"] for r in read_history(tmp_path / name / HISTORY) if "validation_loss" in r]
        for name in ("a", "b")
    }
    assert found == {"a": [1, 2, 3, 4, 5, 6], "b": [6]}
    last = read_history(tmp_path / "a" / HISTORY)[-1]
    assert last["bits_per_byte"] == pytest.approx(last["validation_loss"] / 0.6931471805599453, rel=1e-2)


def test_a_known_device_has_a_utilisation_and_an_unknown_one_is_told_once(
    small: TrainSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = Silent()
    _fit.fit(replace(small, out=tmp_path / "cpu"), CPU, observer)
    assert sum("MFU" in line for line in observer.told) == 1
    monkeypatch.setattr(_fit, "peak_flops", lambda device: 1e12)
    observer = Silent()
    _fit.fit(replace(small, out=tmp_path / "known"), CPU, observer)
    assert not any("MFU" in line for line in observer.told)
    flops = flops_per_token(build_model("micro", vocabulary=256, sequence=16, seed=0), 16)
    for record in read_history(tmp_path / "known" / HISTORY):
        if "mfu" in record:
            assert record["mfu"] == pytest.approx(record["tokens_per_second"] * flops / 1e12, abs=1e-4)
    (line,) = [line for line in observer.told if line.startswith("6: ")]
    assert re.fullmatch(r"6: tokens 0\.\d+", line)


def test_flops_of_gpt2_are_palms() -> None:
    model = build_model("micro", vocabulary=256, sequence=32, seed=0)
    matrices = 2 * (96 * 3 * 96 + 96 * 96 + 2 * 96 * 384) + 256 * 96
    assert flops_per_token(model, 32) == 6 * matrices + 12 * 2 * 96 * 32
    # All but norms, biases and positions: the head counts, the table it is tied to does not count again.
    assert matrices < parameter_count(model) < 1.1 * matrices


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA L4", 121e12),
        ("NVIDIA L40", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)  # fmt: skip
def test_peaks_go_by_whole_words(name: str, peak: float | None) -> None:
    assert named_peak(name) == peak


@pytest.mark.parametrize("name", ["micro", "llama-micro", "bert-micro", "roberta-micro"])
def test_attention_gets_no_mask_so_that_flash_attention_can_take_it(
    name: str, small: TrainSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, seen = torch.nn.functional.scaled_dot_product_attention, set()

    def told(*args: Any, **options: Any) -> torch.Tensor:
        seen.add((options.get("attn_mask") is None and len(args) == 3, options.get("is_causal")))
        return attend(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", told)
    run(small, tmp_path, model=name, steps=1)
    assert seen == {(True, "bert" not in name)}


def test_determinism_is_asked_for_while_the_run_lasts(small: TrainSettings, tmp_path: Path) -> None:
    seen: list[bool] = []
    settings = replace(small, out=tmp_path, deterministic=True)

    def look() -> bool:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return False

    _fit.fit(settings, CPU, Silent(), look)
    assert seen == [True] * 6
    assert not torch.are_deterministic_algorithms_enabled()
