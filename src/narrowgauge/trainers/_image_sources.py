"""What `--data` names, as images with captions or classes: a CSV, tar files, or a folder of classes.

    pairs.csv                     a header line with the columns, a line for each image; paths beside the file
    shards/{000..063}.tar         WebDataset: members of one base name are a pair, 0001.jpg and 0001.txt or .json
    FOLDER/train.csv              with validation.csv beside it
    FOLDER/*.tar                  all of them
    FOLDER/CLASS/*.jpg            class name = folder name; or FOLDER/train/CLASS and FOLDER/val/CLASS

Nothing is decoded here: a picture is a place in a file and a caption. What cannot be one (a line without a caption,
a file that is not there, half a pair) is counted, the first few by name.

Without validation data of their own, pairs are held out by caption, 5% of them in the order of a hash, so that no
held-out caption has been seen, and no image of one: other captions of such images are left out too, and counted. Of
classes 5% of each one's images are held out.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ._corpus import DataError
from ._image_readers import Found, Picture, caption_of, from_classes, from_csv, from_tars

COLUMNS = "filepath,title"

_SHARE = 0.05
_HELD_OUT = ("validation", "val", "test")
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_TAKES = "takes a CSV, tar files (a glob, or names in braces), or a folder of classes"


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Pictures to train and to validate on.

    Attributes:
        train, validation: the pictures.
        classes: names of the training's classes, by number; none for pairs.
        prompts: captions of the classes that are validated on; none for pairs.
        notes: what was left out, in lines fit to print.
        tokenizer: the data's own, if it has one.
    """

    train: tuple[Picture, ...]
    validation: tuple[Picture, ...]
    classes: tuple[str, ...]
    prompts: tuple[str, ...]
    notes: tuple[str, ...]
    tokenizer: Path | None

    @property
    def fingerprint(self) -> str:
        """Equal for equal names, sizes and captions, in the same order."""
        digest = hashlib.sha256()
        for picture in itertools.chain(self.train, (None,), self.validation):
            said = picture and [picture.name, picture.size, picture.caption, picture.label]
            digest.update(json.dumps(said).encode())
        return digest.hexdigest()


def open_images(data: Path | None, validation: Path | None = None, columns: str = COLUMNS) -> ImageSet:
    """Find the pictures that `--data` and `--validation-data` name.

    Args:
        data: see the module.
        validation: likewise; None for a part of `data`.
        columns: names of the CSV's columns of paths and captions, with a comma between them.

    Raises:
        DataError: if there are none to train on, or none to validate on.
    """
    if data is None:
        raise DataError(f"--data: got nothing, {_TAKES}")
    training, beside = _parts(data)
    found = _read(training, columns, "--data")
    own = validation or beside
    if columns != COLUMNS and not any(map(_is_table, (training, *([_parts(own)[0]] if own else ())))):
        raise DataError(f"--columns: got {columns!r} for {data}, takes it for a CSV alone")
    notes: list[str] = []
    if own is not None:
        other = _read(_parts(own)[0], columns, "--validation-data" if validation else "--data")
        notes += [*found.notes(), *other.notes()]
        train, held_out, asked = found.pictures, _by_hash(_relabelled(other, found.classes)), other.classes
    else:
        train, held_out = _split(found)
        asked = found.classes
        notes += found.notes()
        if not held_out or not train:
            raise DataError(
                f"--data: got {data} with {len(found.pictures)} images, too few to hold some out; takes more, or "
                "--validation-data"
            )
    tokenizer = (data if data.is_dir() else data.parent) / "tokenizer.json"
    return ImageSet(
        tuple(train), tuple(held_out), found.classes, tuple(map(caption_of, asked)), tuple(notes),
        tokenizer if tokenizer.is_file() else None,
    )  # fmt: skip


def _parts(data: Path) -> tuple[Path, Path | None]:
    """Where a folder's images to train on are, and those to validate on, if it has them apart."""
    if (data / "train.csv").is_file():
        held_out = data / "validation.csv"
        return data / "train.csv", held_out if held_out.is_file() else None
    if (data / "train").is_dir():
        return data / "train", next((data / name for name in _HELD_OUT if (data / name).is_dir()), None)
    return data, None


def _read(path: Path, columns: str, flag: str) -> Found:
    """All pictures of a source, in an order that its names fix."""
    shards = _shards(path)
    if shards:
        found = from_tars(shards, flag)
    elif path.is_dir():
        found = from_classes(path)
    elif path.name.endswith(_COMPRESSED):
        raise DataError(f"{flag}: got {path}, takes tar files that are not compressed: images are read in place")
    elif path.is_file():
        found = from_csv(path, columns, flag)
    else:
        raise DataError(f"{flag}: got {path}, where nothing is; {_TAKES}")
    if not found.pictures:
        why = "; ".join(found.notes())
        raise DataError(f"{flag}: got {path}, which has no images{f' ({why})' if why else ''}; {_TAKES}")
    return found


def _is_table(path: Path) -> bool:
    return path.is_file() and not path.name.endswith((".tar", *_COMPRESSED))


def _shards(path: Path) -> list[str]:
    """Names of tar files, sorted; none if the path means something else."""
    if path.is_dir():
        return sorted(str(p) for p in path.glob("*.tar"))
    if not path.name.endswith(".tar"):
        return []
    names = list(_expanded(str(path)))
    files = itertools.chain.from_iterable(sorted(glob.glob(n)) if glob.has_magic(n) else (n,) for n in names)
    return list(files)


def _expanded(text: str) -> Iterator[str]:
    """Braces as a shell expands them: {000..012}, {a,b}."""
    found = re.search(r"\{([^{}]*)\}", text)
    if found is None:
        yield text
        return
    span = re.fullmatch(r"(\d+)\.\.(\d+)", found[1])
    if span:
        width = len(span[1]) if span[1].startswith("0") else 0
        words = [f"{n:0{width}d}" for n in range(int(span[1]), int(span[2]) + 1)]
    else:
        words = found[1].split(",")
    for word in words:
        yield from _expanded(text[: found.start()] + word + text[found.end() :])


def _split(found: Found) -> tuple[list[Picture], list[Picture]]:
    """Pictures to train on, in their order, and those that are held out, by their hashes.

    An image of several captions is held out under one of them and left out of training under the others, which
    count as held out as well: so they stay few.
    """
    groups: dict[str, list[Picture]] = defaultdict(list)
    for picture in found.pictures:
        groups[picture.caption].append(picture)
    held_out: list[Picture] = []
    taken: set[tuple[str, int]] = set()
    if found.classes:
        for group in groups.values():
            held_out += _by_hash(group)[: min(len(group) - 1, max(1, round(_SHARE * len(group))))]
        taken = {picture.place for picture in held_out}
    else:
        times = Counter(picture.place for picture in found.pictures)
        wanted, gone = _SHARE * len(found.pictures), 0
        for caption in sorted(groups, key=_hash)[: len(groups) - 1]:
            if gone >= wanted:
                break
            held_out += groups[caption]
            new = {picture.place for picture in groups[caption]} - taken
            gone += sum(times[place] for place in new)
            taken |= new
    kept = set(held_out)
    train = [picture for picture in found.pictures if picture.place not in taken]
    lost = [p.name for p in found.pictures if p.place in taken and p not in kept]
    if lost:
        found.left_out["other captions of held-out images"] += lost
    return train, _by_hash(held_out)


def _by_hash(pictures: Iterable[Picture]) -> list[Picture]:
    """In an order that has nothing to do with what they show."""
    return sorted(pictures, key=lambda picture: _hash(picture.name))


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


def _relabelled(other: Found, classes: tuple[str, ...]) -> list[Picture]:
    """Pictures to validate on, their labels those of the training's classes; -1 for another class."""
    numbers = {name: number for number, name in enumerate(classes)}
    if not classes:
        return other.pictures
    names = other.classes
    return [
        Picture(p.name, p.path, p.offset, p.size, p.caption, numbers.get(names[p.label], -1) if names else -1)
        for p in other.pictures
    ]
