"""CLIP in parts and on several processes is CLIP in one piece: the same losses, gradients and weights.

Gradients are compared as the optimizer is given them: Adam and clipping would hide a wrong factor.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import CPU, Silent, captured, gradients_kept, weights
from parallel_runs import Trainings
from pictured import csv_pairs

from narrowgauge.gauges import read_records
from narrowgauge.linear import TENSORWISE_FP8, swap_linears
from narrowgauge.linear._matmuls import Matmuls
from narrowgauge.trainers import TrainSettings, fit
from narrowgauge.trainers._build import build_parts
from narrowgauge.trainers._compare_run import peak_memory
from narrowgauge.trainers._data import open_task
from narrowgauge.trainers._parallel import ALONE
from narrowgauge.trainers._run_folder import GAUGES, HISTORY, read_history
from narrowgauge.trainers._task import Step, divided

pytestmark = pytest.mark.usefixtures("surroundings")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> TrainSettings:
    # Nine held-out pairs are two parts of a step's eight, and three of four.
    return TrainSettings(
        data=csv_pairs(tmp_path_factory.mktemp("pairs"), repeat=3), model="clip-micro", recipe="fp32", steps=3,
        batch=8, vocabulary=300, lr=2e-3, schedule="constant", warmup=1, validation_windows=9, validate_every=0,
        gauges_every=0, save_every=0, log_every=1, device="cpu", workers=2,
    )  # fmt: skip


Gradients = list[list[torch.Tensor]]


def trained(settings: TrainSettings, out: Path, **changes: Any) -> Gradients:
    """Train, and give the gradients of each step."""
    with gradients_kept() as gradients:
        fit(replace(settings, out=out, **changes), CPU, Silent())
    return gradients


def trained_by_two(
    trainings: Trainings, settings: TrainSettings, out: Path, **changes: Any
) -> tuple[Gradients, Gradients]:
    """The same by two processes."""
    answers = out.parent / f"{out.name}-answers"
    for answer in trainings(asdict(replace(settings, out=out, **changes)), answers):
        assert not isinstance(answer, str), answer
    first, second = (torch.load(answers / f"{rank}.pt") for rank in range(2))
    return first, second


def assert_equal_gradients(some: list[torch.Tensor], wanted: list[torch.Tensor], least: float) -> None:
    # Of biases that change nothing (those of keys) the gradient is rounding of numbers of the others' size.
    size = torch.stack([g.float().norm() for g in wanted]).norm()
    for one, two in zip(some, wanted, strict=True):
        assert (one.float() - two.float()).norm() <= least * (two.float().norm() + 0.01 * size)


def assert_equal_runs(out: Path, reference: Path, least: float = 1e-5) -> None:
    """Losses, validations, accuracies and weights."""
    one, two = ([r for r in read_history(of / HISTORY) if "images_per_second" not in r] for of in (out, reference))
    assert len(one) == len(two) > 3
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=least, abs=least)
    ours, theirs = weights(out), weights(reference)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=100 * least, atol=100 * least)


EXTRAS: dict[str, Any] = {
    "scaler": "dynamic", "gradient_checkpointing": True, "patch_dropout": 0.5, "stable_embedding": True,
    "kq_norm": True, "layer_scale": 0.5,
}  # fmt: skip
DIVIDED: dict[str, tuple[int, dict[str, Any], float]] = {
    "single pairs": (8, {}, 1e-5),
    "dropped patches, a scaler, checkpointing": (2, EXTRAS, 1e-5),
    "bf16 by autocast, tensors' scaler": (4, {"autocast": "bf16", "scaler": "tensor"}, 2e-2),
    "a plan": (2, {"linear": "SWITCHBACK"}, 2e-2),
}


@pytest.mark.parametrize("case", DIVIDED)
def test_in_parts(case: str, clip: TrainSettings, tmp_path: Path) -> None:
    """On a CPU the random numbers of parts, one after the other, are those of the whole."""
    parts, changes, least = DIVIDED[case]
    whole = trained(clip, tmp_path / "whole", **changes)
    after = torch.get_rng_state()
    found = trained(clip, tmp_path / "parts", accumulate=parts, **changes)
    assert torch.equal(torch.get_rng_state(), after)
    assert_equal_gradients(found[0], whole[0], least)
    if least == 1e-5:
        assert_equal_runs(tmp_path / "parts", tmp_path / "whole")


def of_blocks(out: Path, kind: str) -> dict[str, dict[str, Any]]:
    records = [r for r in read_records(out / GAUGES) if r["kind"] == kind and r["step"] == 1]
    return {r["name"]: r for r in records if ".layers." in r["name"]}


def test_features_are_measured_once(clip: TrainSettings, tmp_path: Path) -> None:
    for name, parts in (("whole", 1), ("parts", 2)):
        trained(clip, tmp_path / name, accumulate=parts, gauges_every=1, steps=1)
    for kind in ("activation", "activation_gradient"):
        one, two = (of_blocks(tmp_path / name, kind) for name in ("parts", "whole"))
        assert one.keys() == two.keys()
        assert len(one) == 4
        for name, record in one.items():
            assert record["elements"] == two[name]["elements"]
            assert record["mean"] == pytest.approx(two[name]["mean"], rel=1e-3)


def the_step(clip: TrainSettings, parts: int, plan: Any = None) -> tuple[Any, Step]:
    opened = open_task(clip, lambda stage, fraction: None)
    made = build_parts(clip, opened.outputs, CPU, end=opened.end)
    if plan is not None:
        assert swap_linears(made.model, plan, keep=("visual_projection", "text_projection")).swapped
    return opened.task, Step(made, ALONE, divided(opened.task.draw(), parts), CPU)


def test_moving_averages_move_once_for_each_part(clip: TrainSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    task, step = the_step(clip, 4, TENSORWISE_FP8.with_moving_average())
    layers = [m for m in step.parts.model.modules() if getattr(m, "averages", None) is not None]
    move, moved = Matmuls.move_averages, []
    monkeypatch.setattr(Matmuls, "move_averages", lambda self: moved.append(1) or move(self))
    task.gradients(step)
    assert len(moved) == 4 * len(layers) == 4 * 24
    assert all((layer.averages > 0).all() for layer in layers)


def test_the_memory_is_that_of_a_part(clip: TrainSettings) -> None:
    peaks = []
    for parts in (1, 8):
        task, step = the_step(replace(clip, batch=32), parts)
        task.gradients(step)  # gradients have their memory
        _, peak = peak_memory(lambda task=task, step=step: task.gradients(step), 0, CPU)
        peaks.append(peak)
    assert peaks[1] < peaks[0] / 4


@pytest.mark.slow
def test_compiled_it_is_the_same(clip: TrainSettings, tmp_path: Path) -> None:
    whole = trained(clip, tmp_path / "whole", steps=2)
    with captured() as graphs:
        found = trained(clip, tmp_path / "parts", steps=2, accumulate=2, compile=True)
    assert graphs
    assert_equal_gradients(found[0], whole[0], 1e-5)
    assert_equal_gradients(found[1], whole[1], 1e-3)


def test_two_processes_average_gradients(trainings: Trainings, clip: TrainSettings, tmp_path: Path) -> None:
    whole = trained(clip, tmp_path / "whole")
    for found in trained_by_two(trainings, clip, tmp_path / "two"):
        assert_equal_gradients(found[0], whole[0], 1e-5)
    assert_equal_runs(tmp_path / "two", tmp_path / "whole")


def test_two_processes_share_weights_and_one_goes_on(
    trainings: Trainings, clip: TrainSettings, tmp_path: Path
) -> None:
    """FSDP leaves the logit scale whole, and its gradient is averaged all the same."""
    whole, out = trained(clip, tmp_path / "whole"), tmp_path / "two"
    for found in trained_by_two(trainings, clip, out, parallel="fsdp", accumulate=2, steps=2, gauges_every=2):
        for step in range(2):
            assert_equal_gradients(found[step], whole[step], (1e-5, 1e-3)[step])
    fit(replace(clip, out=out), CPU, Silent())
    losses = [[r["loss"] for r in read_history(of / HISTORY) if "loss" in r] for of in (out, tmp_path / "whole")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert weights(out)["logit_scale"].item() == pytest.approx(weights(tmp_path / "whole")["logit_scale"].item())
