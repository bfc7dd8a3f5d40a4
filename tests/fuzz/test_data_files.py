# ruff: noqa: E501
"""Any damage to what is trained on: prepared tokens, tables, tar files, folders of images."""

from __future__ import annotations

import io
import json
import os
import random
import tarfile
import warnings
from pathlib import Path

import pytest
import torch
from damage import contents, damages, dumped, fuzz, other_json, put, reading, refusal, tried
from hypothesis import strategies as st
from PIL import Image

from narrowgauge.trainers import DataError, prepare_tokens
from narrowgauge.trainers._image_loader import ImageLoader
from narrowgauge.trainers._images import ImageSet, open_images
from narrowgauge.trainers._tokens import open_tokens


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tokens, next to the text that they were made of."""
    folder = tmp_path_factory.mktemp("tokens")
    draw = random.Random(0)
    (folder / "text").mkdir()
    for number in range(6):
        words = " ".join("".join(draw.choices("abcde", k=4)) for _ in range(40))
        (folder / "text" / f"{number}.txt").write_text(words)
    prepare_tokens(folder / "text", folder / "made", vocabulary=300, workers=1)
    return folder / "made"


def all_tokens(folder: Path) -> list[list[int]]:
    """The tokens of the training and the validation side."""
    source = open_tokens(folder, None)
    assert source.train.dtype == torch.uint16, "prepared tokens were taken for a text"
    return [source.train.tolist(), source.validation.tolist()]


@tried(100, 5000)
def test_damaged_tokens_are_all_there_or_named(tokens: Path, tries: int) -> None:
    whole, wanted = contents(tokens), all_tokens(tokens)

    def check(data: st.DataObject) -> None:
        done = data.draw(damages(tokens, whole))
        with reading(tokens):
            found, why = refusal(lambda: all_tokens(tokens))
        put(tokens, whole)
        assert found == wanted or (str(why).startswith("--data") and str(tokens) in str(why)), (done, why)

    fuzz(tries, check)


# --- images

COLOURS = [(20 * n, 255 - 20 * n, 7 * n) for n in range(12)]


def picture(number: int) -> bytes:
    out = io.BytesIO()
    kind = ("JPEG", "PNG", "WEBP")[number % 3]
    Image.new("RGB", (9, 8), COLOURS[number]).save(out, kind)
    return out.getvalue()


def suffix(number: int) -> str:
    return ("jpg", "png", "webp")[number % 3]


def as_table(folder: Path) -> Path:
    for number in range(12):
        (folder / f"{number:04d}.{suffix(number)}").write_bytes(picture(number))
    rows = "".join(f"{n:04d}.{suffix(n)}\ta picture of {n}\n" for n in range(12))
    (folder / "train.csv").write_text(f"filepath\ttitle\n{rows}")
    return folder


def as_tars(folder: Path, kind: int = tarfile.USTAR_FORMAT) -> Path:
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w", format=kind) as archive:
            for number in range(6 * shard, 6 * shard + 6):
                text = f"a picture of {number}".encode()
                said = ("txt", text) if number % 2 else ("json", json.dumps({"caption": text.decode()}).encode())
                for end, data in ((suffix(number), picture(number)), said):
                    info = tarfile.TarInfo(f"{number:04d}.{end}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    return folder


def as_classes(folder: Path) -> Path:
    for number in range(12):
        place = folder / ("cat", "dog")[number % 2]
        place.mkdir(exist_ok=True)
        (place / f"{number:04d}.{suffix(number)}").write_bytes(picture(number))
    return folder


def drawn(found: ImageSet) -> list[str]:
    """Decode everything once; what could not be."""
    loader = ImageLoader(found.train, batch=1, size=4, seed=0, crop_scale=1.0, flip=False, workers=1)
    for _ in found.train:
        loader.draw()
    return loader.damaged


@pytest.mark.parametrize("made", [as_table, as_tars, as_classes])
@tried(50, 3000)
def test_damaged_pairs_are_left_out_and_named_and_the_others_are_there(made, tmp_path: Path, tries: int) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    made(folder)
    whole, every = contents(folder), open_images(folder)
    captions = {p.name: p.caption for p in (*every.train, *every.validation)}
    drawn(every)

    def check(data: st.DataObject) -> None:
        done = data.draw(damages(folder, whole))
        with warnings.catch_warnings(), reading(folder):
            warnings.simplefilter("ignore")
            found, why = refusal(lambda: open_images(folder))
            damaged, spoilt = refusal(lambda: drawn(found)) if found is not None else ([], None)
        assert why is None or (why.startswith("--data") and str(folder) in why), done
        assert spoilt is None or spoilt.startswith("--data"), done
        if found is None:
            return
        names = {p.name for p in (*found.train, *found.validation)}
        assert all(os.path.isfile(p.path) and p.offset + p.size <= os.path.getsize(p.path) for p in found.train)
        # What lies elsewhere is there; what is not there any more is named, if anything says that it was there.
        lost = captions.keys() - names
        if done.kind in ("flip", "zero", "cut", "empty", "delete", "dangling", "loop", "pipe", "folder"):
            assert made is not as_classes or lost <= {done.name}, done
            gone = (done.kind == "delete" and made is not as_table) or (
                done.kind == "folder" and made is as_classes
            )
            assert not lost or gone or found.notes or done.name == "train.csv", done
        for name in damaged or ():
            assert name.partition(":")[0] in done.name or done.name in name or done.kind in ("swap", "insert"), done

    fuzz(tries, check)


@tried(150, 20000)
def test_a_tar_file_with_any_header_is_read_or_named(tmp_path: Path, tries: int) -> None:
    """Fields of a header, with a checksum that is right."""
    folder = tmp_path / "data"
    folder.mkdir()
    as_tars(folder, tarfile.PAX_FORMAT)
    whole = contents(folder)
    drawn(open_images(folder))
    fields = {"name": (0, 100), "mode": (100, 8), "size": (124, 12), "type": (156, 1), "magic": (257, 8),
              "sparse": (386, 97), "realsize": (483, 12), "prefix": (345, 155)}  # fmt: skip
    values = st.sampled_from(
        [b"\xff" * 12, b"\x80" + b"\0" * 3 + b"\x40" + b"\0" * 7, b"\x80" + b"\0" * 7 + b"\xff" * 4, b"77777777777\0",
         b"\0" * 12, b"-1\0", b"x", b"g", b"S", b"L", b"K", b"1", b"2", b"3", b"5", b"6", b"../../x.jpg", b"\xff\xfe.jpg"]
    )  # fmt: skip

    def check(data: st.DataObject) -> None:
        put(folder, whole)
        content = bytearray(whole["0.tar"])
        for _ in range(data.draw(st.integers(1, 3))):
            start = 512 * data.draw(st.integers(0, len(content) // 512 - 1))
            at, length = fields[data.draw(st.sampled_from(sorted(fields)))]
            value = data.draw(values | st.binary(max_size=length))[:length]
            content[start + at : start + at + len(value)] = value
            content[start + 148 : start + 156] = b" " * 8
            total = sum(content[start : start + 512])
            content[start + 148 : start + 156] = b"%06o\0 " % total
        (folder / "0.tar").write_bytes(content)
        with warnings.catch_warnings(), reading(folder):
            warnings.simplefilter("ignore")
            found, why = refusal(lambda: open_images(folder))
            _, spoilt = refusal(lambda: drawn(found)) if found is not None else ([], None)
        assert why is None or why.startswith("--data")
        assert spoilt is None or spoilt.startswith("--data")
        if found is not None:
            # The other archive is as it was.
            there = {p.name for p in (*found.train, *found.validation)}
            assert {f"1.tar:{n:04d}.{suffix(n)}" for n in range(6, 12)} <= there

    fuzz(tries, check)


DEEP = {"a list": b"[" * 100_000, "an object": b'{"caption":' * 99_999, "long": b"x" * (1 << 21), "": b""}


@tried(100, 5000)
def test_any_caption_in_a_json_is_text_or_left_out(tmp_path: Path, tries: int) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    open_images(as_tars(folder))

    def check(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(DEEP)))
        text = DEEP[name] or dumped(data.draw(other_json('{"caption": "x", "width": 3}')))
        with tarfile.open(folder / "0.tar", "w") as archive:
            for name, content in (("a.png", picture(1)), ("a.json", text), ("b.png", picture(4)), ("b.txt", b"b")):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        with reading(folder):
            found = open_images(folder)
        assert all(isinstance(p.caption, str) and p.caption for p in (*found.train, *found.validation))

    fuzz(tries, check)


def test_where_nothing_is_left_it_says_so(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.png")
    (tmp_path / "train.csv").write_text("filepath,title\nx.png,a pipe\n")
    with reading(tmp_path), pytest.raises(DataError, match=r"missing images: 1 \(x\.png\)"):
        open_images(tmp_path)
