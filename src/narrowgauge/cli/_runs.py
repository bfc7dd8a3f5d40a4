"""The runs that `report` and `watch` are given: records of gauges, and comparisons, whose recipes are runs each."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any

from narrowgauge._text import listed
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


def others(run: Path) -> str:
    """The end of a message on a folder without records under their usual name: the files that may have some."""
    from narrowgauge.trainers._run_folder import HISTORY  # half a second, which other messages need not wait

    files = sorted(path.name for path in run.glob("*.jsonl"))
    if files == [HISTORY]:
        return ": its training had --gauges-every 0"
    return f"; it has {listed(files)}: give the file" if files else ""


# What pages and tables read of a comparison. "key?" may be missing, "*" stands for every key, and all items of a
# list have one shape.
_NUMBER: tuple[type, ...] = (int, float)
_MAYBE: tuple[type, ...] = (int, float, NoneType)
_BYTES = dict.fromkeys(("weights", "gradients", "states", "total"), _NUMBER)
_DIFFERENCE = {"mean": _NUMBER, "spread": _MAYBE, "pairs": (int,)}
_HISTORY = {"step": [(int,)], "loss": [_MAYBE], "edq": [_MAYBE], "lost_updates": [_MAYBE]}
_RECIPE: dict[str, Any] = {
    **dict.fromkeys(("validation_loss", "perplexity", "peak_memory_bytes", "optimizer_ms", "step_ms"), _MAYBE),
    **dict.fromkeys(("edq", "lost_updates"), _MAYBE),
    "recipe": (str,), "title": (str,), "diverged": (bool,), "bytes_per_parameter": _NUMBER, "settings?": (dict,),
    "training_loss?": _MAYBE, "optimizer_ms_quartiles?": "pair", "step_ms_quartiles?": "pair",
    "bytes": {"planned": _BYTES, "measured": "bytes"}, "difference": "difference",
    "seeds": [{"seed": (int,), "diverged": (bool,), "history": _HISTORY}],
}  # fmt: skip
_RESULTS = {
    "schema": (int,), "narrowgauge": (str,), "created": (str,), "interrupted": (bool,), "command": (str, NoneType),
    "environment": (dict,), "data": (dict,), "settings": {"steps?": (int,), "*": (object,)},
    "model": {"parameters?": (int,), "*": (object,)}, "reference": (str, NoneType), "measure?": (str,),
    "perplexity?": (bool,), "notes?": [(str,)], "recipes": {"*": _RECIPE},
}  # fmt: skip
# Shapes of what may also be null.
_NAMED: dict[str, Any] = {"pair": [_NUMBER], "bytes": _BYTES, "difference": _DIFFERENCE}
_LARGEST = 1e30


def read_results(path: Path) -> Json:
    """The results of a comparison; a UsageError names the file, and what is wrong with it."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        _check(results)
    except (ValueError, RecursionError, OSError) as error:
        raise UsageError(f"RUN must have the results of a comparison, got {str(path)!r}: {error}") from None
    found: Json = results
    return found


def _check(results: Any) -> None:
    """Refuse what no comparison writes, with a ValueError that names the place."""
    if (flaw := _flaw(results, _RESULTS, "its content")) is not None:
        raise ValueError(f"{flaw} is not what a comparison writes")
    if results["schema"] != 1:
        raise ValueError(f"its schema must be 1, got {results['schema']!r}")
    recipes, measure = results["recipes"], results.get("measure", "validation_loss")
    if not recipes or results["reference"] not in (None, *recipes):
        raise ValueError("its reference is none of its recipes")
    if measure not in ("validation_loss", "training_loss") or any(measure not in row for row in recipes.values()):
        raise ValueError("its measure is no loss that it has")
    for name, row in recipes.items():
        lengths = {len(column) for seed in row["seeds"] for column in seed["history"].values()}
        columns = [len(set(map(len, (seed["history"][key] for key in _HISTORY)))) for seed in row["seeds"]]
        pairs = [row.get(f"{part}_ms_quartiles") for part in ("optimizer", "step")]
        if set(columns) != {1} or 0 in lengths or any(pair is not None and len(pair) != 2 for pair in pairs):
            raise ValueError(f"the lists of recipes.{name} must have one length")


def _flaw(value: Any, shape: Any, place: str) -> str | None:
    """The first place whose value has not its shape; None if all have."""
    if isinstance(shape, str):
        return None if value is None else _flaw(value, _NAMED[shape], place)
    if isinstance(shape, tuple):
        large = isinstance(value, int | float) and not abs(value) <= _LARGEST
        return place if large or not isinstance(value, shape) else None
    if isinstance(shape, list):
        if not isinstance(value, list):
            return place
        return next((f for item in value if (f := _flaw(item, shape[0], place)) is not None), None)
    if not isinstance(value, dict):
        return place
    needed = {key for key in shape if key != "*" and not key.endswith("?")}
    if not needed <= value.keys():
        return f"{place} without {min(needed - value.keys())}"
    for key, item in value.items():
        of = shape.get(key, shape.get(f"{key}?", shape.get("*", (object,))))
        if (flaw := _flaw(item, of, key if place == "its content" else f"{place}.{key}")) is not None:
            return flaw
    return None


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
