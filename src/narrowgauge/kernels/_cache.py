"""The user's folder of what was made once and can be made again: compiled steps, measured choices."""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path:
    """Where it is, by the XDG convention; it need not be there."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path(os.path.expanduser("~")) / ".cache") / "narrowgauge"
