"""Image-text pairs that lie on the device: decoded once, cropped there, so that no training waits for the host.

`narrowgauge train` decodes every picture anew in every step, by as many threads as there are cores. A study trains
on the same few thousand pictures dozens of times, in steps of some milliseconds. So each picture is decoded once,
as the middle square, an eighth larger than what the model sees, and kept as bytes; captions are tokens. A step's
crops are cut from them on the device, by the same law as the trainer's (an area, then a ratio; torchvision's
RandomResizedCrop), of all its pictures at once.

Which pictures a step sees and how they are cut follows from the seed and the number of the step alone.
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import features
from torch import Tensor
from torch.nn import functional as F

from narrowgauge.kernels._cache import folder as cache_folder
from narrowgauge.trainers import DataError, TrainSettings
from narrowgauge.trainers._captions import learned_captions, read_captions
from narrowgauge.trainers._image_loader import ImageLoader
from narrowgauge.trainers._image_models import ClipSizes
from narrowgauge.trainers._image_text import ImageTextTask
from narrowgauge.trainers._images import open_images
from narrowgauge.trainers._models import preset
from studies.shared import emoji

MARGIN = 9 / 8  # of the kept square's edge to the model's: emoji are kept as they were drawn, 72 for 64
RATIO = 4 / 3  # of a crop's edges, at most

_LAST = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pictures and captions on a device, and what a CLIP is asked of them."""

    pixels: Tensor  # uint8 (n, 3, edge, edge), the middle squares of the training's pictures
    tokens: Tensor  # int64 (n, context), their captions
    task: ImageTextTask  # the trainer's own: loss, bound of the logit scale, held-out pictures, zero-shot accuracy
    size: int  # edge of what the model sees
    # vocabulary, end: number of tokens, and the one that ends a caption
    vocabulary: int
    end: int
    about: dict[str, Any]  # what a results file says of the data


def pairs_of(settings: TrainSettings) -> Pairs:
    """The pairs that settings of a CLIP name, made once in a process for equal data; by default emoji."""
    sizes = preset(settings.model)
    if not isinstance(sizes, ClipSizes):
        raise ValueError(f"model must be a CLIP such as 'clip-small', got {settings.model!r}")
    data = installed_emoji() if settings.data is None else settings.data
    return _load(
        data, settings.validation_data, settings.columns, settings.vocabulary,
        min(settings.sequence, sizes.context), sizes.image, settings.validation_windows, settings.max_logit_scale,
        settings.workers, _device(settings),
    )  # fmt: skip


def _device(settings: TrainSettings) -> str:
    if settings.device != "auto":
        return settings.device
    return "cuda" if torch.cuda.is_available() else "cpu"


@functools.lru_cache(maxsize=2)
def _load(
    data: Path, validation: Path | None, columns: str, vocabulary: int | None, context: int, size: int,
    held_out: int, max_logit_scale: float, workers: int | None, device: str,
) -> Pairs:  # fmt: skip
    pictures = open_images(data, validation, columns)
    loader = functools.partial(
        ImageLoader, pictures.train, batch=1, seed=0, crop_scale=1.0, flip=False, workers=workers
    )
    kept = loader(size=round(MARGIN * size))
    pixels, trained = kept.middles(pictures.train)
    said = [picture.caption for picture in trained]
    if pictures.tokenizer is None:
        captions = learned_captions(said, vocabulary, lambda stage, fraction: None)
    else:
        captions = read_captions(pictures.tokenizer, vocabulary)
    shown = loader(size=size)
    task = ImageTextTask(
        pictures, captions, shown, context=context, count=held_out, patch_dropout=0.0,
        max_logit_scale=max_logit_scale,
    )  # fmt: skip
    for note in (*pictures.notes, *(f"skipped: {name}" for name in (*kept.damaged, *shown.damaged)[:5])):
        print(note, file=sys.stderr, flush=True)
    asked = task.validation()["prompts"]
    about = {
        "source": "emoji" if (data / "emoji.json").is_file() else data.name,
        "images": len(pixels),
        "captions": len(set(said)),
        "held_out": len(asked),
        "prompts": int(asked.max()) + 1 if not pictures.prompts else len(pictures.prompts),
        "damaged": len(kept.damaged) + len(shown.damaged),
        "fingerprint": pictures.fingerprint[:12],
    }
    tokens = captions.rows(said, context)
    return Pairs(
        pixels.to(device), tokens.to(device), task, size, captions.vocabulary, captions.end, about
    )  # fmt: skip


def installed_emoji() -> Path:
    """A folder with the installed color emoji font's pairs, drawn once and kept in the user's cache."""
    folder = cache_folder() / "emoji"
    if not (folder / "emoji.json").is_file():  # written last
        if not features.check("raqm"):
            raise DataError(
                "--data: got nothing, and Pillow has no raqm here, without which no emoji can be drawn that is "
                "held out; takes libfribidi (Debian: libfribidi0), or pairs"
            )
        try:
            emoji.write_pairs(
                emoji.read_names(emoji.NAMES), emoji.Drawer(emoji.FONT), folder, size=72, renders=4, seed=0
            )
        except ValueError as error:
            raise DataError(f"--data must be given where there is no emoji font to draw: {error}") from None
    return folder


class Draw:
    """Steps of random crops, without an end; an epoch is as many steps as the pairs fill.

    `scale` is the least share of a picture's area that is kept, 1 for the middle square; with `flip` one in two is
    mirrored.

    """

    def __init__(self, pairs: Pairs, *, batch: int, seed: int, scale: float, flip: bool) -> None:
        if len(pairs.pixels) < batch:
            raise DataError(
                f"--data must have at least --batch {batch} images to train on, got {len(pairs.pixels)}"
            )
        self._pairs, self._batch, self._scale, self._flip = pairs, batch, scale, flip
        self._generator = torch.Generator(pairs.pixels.device).manual_seed(seed & _LAST)
        self._order = torch.empty(0, dtype=torch.int64, device=pairs.pixels.device)

    def next(self) -> dict[str, Tensor]:
        """`images`, float32 (batch, 3, size, size) from 0 to 255, and `tokens`, int64 (batch, context)."""
        pairs, device = self._pairs, self._pairs.pixels.device
        if len(self._order) < self._batch:
            self._order = torch.randperm(len(pairs.pixels), generator=self._generator, device=device)
        places, self._order = self._order[: self._batch], self._order[self._batch :]
        images = crops(pairs.pixels[places], pairs.size, self._scale, self._flip, self._generator)
        return {"images": images, "tokens": pairs.tokens[places]}


def crops(pixels: Tensor, size: int, scale: float, flip: bool, generator: torch.Generator) -> Tensor:
    """A random part of each image, uint8 (n, 3, edge, edge), resized: float32 (n, 3, size, size) from 0 to 255.

    Numbers are interpolated, not averaged: pixels should not be much larger than what they are resized to.

    Source: Szegedy et al. 2015: an area, then a ratio, here of those that fit.
    """
    n = len(pixels)
    area, ratio, left, top, mirrored = torch.rand(5, n, generator=generator, device=pixels.device)
    area = scale + (1 - scale) * area
    widest = (-area.log()).clamp(max=math.log(RATIO))  # beyond it an edge would be longer than the image's
    ratio = (widest * (2 * ratio - 1)).exp()
    width, height = (area * ratio).sqrt(), (area / ratio).sqrt()
    # In coordinates from -1 to 1: half the edges, and where the middle is.
    zero = torch.zeros_like(width)
    sign = torch.where(mirrored < 0.5, -1.0, 1.0) if flip else torch.ones_like(width)
    x, y = (1 - width) * (2 * left - 1), (1 - height) * (2 * top - 1)
    theta = torch.stack([torch.stack([sign * width, zero, x], 1), torch.stack([zero, height, y], 1)], 1)
    # Autocast would multiply the grid in bf16, whose coordinates are a quarter of a pixel apart.
    with torch.autocast(pixels.device.type, enabled=False):
        grid = F.affine_grid(theta, [n, 3, size, size], align_corners=False)
        return F.grid_sample(pixels.float(), grid, "bicubic", "border", align_corners=False).clamp(0, 255)
