"""The user's folder of what was made once and can be made again: compiled steps, measured choices.

What was measured is kept by device, in a file of JSON for each kind of measurement. Such a file may be lost,
damaged or written by several processes at once: it is read as far as it can be, merged under a lock and replaced as
a whole.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from narrowgauge._files import write_whole

_VERSION = 1


def folder() -> Path:
    """Where it is, by the XDG convention; it need not be there. For a user without a home nothing can be."""
    cache, home = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~")
    if os.path.isabs(cache):
        return Path(cache) / "narrowgauge"
    # "~" as it is would be a folder of wherever one works, from which compiled code would be loaded.
    return (Path(home) / ".cache" if os.path.isabs(home) else Path(os.devnull)) / "narrowgauge"


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """The records of a file, by device and key; nothing where it is not there or damaged."""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(contents, dict) or contents.get("version") != _VERSION:
        return {}
    devices = contents.get("devices")
    if not isinstance(devices, dict):
        return {}
    return {name: records for name, records in devices.items() if isinstance(records, dict)}


def merge_records(path: Path, device: str, records: Mapping[str, Any]) -> bool:
    """Add the records of a device to a file, over those of the same keys.

    Returns:
        Whether it could be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            contents = read_records(path)
            contents.setdefault(device, {}).update(records)
            write_whole(path, json.dumps({"version": _VERSION, "devices": contents}, indent=1))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; all at once where the system has no locks, or the file system."""
    with open(path, "w") as file:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
