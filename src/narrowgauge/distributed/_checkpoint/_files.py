"""Files that are complete or absent, whatever happens in between.

Only a rename is atomic, so everything is written under another name first. A rename is durable only after its
folder was synchronized, and a file's bytes after the file was, so both are, in this order, before anything depends
on them.

Locks are the kernel's (`flock`): they end with the process that holds them, however it ends, and so distinguish a
saver that died from one that is still writing.
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

from narrowgauge.distributed._checkpoint._format import DTYPE_NAMES

_AT_ONCE = 1 << 24  # bytes: small enough to be hashed from the processor's cache


def sync_folder(folder: Path) -> None:
    """Wait until names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Write a file so that under this name it has all of its content, on disk, or does not exist."""
    temporary = path.with_name(path.name + ".part")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def replace_file(path: Path, content: bytes, token: str) -> None:
    """Replace a file: at any time there is the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{token}")
    write_file(temporary, content)
    temporary.replace(path)
    sync_folder(path.parent)


def write_tensors(path: Path, named: Sequence[tuple[str, Tensor]]) -> tuple[list[int], int, str]:
    """Write a safetensors file, on disk. Bytes are hashed as they are written, and each tensor is copied to the CPU
    alone, which the writer of the safetensors package does not do.

    Args:
        path: a new file.
        named: tensors on any device, with their names in the header.

    Returns:
        where each tensor's bytes begin, the size of the file, its SHA-256.
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

        def write(content: memoryview) -> None:
            for start in range(0, len(content), _AT_ONCE):
                part = content[start : start + _AT_ONCE]
                digest.update(part)
                file.write(part)

        write(memoryview(preamble))
        for number in order:
            write(_bytes(named[number][1]))
        file.flush()
        os.fsync(file.fileno())
    return [len(preamble) + start for start in starts], len(preamble) + end, digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    # A dimension of size 1 may have any stride, but bytes can be viewed with stride 1 only.
    flat = tensor.detach().cpu().contiguous().resolve_neg().as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


class Lock:
    """A lock on a file, held until `release` or the end of the process. A missing file is created.

    `held` is False if another holds the lock and `wait` is False, or if the file system has no locks.
    """

    def __init__(self, path: Path, wait: bool) -> None:
        # Opened for writing, which network file systems require.
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            self.held = True
        except OSError:
            self.held = False

    def release(self) -> None:
        if self._descriptor >= 0:
            if self.held:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # closing is not enough: a fork may have it open too
            os.close(self._descriptor)
            self._descriptor = -1


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold a folder's own lock; others wait. False where the file system has no locks."""
    lock = Lock(folder / ".lock", wait=True)
    try:
        yield lock.held
    finally:
        lock.release()


def is_free(path: Path) -> bool:
    """Whether the holder of the lock on an existing file has ended or died; False where it cannot be known."""
    try:
        lock = Lock(path, wait=False) if path.exists() else None
    except OSError:  # removed meanwhile, or not writable
        return False
    if lock is None:
        return False
    lock.release()
    return lock.held
