"""What the benchmarks' commands share: lists in an option, and results that outlive a run that is cut off."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def parts(text: str) -> list[str]:
    """What stands between the commas of an option."""
    return [part.strip() for part in text.split(",") if part.strip()]


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Written aside, then renamed: who is ended in the middle leaves the last whole file."""
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(aside, path)
