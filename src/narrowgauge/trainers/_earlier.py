"""What an earlier command left in a folder is renamed, never written over."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path


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
