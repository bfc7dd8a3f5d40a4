"""Files that are replaced in one step."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


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
