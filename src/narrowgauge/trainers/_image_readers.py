"""Readers of images with captions: a CSV, tar files, a folder of classes; `_image_sources` says how they look.

A reader gives what it found, in an order that names fix, and what it left out by reason. Only the last thing that
can be wrong with a picture is not seen here: whether its bytes are an image.
"""

from __future__ import annotations

import csv
import json
import os
import stat
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from ._corpus import DataError

TEMPLATE = "a photo of a {}"
NAMED = 5  # of what is left out, in a note

_SEPARATORS = "\t,;|"
_MOST = 1 << 20  # bytes of a caption, and of what a header of a tar file has beside itself
_PICTURES = (".jpg", ".jpeg", ".png", ".webp")


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

    @property
    def place(self) -> tuple[str, int]:
        """Where its bytes are: equal for one image under several captions."""
        return self.path, self.offset


@dataclass(eq=False)
class Found:
    """What a source has, what was left out by reason, and what is kept but may not be what was meant."""

    pictures: list[Picture] = field(default_factory=list)
    classes: tuple[str, ...] = ()
    left_out: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    doubtful: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def notes(self) -> Iterator[str]:
        yield from (named(f"skipped {why}", names) for why, names in self.left_out.items())
        yield from (named(what, names) for what, names in self.doubtful.items())


def named(what: str, names: list[str]) -> str:
    """A count with the first few names."""
    return f"{what}: {len(names)} ({', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''})"


def caption_of(name: str) -> str:
    """The caption of a class: "a photo of a tabby cat" for `tabby_cat`."""
    return TEMPLATE.format(name.replace("_", " "))


def from_csv(path: Path, columns: str, flag: str) -> Found:
    """The pictures of a table, in its order.

    Args:
        path: of the table; paths of images start at its folder.
        columns: names of those of paths and captions, with a comma between them.
        flag: what a complaint names.

    Raises:
        DataError: if its header has not these columns.
    """
    wanted = [name.strip() for name in columns.split(",")]
    found = Found()
    # Bytes that are not UTF-8 come as lone surrogates, line by line.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        header = file.readline().rstrip("\r\n")
        separator = next((s for s in _SEPARATORS if set(wanted) <= set(_header(header, s))), None)
        if len(wanted) != 2 or separator is None:
            raise DataError(
                f"{flag}: got {path} with the header {header[:100]!r}, takes one with the columns {columns!r} "
                "(--columns), between tabs, commas, semicolons or bars"
            )
        names = _header(header, separator)
        at = [names.index(name) for name in wanted]
        before = 0
        for line, row in _lines(csv.reader(file, delimiter=separator)):
            place = f"{path.name}:{line + 1}"
            if line > before + 1:
                # A quote that nothing closes takes the lines behind it into its caption, up to the next quote.
                found.doubtful["rows over several lines, quoted"].append(f"{path.name}:{before + 2}-{line + 1}")
            before = line
            if row == []:
                continue
            said = [row[i].strip() if row is not None and i < len(row) else "" for i in at]
            if not all(map(_is_text, said)):
                found.left_out["damaged lines"].append(place)
                continue
            file_path = os.path.join(path.parent, said[0])
            size = _size(file_path)
            if size is None:
                found.left_out["missing images"].append(said[0])
                continue
            found.pictures.append(Picture(said[0], file_path, 0, size, said[1]))
    return found


def _size(path: str) -> int | None:
    """Bytes of a file; None for what is not there, or no file (opening a pipe would wait for a writer for ever)."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _header(line: str, separator: str) -> list[str]:
    """The columns that a line names; none where it is no line of a table."""
    try:
        return next(csv.reader([line], delimiter=separator), [])
    except csv.Error:
        return []


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


def from_tars(shards: list[str], flag: str) -> Found:
    """The pairs of tar files, in their order.

    Raises:
        DataError: for a file that is not there.
    """
    found = Found()
    for shard in shards:
        try:
            if os.path.exists(shard) and _size(shard) is None:
                raise IsADirectoryError(0, "it is no file")
            with open(shard, "rb") as file, tarfile.open(fileobj=cast(Any, _Bounded(file)), mode="r:") as archive:
                _members(archive, shard, found)
        except (FileNotFoundError, IsADirectoryError) as error:
            raise DataError(f"{flag}: {shard}: {error.strerror}") from None
        except Exception as error:  # whatever tarfile makes of damage, which is of many kinds
            why = getattr(error, "strerror", None) or error
            found.left_out["damaged archives"].append(f"{os.path.basename(shard)}: {why}")
    return found


class _Bounded:
    """A file for tarfile, which would ask for as much at once as a header says."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.tell, self.seek = file.tell, file.seek

    def read(self, count: int = -1) -> bytes:
        return self._file.read(min(count, _MOST) if count >= 0 else _MOST)


def _members(archive: tarfile.TarFile, shard: str, found: Found) -> None:
    """The pairs of an archive; of one that ends too early, those before."""
    images: dict[str, tuple[str, int, int]] = {}
    captions: dict[str, str] = {}
    end, base = os.path.getsize(shard), os.path.basename(shard)
    try:
        for member in archive:
            folder, _, name = member.name.rpartition("/")
            stem, _, kind = name.partition(".")
            key = f"{folder}/{stem}".lstrip("/")
            if member.size < 0:  # tarfile would go backwards
                raise tarfile.ReadError(f"{member.name} has {member.size} bytes")
            if not member.isreg() or not stem or member.issparse():
                continue
            if f".{kind.lower()}" in _PICTURES:
                if member.offset_data + member.size > end:
                    found.left_out["damaged archives"].append(f"{base}: ends within {member.name}")
                    break
                images[key] = (member.name, member.offset_data, member.size)
            elif kind.lower() == "txt" or (kind.lower() == "json" and key not in captions):
                captions[key] = _caption(archive, member)
            elif kind.lower() != "json":
                found.left_out["members that are neither image nor caption"].append(f"{base}:{member.name}")
        else:
            # Behind the first header tarfile takes a damaged one for the end, which is zeros.
            with open(shard, "rb") as file:
                file.seek(archive.offset)
                if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
                    found.left_out["damaged archives"].append(f"{base}: damaged header at byte {archive.offset}")
    except Exception as error:  # as above
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
    if member.size > _MOST:
        return ""
    file = archive.extractfile(member)
    data = file.read() if file else b""
    try:
        text = data.decode()
        said = text if member.name.lower().endswith(".txt") else json.loads(text).get("caption")
    except (ValueError, AttributeError, RecursionError):
        return ""
    return said.strip() if isinstance(said, str) else ""


def from_classes(folder: Path) -> Found:
    """The images of a folder of classes, by class and name."""
    found = Found(classes=tuple(sorted(entry.name for entry in os.scandir(folder) if _is_class(entry))))
    for label, name in enumerate(found.classes):
        before = len(found.pictures)
        for place, folders, files in os.walk(folder / name):
            folders.sort()
            for file in sorted(files):
                path = os.path.join(place, file)
                said = os.path.relpath(path, folder)
                if not file.lower().endswith(_PICTURES):
                    found.left_out["files that are no images by their names"].append(said)
                    continue
                size = _size(path)
                if size is None:
                    found.left_out["missing images"].append(said)
                    continue
                found.pictures.append(Picture(said, path, 0, size, caption_of(name), label))
        if len(found.pictures) == before:
            found.doubtful["classes without an image"].append(name)
    return found


def _is_class(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir() and not entry.name.startswith(".")
    except OSError:  # a link to itself
        return False
