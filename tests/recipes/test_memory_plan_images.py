"""Memory plans of image models: steps traced beside real ones on the CPU, with all that a training adds."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from measured import peak_bytes, saved_bytes
from torch import Tensor, nn

from forked import run_ranks
from narrowgauge import linear, recipes
from narrowgauge.recipes._losses import (
    class_loss,
    contrast,
    pair_rows,
    step_of,
)
from narrowgauge.recipes._trace import Traced, enable_checkpointing, without_memory
from narrowgauge.trainers._extras import Extras
from narrowgauge.trainers._image_models import (
    IMAGE_PRESETS,
    ClipSizes,
    ImageSizes,
    Tower,
    VitSizes,
    build_image_model,
    clip_configuration,
    vit_configuration,
)
from narrowgauge.trainers._task import Step

# Wide enough for features to outweigh the 512 bytes that a number takes, small enough for one thread.
CLIP = ClipSizes(Tower(128, 3, 2), Tower(96, 3, 2), 8, 64, image=64, context=32)
VIT = VitSizes(Tower(192, 3, 3), 8, image=64)
ADDED = Extras(layer_scale=0.1, kq_norm=True, patch_norm="after", patch_dropout=0.5)


def inputs(model: Any, batch: int, sequence: int) -> tuple[Tensor, Tensor]:
    """Images, and captions or classes."""
    edge = getattr(model.config, "vision_config", model.config).image_size
    images = torch.randint(0, 256, (batch, 3, edge, edge), dtype=torch.uint8)
    return images, torch.randint(0, 300, (batch, sequence) if sequence else (batch,))


@pytest.mark.parametrize(
    ("sizes", "recipe", "checkpointing", "added"),
    [
        (CLIP, "fp32", False, Extras(stable_embedding=True)),
        (CLIP, "A", False, Extras()),
        (CLIP, "fp32", True, ADDED),
        # Not in bf16, whose backward pass takes float32 buffers on a CPU: 2% of a model that small.
        (VIT, "fp32", False, ADDED),
        (VIT, "fp32", True, Extras()),
    ],
)
@pytest.mark.usefixtures("one_thread")
def test_a_trace_is_what_a_real_step_takes(
    sizes: ImageSizes, recipe: str, checkpointing: bool, added: Extras
) -> None:
    """Storages that autograd really saves, and the allocator's own count of a step, on the CPU."""
    batch = 12
    model = build_image_model(sizes, 300, context=32, seed=0)
    added.add(model, 0)
    sequence = 32 if sizes is CLIP else 0
    traced = Traced(without_memory(model), recipes.get(recipe), None, checkpointing, step_of(model).loss, {})
    timeline = traced.trace(batch, sequence)
    recipes.cast(model, recipes.get(recipe).dtype)
    if checkpointing:
        enable_checkpointing(model)
    images, others = inputs(model, batch, sequence)

    def loss() -> Tensor:
        given = images.clone(), others.clone()  # as a training moves them to the device
        if not sequence:
            return class_loss(model, *given)
        return contrast(pair_rows(model, *given), slice(None), model.get_parameter("logit_scale"))

    assert timeline.at("backward").total == pytest.approx(saved_bytes(model, loss), rel=0.01)

    def step() -> None:
        torch.autograd.backward(loss())

    step()
    for p in model.parameters():
        p.grad = None
    assert timeline.peak().total == pytest.approx(peak_bytes(step), rel=0.01)


def test_cosines_grow_with_the_square_of_the_batch() -> None:
    """By hand: what the loss keeps of the cosines of n pairs, beside features."""
    config = clip_configuration(IMAGE_PRESETS["clip-micro"], end=0)  # type: ignore[arg-type]
    saved = {n: recipes.plan_memory(config, "fp32", batch=n).saved for n in (2048, 4096)}
    logits, logs = 4 * 4096**2, 4 * 4096**2
    # The scaled cosines, for the scale's gradient, and the log softmax of rows and of columns.
    bent = saved[4096] - 2 * saved[2048]  # type: ignore[operator]
    assert bent == pytest.approx((logits + 2 * logs) / 2, rel=0.35)


FEW, PAIRS = (
    ClipSizes(Tower(32, 1, 2), Tower(32, 1, 2), 8, 32, image=16, context=8),
    512,
)


def peak_of_a_rank(rank: int, folder: Path) -> None:
    """The trainer's own step of half of the pairs, and what the allocator counts of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model = build_image_model(FEW, 300, context=8, seed=0)
    images, tokens = inputs(model, PAIRS, 8)
    group = SimpleNamespace(
        world=2, rank=rank, backward=lambda *_: nullcontext(), average_scalars=lambda _: None
    )  # fmt: skip
    parts = SimpleNamespace(runs=model, model=model, scaler=None, computing=nullcontext)
    step = Step(parts, group, [{"images": images, "tokens": tokens}], torch.device("cpu"))  # type: ignore[arg-type]

    def pairs(model: Any, examples: dict[str, Tensor]) -> Tensor:
        return pair_rows(model, examples["images"].clone(), examples["tokens"].clone())

    for _ in range(2):  # the first time makes what stays
        for p in model.parameters():
            p.grad = None
        peak = peak_bytes(lambda: step.of_all(pairs, contrast, model.logit_scale))
    (folder / f"{rank}").write_text(str(peak))
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_trace_is_what_a_step_of_two_processes_takes(tmp_path: Path) -> None:
    run_ranks(peak_of_a_rank, 2, tmp_path)
    model = build_image_model(FEW, 300, context=8, seed=0)

    def planned(gpus: int) -> int:
        loss = step_of(model, gpus).loss
        return (
            Traced(without_memory(model), recipes.get("fp32"), None, False, loss, {}).trace(PAIRS, 8).peak().total
        )

    measured = [int((tmp_path / f"{rank}").read_text()) for rank in range(2)]
    assert measured == pytest.approx([planned(2)] * 2, rel=0.01)
    assert planned(2) > 1.2 * planned(1)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_clip_on_several_gpus(clip: Any, parallel: Any) -> None:
    """By hand: the log softmax of n images beside all captions, and of n captions beside all images, is kept."""
    n, gpus = 2048, 4
    one = recipes.plan_memory(clip, "fp32", batch=n)
    several = recipes.plan_memory(clip, "fp32", batch=n, gpus=gpus, parallel=parallel)
    assert several.saved - one.saved == pytest.approx(4 * 2 * n * (gpus * n - n), rel=0.05)
    shares = gpus if parallel == "fsdp" else 1
    assert several.held["states"] == pytest.approx(one.held["states"] / shares, rel=0.05)
    assert several.at_peak["communication"] > 0


@pytest.fixture(scope="module")
def clip() -> Any:
    return clip_configuration(IMAGE_PRESETS["clip-micro"], end=0)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def vit() -> Any:
    return vit_configuration(IMAGE_PRESETS["vit-micro"], 1000)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_largest_that_fits_fits_and_one_more_does_not(clip: Any, vit: Any) -> None:
    for config, memory in ((clip, "700MB"), (vit, "300MB")):
        plan = recipes.plan_memory(config, "D", batch=2, device_memory=memory)
        batch = plan.largest_batch()
        fits, not_so = (recipes.plan_memory(config, "D", batch=n, device_memory=memory) for n in (batch, batch + 1))
        assert batch > 100
        assert fits.fits
        assert not not_so.fits
        assert plan.largest_model() == int(plan.device_memory / 16)  # type: ignore[operator]
    clips = recipes.plan_memory(clip, "D", batch=2, device_memory="700MB")
    assert (clips.example, clips.sequence, clips.longest_sequence()) == ("pair", 16, 16)
    words = recipes.plan_memory(clip, "D", batch=64, sequence=8)
    longer = recipes.plan_memory(clip, "D", batch=64)
    assert words.saved < longer.saved  # type: ignore[operator]
    plan = recipes.plan_memory(vit, "D", device_memory="300MB")
    assert (plan.example, plan.sequence, plan.record()["sequence"]) == ("image", None, None)
    with pytest.raises(ValueError, match=r"^model_or_config must .*a model that.*got a ViTForImageClassification"):
        plan.longest_sequence()


def test_patches_that_are_dropped_take_nothing(vit: Any) -> None:
    def saved(share: float) -> Any:
        model = build_image_model(IMAGE_PRESETS["vit-micro"], 5, context=0, seed=0)
        Extras(patch_dropout=share).add(model, 0)
        return recipes.plan_memory(model, "A", batch=64).saved

    whole, half = saved(0.0), saved(0.5)
    # 16 patches and a class token: 9 of 17 rows are left in the blocks; pixels and embeddings stay.
    assert 9 / 17 < half / whole < 0.65


def test_the_heads_stay_as_they_are(clip: Any) -> None:
    plan = recipes.plan_memory(clip, "A", batch=4, linear=linear.SWITCHBACK)
    plain = recipes.plan_memory(clip, "A", batch=4)
    assert plan.linear
    assert plan.held == plain.held
    traced = Traced(
        without_memory(build_image_model(IMAGE_PRESETS["clip-micro"], 300, context=16, seed=0)), recipes.get("A"),
        linear.SWITCHBACK, False, step_of(nn.Linear(1, 1)).loss, {},
    )  # fmt: skip
    planned = [n for n, m in traced.model.named_modules() if getattr(m, "plan", None) is not None]
    assert len(planned) == 24
    assert all(".layers." in name for name in planned)


def test_what_cannot_be_is_refused_by_name(clip: Any, vit: Any) -> None:
    for config, options, message in (
        (vit, {"sequence": 16}, "sequence must be None for a ViTForImageClas.*, got 16"),
        (clip, {"sequence": 17}, "sequence must be at most 16.*, got 17"),
        (clip, {"accumulate": True}, "accumulate must be False for a CLIPModel.*, got True"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            recipes.plan_memory(config, "A", **options)


def test_a_tower_alone_needs_a_loss() -> None:
    from transformers import ViTModel

    model = ViTModel(vit_configuration(IMAGE_PRESETS["vit-micro"], 5))  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"^loss must be a function of model, batch and sequence for a ViTModel.*, got None"
    ):
        recipes.plan_memory(model, "A")
