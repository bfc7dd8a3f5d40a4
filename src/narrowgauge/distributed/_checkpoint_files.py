"""Files that are there or are not, whatever happens in between.

A rename is atomic, and nothing else is: so everything is written under another name first. A rename is durable
only once its folder was synchronised, and a file's bytes once the file was: so both are, in this order, before
anybody is told.

Locks are those of the kernel (`flock`): they end with the process that holds them, however it ends, and so tell a
saver that died from one that is still at it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from narrowgauge.distributed._checkpoint_format import DTYPE_NAMES

# What a file system without locks says.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_AT_ONCE = 1 << 24  # bytes: small enough to be hashed from the processor's cache


def sync_folder(folder: Path) -> None:
    """Wait until names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """A file that has all of its content, on disk, or does not exist under this name."""
    beside = path.with_name(path.name + ".part")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def replace_file(path: Path, content: bytes, token: str) -> None:
    """Put a file in another's place: there is the old one or the new one at any time."""
    beside = path.with_name(f".{path.name}.{token}")
    write_file(beside, content)
    beside.replace(path)
    sync_folder(path.parent)


def write_tensors(path: Path, named: Sequence[tuple[str, Tensor]]) -> tuple[list[int], int, str]:
    """A safetensors file, on disk.

    Args:
        path: a new file.
        named: tensors on any device, with their names in the header.

    Returns:
        where each tensor's bytes begin, the size of the file, its SHA-256.

    Raises:
        OSError: where the disk says no.
    """
    # Wide elements first: with a header padded to 8 bytes every tensor is aligned to its elements.
    order = sorted(range(len(named)), key=lambda number: -named[number][1].dtype.itemsize)
    header: dict[str, object] = {}
    starts, end = [0] * len(named), 0
    for number in order:
        name, tensor = named[number]
        starts[number], end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[number], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    preamble = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256()
    with path.open("xb") as file:

        def put(content: memoryview) -> None:
            for start in range(0, len(content), _AT_ONCE):
                part = content[start : start + _AT_ONCE]
                digest.update(part)
                file.write(part)

        put(memoryview(preamble))
        for number in order:
            put(_bytes(named[number][1]))
        file.flush()
        os.fsync(file.fileno())
    return [len(preamble) + start for start in starts], len(preamble) + end, digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


class Lock:
    """A lock on a file or folder that exists, held until `release` or the end of the process.

    Attributes:
        works: whether the file system has locks at all.
        held: whether this one is held.
    """

    def __init__(self, path: Path, wait: bool) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        self.works = self.held = True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            self.held = False
        except OSError as error:
            self.works = self.held = False
            if error.errno not in _NO_LOCKS:
                os.close(self._descriptor)
                raise

    def release(self) -> None:
        if self._descriptor >= 0:
            if self.held:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # closing is not enough: a fork may have it open too
            os.close(self._descriptor)
            self._descriptor = -1


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder's own lock; others who ask for it wait. Without locks in the file system it holds nothing."""
    path = folder / ".lock"
    path.touch()
    lock = Lock(path, wait=True)
    try:
        yield
    finally:
        lock.release()


def is_abandoned(folder: Path) -> bool:
    """Whether whoever held a folder's lock has died, or ended. Without locks nobody can tell: False."""
    try:
        lock = Lock(folder, wait=False)
    except FileNotFoundError:
        return False
    lock.release()
    return lock.held
