"""A training of a CLIP for the studies: what runs of a seed share, what is noted down, and pairs on the device."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import _clip_run
import _emoji
import pytest
import torch
from _clip_pairs import Draw, crops, pairs_of
from _clip_run import train
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.recipes._losses import normalized
from narrowgauge.trainers import DataError, TrainSettings

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def settings(squares: Path) -> TrainSettings:
    return TrainSettings(
        model="clip-micro", data=squares, recipe="stable-adamw", batch=8, sequence=8, vocabulary=280, steps=6,
        warmup=2, lr=1e-3, validate_every=3, clip=0.0, patch_dropout=0.5, device="cpu", workers=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def plain(settings: TrainSettings) -> _clip_run.Trained:
    return train(settings)


def test_a_run_is_the_same_again(settings: TrainSettings, plain: _clip_run.Trained) -> None:
    again = train(settings)
    assert again.losses == plain.losses
    assert len(plain.losses) == settings.steps
    assert again.magnitudes == plain.magnitudes
    assert train(replace(settings, seed=1)).losses[0] != plain.losses[0]


def test_watching_and_validating_change_no_bit(settings: TrainSettings, plain: _clip_run.Trained) -> None:
    alone = train(replace(settings, validate_every=0), magnitudes=False)
    assert alone.losses == plain.losses
    assert [v["step"] for v in alone.validations] == [6]
    assert alone.validations[-1] == plain.validations[-1]
    assert alone.magnitudes == []
    assert [v["step"] for v in plain.validations] == [0, 3, 6]
    assert all(0 <= v["zero_shot_top1"] <= v["zero_shot_top5"] <= 1 for v in plain.validations)


def test_the_global_random_state_is_left_alone(settings: TrainSettings) -> None:
    before = torch.random.get_rng_state()
    train(replace(settings, steps=1, validate_every=0))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_plans_begin_alike_and_part(settings: TrainSettings, plain: _clip_run.Trained) -> None:
    rounded = train(replace(settings, linear="TENSORWISE_FP8"))
    assert rounded.losses[0] == pytest.approx(plain.losses[0], abs=0.1)
    assert rounded.losses[0] != plain.losses[0]
    scaled = train(replace(settings, layer_scale=0.0))
    # A block that adds nothing: what goes in comes out, whichever block it is.
    first = scaled.magnitudes[0]["mean"]
    assert max(first) - min(first) < 1e-6 < max(plain.magnitudes[0]["mean"]) - min(plain.magnitudes[0]["mean"])
    assert scaled.parameters == plain.parameters + 2 * 2 * (64 + 32)
    normed = train(replace(settings, kq_norm=True))
    assert normed.parameters > plain.parameters


def test_magnitudes_are_those_of_the_blocks(settings: TrainSettings) -> None:
    pairs = pairs_of(settings)
    model = _clip_run.start(settings, pairs).model.eval()
    said = train(replace(settings, steps=1)).magnitudes[0]
    shown: list[Tensor] = []
    blocks = model.get_submodule(_clip_run.BLOCKS)
    for block in blocks:
        block.register_forward_hook(lambda block, arguments, output: shown.append(output))
    pixels = pairs.task.validation()["images"]
    with torch.no_grad():
        model.get_image_features(pixel_values=normalized(pixels))
    assert len(shown) == len(blocks) == 2
    assert said["mean"] == pytest.approx([float(x.double().abs().mean()) for x in shown], rel=1e-6)
    assert said["absmax"] == pytest.approx([float(x.abs().max()) for x in shown], rel=1e-6)


def test_anybodys_optimizer_and_a_number_a_step(settings: TrainSettings) -> None:
    """RMS_t of the patch embedding: by the second moment that torch's AdamW has, and as our own measures it."""

    def theirs(model: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
        assert options["betas"] == (0.9, 0.95)
        return torch.optim.AdamW(model.parameters(), options["lr"], options["betas"], 1e-6, options["weight_decay"])

    def ours(model: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
        optimizer = ng.optim.AdamW(
            model.named_parameters(), options["lr"], options["betas"], 1e-6, options["weight_decay"]
        )
        optimizer.gauges = True
        return optimizer

    def rms(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        p = model.get_parameter(_clip_run.PATCHES)
        if isinstance(optimizer, torch.optim.AdamW):
            state = optimizer.state[p]
            return {"rms": ng.gauges.rms_ratio(p.grad, state["exp_avg_sq"] / (1 - 0.95 ** state["step"]), 1e-6)}
        sums = optimizer.last_stats[_clip_run.PATCHES].sums
        return {"rms": (sums[-2] / sums[-1]).sqrt()}

    found = [train(settings, make=make, scalars=rms, magnitudes=False) for make in (theirs, ours)]
    assert [len(each.scalars["rms"]) for each in found] == [6, 6]
    assert found[0].scalars["rms"][0] == pytest.approx(1.0, abs=1e-3)
    assert found[1].scalars["rms"] == pytest.approx(found[0].scalars["rms"], rel=1e-3)
    assert found[1].losses == pytest.approx(found[0].losses, rel=1e-3)


def test_gradients_are_clipped_whosever_the_optimizer_is(settings: TrainSettings) -> None:
    def norm(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        return {"norm": torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()}

    def sgd(model: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), options["lr"])

    few = replace(settings, steps=2, validate_every=0)
    free, bound = (train(replace(few, clip=c), make=sgd, scalars=norm) for c in (0.0, 0.01))
    assert min(free.scalars["norm"]) > 0.011
    assert bound.scalars["norm"] == pytest.approx([0.01, 0.01], rel=1e-4)


def test_a_loss_that_is_not_finite_ends_a_run(settings: TrainSettings) -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.fill_(math.nan)

    ended = train(
        replace(settings, validate_every=0), make=lambda model, options: Broken(model.parameters(), lr=1.0)
    )
    assert not ended.finite
    assert len(ended.losses) == 2
    assert ended.validations == []
    assert ended.rise == math.inf


def test_it_learns(settings: TrainSettings) -> None:
    long = train(replace(settings, steps=60, warmup=10, lr=2e-3, batch=13, validate_every=0, patch_dropout=0.0))
    assert long.losses[0] > 2.0
    assert long.curve(12)[-1][1] < 1.3
    assert long.rise < 0.1
    assert long.curve(12)[-1][0] == 60


def test_settings_are_said_without_folders(settings: TrainSettings) -> None:
    said = _clip_run.plain(settings)
    assert said["data"] == settings.data.name
    assert said["model"] == "clip-micro"
    assert "out" not in said


def test_crops_of_all_of_it_are_the_image() -> None:
    pixels = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    whole = crops(pixels, 16, 1.0, False, torch.Generator().manual_seed(0))
    torch.testing.assert_close(whole, pixels.float(), atol=0.05, rtol=0)
    with torch.autocast("cpu", torch.bfloat16):
        again = crops(pixels, 16, 1.0, False, torch.Generator().manual_seed(0))
    assert torch.equal(again, whole)
    turned = crops(pixels, 16, 1.0, True, torch.Generator().manual_seed(0))
    kinds = [
        (torch.allclose(t, p.float(), atol=0.05), torch.allclose(t, p.flip(-1).float(), atol=0.05))
        for t, p in zip(turned, pixels, strict=True)
    ]
    assert all(a != b for a, b in kinds)


def test_crops_lie_within_and_have_their_area() -> None:
    """On a ramp the pixels tell where they are from: edges, area and ratio of every crop."""
    edge = 100
    ramp = (torch.arange(edge) + 0.5).expand(edge, edge)
    # Across in the first channel, down in the second.
    pixels = torch.stack([ramp, ramp.T, ramp])[None].expand(300, -1, -1, -1).to(torch.uint8)
    found = crops(pixels, 50, 0.25, False, torch.Generator().manual_seed(0))
    # A ramp of whole numbers; away from the border, where bicubic needs neighbours.
    middle = found[:, 0, 25, 5:45], found[:, 1, 5:45, 25]
    width, height = ((50 / 39) * (line[:, -1] - line[:, 0]) / edge for line in middle)
    area, ratio = width * height, width / height
    assert (area > 0.24).all()
    assert (area < 1.02).all()
    assert area.mean() == pytest.approx(0.625, abs=0.03)
    assert ratio.amax() < 1.37 and ratio.amin() > 0.73 and ratio.log().std() > 0.08  # noqa: PT018


def test_an_epoch_has_every_picture_once(settings: TrainSettings) -> None:
    pairs = pairs_of(settings)
    assert pairs.about["images"] == 13
    assert pairs.about["held_out"] == pairs.about["prompts"] == 3
    assert pairs.pixels.shape == (13, 3, 36, 36)
    draw = Draw(pairs, batch=6, seed=0, scale=1.0, flip=False)
    rows = torch.cat([draw.next()["tokens"] for _ in range(2)])
    assert len(rows.unique(dim=0)) == 12
    with pytest.raises(DataError, match=r"got 13 to train on, --batch 14"):
        Draw(pairs, batch=14, seed=0, scale=1.0, flip=False)


def test_what_cannot_be_trained_on(
    settings: TrainSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="model: got 'vit-micro', takes a CLIP"):
        pairs_of(TrainSettings(model="vit-micro", data=settings.data))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_emoji, "NAMES", tmp_path / "none.txt")
    with pytest.raises(DataError, match=r"--data: got nothing, and there is no emoji font to draw: --names: got"):
        pairs_of(replace(settings, data=None))
