"""From files to pixels: what a step sees follows from the seed and its number, whoever decodes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pictured import csv_pairs
from PIL import Image

from narrowgauge.recipes._losses import DEVIATION, MEAN, normalized
from narrowgauge.trainers import DataError
from narrowgauge.trainers._image_loader import ImageLoader, decode, random_crop
from narrowgauge.trainers._images import Picture, open_images


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Picture]:
    return list(open_images(csv_pairs(tmp_path_factory.mktemp("pairs"))).train)


def loader(pictures: list[Picture], **changes: Any) -> ImageLoader:
    options = {"batch": 7, "size": 16, "seed": 3, "crop_scale": 0.5, "flip": True, "workers": 2}
    return ImageLoader(pictures, **(options | changes))


def steps(of: ImageLoader, count: int) -> list[tuple[torch.Tensor, list[str]]]:
    return [(pixels, [p.name for p in drawn]) for pixels, drawn in (of.draw() for _ in range(count))]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(a, b) and n == m for (a, n), (b, m) in zip(one, other, strict=True))


def test_the_number_of_threads_changes_nothing_and_the_seed_does(pictures: list[Picture]) -> None:
    first = steps(loader(pictures), 20)
    assert same(first, steps(loader(pictures, workers=5), 20))
    assert same(first, steps(loader(pictures, workers=None), 20))
    assert not same(first, steps(loader(pictures, seed=4), 20))


@pytest.mark.parametrize("after", [0, 3, 17])
def test_a_loader_goes_on_where_another_was(pictures: list[Picture], after: int) -> None:
    first, second = loader(pictures), loader(pictures)
    steps(first, after)
    steps(second, 2)  # what was decoded ahead is forgotten
    second.load_state_dict(first.state_dict())
    assert same(steps(first, 12), steps(second, 12))


def test_an_epoch_shows_each_image_once_and_others_are_in_another_order(pictures: list[Picture]) -> None:
    of = loader(pictures)
    whole = len(pictures) // 7
    epochs = [[name for _, names in steps(of, whole) for name in names] for _ in range(3)]
    for names in epochs:
        assert len(set(names)) == len(names) == whole * 7
    assert epochs[0] != epochs[1] != epochs[2]
    # What an epoch leaves is in others.
    assert set().union(*epochs) == {picture.name for picture in pictures}


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 90), st.integers(1, 90), st.floats(0.01, 1.0), st.integers(0, 2**31))
def test_a_crop_is_a_part_of_the_image_of_at_least_the_asked_share(
    width: int, height: int, scale: float, seed: int
) -> None:
    class Asked:
        """An image that notes what is cut from it."""

        size = (width, height)

        def resize(self, size: Any, how: Any, box: Any) -> Image.Image:
            boxes.append(box)
            return Image.new("RGB", size)

    boxes: list[tuple[float, float, float, float]] = []
    pixels = random_crop(Asked(), 8, scale, False, np.random.default_rng(seed))
    assert pixels.shape == (3, 8, 8)
    ((left, top, right, bottom),) = boxes
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    w, h = right - left, bottom - top
    if w == h == min(width, height):
        return  # the middle, where nothing that was drawn fits
    assert (w + 0.5) * (h + 0.5) >= scale * width * height
    assert 0.75 * (h - 0.5) <= w + 0.5
    assert 0.75 * (w - 0.5) <= h + 0.5


def test_one_image_in_two_is_mirrored(pictures: list[Picture]) -> None:
    ramp = Image.fromarray(np.tile(np.arange(16, dtype=np.uint8) * 16, (16, 1))).convert("RGB")
    draw = np.random.default_rng(0)
    rising = [bool(random_crop(ramp, 8, 1.0, True, draw)[0, 0, -1] > 128) for _ in range(400)]
    assert 0.4 < np.mean(rising) < 0.6
    assert all(random_crop(ramp, 8, 1.0, False, draw)[0, 0, -1] > 128 for _ in range(20))


def test_pixels_are_normalized_by_clips_numbers() -> None:
    images = torch.randint(256, (2, 3, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    wanted = (images.double() / 255 - torch.tensor(MEAN).double()[:, None, None]) / torch.tensor(
        DEVIATION
    ).double()[:, None, None]
    assert torch.allclose(normalized(images).double(), wanted, atol=2e-6)


def test_other_modes_become_rgb(tmp_path: Path) -> None:
    for mode, kind in (("L", "png"), ("P", "png"), ("RGBA", "png"), ("CMYK", "jpg"), ("RGB", "webp"), ("1", "png")):
        path = tmp_path / f"{mode}.{kind}"
        Image.new(mode, (5, 4)).save(path)
        assert decode(Picture("", str(path), 0, path.stat().st_size, "")).mode == "RGB"


@pytest.fixture
def spoilt(tmp_path: Path) -> list[Picture]:
    """Of 57 images some that cannot be read: cut, of zeros, and gone."""
    pictures = list(open_images(csv_pairs(tmp_path)).train)
    for number, content in ((5, None), (20, b"\0" * 100), (33, Path(pictures[33].path).read_bytes()[:70])):
        path = Path(pictures[number].path)
        path.unlink() if content is None else path.write_bytes(content)
    return pictures


def test_damaged_images_are_left_out_and_others_take_their_places(spoilt: list[Picture]) -> None:
    first, second = loader(spoilt), loader(spoilt, workers=4)
    drawn = steps(first, 16)
    assert same(drawn, steps(second, 16))
    bad = {spoilt[n].name for n in (5, 20, 33)}
    assert not bad & {name for _, names in drawn for name in names}
    assert all(len(names) == len(pixels) == 7 for pixels, names in drawn)
    assert first.damaged == second.damaged
    assert {line.partition(": ")[0] for line in first.damaged} == bad
    assert any(line.endswith("No such file or directory") for line in first.damaged)
    assert not any("BytesIO" in line for line in first.damaged)


def test_of_those_to_validate_on_damaged_ones_are_left_out(spoilt: list[Picture]) -> None:
    of = loader(spoilt)
    pixels, good = of.middles(spoilt[:25])
    assert pixels.shape == (23, 3, 16, 16)
    assert good == [p for n, p in enumerate(spoilt[:25]) if n not in (5, 20)]
    assert len(of.damaged) == 2
    with pytest.raises(DataError, match="--data: none of 1 images to validate on can be read"):
        of.middles(spoilt[5:6])


def test_where_nothing_can_be_read_it_says_so(spoilt: list[Picture]) -> None:
    for picture in spoilt:
        Path(picture.path).unlink(missing_ok=True)
    with pytest.raises(
        DataError, match=r"--data: 32 images in a row cannot be read, the last of them images/.*such"
    ):
        loader(spoilt).draw()
