"""Files that are replaced in one step, and those of an earlier command, which are never written over."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write beside the file, then rename: a reader finds the old content or the new, never a part."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    # A command line or a name may hold bytes that are not text.
    data = content if isinstance(content, bytes) else content.encode("utf-8", errors="replace")
    try:
        aside.write_bytes(data)
        aside.replace(path)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk names no file
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def free_path(path: Path) -> Path:
    """A path that does not exist: this one, or with a number after it."""
    numbered = (path.with_name(f"{path.name}{number}") for number in itertools.count(2))
    return next(p for p in itertools.chain([path], numbered) if not p.exists())


def set_aside(out: Path, names: Sequence[str]) -> list[Path]:
    """Rename what an earlier command, a comparison say, left in this folder, after the time of its writing.

    Returns:
        The new paths, of the names that were there.
    """
    stamp, kept = None, []
    for name in names:
        path = out / name
        if path.exists():
            stamp = stamp or datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y%m%dT%H%M%SZ")
            target = path.with_name(f"{path.stem}.{stamp}{path.suffix}")
            number = 1
            while target.exists():
                number += 1
                target = path.with_name(f"{path.stem}.{stamp}-{number}{path.suffix}")
            kept.append(path.rename(target))
    return kept
