"""Text to train on: a file, a folder of files, or the source of Python's own standard library.

A comparison of number formats is worth as much as its validation loss, so the split is made before anything
looks at the text, and it depends on the text alone:

- Several files are split *by file*. A span cut out of every file would leave its neighbours, which say nearly
  the same, in the training text. Files go to validation in the order of a hash of their names until they hold
  5% of the bytes, so that a folder copied elsewhere, or with a file added, is split as before.
- A single file is cut once: the last tenth validates.
- A file dropped twice into a folder would put its copy on the other side, so copies are left out first.

What cannot be text (hidden, binary, not UTF-8, unreadable) is skipped and counted by reason, never guessed at. Of
a file that is not UTF-8 either all is left out, or the lines alone that are not, whose places are kept.
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

_TAKES = "--data takes a UTF-8 text file or a folder of them"
_SHARE = 0.05  # of the bytes, to validation, by whole files
_LARGEST = 0.10  # share of one file above which it stays in training, if there are smaller ones
_TOO_SMALL = 0.01  # below this share whole files do not make a validation text
_CUT = 0.10  # of a single file, its end, to validation
_HEAD = 8192  # bytes: enough to tell most binary files without reading gigabytes
_NOT_STANDARD = {"site-packages", "dist-packages"}


class DataError(ValueError):
    """The text asked for cannot be trained on; the message is one line for the user of --data."""


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
        source: where the text comes from, in words fit to print.
        train: the documents to train on.
        validation: the documents to validate on; no text of theirs is in ``train``.
        skipped: how many files were left out, by reason.
        damaged: places, as ``file:line``, of lines that were left out of files that are used.
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


def load_corpus(path: Path | None, *, without: Literal["files", "lines"] = "files") -> Corpus:
    """Read a text and split it into training and validation documents.

    Args:
        path: a text file, or a folder that is read with its subfolders; None for the source text of the
            running interpreter's standard library (about 30 MB, packages installed beside it left out).
        without: what is left out where bytes are not UTF-8, whole files or the lines that they are in.

    Returns:
        The same corpus for the same files, wherever they lie.

    Raises:
        DataError: if the path is missing, may not be read, or holds no text.
    """
    if path is None:
        return _standard_library()
    try:
        path = path.expanduser()
    except RuntimeError as error:
        raise DataError(f"{_TAKES}, got {str(path)!r}: {error}") from None
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            os.scandir(path).close()  # the walk below takes a folder it may not list for an empty one
            documents, skipped, damaged = _read_folder(path, lines=without == "lines")
            return _corpus(_printable(path), documents, skipped, damaged)
        if not stat.S_ISREG(mode):
            raise DataError(f"{_TAKES}, got {str(path)!r}, which is neither")
        places: list[str] | None = [] if without == "lines" else None
        text = _read(path, path.name, places)
    except OSError as error:
        raise DataError(f"{_TAKES}, got {str(path)!r}: {error.strerror or error}") from error
    except _NotText as reason:
        raise DataError(f"{_TAKES}, got {str(path)!r}, which is {reason}") from None
    return _corpus(_printable(path), [Document(path.name, text)], Counter(), places or [])


def _printable(path: Path) -> str:
    """A path in one line of valid Unicode; file names need not be either."""
    text = os.fsencode(path).decode(errors="replace")
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def _standard_library() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    documents, skipped, _ = _read_folder(root, suffix=".py", without=_NOT_STANDARD)
    if not documents:
        raise DataError(f"{_TAKES}, got none, and this Python has no source text of its library in {str(root)!r}")
    return _corpus(f"the standard library of Python {platform.python_version()}", documents, skipped)


def _corpus(source: str, documents: list[Document], skipped: Counter[str], damaged: Sequence[str] = ()) -> Corpus:
    if not documents:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted((+skipped).items()))
        why = f"no text was found in it ({reasons})" if reasons else "it is empty"
        raise DataError(f"{_TAKES}, got {source!r}, but {why}")
    train, validation = _split(documents)
    return Corpus(source, tuple(train), tuple(validation), dict(sorted((+skipped).items())), tuple(damaged))


class _NotText(Exception):
    """Why a file is no text; the message is the reason that is counted."""


def _read(path: Path, name: str, damaged: list[str] | None) -> str:
    """The text of a file, line ends and all.

    Args:
        path: of the file.
        name: of the file, for the places of what is left out.
        damaged: gets the places of lines that are not UTF-8, which are left out; None refuses the file.
    """
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
    kept = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        try:
            kept.append(line.decode())
        except UnicodeDecodeError:
            damaged.append(_printable(Path(f"{name}:{number}")))
    text = "\n".join(kept)
    if not text.strip():
        raise _NotText("not UTF-8")
    return text


def _read_folder(
    root: Path, suffix: str = "", without: set[str] | frozenset[str] = frozenset(), lines: bool = False
) -> tuple[list[Document], Counter[str], list[str]]:
    """The texts below a folder by name, each content once, how many files were skipped and why, and which lines."""
    skipped: Counter[str] = Counter()
    damaged: list[str] = []
    paths = {path.relative_to(root).as_posix(): path for path in _walk(root, without, skipped)}
    documents: dict[str, Document] = {}
    for name, path in sorted(paths.items()):
        if not name.endswith(suffix):
            continue
        try:
            if not path.is_file():  # opening a pipe would wait for a writer for ever
                raise _NotText("missing" if not path.exists() else "special")
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


def _walk(root: Path, without: set[str] | frozenset[str], skipped: Counter[str]) -> Iterator[Path]:
    """Every file below a folder that is not hidden; a folder linked to several times is entered once."""
    seen = set()

    def unreadable(_: OSError) -> None:
        skipped["unreadable"] += 1

    for folder, folders, files in os.walk(root, onerror=unreadable, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            skipped["linked twice"] += 1
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        skipped["hidden"] += sum(name.startswith(".") for name in (*folders, *files))
        # In place: os.walk enters what is left of the list, in its order.
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in without)
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
    for document in sorted(documents, key=_name_hash):
        if len(documents) > 1 and held < _SHARE * total and sizes[document.name] <= bound:
            chosen.add(document.name)
            held += sizes[document.name]
    train = [document for document in documents if document.name not in chosen]
    validation = [document for document in documents if document.name in chosen]
    if held < _TOO_SMALL * total:
        largest = max(train, key=lambda document: sizes[document.name])
        head, tail = _cut(largest)
        train = [head if document is largest else document for document in train]
        validation.append(tail)
    return [document for document in train if document.text], validation


def _name_hash(document: Document) -> bytes:
    """The same on every machine and in every run, unlike `hash`."""
    return hashlib.sha256(document.name.encode(errors="surrogateescape")).digest()


def _cut(document: Document) -> tuple[Document, Document]:
    """A document's beginning and its end."""
    at = int(len(document.text) * (1 - _CUT))
    return Document(document.name, document.text[:at]), Document(document.name, document.text[at:])
