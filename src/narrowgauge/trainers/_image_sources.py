"""What `--data` names, as images with captions or classes: a CSV, tar files, or a folder of classes.

    pairs.csv                     a header line with the columns, a line for each image; paths beside the file
    shards/{000..063}.tar         WebDataset: members of one base name are a pair, 0001.jpg and 0001.txt or .json
    FOLDER/train.csv              with validation.csv beside it
    FOLDER/*.tar                  all of them
    FOLDER/CLASS/*.jpg            class name = folder name; or FOLDER/train/CLASS and FOLDER/val/CLASS

Nothing is decoded here: a picture is a place in a file and a caption. What cannot be one (a line without a caption,
a file that is not there, half a pair) is counted, the first few by name.

Without validation data of their own, pairs are held out by caption, 5% of them in the order of a hash, so that no
held-out caption has been seen, and no image of one; of classes, 5% of each one's images.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import itertools
import json
import os
import re
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ._corpus import DataError

COLUMNS = "filepath,title"
TEMPLATE = "a photo of a {}"
NAMED = 5  # of what is left out, in a note

_SHARE = 0.05
_SEPARATORS = "\t,;|"
_PICTURES = (".jpg", ".jpeg", ".png", ".webp")
_HELD_OUT = ("validation", "val", "test")
_TAKES = "takes a CSV, tar files (a glob, or names in braces), or a folder of classes"


@dataclass(frozen=True, slots=True)
class Picture:
    """An image and what is said of it.

    Attributes:
        name: as notes call it.
        path, offset, size: where its bytes are.
        caption: what is said of it.
        label: number of its class; -1 without classes.
    """

    name: str
    path: str
    offset: int
    size: int
    caption: str
    label: int = -1


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


@dataclass(eq=False)
class _Found:
    """What a source has, and what was left out of it by reason."""

    pictures: list[Picture] = field(default_factory=list)
    classes: tuple[str, ...] = ()
    left_out: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def notes(self) -> Iterator[str]:
        return (named(f"skipped {why}", names) for why, names in self.left_out.items())


def named(what: str, names: list[str]) -> str:
    """A count with the first few names."""
    return f"{what}: {len(names)} ({', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''})"


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
    notes = [*found.notes()]
    if own is not None:
        other = _read(_parts(own)[0], columns, "--validation-data" if validation else "--data")
        notes += other.notes()
        train, held_out, asked = found.pictures, _by_hash(_relabelled(other, found.classes)), other.classes
    else:
        train, held_out = _split(found)
        asked = found.classes
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


def caption_of(name: str) -> str:
    """The caption of a class: "a photo of a tabby cat" for `tabby_cat`."""
    return TEMPLATE.format(name.replace("_", " "))


def _parts(data: Path) -> tuple[Path, Path | None]:
    """Where a folder's images to train on are, and those to validate on, if it has them apart."""
    if (data / "train.csv").is_file():
        held_out = data / "validation.csv"
        return data / "train.csv", held_out if held_out.is_file() else None
    if (data / "train").is_dir():
        return data / "train", next((data / name for name in _HELD_OUT if (data / name).is_dir()), None)
    return data, None


def _read(path: Path, columns: str, flag: str) -> _Found:
    """All pictures of a source, in an order that its names fix."""
    shards = _shards(path)
    if shards:
        found = _from_tars(shards, flag)
    elif path.is_dir():
        found = _from_classes(path)
    elif path.is_file():
        found = _from_csv(path, columns, flag)
    else:
        raise DataError(f"{flag}: got {path}, where nothing is; {_TAKES}")
    if not found.pictures:
        why = "; ".join(found.notes())
        raise DataError(f"{flag}: got {path}, which has no images{f' ({why})' if why else ''}; {_TAKES}")
    return found


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


def _from_csv(path: Path, columns: str, flag: str) -> _Found:
    wanted = [name.strip() for name in columns.split(",")]
    found = _Found()
    # Bytes that are not UTF-8 come as lone surrogates, line by line.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        header = file.readline().rstrip("\r\n")
        separator = next(
            (s for s in _SEPARATORS if set(wanted) <= set(next(csv.reader([header], delimiter=s)))), None
        )
        if len(wanted) != 2 or separator is None:
            raise DataError(
                f"{flag}: got {path} with the header {header[:100]!r}, takes one with the columns {columns!r} "
                "(--columns), between tabs, commas, semicolons or bars"
            )
        names = next(csv.reader([header], delimiter=separator))
        at = [names.index(name) for name in wanted]
        for line, row in _lines(csv.reader(file, delimiter=separator)):
            place = f"{path.name}:{line + 1}"
            if row == []:
                continue
            said = [row[i].strip() if row is not None and i < len(row) else "" for i in at]
            if not all(map(_is_text, said)):
                found.left_out["damaged lines"].append(place)
                continue
            file_path = os.path.join(path.parent, said[0])
            try:
                size = os.stat(file_path).st_size
            except OSError:
                found.left_out["missing images"].append(said[0])
                continue
            found.pictures.append(Picture(said[0], file_path, 0, size, said[1]))
    return found


def _lines(reader: Iterable[list[str]]) -> Iterator[tuple[int, list[str] | None]]:
    """Rows with the line that each ends on; None for one that cannot be read."""
    rows = iter(reader)
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error:
            yield rows.line_num, None  # type: ignore[attr-defined]
        else:
            yield rows.line_num, row  # type: ignore[attr-defined]


def _is_text(text: str) -> bool:
    """Whether there is something, and nothing that UTF-8 or the end of a caption stands for."""
    return bool(text) and "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text)


def _from_tars(shards: list[str], flag: str) -> _Found:
    found = _Found()
    for shard in shards:
        try:
            with tarfile.open(shard, "r:") as archive:
                _members(archive, shard, found)
        except (OSError, tarfile.TarError) as error:
            why = getattr(error, "strerror", None) or error
            if isinstance(error, FileNotFoundError | IsADirectoryError):
                raise DataError(f"{flag}: {shard}: {why}") from None
            found.left_out["damaged archives"].append(f"{os.path.basename(shard)}: {why}")
    return found


def _members(archive: tarfile.TarFile, shard: str, found: _Found) -> None:
    """The pairs of an archive; of one that ends too early, those before."""
    images: dict[str, tuple[str, int, int]] = {}
    captions: dict[str, str] = {}
    end, base = os.path.getsize(shard), os.path.basename(shard)
    try:
        for member in archive:
            folder, _, name = member.name.rpartition("/")
            stem, _, kind = name.partition(".")
            key = f"{folder}/{stem}".lstrip("/")
            if not member.isreg() or not stem:
                continue
            if f".{kind.lower()}" in _PICTURES:
                if member.offset_data + member.size > end:
                    found.left_out["damaged archives"].append(f"{base}: ends within {member.name}")
                    break
                images[key] = (member.name, member.offset_data, member.size)
            elif kind.lower() == "txt" or (kind.lower() == "json" and key not in captions):
                captions[key] = _caption(archive, member)
        else:
            # Behind the first header tarfile takes a damaged one for the end, which is zeros.
            with open(shard, "rb") as file:
                file.seek(archive.offset)
                if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
                    found.left_out["damaged archives"].append(f"{base}: damaged header at byte {archive.offset}")
    except (tarfile.TarError, OSError) as error:
        found.left_out["damaged archives"].append(f"{base}: {error}")
    for key, (name, offset, size) in images.items():
        if key not in captions:
            found.left_out["images without a caption"].append(f"{base}:{name}")
        elif not _is_text(captions[key]):
            found.left_out["damaged captions"].append(f"{base}:{key}")
        else:
            found.pictures.append(Picture(f"{base}:{name}", shard, offset, size, captions[key]))
    lost = [f"{base}:{key}" for key in captions if key not in images]
    if lost:
        found.left_out["captions without an image"] += lost


def _caption(archive: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    """A member's caption; empty for one that cannot be read."""
    file = archive.extractfile(member)
    data = file.read() if file else b""
    try:
        text = data.decode()
        said = text if member.name.lower().endswith(".txt") else json.loads(text).get("caption")
    except (ValueError, AttributeError):
        return ""
    return said.strip() if isinstance(said, str) else ""


def _from_classes(folder: Path) -> _Found:
    found = _Found(classes=tuple(sorted(entry.name for entry in os.scandir(folder) if _is_class(entry))))
    for label, name in enumerate(found.classes):
        for place, folders, files in os.walk(folder / name):
            folders.sort()
            for file in sorted(files):
                path = os.path.join(place, file)
                said = os.path.relpath(path, folder)
                if not file.lower().endswith(_PICTURES):
                    found.left_out["files that are no images by their names"].append(said)
                    continue
                size = os.stat(path).st_size
                found.pictures.append(Picture(said, path, 0, size, caption_of(name), label))
    return found


def _is_class(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir() and not entry.name.startswith(".")


def _split(found: _Found) -> tuple[list[Picture], list[Picture]]:
    """Pictures to train on, in their order, and those that are held out, by their hashes."""
    groups: dict[str, list[Picture]] = defaultdict(list)
    for picture in found.pictures:
        groups[picture.caption].append(picture)
    held_out: list[Picture] = []
    if found.classes:
        for group in groups.values():
            held_out += _by_hash(group)[: min(len(group) - 1, max(1, round(_SHARE * len(group))))]
    else:
        wanted = _SHARE * len(found.pictures)
        for caption in sorted(groups, key=_hash)[: len(groups) - 1]:
            if len(held_out) >= wanted:
                break
            held_out += groups[caption]
    taken = {picture.name for picture in held_out}
    return [picture for picture in found.pictures if picture.name not in taken], _by_hash(held_out)


def _by_hash(pictures: Iterable[Picture]) -> list[Picture]:
    """In an order that has nothing to do with what they show."""
    return sorted(pictures, key=lambda picture: _hash(picture.name))


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


def _relabelled(other: _Found, classes: tuple[str, ...]) -> list[Picture]:
    """Pictures to validate on, their labels those of the training's classes; -1 for another class."""
    numbers = {name: number for number, name in enumerate(classes)}
    if not classes:
        return other.pictures
    names = other.classes
    return [
        Picture(p.name, p.path, p.offset, p.size, p.caption, numbers.get(names[p.label], -1) if names else -1)
        for p in other.pictures
    ]
