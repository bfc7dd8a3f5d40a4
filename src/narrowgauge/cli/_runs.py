"""The runs that `report` and `watch` are given: records of gauges, and comparisons, whose recipes are runs each."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from narrowgauge.cli._files import UsageError
from narrowgauge.cli._results import RESULTS
from narrowgauge.gauges._history import History, LiveReader
from narrowgauge.gauges._records import Record, records_file

Json = dict[str, Any]


def results_file(run: Path) -> Path | None:
    """The results.json at a path, the file or its folder; None where there are records of gauges, or nothing."""
    if run.is_dir():
        path = run / RESULTS
        return path if path.is_file() and not records_file(run).exists() else None
    return run if run.name == RESULTS and run.is_file() else None


def read_results(path: Path) -> Json:
    """The results of a comparison; a UsageError names the file if it has none."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        if results["schema"] != 1 or not isinstance(results["recipes"], dict):
            raise ValueError(f"its schema must be 1, got {results['schema']!r}")
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UsageError(f"RUN must have the results of a comparison, got {str(path)!r}: {error}") from None
    found: Json = results
    return found


def histories(results: Json) -> dict[str, History]:
    """The runs of a comparison as histories, by recipe, and seed where there are several."""
    device = results["environment"].get("device")
    found = {}
    for name, recipe in results["recipes"].items():
        for seed in recipe["seeds"]:
            title = name if len(recipe["seeds"]) == 1 else f"{name}, seed {seed['seed']}"
            found[title] = History(_records(recipe["recipe"], device, seed["history"]))
    return found


def _records(recipe: str, device: object, history: Json) -> Iterator[Record]:
    yield {"kind": "run", "optimizer": recipe, "device": device}
    for step, loss, edq, lost in zip(
        *(history[key] for key in ("step", "loss", "edq", "lost_updates")), strict=True
    ):
        yield {"kind": "step", "step": step, "loss": "nan" if loss is None else loss}
        if edq is not None:
            yield {"kind": "update", "step": step, "name": "", "descent_quality": edq, "lost": lost}


class Followed:
    """A path that is read again and again.

    Attributes:
        path: as the user gave it.
        reader: of the records at this path.
        results: of the comparison at this path, if there is one.
        histories: what was read so far: of a comparison by recipe, else one by its path.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.reader = path, LiveReader(path)
        self.results: Json | None = None
        self.histories: dict[str, History] = {}
        self._stamp: tuple[int, int] | None = None

    def read(self) -> None:
        """Read what is new."""
        file = results_file(self.path)
        if file is None:
            self.reader.read()
            self.results, self._stamp = None, None
            self.histories = {str(self.path): self.reader.history}
            return
        status = os.stat(file)
        if (stamp := (status.st_mtime_ns, status.st_ino)) != self._stamp:
            self._stamp, self.results = stamp, read_results(file)
            self.histories = histories(self.results)
