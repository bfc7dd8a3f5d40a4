"""The numbers of a run, a line of JSON each: loss and learning rate by step, speed, validations.

    {"step": 20, "loss": 7.4375, "lr": 6e-05}
    {"step": 20, "tokens_per_second": 51200.0, "mfu": 0.41}
    {"step": 100, "validation_loss": 5.81, "perplexity": 333.6, "bits_per_byte": 2.41}

A resumed run removes the records after its checkpoint and takes those steps again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

FILE = "history.jsonl"


def read_history(path: Path) -> list[dict[str, Any]]:
    """The records of a file, up to the first line that is damaged or unfinished; none if there is no file."""
    found: list[dict[str, Any]] = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return found
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not _is_record(record):
            break
        found.append(record)
    return found


def _is_record(record: Any) -> bool:
    """Whether a JSON value is a record: a step, and numbers."""
    return (
        isinstance(record, dict)
        and type(record.get("step")) is int
        and all(value is None or isinstance(value, int | float | str) for value in record.values())
    )


class History:
    """Writes records to a run's folder.

    Args:
        folder: the run's; None writes nothing.
        after: the step that the run resumes from; records of later steps are removed.
    """

    def __init__(self, folder: Path | None, after: int) -> None:
        self._file: TextIO | None = None
        if folder is None:
            return
        path = folder / FILE
        kept = [record for record in read_history(path) if record["step"] <= after]
        aside = folder / f".{FILE}.new"
        aside.write_text("".join(map(_line, kept)), encoding="utf-8")
        aside.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def add(self, **record: Any) -> None:
        """Write a record."""
        if self._file is not None:
            self._file.write(_line(record))

    def flush(self) -> None:
        """Give what was written to the operating system, so that it survives this process."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _line(record: Mapping[str, Any]) -> str:
    # JSON has no infinity.
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(plain, allow_nan=False) + "\n"
