"""From settings to a task: the data that a model takes, opened and ready to be drawn from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.recipes._losses import DEVIATION, MEAN
from narrowgauge.trainers._captions import learned_captions, read_captions
from narrowgauge.trainers._export import export_tokenizer
from narrowgauge.trainers._image_loader import ImageLoader
from narrowgauge.trainers._image_models import ClipSizes, VitSizes
from narrowgauge.trainers._image_text import ImageClassTask, ImageTextTask
from narrowgauge.trainers._images import ImageSet, open_images
from narrowgauge.trainers._language import LanguageTask, few_windows
from narrowgauge.trainers._models import preset
from narrowgauge.trainers._settings import TrainSettings
from narrowgauge.trainers._task import Task, count
from narrowgauge.trainers._text import DataError
from narrowgauge.trainers._tokens import END_OF_TEXT, OnProgress, open_tokens


@dataclass(frozen=True, eq=False)
class Opened:
    """A task, and the sizes that its model takes.

    Attributes:
        task: the task.
        outputs: number of tokens of the text, or of classes.
        end: the token that ends a text.
        fingerprint: equal for equal data.
        notes: lines about what was left out.
        export: writes tokenizer or image processor into a folder; sets the classes in the model's configuration.
    """

    task: Task
    outputs: int
    end: int
    fingerprint: str
    notes: tuple[str, ...]
    export: Callable[[Any, Path], None]


def open_task(settings: TrainSettings, on_progress: OnProgress) -> Opened:
    """Open the data of a run; a DataError or ValueError names the option that cannot be trained on."""
    sizes = preset(settings.model)
    if not isinstance(sizes, ClipSizes | VitSizes):
        return _text(settings, on_progress)
    data = open_images(settings.data, settings.validation_data, settings.columns)
    loader = ImageLoader(
        data.train, batch=settings.batch, size=sizes.image, seed=settings.seed, crop_scale=settings.crop_scale,
        flip=settings.flip, workers=settings.workers,
    )  # fmt: skip
    if isinstance(sizes, ClipSizes):
        return _pairs(settings, sizes, data, loader, on_progress)
    return _classes(settings, sizes, data, loader)


def _text(settings: TrainSettings, on_progress: OnProgress) -> Opened:
    source = open_tokens(settings.data, settings.vocabulary, on_progress)
    objective = preset(settings.model).objective
    assert objective in ("causal", "masked")
    task = LanguageTask(
        source, objective, batch=settings.batch, sequence=settings.sequence,
        windows=settings.validation_windows, seed=settings.seed,
    )  # fmt: skip

    def export(model: Any, folder: Path) -> None:
        export_tokenizer(source.tokenizer, folder, objective=objective, sequence=settings.sequence)

    notes = (*source.notes, *few_windows(count(task.validation()), settings.validation_windows))
    return Opened(task, source.vocabulary, END_OF_TEXT, source.fingerprint, notes, export)


def _pairs(
    settings: TrainSettings, sizes: ClipSizes, data: ImageSet, loader: ImageLoader, on_progress: OnProgress
) -> Opened:
    context = min(settings.sequence, sizes.context)
    if data.tokenizer is None:
        captions = learned_captions([p.caption for p in data.train], settings.vocabulary, on_progress)
    else:
        captions = read_captions(data.tokenizer, settings.vocabulary)
    task = ImageTextTask(
        data, captions, loader, context=context, count=settings.validation_windows,
        patch_dropout=settings.patch_dropout, max_logit_scale=settings.max_logit_scale,
    )  # fmt: skip
    digest = hashlib.sha256(f"{data.fingerprint} {captions.fingerprint}".encode()).hexdigest()

    def export(model: Any, folder: Path) -> None:
        captions.export(folder, context)
        _export_processor(sizes.image, folder)

    return Opened(task, captions.vocabulary, captions.end, digest, data.notes, export)


def _classes(settings: TrainSettings, sizes: VitSizes, data: ImageSet, loader: ImageLoader) -> Opened:
    if not data.classes:
        raise DataError(f"--data must be a folder of classes with --model {settings.model}, got {settings.data}")
    strange = [picture.name for picture in data.validation if picture.label < 0]
    if strange:
        raise DataError(f"--validation-data must have the classes of --data alone, got {strange[0]}")
    task = ImageClassTask(
        data, loader, count=settings.validation_windows, patch_dropout=settings.patch_dropout
    )  # fmt: skip

    def export(model: Any, folder: Path) -> None:
        model.config.id2label = dict(enumerate(data.classes))
        model.config.label2id = {name: number for number, name in enumerate(data.classes)}
        _export_processor(sizes.image, folder)

    return Opened(task, len(data.classes), END_OF_TEXT, data.fingerprint, data.notes, export)


def _export_processor(size: int, folder: Path) -> None:
    """Write how images become a model's input, for transformers' AutoImageProcessor; as in validation."""
    processor = {
        "image_processor_type": "CLIPImageProcessor", "do_convert_rgb": True,
        "do_resize": True, "size": {"shortest_edge": size}, "resample": 3,
        "do_center_crop": True, "crop_size": {"height": size, "width": size},
        "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": MEAN, "image_std": DEVIATION,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n", encoding="utf-8")
