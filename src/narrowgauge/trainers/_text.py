"""Text to train on: a file, a folder of files, or the source of Python's own standard library.

Text is split into training and validation before anything reads it, and the split depends on the text alone:

- Several files are split by file, because the neighbors of a span that is cut out of a file say nearly the same.
  Files go to validation in the order of a hash of their names until they hold 5% of the bytes, so a folder that is
  copied elsewhere, or gets one more file, is split as before.
- The last tenth of a single file validates.
- Copies of a file are left out first: a copy could end up on the other side.

Files that are not text (hidden, binary, not UTF-8, unreadable) are skipped and counted by reason. Of a file that is
not UTF-8 either the whole file is left out, or the lines that are not UTF-8, whose line numbers are recorded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

NAMED = 5  # names in a note about files, lines or images that were left out

_MUST_BE = "--data must be a UTF-8 text file or a folder of them"
_SHARE = 0.05  # of the bytes, to validation, by whole files
_LARGEST = 0.10  # share of one file above which it stays in training, if there are smaller ones
_TOO_SMALL = 0.01  # below this share whole files do not make a validation text
_CUT = 0.10  # of a single file, its end, to validation
_HEAD = 8192  # bytes: enough to tell most binary files without reading gigabytes
_NOT_STANDARD = {"site-packages", "dist-packages"}


class DataError(ValueError):
    """The data cannot be trained on; the message is one line for the user of --data."""


@dataclass(frozen=True)
class Document:
    """One text, not empty: its name (relative, with forward slashes) and its content."""

    name: str
    text: str

    @property
    def size(self) -> int:
        """Bytes of the text in UTF-8."""
        return len(self.text.encode())


@dataclass(frozen=True)
class Corpus:
    """Documents split in two, in a fixed order.

    Attributes:
        source: where the text comes from, printable.
        train: the documents to train on.
        validation: the documents to validate on; none of their texts is in ``train``.
        skipped: how many files were left out, by reason.
        damaged: ``file:line`` of lines that were left out of files that are used.
    """

    source: str
    train: tuple[Document, ...]
    validation: tuple[Document, ...]
    skipped: Mapping[str, int]
    damaged: tuple[str, ...] = ()

    @property
    def documents(self) -> tuple[Document, ...]:
        """All documents; the two parts of a file that was cut count as two."""
        return self.train + self.validation

    @property
    def total_bytes(self) -> int:
        """Bytes of all documents in UTF-8."""
        return sum(document.size for document in self.documents)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about what was left out."""
        notes = [first_few("skipped lines that are not UTF-8", self.damaged)] if self.damaged else []
        if self.skipped:
            notes.append("skipped files: " + ", ".join(f"{n} {why}" for why, n in self.skipped.items()))
        return tuple(notes)


def first_few(what: str, names: Sequence[str]) -> str:
    """A count with the first few names: ``skipped damaged lines: 7 (a:3, a:4, b:9, b:12, c:1, ...)``."""
    return f"{what}: {len(names)} ({', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''})"


def load_corpus(path: Path | None, *, without: Literal["files", "lines"] = "files") -> Corpus:
    """Read a text and split it into training and validation documents.

    Args:
        path: a text file, or a folder that is read with its subfolders; None for the source text of the
            running interpreter's standard library (about 30 MB, without installed packages).
        without: what is left out where bytes are not UTF-8: whole files, or single lines.

    Returns:
        The same corpus for the same files, wherever they are.

    Raises:
        DataError: if the path is missing, may not be read, or holds no text.
    """
    source, documents, skipped, damaged = _documents(path, without)
    train, validation = _split(documents)
    return Corpus(source, tuple(train), tuple(validation), skipped, tuple(damaged))


def load_apart(path: Path | None, validation: Path, *, without: Literal["files", "lines"] = "files") -> Corpus:
    """Read a text to train on and another to validate on, both whole. For arguments and errors see `load_corpus`.

    Documents to train on that are in the other text too are left out.
    """
    source, documents, skipped, damaged = _documents(path, without)
    _, held_out, more_skipped, more_damaged = _documents(validation, without)
    held = {document.text for document in held_out}
    train = [document for document in documents if document.text not in held]
    if not train:
        raise DataError(f"{_MUST_BE}, got {source!r}, all of which is in the text to validate on")
    count = Counter(skipped) + Counter(more_skipped)
    count += Counter({"in the text to validate on": len(documents) - len(train)})
    return Corpus(source, tuple(train), tuple(held_out), dict(sorted(count.items())), (*damaged, *more_damaged))


def _documents(
    path: Path | None, without: Literal["files", "lines"]
) -> tuple[str, list[Document], Mapping[str, int], Sequence[str]]:
    """What a text is called, its documents by name, files that were skipped by reason, damaged lines."""
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        documents, skipped, _ = _read_folder(root, suffix=".py", exclude=_NOT_STANDARD)
        return _found(f"the standard library of Python {platform.python_version()}", documents, skipped)
    damaged: list[str] | None = [] if without == "lines" else None
    try:
        path = path.expanduser()
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            os.scandir(path).close()  # os.walk takes a folder that it may not list for an empty one
            return _found(_printable(path), *_read_folder(path, lines=damaged is not None))
        if not stat.S_ISREG(mode):
            raise _NotText("neither")
        document = Document(path.name, _read(path, path.name, damaged))
    except (OSError, RuntimeError) as error:  # RuntimeError: a home that cannot be found
        raise DataError(f"{_MUST_BE}, got {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
    except _NotText as reason:
        raise DataError(f"{_MUST_BE}, got {str(path)!r}, which is {reason}") from None
    return _found(_printable(path), [document], Counter(), damaged or [])


def _printable(path: Path) -> str:
    """A path in one line of valid Unicode; file names need not be either."""
    text = os.fsencode(path).decode(errors="replace")
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def _found(
    source: str, documents: list[Document], skipped: Counter[str], damaged: Sequence[str] = ()
) -> tuple[str, list[Document], Mapping[str, int], Sequence[str]]:
    reasons = dict(sorted((+skipped).items()))
    if not documents:
        listed = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        why = f"no text was found in it ({listed})" if listed else "it is empty"
        raise DataError(f"{_MUST_BE}, got {source!r}, but {why}")
    return source, documents, reasons, damaged


class _NotText(Exception):
    """A file is not text; the message is the reason that is counted."""


def _read(path: Path, name: str, damaged: list[str] | None) -> str:
    """The text of a file, line ends included; `name:line` of lines that are not UTF-8 go to `damaged`, if given."""
    with path.open("rb") as file:
        data = file.read(_HEAD)
        if b"\0" not in data:
            data += file.read()
    if not data:
        raise _NotText("empty")
    if b"\0" in data:
        raise _NotText("binary")
    try:
        return data.decode()
    except UnicodeDecodeError:
        if damaged is None:
            raise _NotText("not UTF-8") from None
    good = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        try:
            good.append(line.decode())
        except UnicodeDecodeError:
            damaged.append(_printable(Path(f"{name}:{number}")))
    text = "\n".join(good)
    if not text.strip():
        raise _NotText("not UTF-8")
    return text


def _read_folder(
    root: Path, *, suffix: str = "", exclude: set[str] | frozenset[str] = frozenset(), lines: bool = False
) -> tuple[list[Document], Counter[str], list[str]]:
    """The texts below a folder by name, copies once; skipped files by reason; damaged lines."""
    skipped: Counter[str] = Counter()
    damaged: list[str] = []
    documents: dict[str, Document] = {}
    paths = {path.relative_to(root).as_posix(): path for path in _walk(root, exclude, skipped)}
    for name, path in sorted(paths.items()):
        if not name.endswith(suffix):
            continue
        try:
            if not path.is_file():  # opening a pipe would wait for a writer forever
                raise _NotText("special" if path.exists() else "missing")
            places: list[str] | None = [] if lines else None
            text = _read(path, name, places)
            if text in documents:
                raise _NotText("duplicate")
            documents[text] = Document(name, text)
            damaged += places or []
        except _NotText as reason:
            skipped[str(reason)] += 1
        except OSError:
            skipped["unreadable"] += 1
    return list(documents.values()), skipped, damaged


def _walk(root: Path, exclude: set[str] | frozenset[str], skipped: Counter[str]) -> Iterator[Path]:
    """Every file below a folder that is not hidden; a folder linked to several times is entered once."""
    seen = set()
    for folder, folders, files in os.walk(root, onerror=lambda _: skipped.update(["unreadable"]), followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            skipped["linked twice"] += 1
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        skipped["hidden"] += sum(name.startswith(".") for name in (*folders, *files))
        # In place: os.walk enters what is left of the list, in its order.
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in exclude)
        yield from (Path(folder, name) for name in files if not name.startswith("."))


def _split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Training and validation documents: whole files where that gives a fair share, else the end of the largest.

    A file of over a tenth of the bytes stays in training unless all files are that large (then the smallest is
    the bound). Where one file dominates, the rest may be too little to validate on: its end is cut off as well.
    """
    sizes = {document.name: document.size for document in documents}
    total = sum(sizes.values())
    bound = max(_LARGEST * total, min(sizes.values()))
    chosen: set[str] = set()
    held = 0
    # A hash that is the same on every machine and in every run, unlike `hash`.
    for name in sorted(sizes, key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest()):
        if len(documents) > 1 and held < _SHARE * total and sizes[name] <= bound:
            chosen.add(name)
            held += sizes[name]
    train = [document for document in documents if document.name not in chosen]
    validation = [document for document in documents if document.name in chosen]
    if held < _TOO_SMALL * total:
        largest = max(train, key=lambda document: sizes[document.name])
        at = int(len(largest.text) * (1 - _CUT))
        head = Document(largest.name, largest.text[:at])
        train = [head if document is largest else document for document in train]
        validation.append(Document(largest.name, largest.text[at:]))
    return [document for document in train if document.text], validation
