"""Output files: checked before the work begins, and written whole."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from narrowgauge.cli._errors import UsageError

PICTURES = (".svg", ".png", ".pdf")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write beside the file, then rename: a reader finds the old content or the new, never a part."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    # A command line or a name may hold bytes that are not text.
    data = content if isinstance(content, bytes) else content.encode("utf-8", errors="replace")
    try:
        aside.write_bytes(data)
        aside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def write_output(option: str, path: Path, content: str | bytes) -> None:
    """Write the file of an option, with its folder.

    Raises:
        UsageError: naming the option if the file cannot be written.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or (path.exists() and not path.is_file()):
            # A link, a pipe, /dev/stdout: renaming would replace it.
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        else:
            write_whole(path, content)
    except OSError as error:
        raise UsageError(f"{option}: cannot write {str(path)!r}: {error.strerror or error}") from None


def expanded(option: str, path: Path) -> Path:
    """The path with `~` replaced by a home folder.

    Raises:
        UsageError: for a home that does not exist.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise UsageError(f"{option}: got {str(path)!r}: {error}") from None


def picture_path(option: str, path: Path) -> Path:
    """The expanded path of a picture.

    Raises:
        UsageError: for a suffix other than `PICTURES`.
    """
    if path.suffix.lower() not in PICTURES:
        raise UsageError(f"{option}: got {str(path)!r}, takes a path that ends in {', '.join(PICTURES)}")
    return expanded(option, path)
