"""Files that are there or are not, whatever happens in between.

A rename is atomic, and nothing else is: so everything is written under another name first. A rename is durable
only once its folder was synchronised, and a file's bytes once the file was: so both are, in this order, before
anybody is told.

Locks are those of the kernel (`flock`): they end with the process that holds them, however it ends, and so tell a
saver that died from one that is still at it.
"""

from __future__ import annotations

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
    # Strides of dimensions of size 1 are any, but bytes are viewed by a stride of 1 only.
    flat = tensor.detach().cpu().contiguous().resolve_neg().as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


class Lock:
    """A lock on a file, held until `release` or the end of the process. A file that is not there is made.

    Args:
        path: the file.
        wait: until nobody else holds it.

    Attributes:
        works: whether the file system has locks at all.
        held: whether this one is held.
    """

    def __init__(self, path: Path, wait: bool) -> None:
        # For writing, which network file systems ask for.
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self.works = self.held = True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            self.held = False
        except OSError:
            self.works = self.held = False

    def release(self) -> None:
        if self._descriptor >= 0:
            if self.held:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # closing is not enough: a fork may have it open too
            os.close(self._descriptor)
            self._descriptor = -1


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold a folder's own lock; others who ask for it wait. False where the file system has no locks."""
    lock = Lock(folder / ".lock", wait=True)
    try:
        yield lock.held
    finally:
        lock.release()


def is_free(path: Path) -> bool:
    """Whether whoever held the lock on a file that is there has ended, or died; False where nobody can tell."""
    try:
        lock = Lock(path, wait=False) if path.exists() else None
    except OSError:  # gone meanwhile, or not ours to write to
        return False
    if lock is None:
        return False
    lock.release()
    return lock.held
