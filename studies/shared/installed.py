"""The Python sources that are installed on a machine, as a text to train on: its validation part is other
packages.

What stands at the top of `site-packages` and of the standard library is a package, all of its files go to one
side, and so no file of a package that validates was ever trained on, nor its neighbors. Packages carry copies
of one another (`pip/_vendor`), often with a line changed, so a file counts as a copy if its lines are the same
but for blanks around them, for empty lines and for comments; `shared_lines` says what is left of that.

Packages are read in an order that a seed makes of their sorted names, files of a package likewise, until there
is enough. None gives more than a fifth, or a machine with torch on it would have a text of torch.
"""

from __future__ import annotations

import hashlib
import platform
import random
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from narrowgauge.trainers import Corpus, DataError
from narrowgauge.trainers._text import _NOT_STANDARD, Document, _NotText, _read

MOST = 0.2  # of all bytes, from one package
HELD_OUT = 0.05  # of the bytes, to validation, by whole packages
LARGEST = 0.02  # share above which a package stays in training, if there are smaller ones: so several validate
LONG = 40  # characters of a line that is not alike by chance


def installed_sources(most_bytes: int, seed: int = 0, roots: Sequence[Path] | None = None) -> Corpus:
    """The sources, split by package: of the interpreter's standard library and site-packages, or of other roots."""
    order = random.Random(seed)
    packages: dict[str, list[Document]] = {}
    seen: set[bytes] = set()
    skipped: dict[str, int] = {}
    left = most_bytes
    for name, files in _shuffled(_packages(roots or _roots()), order):
        documents: list[Document] = []
        share = min(left, int(MOST * most_bytes))
        for path, shown in _shuffled_files(name, files, order):
            if share <= 0:
                break
            try:
                text = _read(path, shown, None)
                _refuse_copies(text, seen)
            except (_NotText, OSError) as reason:
                why = str(reason) if isinstance(reason, _NotText) else "unreadable"
                skipped[why] = skipped.get(why, 0) + 1
                continue
            documents.append(Document(shown, text))
            share -= documents[-1].size
            left -= documents[-1].size
        if documents:
            packages[name] = documents
        if left <= 0:
            break
    train, validation = _split(packages)
    source = f"{len(packages)} packages of Python {platform.python_version()}'s library and site-packages"
    return Corpus(source, tuple(train), tuple(validation), dict(sorted(skipped.items())))


def shared_lines(corpus: Corpus) -> float:
    """Of the validation text's lines of over 40 characters, the share that stands in the training text too."""
    wanted = {line for document in corpus.validation for line in _long_lines(document.text)}
    found = {line for document in corpus.train for line in _long_lines(document.text) if line in wanted}
    lines = [line for document in corpus.validation for line in _long_lines(document.text)]
    return sum(line in found for line in lines) / max(1, len(lines))


def _long_lines(text: str) -> Iterator[str]:
    return (line for raw in text.splitlines() if len(line := raw.strip()) > LONG)


def _roots() -> list[Path]:
    found = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    return list(dict.fromkeys(path.resolve() for path in found if path.is_dir()))


def _packages(roots: Sequence[Path]) -> dict[str, list[tuple[Path, str]]]:
    """Files and their names by package; a package in two roots is one."""
    packages: dict[str, list[tuple[Path, str]]] = {}
    for root in roots:
        for entry in sorted(root.iterdir()):
            if entry.name.startswith(".") or entry.name in _NOT_STANDARD or entry.suffix == ".dist-info":
                continue
            if entry.is_dir():
                packages.setdefault(entry.name, []).append((entry, entry.name))
            elif entry.suffix == ".py":
                packages.setdefault(entry.stem, []).append((entry, entry.name))
    return packages


def _shuffled(
    packages: Mapping[str, list[tuple[Path, str]]], order: random.Random
) -> Iterator[tuple[str, list[tuple[Path, str]]]]:
    names = sorted(packages)
    order.shuffle(names)
    return ((name, packages[name]) for name in names)


def _shuffled_files(
    name: str, entries: Sequence[tuple[Path, str]], order: random.Random
) -> Iterator[tuple[Path, str]]:
    files: list[tuple[str, Path]] = []
    for entry, shown in entries:
        if entry.is_dir():
            files += [(f"{shown}/{path.relative_to(entry).as_posix()}", path) for path in entry.rglob("*.py")]
        else:
            files.append((shown, entry))
    # A generator of the package's own: what other packages hold does not change the order of its files.
    files.sort()
    random.Random(f"{name} {order.getrandbits(64)}").shuffle(files)
    return ((path, shown) for shown, path in files if path.is_file())


def _refuse_copies(text: str, seen: set[bytes]) -> None:
    lines = (line.strip() for line in text.splitlines())
    code = "\n".join(line for line in lines if line and not line.startswith("#"))
    if not code:
        raise _NotText("without code")
    key = hashlib.sha256(code.encode(errors="surrogatepass")).digest()
    if key in seen:
        raise _NotText("duplicate")
    seen.add(key)


def _split(packages: Mapping[str, list[Document]]) -> tuple[list[Document], list[Document]]:
    """Packages to validation in the order of a hash of their names, the very large ones left out."""
    if len(packages) < 2:
        raise DataError(f"--data must be a text where fewer than 2 packages are installed, got {len(packages)}")
    sizes = {name: sum(document.size for document in documents) for name, documents in packages.items()}
    total = sum(sizes.values())
    bound = max(LARGEST * total, min(sizes.values()))
    held: list[str] = []
    for name in sorted(packages, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if (
            sum(sizes[n] for n in held) < HELD_OUT * total
            and sizes[name] <= bound
            and len(held) < len(packages) - 1
        ):
            held.append(name)
    train = [document for name, documents in packages.items() if name not in held for document in documents]
    return train, [document for name in held for document in packages[name]]
