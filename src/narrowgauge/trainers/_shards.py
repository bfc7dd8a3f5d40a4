"""Tokens on disk: files that are mapped into memory, and say when they are not what was written.

    shards/
      index.json              version, vocabulary, how the text was, and of each shard its tokens and checksum
      tokenizer.json          of the tokenizers library
      train-00000.tokens      ...
      validation-00000.tokens ...

A shard is a header of 64 bytes and then its tokens, little-endian, 2 bytes each for a vocabulary of up to 65536 and
else 4:

    offset  bytes
    0       8      the magic, "NGTOKENS"
    8       4      version, 1
    12      4      bytes a token
    16      8      number of tokens
    24      32     SHA-256 of the tokens' bytes
    56      8      zeros

Opening reads every byte once, for the checksums; after that pages come as windows ask for them. A window never
reaches over the end of a shard.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ._corpus import DataError

MAGIC = b"NGTOKENS"
VERSION = 1
INDEX = "index.json"
TOKENIZER = "tokenizer.json"
_HEADER = struct.Struct("<8sIIQ32s8x")
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
MOST_TOKENS = 1 << 20  # in a vocabulary: what --vocabulary takes, and an embedding may be made for
_CHUNK = 1 << 22  # bytes hashed at a time


class DamagedShardError(DataError):
    """A file of prepared tokens is not what was written; the message names it."""


class Windows:
    """All windows of one length in some arrays of tokens, by number: none reaches from one array into the next."""

    def __init__(self, arrays: Sequence[NDArray[Any]], length: int) -> None:
        self._arrays = [array for array in arrays if len(array) >= length]
        self._length = length
        self._ends = np.cumsum([len(array) - length + 1 for array in self._arrays], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, numbers: Tensor) -> Tensor:
        """int64 tensor (n, length) of the windows with these numbers, an int64 tensor (n,)."""
        wanted = numbers.numpy()
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise IndexError(f"numbers: got {wanted.min()} to {wanted.max()}, takes 0 to {len(self) - 1}")
        found = np.empty((len(wanted), self._length), np.int64)
        for row, (number, at) in enumerate(
            zip(wanted, np.searchsorted(self._ends, wanted, side="right"), strict=True)
        ):
            start = number - (self._ends[at - 1] if at else 0)
            found[row] = self._arrays[at][start : start + self._length]
        return torch.from_numpy(found)


@dataclass(frozen=True, eq=False)
class TokenShards:
    """The tokens of one side, training or validation, in arrays that are mapped into memory."""

    arrays: tuple[NDArray[Any], ...]

    def __len__(self) -> int:
        return sum(map(len, self.arrays))

    def windows(self, length: int) -> Windows:
        """All windows of a length, in the order of the shards."""
        return Windows(self.arrays, length)


def write_shard(path: Path, tokens: NDArray[Any], width: int) -> dict[str, Any]:
    """Write a shard, to appear whole and at once.

    Args:
        path: of the file.
        tokens: integer array (n,), below 2^(8 * width).
        width: bytes a token, 2 or 4.

    Returns:
        What the index says of it: file, tokens, sha256.
    """
    data = tokens.astype(_DTYPES[width]).tobytes()
    digest = hashlib.sha256(data)
    aside = path.with_name(f".{path.name}.new")
    aside.write_bytes(_HEADER.pack(MAGIC, VERSION, width, len(tokens), digest.digest()) + data)
    aside.replace(path)
    return {"file": path.name, "tokens": len(tokens), "sha256": digest.hexdigest()}


def read_bytes(path: Path, most: int = -1) -> bytes:
    """A file's content, or its first bytes.

    Raises:
        DamagedShardError: if it is not there, or no file: opening a pipe would wait for a writer for ever.
    """
    try:
        if path.exists() and not path.is_file():
            raise OSError(0, "it is no file")
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise DamagedShardError(f"--data: {path}: {error.strerror}") from None


def open_shard(path: Path) -> tuple[NDArray[Any], str]:
    """A shard's tokens, mapped into memory, and the checksum of its header, which is not compared yet.

    Raises:
        DamagedShardError: for another magic, version or length, or a file that cannot be read.
    """
    head = read_bytes(path, _HEADER.size)
    size = path.stat().st_size
    if len(head) < _HEADER.size or not head.startswith(MAGIC):
        raise DamagedShardError(f"--data: {path} is no shard of tokens: it does not begin with {MAGIC.decode()}")
    _, version, width, count, digest = _HEADER.unpack(head)
    if version != VERSION or width not in _DTYPES:
        raise DamagedShardError(
            f"--data: {path}: got version {version} with {width} bytes a token, takes version {VERSION} with 2 or 4"
        )
    if size != _HEADER.size + count * width:
        raise DamagedShardError(
            f"--data: {path} has {size} bytes, takes {_HEADER.size + count * width} for its {count} tokens"
        )
    if not count:
        return np.empty(0, _DTYPES[width]), digest.hex()
    return np.memmap(path, _DTYPES[width], "r", _HEADER.size, (count,)), digest.hex()


def verify(path: Path, tokens: NDArray[Any], sha256: str) -> None:
    """Compare a shard's tokens with their checksum; reads all of them.

    Raises:
        DamagedShardError: if they differ.
    """
    digest, data = hashlib.sha256(), tokens.view(np.uint8)
    for first in range(0, len(data), _CHUNK):
        digest.update(data[first : first + _CHUNK].data)
    if digest.hexdigest() != sha256:
        raise DamagedShardError(f"--data: {path} is damaged: its tokens have another checksum than was written")


def is_shards(folder: Path) -> bool:
    """Whether a folder holds prepared tokens; where a file of theirs is missing it is no folder of texts either."""
    shards = sorted(folder.glob("*.tokens"))
    return (bool(shards) and (folder / INDEX).exists()) or any(map(_has_magic, (folder / INDEX, *shards)))


def _has_magic(path: Path) -> bool:
    try:
        return MAGIC in read_bytes(path, _HEADER.size)
    except DamagedShardError:
        return False


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a folder of shards.

    Raises:
        DamagedShardError: if it is none, or of another version.
    """
    path = folder / INDEX
    try:
        index = json.loads(read_bytes(path).decode())
        if index["magic"] != MAGIC.decode() or index["version"] != VERSION:
            raise DamagedShardError(
                f"--data: {path}: got version {index['version']!r}, takes {VERSION} of {MAGIC.decode()}"
            )
        for side in ("train", "validation"):
            for entry in index[side]:
                _ = entry["tokens"], entry["sha256"]
                os.fsencode(entry["file"])  # a ValueError for what no file system can name
                if Path(entry["file"]).name != entry["file"] or "\0" in entry["file"]:
                    raise ValueError(f"{entry['file']!r} is no name of a file beside it")
        vocabulary, bytes_per_token = index["vocabulary"], index["bytes_per_token"]
        if type(vocabulary) is not int or not 256 <= vocabulary <= MOST_TOKENS:
            raise ValueError(f"vocabulary: got {vocabulary!r}, takes an integer from 256 to {MOST_TOKENS}")
        if not 0 < float(bytes_per_token) < math.inf:
            raise ValueError(f"bytes_per_token: got {bytes_per_token!r}, takes a number above 0")
        if not all(isinstance(note, str) for note in index.get("notes", [])):
            raise ValueError("notes: takes a list of texts")
    except DamagedShardError:
        raise
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DamagedShardError(f"--data: {path} is damaged: {type(error).__name__}: {error}") from None
    return dict(index)


def open_shards(folder: Path, index: dict[str, Any]) -> tuple[TokenShards, TokenShards]:
    """The tokens to train and to validate on, every byte compared with its checksum.

    Args:
        folder: of the shards.
        index: as `read_index` gives it.

    Raises:
        DamagedShardError: naming the first file that is not what was written.
    """

    def opened(entry: dict[str, Any]) -> NDArray[Any]:
        path = folder / str(entry["file"])
        tokens, sha256 = open_shard(path)
        if sha256 != entry["sha256"] or len(tokens) != entry["tokens"]:
            raise DamagedShardError(f"--data: {path} is another shard than {INDEX} names")
        verify(path, tokens, sha256)
        if len(tokens) and int(tokens.max()) >= int(index["vocabulary"]):
            raise DamagedShardError(f"--data: {path} has tokens beyond the vocabulary of {index['vocabulary']}")
        return tokens

    with ThreadPoolExecutor() as pool:  # hashing lets other threads run
        sides = [tuple(pool.map(opened, index[side])) for side in ("train", "validation")]
    return TokenShards(sides[0]), TokenShards(sides[1])
