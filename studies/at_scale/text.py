"""Half a billion tokens of text: the sources and documentation of packages, copies left out, held out by package.

    apt-get download $(cat debian.txt); pip download --no-deps -r python.txt        # in runs/packages
    python -m studies.at_scale.text --megabytes 1850 --out runs/text runs/packages
    narrowgauge tokens --data runs/text/train --validation runs/text/validation --learn-from 128 \\
        --vocabulary 50304 --out runs/tokens
    python -m studies.at_scale.parts runs/tokens --text runs/text/text.json --out runs/parts

`PACKAGES` are archives as a registry serves them, `.deb`, `.whl`, `.zip` and `.tar.*`, or folders of them. An
archive is a package. Archives in it are read too, archives in those are not. Of a package's several files the
newest counts. `debian.txt` and `python.txt` beside this file name the packages of the committed results. Prepared
from them twice, the tokens had the same fingerprint.

What is read: sources and documentation by their endings, HTML without its tags. What is no text for people is left
out: over a megabyte or under 200 bytes, lines as long as minified code or embedded data have, tables of numbers.

Packages carry copies of one another, often with lines changed. Lines are compared without the blanks around them,
and a line of three characters or fewer is not counted. Where `WINDOW` counted lines in a row have been seen
before, in any package, they are left out; of a file that loses more than half, all of it. Held-out packages are
compared last, so that what they share with the training text is left out of them. A package gives a tenth of all
bytes at most, before files are drawn for the text's size.

Files are named by a hash: their order is a shuffle, and each stretch of the tokens a sample of all packages.
`text.json` lists the packages, and what was kept of each.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import html
import io
import json
import lzma
import re
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

WINDOW = 6  # counted lines in a row that are not alike by chance
COUNTED = 4  # bytes of a counted line, at least, without its blanks
LEAST, MOST = 200, 1 << 20  # bytes of a file
LONGEST, MEAN = 2000, 200  # characters of its longest line, and of its lines in the mean
LETTERS = 0.5  # of the characters that are no blanks: letters, at least
SHARE = 0.1  # of all bytes, from one package at most
HELD_OUT = 0.01  # of all bytes: held out, by whole packages
SMALL = 0.002  # share above which a package is not held out: so that many are
KINDS = {
    "Python": ".py .pyi .pyx .pxd",
    "C and C++": ".c .h .cc .cpp .cxx .hh .hpp .hxx .inl .ipp .tcc .cu .cuh",
    "other languages": ".rs .go .java .pas .pp .lisp .lsp .scm .rkt .hs .ml .erl .ts .f90 .jl .r .sh .pl .el .adb",
    "documentation": ".md .rst .txt .texi .texinfo .adoc .org",
    "HTML": ".html .htm .xhtml",
    "manual pages": ".1 .2 .3 .4 .5 .7 .8",
}
KIND = {ending: kind for kind, endings in KINDS.items() for ending in endings.split()}
_ARCHIVE = re.compile(r"\.(deb|whl|zip|tar|tar\.\w+|tgz|tbz2|txz)$")
_BLOCK = re.compile(r"<(script|style|head|nav)\b.*?</\1\s*>|<!--.*?-->", re.DOTALL | re.IGNORECASE)
_BREAK = re.compile(r"</?(?:p|div|br|li|tr|h\d|pre|dt|dd|ul|ol|table|section)\b[^>]*>", re.IGNORECASE)
_TAG = re.compile(r"<[^>]*>")
_EMPTY = re.compile(r"\s*\n\s*\n")
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, OSError)
_BYTES = np.arange(256)
BLANK = np.isin(_BYTES, list(b" \t\r\f"))
LETTER = np.isin(_BYTES & ~0x20, list(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")) | (_BYTES >= 0x80)
_MIXED, _POWERS = np.random.default_rng(0).integers(1 << 63, size=(2, 4096), dtype=np.uint64) | np.uint64(1)
Refused = Callable[[str], None]


@dataclass
class Package:
    """An archive, its texts by name, and how many files were left out, by reason."""

    name: str
    texts: dict[str, str] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def size(self) -> int:
        """Bytes of its texts."""
        return sum(len(text.encode()) for text in self.texts.values())


def read(path: Path) -> Package:
    """The texts of an archive that are for people, copies among them included."""
    package = Package(package_name(path.name))
    for name, data in _members(path.name, path.read_bytes()):
        kind = KIND.get(PurePosixPath(name).suffix.lower())
        if kind is None:
            continue
        try:
            package.texts[name] = readable(data, kind)
        except ValueError as reason:
            package.left_out[str(reason)] += 1
    return package


def package_name(file: str) -> str:
    """`numpy 2.4.6` of a wheel, `gcc-12-source 12.2.0-14` of a Debian package."""
    stem = _ARCHIVE.sub("", file)
    if file.endswith((".deb", ".whl")):
        name, version = stem.split("-" if file.endswith(".whl") else "_")[:2]
        return f"{name.lower()} {version.replace('%3a', ':')}"
    return stem


def readable(data: bytes, kind: str) -> str:
    """A file's text as it is kept; a ValueError with the reason if it is not."""
    if not LEAST <= len(data) <= MOST:
        raise ValueError("too short" if len(data) < LEAST else "too long")
    if b"\0" in data:
        raise ValueError("binary")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    if kind == "HTML":
        text = html.unescape(_TAG.sub("", _BREAK.sub("\n", _BLOCK.sub("", text))))
        text = _EMPTY.sub("\n\n", text)
    text = text.replace("\r\n", "\n").strip() + "\n"
    lines = text.split("\n")
    if len(text) > MEAN * len(lines) or max(map(len, lines)) > LONGEST:
        raise ValueError("long lines")
    shown = np.frombuffer(text.encode(), np.uint8)
    shown = shown[~BLANK[shown] & (shown != ord("\n"))]
    if len(shown) < LEAST / 2:
        raise ValueError("too short")
    if LETTER[shown].mean() < LETTERS:
        raise ValueError("few letters")
    return text


def _members(name: str, data: bytes, nested: bool = True) -> Iterator[tuple[str, bytes]]:
    """Every file of an archive that may be read, by name; `nested`: those of archives in it too."""
    if name.endswith(".deb"):
        yield from _members(*next(part for part in _ar(data) if part[0].startswith("data.tar")))
        return
    if name.endswith((".whl", ".zip")):
        zipped = zipfile.ZipFile(io.BytesIO(data))
        found = ((m.filename, m.file_size, partial(zipped.read, m)) for m in zipped.infolist())
    else:
        tarred = tarfile.open(fileobj=io.BytesIO(_unpacked(name, data)))  # noqa: SIM115, in memory
        found = ((m.name.removeprefix("./"), m.size, partial(_content, tarred, m)) for m in tarred if m.isfile())
    for inner, size, content in found:
        ending = PurePosixPath(inner.removesuffix(".gz")).suffix.lower()
        if _ARCHIVE.search(inner):
            if nested:
                with suppress(*_BROKEN):  # test suites carry archives that nobody can read
                    for name_inside, text in _members(inner, content(), nested=False):
                        yield f"{inner}/{name_inside}", text
        elif ending in KIND:
            text = content() if size <= MOST else bytes(MOST + 1)
            yield (
                inner.removesuffix(".gz"),
                gzip.decompress(text) if inner.endswith(".gz") and size <= MOST else text,
            )


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    return file.read() if file else b""


def _unpacked(name: str, data: bytes) -> bytes:
    if name.endswith(".zst"):
        import zstandard

        return zstandard.ZstdDecompressor().stream_reader(data).read()
    for ending, module in ((("xz", "txz"), lzma), (("gz", "tgz"), gzip), (("bz2", "tbz2"), bz2)):
        if name.endswith(ending):
            return module.decompress(data)
    return data


def _ar(data: bytes) -> Iterator[tuple[str, bytes]]:
    """The parts of an `ar` archive, which a Debian package is: a line of 60 bytes before each."""
    at = len(b"!<arch>\n")
    while at + 60 <= len(data):
        name, size = data[at : at + 16].decode().strip().rstrip("/"), int(data[at + 48 : at + 58])
        yield name, data[at + 60 : at + 60 + size]
        at += 60 + size + size % 2


# --- copies


def line_hashes(text: str) -> NDArray[np.uint64]:
    """A hash of each line but for its blanks, a polynomial in 64 bits; 0 for a line that is not counted."""
    data = np.frombuffer(text.encode() + b"\n", np.uint8)
    data = data[~BLANK[data]]
    ends = np.flatnonzero(data == ord("\n"))
    starts = np.concatenate([[0], ends[:-1] + 1])
    sizes = ends - starts
    place = np.arange(len(data)) - np.repeat(starts, sizes + 1)
    hashes = np.add.reduceat(_MIXED[data] * _POWERS[place % len(_POWERS)], starts)
    return np.where(sizes >= COUNTED, hashes | np.uint64(1), np.uint64(0))


def windows(lines: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash of each `WINDOW` lines in a row, over counted lines alone; of all of them if there are fewer."""
    count = max(1, len(lines) - WINDOW + 1)
    found = np.zeros(count, np.uint64)
    for place in range(min(WINDOW, len(lines))):
        found = found * np.uint64(0x9E3779B97F4A7C15) + lines[place : place + count]
    return found


def without_copies(texts: Sequence[str]) -> list[str]:
    """The texts, each without the lines that repeat one before it or itself; empty where most are gone."""
    lines = [line_hashes(text) for text in texts]
    counted = [np.flatnonzero(of) for of in lines]
    hashes = [windows(of[at]) for of, at in zip(lines, counted, strict=True)]
    joined = np.concatenate(hashes) if hashes else np.empty(0, np.uint64)
    first = np.zeros(len(joined), bool)
    first[np.unique(joined, return_index=True)[1]] = True
    kept, begin = [], 0
    for text, at, of in zip(texts, counted, hashes, strict=True):
        repeated = np.flatnonzero(~first[begin : begin + len(of)])
        begin += len(of)
        kept.append(_without(text, at, repeated) if len(at) else "")
    return kept


def _without(text: str, counted: NDArray[np.intp], repeated: NDArray[np.intp]) -> str:
    """A text without the lines of repeated windows, and of what stands between their lines."""
    if not len(repeated):
        return text
    gone = np.zeros(len(counted), bool)
    for place in range(min(WINDOW, len(counted))):
        gone[repeated + place] = True
    if gone.sum() > len(counted) / 2:
        return ""
    lines = text.split("\n")
    left = np.ones(len(lines), bool)
    left[counted[gone]] = False
    # A line that is not counted, a brace or an empty one, goes with the counted line before it.
    owner = np.searchsorted(counted, np.arange(len(lines)), "right") - 1
    left &= ~gone[np.maximum(owner, 0)] | (owner < 0)
    return "\n".join(line for line, stays in zip(lines, left, strict=True) if stays)


# --- the split


def order(name: str) -> str:
    """The place of a package or a file: a hash of its name."""
    return hashlib.blake2b(name.encode(errors="replace"), digest_size=8).hexdigest()


def held_out(packages: Sequence[Package]) -> set[str]:
    """Names of the packages to validate on: small ones, in the order of a hash of their names."""
    sizes = {package.name: package.size for package in packages}
    total, held = sum(sizes.values()), 0
    chosen = set()
    for name in sorted((n for n in sizes if 0 < sizes[n] <= SMALL * total), key=order):
        if held >= HELD_OUT * total:
            break
        chosen.add(name)
        held += sizes[name]
    return chosen


def shortened(packages: Sequence[Package], share: float) -> None:
    """Leave files out of packages, the last of a hash of their names, until none has more than a share of all."""
    sizes = {package.name: package.size for package in packages}
    bound = _bound(list(sizes.values()), share)
    for package in packages:
        left, excess = package.texts, sizes[package.name] - bound
        for name in sorted(left, key=lambda n: order(f"{package.name}/{n}"), reverse=True):
            if excess <= 0:
                break
            excess -= len(left.pop(name).encode())
            package.left_out["beyond the share of a package"] += 1


def _sampled(packages: Sequence[Package], most: int) -> None:
    """Keep so many bytes of packages: the files that come first by the hash that names them."""
    placed = sorted(
        ((order(f"{p.name}/{name}"), p, name) for p in packages for name in p.texts), key=lambda entry: entry[0]
    )
    for _, package, name in placed:
        size = len(package.texts[name].encode())
        if size > most:
            del package.texts[name]
            package.left_out["beyond the bytes asked for"] += 1
        most -= min(size, most)


def _bound(sizes: Sequence[int], share: float) -> float:
    """The largest size that is no more than a share of all, once those above are cut to it."""
    above, rest = 0, sum(sizes)
    for size in sorted(sizes, reverse=True):
        bound = share * rest / max(1 - share * above, 1e-9)
        if size <= bound or share * above >= 1:
            return bound
        above, rest = above + 1, rest - size
    return float(max(sizes, default=0))


def collect(paths: Sequence[Path], out: Path, workers: int, most: int | None = None) -> dict[str, Any]:
    """Read packages, leave copies out, write the rest, of the training text so many bytes at most.

    What became of the packages is returned, and written to `text.json`.
    """
    with ProcessPoolExecutor(workers) as pool:
        packages = sorted(pool.map(read, _largest_first(newest(paths))), key=lambda package: order(package.name))
    raw = {package.name: (len(package.texts), package.size) for package in packages}
    held = held_out(packages)
    packages.sort(key=lambda package: package.name in held)  # held out: last
    names = [(package, name) for package in packages for name in package.texts]
    for (package, name), text in zip(names, without_copies([p.texts[n] for p, n in names]), strict=True):
        if text:
            package.texts[name] = text
        else:
            del package.texts[name]
            package.left_out["copy"] += 1
    once = {package.name: package.size for package in packages}
    shortened(packages, SHARE)
    if most is not None:
        _sampled([package for package in packages if package.name not in held], most)
    for package in packages:
        side = out / ("validation" if package.name in held else "train")
        for name, text in package.texts.items():
            place = order(f"{package.name}/{name}")
            path = side / place[:2] / f"{place}-{PurePosixPath(name).name[-60:]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
    found = {
        "packages": [
            {
                "name": package.name, "held_out": package.name in held,
                "files_read": raw[package.name][0], "bytes_read": raw[package.name][1],
                "bytes_without_copies": once[package.name],
                "files": len(package.texts), "bytes": package.size, "left_out": dict(package.left_out),
            }
            for package in sorted(packages, key=lambda package: package.name)
        ],
        "kinds": _kinds(packages),
    }  # fmt: skip
    (out / "text.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def _largest_first(paths: Sequence[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: -path.stat().st_size)


def newest(paths: Sequence[Path]) -> list[Path]:
    """The archives, one of each package: the last by its version's numbers."""
    files = [f for path in paths for f in (path.iterdir() if path.is_dir() else [path]) if _ARCHIVE.search(f.name)]
    latest: dict[str, Path] = {}
    for file in files:
        name = package_name(file.name).partition(" ")[0].replace("-", "_")
        if name not in latest or _numbers(file) > _numbers(latest[name]):
            latest[name] = file
    return sorted(latest.values())


def _numbers(path: Path) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", package_name(path.name).partition(" ")[2])]


def _kinds(packages: Sequence[Package]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for package in packages:
        for name, text in package.texts.items():
            row = found.setdefault(KIND[PurePosixPath(name).suffix.lower()], {"files": 0, "bytes": 0})
            row["files"] += 1
            row["bytes"] += len(text.encode())
    return found


def main(
    packages: Annotated[list[Path], typer.Argument(help="Archives, or folders of them.")],
    out: Annotated[Path, typer.Option(help="New folder for the texts.")],
    megabytes: Annotated[int | None, typer.Option(min=1, help="Of training text, at most.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that read.")] = 2,
) -> None:
    """Write the texts of packages, each once."""
    found = collect(packages, out, workers, None if megabytes is None else megabytes * 1_000_000)
    rows = found["packages"]
    print(f"{len(rows)} packages, {sum(row['held_out'] for row in rows)} held out")
    for key in ("bytes_read", "bytes_without_copies", "bytes", "files"):
        print(f"{key}: {sum(row[key] for row in rows):,}")


if __name__ == "__main__":
    typer.run(main)
