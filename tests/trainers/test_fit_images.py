"""CLIP and ViT trained small: each option does what it says, and what is left loads."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import CPU, Silent, assert_it_goes_on, records, run, weights
from pictured import class_folder, csv_pairs

from narrowgauge.nn import HeadLayerNorm, LayerScale, PatchNorm, StableEmbedding
from narrowgauge.recipes._losses import normalized
from narrowgauge.trainers import SettingsError, TrainSettings, fit, load_model
from narrowgauge.trainers._build import build_parts
from narrowgauge.trainers._data import open_task
from narrowgauge.trainers._export import ADDITIONS, export_model
from narrowgauge.trainers._image_loader import decode
from narrowgauge.trainers._images import open_images
from narrowgauge.trainers._run_folder import HISTORY, read_history
from narrowgauge.trainers._settings import refuse_others

pytestmark = pytest.mark.usefixtures("surroundings")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> TrainSettings:
    return TrainSettings(
        data=csv_pairs(tmp_path_factory.mktemp("pairs"), repeat=3), model="clip-micro", recipe="fp32", steps=6,
        batch=8, vocabulary=300, lr=2e-3, warmup=2, validation_windows=8, validate_every=3, gauges_every=0,
        save_every=0, log_every=1, device="cpu", workers=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def vit(clip: TrainSettings, tmp_path_factory: pytest.TempPathFactory) -> TrainSettings:
    data = class_folder(tmp_path_factory.mktemp("classes"), each=20)
    return replace(clip, data=data, model="vit-micro", vocabulary=None)


ADDED: dict[str, Any] = {"kq_norm": True, "patch_norm": "after", "layer_scale": 0.5, "patch_dropout": 0.5}
STOPPED: dict[str, dict[str, Any]] = {
    "clip": {"recipe": "adamw8bit-split8", **ADDED, "stable_embedding": True},
    "clip, a plan, stochastic rounding": {"recipe": "stochastic", "linear": "SWITCHBACK", "flip": True},
    "clip, autocast, a scaler": {"autocast": "bf16", "scaler": "tensor", "gradient_checkpointing": True},
    "clip, in parts": {"recipe": "adamw8bit-split8", "patch_dropout": 0.5, "accumulate": 2, "gauges_every": 2},
    "vit": {"recipe": "adamw8bit-split8", **ADDED, "patch_norm": "before", "accumulate": 2},
}


# The others are combinations of what these and the text's prove.
QUICK = ("clip, in parts", "vit")


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in STOPPED])
def test_a_run_that_stops_goes_on_as_if_it_had_not(
    case: str, clip: TrainSettings, vit: TrainSettings, tmp_path: Path
) -> None:
    assert_it_goes_on(vit if case == "vit" else clip, tmp_path, {"workers": 3}, **STOPPED[case])
    top = "top1" if case == "vit" else "zero_shot_top1"
    assert all(0 <= r[top] <= 1 for r in records(tmp_path / "whole") if "validation_loss" in r)


@pytest.mark.parametrize("recipe", ["adamw8bit-split8", "master"])
def test_the_scale_stays_within_its_bound(recipe: str, clip: TrainSettings, tmp_path: Path) -> None:
    """It would rise above e^2.66, where it begins; low words and copies of it do not bring it back."""
    run(clip, tmp_path, recipe=recipe, max_logit_scale=3.0, steps=4)
    scale = weights(tmp_path)["logit_scale"].item()
    assert 0.9 * math.log(3) < scale < 1.01 * math.log(3)


@pytest.mark.parametrize("model", ["clip", "vit"])
def test_it_learns(model: str, clip: TrainSettings, vit: TrainSettings, tmp_path: Path) -> None:
    """Colours and shapes: of held-out captions, and of three classes."""
    small = {"clip": clip, "vit": vit}[model]
    losses = run(small, tmp_path, steps=60, batch=16, validate_every=30, validation_windows=16, gauges_every=20)
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    first, last = (r for r in read_history(tmp_path / HISTORY) if "validation_loss" in r)
    assert last["validation_loss"] < first["validation_loss"]
    # Chance is a third; and of nine held-out captions a ninth.
    assert last[{"clip": "zero_shot_top5", "vit": "top1"}[model]] > 0.6


@pytest.mark.parametrize("name", ["clip-micro", "vit-micro"])
@pytest.mark.parametrize("beside", [False, True])
def test_what_is_left_loads_and_says_the_same(
    name: str, beside: bool, clip: TrainSettings, vit: TrainSettings, tmp_path: Path
) -> None:
    import transformers

    small = replace(clip if name == "clip-micro" else vit, layer_scale=0.5, stable_embedding=name == "clip-micro")
    if beside:
        small = replace(small, kq_norm=True, patch_norm="after")
    model = build_parts(small, 300, CPU).model.eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LayerScale | StableEmbedding | HeadLayerNorm | PatchNorm):
                for parameter in module.parameters():
                    parameter.copy_(torch.rand(parameter.shape, generator=draw) + 0.5)
    notes = export_model(model, tmp_path)
    kind = transformers.CLIPModel if name == "clip-micro" else transformers.ViTForImageClassification
    plain, told = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told.values()), told
    assert (tmp_path / ADDITIONS).exists() == beside == bool(notes)
    assert not hasattr(plain.config, "use_cache")
    inputs: dict[str, torch.Tensor] = {"pixel_values": torch.randn(2, 3, 32, 32, generator=draw)}
    if name == "clip-micro":
        inputs["input_ids"] = torch.tensor([[5, 6, 188, 188], [7, 8, 9, 188]])
    logits = "logits_per_image" if name == "clip-micro" else "logits"
    with torch.no_grad():
        said, back, bare = (getattr(m(**inputs), logits) for m in (model, load_model(tmp_path), plain.eval()))
    assert (back - said).abs().max() <= 3e-6 * said.abs().max()
    assert ((bare - said).abs().max() > 1e-3 * said.abs().max()) == beside


def test_norms_of_a_language_model_come_back_too(clip: TrainSettings, tmp_path: Path) -> None:
    model = build_parts(TrainSettings(model="llama-micro", recipe="fp32", kq_norm=True), 300, CPU).model.eval()
    (note,) = export_model(model, tmp_path)
    assert note.startswith("kq_norm: in additions.safetensors; transformers leaves them out")
    tokens = torch.randint(300, (2, 9), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(load_model(tmp_path)(tokens).logits, model(tokens).logits, atol=1e-6)
    # A later model without them leaves none behind.
    assert export_model(build_parts(TrainSettings(model="llama-micro"), 300, CPU).model, tmp_path) == ()
    assert not (tmp_path / ADDITIONS).exists()
    with pytest.raises(ValueError, match=r"folder must be one that narrowgauge train ended in, got .*nowhere"):
        load_model(tmp_path / "nowhere")


def test_a_run_leaves_tokenizer_processor_and_notes(clip: TrainSettings, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

    observer = Silent()
    fit(replace(clip, out=tmp_path, kq_norm=True, patch_norm="before"), CPU, observer)
    assert any(line.startswith("kq_norm and patch_norm: in additions.safetensors;") for line in observer.told)
    config = (tmp_path / "config.toml").read_text()
    assert "# The model has norms that its class has no place for, in additions.safetensors:" in config
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = tokenizer(["a red disc on blue", "a bar"], padding=True, return_tensors="pt")
    assert texts.keys() == {"input_ids"}
    opened = open_task(clip, lambda stage, fraction: None)
    # Held-out images through transformers' processor are what was validated on.
    processor = CLIPImageProcessorPil.from_pretrained(tmp_path)
    pictures = open_images(clip.data).validation[:8]
    theirs = processor([decode(picture) for picture in pictures], return_tensors="pt")["pixel_values"]
    ours = normalized(opened.task.validation()["images"])
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().mean() < 0.03  # they crop after resizing to whole pixels
    assert CLIPModel.from_pretrained(tmp_path)(**texts, pixel_values=ours).logits_per_image.shape == (8, 2)


def test_a_vit_knows_its_classes(vit: TrainSettings, tmp_path: Path) -> None:
    from transformers import AutoModelForImageClassification

    run(vit, tmp_path, steps=1)
    config = AutoModelForImageClassification.from_pretrained(tmp_path).config
    assert config.id2label == {0: "blue_bar", 1: "green_cross", 2: "red_disc"}
    assert config.label2id == {"blue_bar": 0, "green_cross": 1, "red_disc": 2}


def test_damaged_images_are_told_by_name(clip: TrainSettings, tmp_path: Path) -> None:
    table = csv_pairs(tmp_path / "pairs")
    captions = [p.name for p in open_images(table).train]
    for n, name in enumerate(captions[:12]):
        (table.parent / name).write_bytes(b"x" * n)
    with table.open("a") as file:
        file.write("images/gone.png,nothing\n")
    observer = Silent()
    fit(replace(clip, data=table, out=tmp_path / "run", steps=12), CPU, observer)
    said = [line for line in observer.told if line.startswith("skipped")]
    assert said[0] == "skipped missing images: 1 (images/gone.png)"
    assert all(line.startswith("skipped damaged images: ") for line in said[1:])
    assert 1 <= len(said[1:]) <= 7
    assert ": cannot identify image file" in said[1]
    again = Silent()
    fit(replace(clip, data=table, out=tmp_path / "again", steps=12, workers=1), CPU, again)
    assert [line for line in again.told if line.startswith("skipped")] == said


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "parts of a pair": ({"accumulate": 3}, "--accumulate must be a divisor of --batch 8, got 3"),
    "one pair": ({"batch": 1}, "--batch must be at least 2 with --model clip-micro, got 1"),
    "a norm elsewhere": ({"patch_norm": "behind"}, "--patch-norm must be one of none, before, after, got 'behind'"),
    "a scale below one": ({"max_logit_scale": 0.5}, "--max-logit-scale must be a number from 1, or 0 for no"),
    "one column": ({"columns": "filepath"}, "--columns must be two names with a comma between them"),
    "words of a classifier": ({"model": "vit-micro"}, "--vocabulary must be left out with --model vit-micro"),
    "a table of classes": ({"model": "vit-micro", "vocabulary": None}, "--data must be a folder of classes with"),
    "a larger batch": ({"batch": 1000}, "--data must have at least --batch 1000 images to train on, got 171"),
    "nothing": ({"data": None}, "--data must be a CSV, tar files"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_by_name(case: str, clip: TrainSettings, tmp_path: Path) -> None:
    changes, says = REFUSED[case]
    with pytest.raises(ValueError, match=says) as caught:
        fit(replace(clip, out=tmp_path, **changes), CPU, Silent())
    assert "\n" not in str(caught.value)


def test_a_class_that_training_has_not_is_refused(vit: TrainSettings, tmp_path: Path) -> None:
    class_folder(tmp_path, each=2)
    (tmp_path / "red_disc").rename(tmp_path / "teal_disc")
    with pytest.raises(ValueError, match=r"--validation-data must have .*, got teal_disc/00\d.png"):
        fit(replace(vit, validation_data=tmp_path, out=tmp_path / "run"), CPU, Silent())


def test_a_checkpoint_from_before_an_option_goes_on_under_its_default(tmp_path: Path) -> None:
    now = TrainSettings(data=tmp_path)
    saved = {k: v for k, v in now.plain().items() if k not in ("kq_norm", "patch_norm", "max_logit_scale")}
    refuse_others(now, saved, tmp_path)
    with pytest.raises(SettingsError, match=r"--kq-norm must be False to go on .*, got True"):
        refuse_others(replace(now, kq_norm=True), saved, tmp_path)
    del saved["decay_all"]
    refuse_others(replace(now, decay_all=True), saved, tmp_path)
    with pytest.raises(SettingsError, match=r"--decay-all must be True to go on .*, got False"):
        refuse_others(now, saved, tmp_path)
