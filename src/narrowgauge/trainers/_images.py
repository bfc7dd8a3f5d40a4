"""Images with captions or classes, as `--data` names them: a CSV, tar files, or a folder of classes.

    pairs.csv                     a header line with the columns, a line for each image; paths relative to the file
    shards/{000..063}.tar         WebDataset: members of one base name are a pair, 0001.jpg and 0001.txt or .json
    FOLDER/train.csv              with validation.csv in the same folder
    FOLDER/*.tar                  all of them
    FOLDER/CLASS/*.jpg            class name = folder name; or FOLDER/train/CLASS and FOLDER/val/CLASS

Nothing is decoded here: a picture is a place in a file and a caption, and pairs are read where they are, in any
order. Damage is expected. A line without a caption, a missing file, half a pair, an archive that ends too early is
counted and the first few are named; the rest is used. Whether a file's bytes are an image is found out when it is
decoded.

Without validation data of their own, pairs are held out by caption, 5% of them in the order of a hash, so that no
held-out caption is trained on, and no image of one: other captions of such images are left out too, and counted. Of
classes 5% of each one's images are held out.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import itertools
import json
import os
import re
import stat
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from narrowgauge.trainers._text import DataError, first_few

COLUMNS = "filepath,title"

_TEMPLATE = "a photo of a {}"
_SHARE = 0.05
_HELD_OUT = ("validation", "val", "test")
_PICTURES = (".jpg", ".jpeg", ".png", ".webp")
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_SEPARATORS = "\t,;|"
_MOST = 1 << 20  # bytes of a caption, and of one read of a tar file's header
_MUST_BE = "must be a CSV, tar files (a glob, or names in braces), or a folder of classes"


@dataclass(frozen=True, slots=True)
class Picture:
    """An image and its caption.

    Attributes:
        name: for notes.
        path, offset, size: where its bytes are.
        caption: its caption.
        label: number of its class; -1 without classes.
    """

    name: str
    path: str
    offset: int
    size: int
    caption: str
    label: int = -1

    @property
    def place(self) -> tuple[str, int]:
        """Equal for one image under several captions."""
        return self.path, self.offset


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Pictures to train and to validate on.

    Attributes:
        train, validation: the pictures.
        classes: names of the training's classes, by number; none for pairs.
        prompts: captions of the classes that are validated on; none for pairs.
        notes: lines about what was left out.
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
            values = picture and [picture.name, picture.size, picture.caption, picture.label]
            digest.update(json.dumps(values).encode())
        return digest.hexdigest()


@dataclass(eq=False)
class _Source:
    """The pictures of one source, in an order that its names fix, and names of what was left out, by reason."""

    pictures: list[Picture] = field(default_factory=list)
    classes: tuple[str, ...] = ()
    left_out: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def notes(self) -> list[str]:
        return [first_few(what, names) for what, names in self.left_out.items()]


def open_images(data: Path | None, validation: Path | None = None, columns: str = COLUMNS) -> ImageSet:
    """Find the pictures of `--data` and `--validation-data` (None: a part of the former); see the module.

    Raises:
        DataError: if there are none to train on, or none to validate on.
    """
    if data is None:
        raise DataError(f"--data {_MUST_BE}, got nothing")
    training, held_out = _sides(data)
    flag = "--data" if validation is None else "--validation-data"
    held_out = held_out if validation is None else _sides(validation)[0]
    found = _read(training, columns, "--data")
    if columns != COLUMNS and not any(map(_is_table, filter(None, (training, held_out)))):
        raise DataError(f"--columns must be left out where --data is no CSV, got {columns!r} for {data}")
    if held_out is None:
        train, validated = _split(found)
        notes, asked = found.notes(), found.classes
        if not validated or not train:
            raise DataError(
                f"--data must have enough images to hold some out, or --validation-data must be given, got {data} "
                f"with {len(found.pictures)}"
            )
    else:
        other = _read(held_out, columns, flag)
        train, validated = found.pictures, _by_hash(_relabelled(other, found.classes))
        notes, asked = found.notes() + other.notes(), other.classes
    tokenizer = (data if data.is_dir() else data.parent) / "tokenizer.json"
    return ImageSet(
        tuple(train), tuple(validated), found.classes, tuple(map(_caption_of_class, asked)), tuple(notes),
        tokenizer if tokenizer.is_file() else None,
    )  # fmt: skip


def _sides(data: Path) -> tuple[Path, Path | None]:
    """The places of a folder's images to train on, and of those to validate on, if it has them apart."""
    if (data / "train.csv").is_file():
        held_out = data / "validation.csv"
        return data / "train.csv", held_out if held_out.is_file() else None
    if (data / "train").is_dir():
        return data / "train", next((data / name for name in _HELD_OUT if (data / name).is_dir()), None)
    return data, None


def _is_table(path: Path) -> bool:
    return path.is_file() and not path.name.endswith((".tar", *_COMPRESSED))


def _read(path: Path, columns: str, flag: str) -> _Source:
    shards = _shards(path)
    if shards:
        found = _read_tars(shards, flag)
    elif path.is_dir():
        found = _read_classes(path)
    elif path.name.endswith(_COMPRESSED):
        raise DataError(f"{flag} must be tar files that are not compressed, got {path}: images are read in place")
    elif path.is_file():
        found = _read_table(path, columns, flag)
    else:
        raise DataError(f"{flag} {_MUST_BE}, got {path}, where nothing is")
    if not found.pictures:
        why = "; ".join(found.notes())
        raise DataError(f"{flag} {_MUST_BE}, got {path}, which has no images{f' ({why})' if why else ''}")
    return found


def _size(path: str) -> int | None:
    """Bytes of a regular file, or None: opening a pipe would wait for a writer forever."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


# --- a table


def _read_table(path: Path, columns: str, flag: str) -> _Source:
    """The pictures of a CSV, in its order; a DataError if its header does not have the columns."""
    wanted = [name.strip() for name in columns.split(",")]
    found = _Source()
    # Bytes that are not UTF-8 come as lone surrogates, line by line.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        header = file.readline().rstrip("\r\n")
        headers = {s: next(_rows([header], s), (0, []))[1] for s in _SEPARATORS}
        separator = next((s for s, names in headers.items() if set(wanted) <= set(names)), None)
        if separator is None:
            raise DataError(
                f"{flag}: the header of {path} must have the columns {columns!r} (--columns), between tabs, "
                f"commas, semicolons or bars, got {header[:100]!r}"
            )
        at = [headers[separator].index(name) for name in wanted]
        before = 1
        for number, row in _rows(file, separator):
            line = number + 1  # after the header's
            if line > before + 1:
                # A quote that is not closed takes the next lines into its caption, up to the next quote.
                found.left_out["rows over several lines, quoted"].append(f"{path.name}:{before + 1}-{line}")
            before = line
            if not row:
                continue
            name, caption = (row[i].strip() if i < len(row) else "" for i in at)
            file_path = os.path.join(path.parent, name)
            if not _is_text(name) or not _is_text(caption):
                found.left_out["skipped damaged lines"].append(f"{path.name}:{line}")
            elif (size := _size(file_path)) is None:
                found.left_out["skipped missing images"].append(name)
            else:
                found.pictures.append(Picture(name, file_path, 0, size, caption))
    return found


def _rows(lines: Iterable[str], separator: str) -> Iterator[tuple[int, list[str]]]:
    """Rows with the line that each ends on; one empty field for a row that cannot be read."""
    reader = csv.reader(lines, delimiter=separator)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error:
            row = [""]
        yield reader.line_num, row


def _is_text(text: str) -> bool:
    """Whether a text is not empty, valid UTF-8, and without the byte that ends a caption."""
    return bool(text) and "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text)


# --- tar files


def _shards(path: Path) -> list[str]:
    """Names of tar files, sorted; none if the path is something else."""
    if path.is_dir():
        return sorted(str(p) for p in path.glob("*.tar"))
    if not path.name.endswith(".tar"):
        return []
    names = _expanded(str(path))
    return [shard for n in names for shard in (sorted(glob.glob(n)) if glob.has_magic(n) else (n,))]


def _expanded(text: str) -> Iterator[str]:
    """Braces as a shell expands them: {000..012}, {a,b}."""
    found = re.search(r"\{([^{}]*)\}", text)
    if found is None:
        yield text
        return
    words = found[1].split(",")
    if span := re.fullmatch(r"(\d+)\.\.(\d+)", found[1]):
        width = len(span[1]) if span[1].startswith("0") else 0
        words = [f"{n:0{width}d}" for n in range(int(span[1]), int(span[2]) + 1)]
    for word in words:
        yield from _expanded(text[: found.start()] + word + text[found.end() :])


def _read_tars(shards: list[str], flag: str) -> _Source:
    """The pairs of tar files, in their order; a DataError for a file that is missing."""
    found = _Source()
    for shard in shards:
        if os.path.exists(shard) and _size(shard) is None:
            raise DataError(f"{flag}: {shard}: it is no file")
        base = os.path.basename(shard)
        captions: dict[str, str] = {}
        images: dict[str, tuple[str, int, int]] = {}
        try:
            with open(shard, "rb") as file:
                for key, name, offset, size in _members(file, captions, found.left_out, base):
                    images[key] = name, offset, size
        except FileNotFoundError as error:
            raise DataError(f"{flag}: {shard}: {error.strerror}") from None
        except Exception as error:  # tarfile raises many kinds for damage; the pairs before it are used
            why = getattr(error, "strerror", None) or str(error)
            found.left_out["skipped damaged archives"].append(f"{base}: {why}")
        for key, (name, offset, size) in images.items():
            if key not in captions:
                found.left_out["skipped images without a caption"].append(f"{base}:{name}")
            elif not _is_text(captions[key]):
                found.left_out["skipped damaged captions"].append(f"{base}:{key}")
            else:
                found.pictures.append(Picture(f"{base}:{name}", shard, offset, size, captions[key]))
        if lost := [f"{base}:{key}" for key in captions if key not in images]:
            found.left_out["skipped captions without an image"] += lost
    return found


def _members(
    file: BinaryIO, captions: dict[str, str], left_out: dict[str, list[str]], base: str
) -> Iterator[tuple[str, str, int, int]]:
    """Key, name, offset and size of an archive's images; adds its captions, by key. Damage raises any error."""
    end = os.fstat(file.fileno()).st_size
    with tarfile.open(fileobj=cast(Any, _Bounded(file)), mode="r:") as archive:
        for member in archive:
            folder, _, name = member.name.rpartition("/")
            stem, _, kind = name.partition(".")
            key, kind = f"{folder}/{stem}".lstrip("/"), kind.lower()
            if member.size < 0:  # tarfile would go backwards
                raise tarfile.ReadError(f"{member.name} has {member.size} bytes")
            if not member.isreg() or not stem or member.issparse():
                continue
            if f".{kind}" in _PICTURES:
                if member.offset_data + member.size > end:
                    raise tarfile.ReadError(f"ends within {member.name}")
                yield key, member.name, member.offset_data, member.size
            elif kind == "txt" or (kind == "json" and key not in captions):
                captions[key] = _caption(archive, member)
            elif kind != "json":
                left_out["skipped members that are neither image nor caption"].append(f"{base}:{member.name}")
        # After the first header tarfile takes a damaged one for the end, which is zeros.
        file.seek(archive.offset)
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise tarfile.ReadError(f"damaged header at byte {archive.offset}")


class _Bounded:
    """A file whose reads are bounded: tarfile would ask for as much at once as a header says."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.tell, self.seek = file.tell, file.seek

    def read(self, count: int = -1) -> bytes:
        return self._file.read(min(count, _MOST) if count >= 0 else _MOST)


def _caption(archive: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    """A member's caption; empty for one that cannot be read."""
    file = archive.extractfile(member) if member.size <= _MOST else None
    try:
        text: Any = file.read().decode() if file else ""
        if member.name.lower().endswith(".json"):
            text = json.loads(text).get("caption")
    except (ValueError, AttributeError, RecursionError):
        return ""
    return text.strip() if isinstance(text, str) else ""


# --- classes


def _read_classes(folder: Path) -> _Source:
    """The images of a folder of classes, by class and name."""
    found = _Source(classes=tuple(sorted(entry.name for entry in os.scandir(folder) if _is_class(entry))))
    for label, name in enumerate(found.classes):
        before = len(found.pictures)
        for place, folders, files in os.walk(folder / name):
            folders.sort()
            for path in (os.path.join(place, file) for file in sorted(files)):
                shown, size = os.path.relpath(path, folder), _size(path)
                if not path.lower().endswith(_PICTURES):
                    found.left_out["skipped files that are no images by their names"].append(shown)
                elif size is None:
                    found.left_out["skipped missing images"].append(shown)
                else:
                    found.pictures.append(Picture(shown, path, 0, size, _caption_of_class(name), label))
        if len(found.pictures) == before:
            found.left_out["classes without an image"].append(name)
    return found


def _is_class(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir() and not entry.name.startswith(".")
    except OSError:  # a link to itself
        return False


def _caption_of_class(name: str) -> str:
    """The caption of a class: "a photo of a tabby cat" for `tabby_cat`."""
    return _TEMPLATE.format(name.replace("_", " "))


def _relabelled(other: _Source, classes: tuple[str, ...]) -> list[Picture]:
    """Pictures to validate on, their labels those of the training's classes; -1 for another class."""
    if not classes:
        return other.pictures
    numbers = {name: number for number, name in enumerate(classes)}
    labels = [numbers.get(name, -1) for name in other.classes]
    return [replace(p, label=labels[p.label] if labels else -1) for p in other.pictures]


# --- what is held out


def _split(found: _Source) -> tuple[list[Picture], list[Picture]]:
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
    chosen = set(held_out)
    train = [picture for picture in found.pictures if picture.place not in taken]
    if lost := [p.name for p in found.pictures if p.place in taken and p not in chosen]:
        found.left_out["skipped other captions of held-out images"] += lost
    return train, _by_hash(held_out)


def _by_hash(pictures: Iterable[Picture]) -> list[Picture]:
    """In an order that does not depend on what they show."""
    return sorted(pictures, key=lambda picture: _hash(picture.name))


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()
