"""From files to batches of pixels: decoded by threads, in an order and with crops that follow from the seed alone.

A step's images are a function of the seed and the step's number. Every epoch has a permutation of its own, and
every image in it a generator of its own for the crop. So steps can be decoded ahead by any number of threads, and a
resumed run needs nothing but the number of steps drawn.

An image that cannot be decoded is left out and named; it is replaced by the image that comes a batch later in the
epoch, in every run the same one.

Pillow decodes and resizes without holding Python's lock, so threads are enough.
"""

from __future__ import annotations

import io
import math
import os
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from narrowgauge.trainers._images import Picture
from narrowgauge.trainers._text import DataError

_AHEAD = 2  # steps that are decoded before they are asked for
_TRIES = 32  # images in a row that cannot be decoded before the fault is not the images'
_RATIOS = (3 / 4, 4 / 3)  # of a random crop; torchvision's
_MOST_WORKERS = 16

_Pixels = NDArray[np.uint8]


def decode(picture: Picture) -> Any:
    """A picture as an RGB image of Pillow, which raises many kinds of errors for a damaged one."""
    from PIL import Image

    with open(picture.path, "rb") as file:
        file.seek(picture.offset)
        data = file.read(picture.size)
    return Image.open(io.BytesIO(data)).convert("RGB")


def center_crop(image: Any, size: int) -> _Pixels:
    """The middle square of an image, resized: (3, size, size)."""
    width, height = image.size
    edge = min(width, height)
    left, top = (width - edge) / 2, (height - edge) / 2
    return _resized(image, size, (left, top, left + edge, top + edge))


def random_crop(image: Any, size: int, scale: float, flip: bool, draw: np.random.Generator) -> _Pixels:
    """A random part of an image of Pillow, resized: (3, size, size).

    At least `scale` of its area; 1 is the middle square. With `flip` one in two is mirrored.

    Source: Szegedy et al. 2015, as torchvision's RandomResizedCrop has it: an area and a ratio are drawn, up to ten
    times, until they fit.
    """
    width, height = image.size
    pixels = None
    for _ in range(10 if scale < 1 else 0):
        area = width * height * draw.uniform(scale, 1.0)
        ratio = math.exp(draw.uniform(math.log(_RATIOS[0]), math.log(_RATIOS[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(draw.integers(width - w + 1)), int(draw.integers(height - h + 1))
            pixels = _resized(image, size, (left, top, left + w, top + h))
            break
    if pixels is None:
        pixels = center_crop(image, size)
    return pixels[:, :, ::-1] if flip and draw.random() < 0.5 else pixels


def _resized(image: Any, size: int, box: tuple[float, float, float, float]) -> _Pixels:
    from PIL import Image

    return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, box=box)).transpose(2, 0, 1)


class ImageLoader:
    """Endless batches of random crops, (size, size) pixels each; a DataError for fewer pictures than a batch takes.

    An epoch is as many whole batches as the pictures fill, the rest is left to other epochs. `workers` threads
    decode; None is one a core, 16 at most. `crop_scale` and `flip` are `random_crop`'s.
    """

    def __init__(
        self, pictures: Sequence[Picture], *, batch: int, size: int, seed: int, crop_scale: float, flip: bool,
        workers: int | None,
    ) -> None:  # fmt: skip
        if len(pictures) < batch:
            raise DataError(f"--data must have at least --batch {batch} images to train on, got {len(pictures)}")
        self._decoder = _Decoder(pictures, batch, size, seed, crop_scale, flip)
        self._pool = ThreadPoolExecutor(workers or min(_MOST_WORKERS, os.cpu_count() or 1), "decode")
        weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        self._drawn = 0
        self._pending: deque[tuple[_Pixels, list[Future[tuple[int, list[str]]]]]] = deque()
        self._damaged: dict[str, None] = {}

    @property
    def damaged(self) -> list[str]:
        """Names of images that could not be decoded so far, with the reason."""
        return list(self._damaged)

    def draw(self) -> tuple[Tensor, list[Picture]]:
        """The next step's images, uint8 (batch, 3, size, size), and pictures; a DataError if none can be read."""
        decoder = self._decoder
        while len(self._pending) <= _AHEAD:
            step = self._drawn + len(self._pending)
            pixels = np.empty((decoder.batch, 3, decoder.size, decoder.size), np.uint8)
            order = decoder.order(step)
            rows = range(decoder.batch)
            self._pending.append((pixels, [self._pool.submit(decoder.fill, pixels, order, step, r) for r in rows]))
        pixels, futures = self._pending.popleft()
        drawn = [future.result() for future in futures]
        self._drawn += 1
        self._damaged.update(dict.fromkeys(name for _, names in drawn for name in names))
        return torch.from_numpy(pixels), [decoder.pictures[index] for index, _ in drawn]

    def middles(self, pictures: Sequence[Picture]) -> tuple[Tensor, list[Picture]]:
        """The middle squares of pictures that can be decoded, and these pictures; the others are `damaged`."""
        found = list(self._pool.map(self._decoder.middle, pictures))
        good = [(p, pixels) for p, pixels in zip(pictures, found, strict=True) if not isinstance(pixels, str)]
        self._damaged.update(dict.fromkeys(why for why in found if isinstance(why, str)))
        if not good:
            raise DataError(f"--data: none of {len(found)} images to validate on can be read: {self.damaged[-1]}")
        return torch.from_numpy(np.stack([pixels for _, pixels in good])), [picture for picture, _ in good]

    def state_dict(self) -> dict[str, Any]:
        """The state of the draw."""
        return {"drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the draw of another loader of the same pictures and sizes."""
        self._pending.clear()
        self._drawn = int(state["drawn"])


@dataclass(eq=False)
class _Decoder:
    """What the threads use: not the loader itself, which could never be freed."""

    pictures: Sequence[Picture]
    batch: int
    size: int
    seed: int
    crop_scale: float
    flip: bool
    _orders: dict[int, NDArray[np.int64]] = field(default_factory=dict)

    def order(self, step: int) -> NDArray[np.int64]:
        """The permutation of a step's epoch."""
        epoch = step // (len(self.pictures) // self.batch)
        if epoch not in self._orders:
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = np.random.default_rng((self.seed, 0, epoch)).permutation(len(self.pictures))
        return self._orders[epoch]

    def fill(self, pixels: _Pixels, order: NDArray[np.int64], step: int, row: int) -> tuple[int, list[str]]:
        """Decode a row of a batch; the index of its picture, and complaints about those that are damaged."""
        damaged: list[str] = []
        first = step % (len(self.pictures) // self.batch) * self.batch + row
        for attempt in range(min(_TRIES, len(order))):
            index = int(order[(first + attempt * self.batch) % len(order)])
            # The second word keeps these numbers apart from those of the permutations.
            draw = np.random.default_rng((self.seed, 1, step, row, attempt))
            try:
                pixels[row] = random_crop(decode(self.pictures[index]), self.size, self.crop_scale, self.flip, draw)
            except Exception as error:
                damaged.append(_complaint(self.pictures[index], error))
            else:
                return index, damaged
        raise DataError(f"--data: {len(damaged)} images in a row cannot be read, the last of them {damaged[-1]}")

    def middle(self, picture: Picture) -> _Pixels | str:
        """The middle square of a picture, or the complaint about it."""
        try:
            return center_crop(decode(picture), self.size)
        except Exception as error:
            return _complaint(picture, error)


def _complaint(picture: Picture, error: Exception) -> str:
    why = getattr(error, "strerror", None) or str(error).partition("<")[0].strip() or type(error).__name__
    return f"{picture.name}: {why}"
