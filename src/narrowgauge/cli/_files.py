"""What a user gave, and the files that are written for it: errors of the input, and output files written whole.

A `UsageError` is one line and exit status 2. Any other exception is a defect and shows its traceback.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from narrowgauge._files import write_whole

PICTURES = (".svg", ".png", ".pdf")


class UsageError(ValueError):
    """The input cannot work. The message is one line that names the option or the file."""


@contextlib.contextmanager
def user_input() -> Iterator[None]:
    """Turn the errors of a block into usage errors.

    The library raises ValueError for wrong arguments and unreadable files. Put around calls that check or read what
    the user gave, and around nothing else: a ValueError from a computation is a defect.
    """
    try:
        yield
    except UsageError:
        raise
    except (ValueError, OverflowError) as error:
        raise UsageError(str(error)) from error


def write_output(option: str, path: Path, content: str | bytes) -> None:
    """Write the file of an option, with its folder; a UsageError names the option if that is not possible."""
    with writing(option, path):
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or (path.exists() and not path.is_file()):
            # A link, a pipe, /dev/stdout: renaming would replace it.
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        else:
            write_whole(path, content)


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Turn the system's errors of a block that writes an option's file into a UsageError that names both."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{option}: cannot write {str(path)!r}: {error.strerror or error}") from None


def folder_to_write(option: str, path: Path) -> None:
    """Make a folder; a UsageError names the option if that is not possible, or nothing can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option}: cannot make the folder {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"{option}: cannot write into {path}: takes a folder with write permission")


def expanded(option: str, path: Path) -> Path:
    """The path with `~` replaced by a home folder; a UsageError for a home that does not exist."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise UsageError(f"{option}: got {str(path)!r}: {error}") from None


def picture_path(option: str, path: Path) -> Path:
    """The expanded path of a picture; a UsageError for a suffix other than `PICTURES`."""
    if path.suffix.lower() not in PICTURES:
        raise UsageError(f"{option} must end in {', '.join(PICTURES)}, got {str(path)!r}")
    return expanded(option, path)
