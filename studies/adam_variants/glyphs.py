"""An image task without a download: which letter or digit is it, in a font that was never trained on?

Characters are rendered from the fonts that matplotlib brings, then turned, scaled, shifted, inverted and buried
in noise, anew for every batch. Five fonts are for training and three others, of other families or weights,
validate, so that accuracy stays below 100% and says something of what was learned. The network is a small
ResNet.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from torch.nn import functional as F

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
TRAINED = ("DejaVuSans", "DejaVuSans-BoldOblique", "DejaVuSerif", "STIXGeneral", "cmss10")
HELD_OUT = ("DejaVuSansMono-Bold", "STIXGeneralBolIta", "cmtt10")
_DRAWN, SIZE = 48, 32  # pixels a side: of the drawing, and of what the network sees
NOISE = 0.35  # standard deviation, where black and white are 1 apart


@functools.cache
def bank(fonts: tuple[str, ...]) -> Tensor:
    """All characters in some fonts: float32 (fonts, characters, _DRAWN, _DRAWN), 0 is paper and 1 is ink."""
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    drawn = torch.zeros(len(fonts), len(CHARACTERS), _DRAWN, _DRAWN)
    for row, font in enumerate(fonts):
        # With fribidi, which comes with some fonts, Pillow's default places characters a pixel elsewhere.
        face = ImageFont.truetype(str(folder / f"{font}.ttf"), 36, layout_engine=ImageFont.Layout.BASIC)
        for column, character in enumerate(CHARACTERS):
            image = Image.new("L", (_DRAWN, _DRAWN))
            ImageDraw.Draw(image).text((_DRAWN / 2, _DRAWN / 2), character, fill=255, font=face, anchor="mm")
            drawn[row, column] = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(
                _DRAWN, _DRAWN
            )
    return drawn / 255


class Glyphs(Iterator[tuple[Tensor, Tensor]]):
    """Endless batches: images, float32 (batch, 1, SIZE, SIZE), and the numbers of their characters.

    Drawn on the CPU by a generator of this object's own: equal for equal fonts, batch and seed, on any device.
    """

    def __init__(self, fonts: tuple[str, ...], batch: int, seed: int) -> None:
        self._bank, self._batch = bank(fonts), batch
        self._generator = torch.Generator().manual_seed(seed)

    def __next__(self) -> tuple[Tensor, Tensor]:
        n, g = self._batch, self._generator

        def uniform(low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(n, generator=g)

        fonts = torch.randint(len(self._bank), (n,), generator=g)
        labels = torch.randint(len(CHARACTERS), (n,), generator=g)
        angle, scale = uniform(-0.5, 0.5), uniform(0.8, 1.6)
        turned = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(n, 2, 2)
        turned[:, 0] += uniform(-0.3, 0.3)[:, None] * turned[:, 1]  # sheared
        shift = torch.stack([uniform(-0.25, 0.25), uniform(-0.25, 0.25)], 1)
        where = torch.cat([turned * scale[:, None, None], shift[:, :, None]], 2)
        grid = F.affine_grid(where, [n, 1, SIZE, SIZE], align_corners=False)
        images = F.grid_sample(self._bank[fonts, labels][:, None], grid, align_corners=False)
        sign = torch.where(uniform(0, 1) < 0.5, 1.0, -1.0)
        images = (images - 0.25) * sign[:, None, None, None]
        return images + NOISE * torch.randn(images.shape, generator=g), labels


class _Block(nn.Module):
    """x + conv(relu(norm(conv(relu(norm(x)))))); halves the picture where the width changes."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        stride = 1 if before == width else 2
        self.branch = nn.Sequential(
            nn.BatchNorm2d(before), nn.ReLU(), nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, 1, 1, bias=False),
        )  # fmt: skip
        self.past = nn.Identity() if stride == 1 else nn.Conv2d(before, width, 1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.past(x) + self.branch(x)


def network(seed: int, width: int = 32) -> nn.Module:
    """A ResNet of three stages of two blocks, in fp32 on the CPU: 0.7 million parameters at width 32."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        widths = (width, width, width, 2 * width, 2 * width, 4 * width, 4 * width)
        blocks = [_Block(before, after) for before, after in itertools.pairwise(widths)]
        return nn.Sequential(
            nn.Conv2d(1, width, 3, 1, 1, bias=False), *blocks, nn.BatchNorm2d(4 * width), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, len(CHARACTERS)),
        )  # fmt: skip


@torch.no_grad()
def validate(model: nn.Module, batches: int, batch: int, device: str) -> tuple[float, float]:
    """Mean loss and accuracy in fonts that were held out, on always the same images."""
    held_out, loss, right = Glyphs(HELD_OUT, batch, seed=0), 0.0, 0.0
    model.eval()
    for _ in range(batches):
        images, labels = (t.to(device) for t in next(held_out))
        scores = model(images)
        loss += float(F.cross_entropy(scores, labels)) / batches
        right += float((scores.argmax(1) == labels).float().mean()) / batches
    model.train()
    return (loss if math.isfinite(loss) else math.nan), right
