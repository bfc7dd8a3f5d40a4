"""What the benchmarks' commands share: lists in an option, and results that outlive a run that is cut off."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def parts(text: str) -> list[str]:
    """What stands between the commas of an option."""
    return [part.strip() for part in text.split(",") if part.strip()]


def check_seconds(seconds: float) -> None:
    """Refuse a time that is none, or has no end.

    Raises:
        ValueError: naming the argument, what it got, what it takes.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"--seconds: got {seconds}, takes a finite number above 0")


def begin(path: Path, results: Mapping[str, Any]) -> None:
    """Write a results file before an hour of measuring, not after it.

    Raises:
        ValueError: if it cannot be written.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, results)
    except OSError as error:
        raise ValueError(f"--json: got '{path}', takes a file that can be written: {error}") from None


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Written aside, then renamed: who is ended in the middle leaves the last whole file."""
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(aside, path)
