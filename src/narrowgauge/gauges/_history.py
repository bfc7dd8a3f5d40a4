"""A run's records as columns, for the report, the terminal page and the advice.

Records come one by one, each about one tensor at one step. A reader asks the other way round: how did this number
of this tensor change over the steps? A history takes records in any order and stores each number in a column of its
own, so that a growing run can be read again and again.

No record raises an error. A killed run, a newer version or an edit by hand leave records that lack a number or have
one of another type: what cannot be read as a number is left out, and records without a step or a name are counted
in `ignored`. Inf and NaN are values.

`LiveReader` reads a file into a history while a training writes it. Between two reads the file may have grown by
nothing, by a hundred lines, or by half a line, which is read when its rest is there. A file that became shorter, or
was replaced, belongs to a run that was started again or resumed from an earlier step: it is read from the
beginning. A file that does not exist yet is waited for.
"""

from __future__ import annotations

import math
import os
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from narrowgauge.gauges._records import NONFINITE, LineReader, records_file, unpacked

Floats = NDArray[np.float64]
Record = Mapping[str, Any]

# Keys of a record that are not numbers of its tensor.
_NOT_COLUMNS = {"kind", "step", "name", "usage", "error", "sums"}
_CODES = 256
_DEEPEST = 4  # levels of nested numbers that are read, such as "formats.e4m3.underflow"
_MOST_MAPS = 16  # this library writes one

# SwitchBack searches for spikes from step 1000 of 20,000 on (Section 3.2, Appendix E): before it the learning rate
# is low and the moments are young. The same share of a shorter run.
_START, _SHARE = 1000, 20
STOCHASTIC = "stochastic"  # the weight storage that loses most updates on purpose, and in the mean none
_NO_LOW_WORDS = ("plain", STOCHASTIC)  # those that store nothing beside the weight


def storages_by_slot(header: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """How each parameter is kept, from a header: by its group, or on its own.

    Under "weights" the storage of the weight, under the names of slots those of moments; under "states" that of all
    slots without their own.
    """
    found = {}
    for group in _groups_of(header):
        states = group.get("states")
        slots = states if isinstance(states, Mapping) else {"states": states}
        for name in group["parameters"]:
            kept = {"weights": group.get("weights"), **slots}
            for key in ("kept", "storages"):  # the later one counts
                own = group.get(key)
                apart = own.get(name) if isinstance(own, Mapping) else None
                kept |= apart if isinstance(apart, Mapping) else {}
            kept.pop("reason", None)  # a fitted recipe's, beside the storages
            found[name] = {slot: storage for slot, storage in kept.items() if isinstance(storage, str)}
    return found


def _groups_of(header: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of a first record, those with names of parameters."""
    groups = header.get("groups")
    return [
        group | {"parameters": [name for name in group["parameters"] if isinstance(name, str)]}
        for group in (groups if isinstance(groups, list) else ())
        if isinstance(group, dict) and isinstance(group.get("parameters"), list)
    ]


class Series(NamedTuple):
    """A number over the steps at which it was measured: ascending steps (n,), values (n,)."""

    steps: NDArray[np.int64]
    values: Floats

    def since(self, step: int) -> Series:
        """From a step on."""
        late = self.steps >= step
        return Series(self.steps[late], self.values[late])

    def until(self, step: int) -> Series:
        """Before a step."""
        early = self.steps < step
        return Series(self.steps[early], self.values[early])

    @property
    def finite(self) -> Series:
        """Without inf and NaN."""
        sound = np.isfinite(self.values)
        return Series(self.steps[sound], self.values[sound])


class History:
    """Columns of a run's records.

    Args:
        records: as `read_records` or a watch's `rows()` gives them.
        damage: where reading a damaged file ended, and why.

    Attributes:
        header: the first record of kind "run", empty without one.
        parameters: names and shapes from the header; an invalid shape is empty.
        weights: weight storages by parameter: the present ones.
        second_moments: storages of the slot "v" by parameter: the present ones.
        runs: number of headers: more than one for a run that was resumed into the same file.
        count: number of records.
        ignored: number of records without a step of at least 1, without a name, or with an invalid or surplus map.
        missing: by (kind, reason) the names of what was not recorded.
        alarms: records of kinds "spike", "nonfinite" and "lost", in order.
        adapted: records of kind "adapted", in order.
        usage: how often each code was used in all records, by (tensor, slot).
        state_formats: the number format by (tensor, slot).
        maps: usage and sums of relative errors of Adam's updates by codes, two (256, 256), by tensor; "" is all.
        memo: results computed from the records so far, by name; cleared by every new record.
    """

    def __init__(self, records: Iterable[Record] = (), damage: str | None = None) -> None:
        self.header: dict[str, Any] = {}
        self.parameters: dict[str, list[int]] = {}
        self.damage = damage
        self.runs = self.count = self.ignored = self.last_step = 0
        self.alarms: list[Record] = []
        self.adapted: list[Record] = []
        self.missing: dict[tuple[str, str], list[str]] = {}
        self.usage: dict[tuple[str, str], Floats] = {}
        self.state_formats: dict[tuple[str, str], str] = {}
        self.maps: dict[str, tuple[Floats, Floats]] = {}
        self.memo: dict[str, Any] = {}
        self._groups: dict[str, Mapping[str, Any]] = {}
        self._kept: dict[str, dict[str, str]] = {}
        self.weights: dict[str, str] = {}
        self._changed: dict[str, int] = {}
        self.second_moments: dict[str, str] = {}
        self._columns: dict[tuple[str, str, str], tuple[array[int], array[float]]] = {}
        self._names: dict[str, dict[str, None]] = {}
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Add a record."""
        if not isinstance(record, Mapping):
            raise TypeError(f"records must be mappings, got {type(record).__name__}")
        self.count += 1
        self.memo.clear()
        kind, step = record.get("kind"), record.get("step")
        if kind == "run":
            self.runs += 1
            if not self.header:
                self._begin(_shown(record))
            else:  # a run that was resumed, with storages that may have been changed
                self._change(self.last_step, storages_by_slot(_shown(record)))
            return
        name = _shown(record.get("name", ""))
        if not isinstance(kind, str) or not _is_count(step) or step < 1 or not isinstance(name, str):
            self.ignored += 1
            return
        self.last_step = max(self.last_step, step)
        if kind in ("spike", "nonfinite", "lost"):
            self.alarms.append(_shown(record))
            return
        if kind == "skips":
            return  # its alarm has it
        if kind == "adapted":
            self.adapted.append(_shown(record))
            return
        if kind == "storages":
            self._change(step, record.get("parameters"))
            return
        if kind == "missing":
            self._add_missing(_shown(record))
            return
        if kind == "state":
            slot = _shown(str(record.get("slot", "?")))
            self._add_usage((name, slot), record.get("usage"))
            self.state_formats[name, slot] = _shown(str(record.get("format", "")))
            name = f"{name} [{slot}]"
        elif kind == "adam_error":
            self._add_map(name, record)
        elif kind == "step" and "rms" in record:
            self._add_ratios(step, record["rms"])
            record = {key: value for key, value in record.items() if key != "rms"}
        self._names.setdefault(kind, {}).setdefault(name)
        self._add_numbers((kind, name), "", step, record)

    def _begin(self, header: dict[str, Any]) -> None:
        self.header = header
        shapes = header.get("parameters")
        for name, shape in shapes.items() if isinstance(shapes, dict) else ():
            self.parameters[name] = list(shape) if isinstance(shape, list) and all(map(_is_count, shape)) else []
        for group in _groups_of(header):
            self._groups |= dict.fromkeys(group["parameters"], group)
        self._keep(storages_by_slot(header))

    def _keep(self, kept: Mapping[str, dict[str, str]]) -> None:
        self._kept |= kept
        self.weights |= {name: own["weights"] for name, own in kept.items() if "weights" in own}
        slots = {name: own.get("v", own.get("states")) for name, own in kept.items()}
        self.second_moments |= {name: storage for name, storage in slots.items() if storage is not None}

    def _change(self, step: int, changed: object) -> None:
        """Take in that parameters have other storages since a step; `changed` has them by parameter and slot."""
        for name, own in changed.items() if isinstance(changed, Mapping) else ():
            if isinstance(own, Mapping) and isinstance(name, str):
                name = _shown(name)
                kept = {slot: storage for slot, storage in own.items() if isinstance(storage, str)}
                if kept and kept != self._kept.get(name):
                    self._keep({name: kept})
                    self._changed[name] = step

    def changed(self, name: str) -> int:
        """The step after which a tensor's storages, or with "" any tensor's, were last changed; 0 if never."""
        return self._changed.get(name.split(" [")[0], 0) if name else max(self._changed.values(), default=0)

    def _add_numbers(self, key: tuple[str, str], prefix: str, step: int, values: Record) -> None:
        for field, value in values.items():
            if not prefix and field in _NOT_COLUMNS:
                continue
            field = _shown(str(field))
            if isinstance(value, Mapping):
                if prefix.count(".") < _DEEPEST:
                    self._add_numbers(key, f"{prefix}{field}.", step, value)
            elif (number := as_number(value)) is not None:
                steps, numbers = self._columns.setdefault((*key, prefix + field), (array("q"), array("d")))
                steps.append(step)
                numbers.append(number)

    def _add_missing(self, record: Record) -> None:
        what, why, names = (record.get(key) for key in ("of", "why", "names"))
        if isinstance(what, str) and isinstance(why, str) and isinstance(names, list):
            known = self.missing.setdefault((what, why), [])
            known += [name for name in names if isinstance(name, str) and name not in known]

    def _add_ratios(self, step: int, ratios: object) -> None:
        """RMS_t of a few tensors between due steps: one series with that of due steps."""
        for name, ratio in ratios.items() if isinstance(ratios, Mapping) else ():
            if isinstance(name, str):
                self._names.setdefault("update", {}).setdefault(_shown(name))
                self._add_numbers(("update", _shown(name)), "", step, {"rms": ratio})

    def _add_usage(self, key: tuple[str, str], usage: object) -> None:
        if isinstance(usage, Sequence) and not isinstance(usage, str):
            counts = np.array([_count(value) for value in usage])
            old = self.usage.get(key)
            self.usage[key] = counts if old is None or len(old) != len(counts) else old + counts

    def _add_map(self, name: str, record: Record) -> None:
        """Both halves of a map or none, for the first few names."""
        usage, error = (unpacked(record.get(key), (_CODES, _CODES)) for key in ("usage", "error"))
        fits = name in self.maps or len(self.maps) < _MOST_MAPS
        if not fits or usage is None or error is None or not (_is_sum(usage) and _is_sum(error)):
            self.ignored += 1
            return
        total = self.maps.setdefault(name, (np.zeros((_CODES, _CODES)), np.zeros((_CODES, _CODES))))
        total[0][:] += usage
        total[1][:] += error

    def names(self, kind: str) -> list[str]:
        """Tensors with records of a kind, in the order of the model, then of the records."""
        order = {name: place for place, name in enumerate(self.parameters)}
        found = [name for name in self._names.get(kind, ()) if name]
        return sorted(found, key=lambda name: order.get(name, len(order)))

    def series(self, kind: str, field: str, name: str = "") -> Series:
        """A number of a tensor over the steps; of a step measured twice (a resumed run) the later record."""
        columns = self._columns.get((kind, name, field))
        if columns is None:
            return Series(np.empty(0, np.int64), np.empty(0))
        steps, values = np.array(columns[0], np.int64), np.array(columns[1], np.float64)
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
        last = np.append(steps[1:] != steps[:-1], True)
        return Series(steps[last], values[last])

    def fields(self, kind: str, name: str) -> list[str]:
        """Names of a tensor's numbers, such as "rms" or "formats.e4m3.underflow"."""
        return [field for k, n, field in self._columns if (k, n) == (kind, name)]

    def matrix(self, kind: str, field: str) -> tuple[list[str], NDArray[np.int64], Floats]:
        """A number of all tensors: names (r,), steps (c,), values (r, c) with NaN where it was not measured."""
        found = {name: self.series(kind, field, name) for name in self.names(kind)}
        found = {name: series for name, series in found.items() if len(series.steps)}
        if not found:
            return [], np.empty(0, np.int64), np.empty((0, 0))
        steps = np.unique(np.concatenate([series.steps for series in found.values()]))
        values = np.full((len(found), len(steps)), np.nan)
        for row, series in zip(values, found.values(), strict=True):
            row[np.searchsorted(steps, series.steps)] = series.values
        return list(found), steps, values

    def is_embedding(self, name: str) -> bool:
        """Whether a parameter is an embedding's weight, by the header or by its name."""
        known = self.header.get("embeddings")
        return (isinstance(known, list) and name in known) or is_embedding(name)

    @property
    def loss(self) -> Series:
        """The loss of every step at which it is known."""
        return self.series("step", "loss")

    @property
    def settled(self) -> int:
        """The first step that is judged: after a twentieth of the run, at most 1000 steps."""
        return min(_START, self.last_step // _SHARE) + 1

    # How the run was set up

    def group_of(self, name: str) -> Mapping[str, Any]:
        """The options of a parameter's group; empty if the header has none."""
        return self._groups.get(name, {})

    def listed_parameters(self, key: str) -> list[str]:
        """The parameters that the header lists under "frozen" or "apart"."""
        names = self.header.get(key)
        known = self.parameters
        return [n for n in names if isinstance(n, str) and n in known] if isinstance(names, list) else []

    def clips_updates(self, name: str) -> bool:
        """Whether a parameter's updates are clipped; without groups in the header by the optimizer's name."""
        group = self.group_of(name)
        if "clip_updates" in group:
            return group["clip_updates"] is True
        return not group and str(self.header.get("optimizer", "")).startswith("Stable")

    def low_word_storage(self, name: str) -> str | None:
        """The weight storage of a parameter with low words or a master copy; None without, or if not known."""
        weights = self.weights.get(name)
        return None if weights in _NO_LOW_WORDS else weights

    @property
    def uses_float8(self) -> bool:
        """Whether a layer multiplies in float8."""
        layers = self.header.get("low_precision")
        found = layers.values() if isinstance(layers, dict) else ()
        formats = (str(each) for formats in found if isinstance(formats, list) for each in formats)
        return any(each.startswith(("e4m3", "e5m2")) for each in formats)

    def blocks(self, kind: str = "activation") -> dict[str, list[str]]:
        """Modules that repeat through the depth, "h.0", "h.1", …, by their pattern "h.#"; the shortest first.

        Modules that repeat inside a block, such as experts or heads, have two numbers and are left out.
        """
        found: dict[str, list[str]] = {}
        for name in self.names(kind):
            found.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "#", name), []).append(name)
        patterns = sorted((p for p in found if p.count("#") == 1), key=lambda p: (p.count("."), p))

        def number(name: str) -> int:
            return next(int(part) for part in name.split(".") if part.isdigit())

        return {pattern: sorted(found[pattern], key=number) for pattern in patterns if len(found[pattern]) > 1}


def _shown(value: Any) -> Any:
    """A value whose text can be shown: control characters and lone surrogates are replaced.

    Names come from users and files. A terminal obeys control characters, and neither a page nor a drawing can hold
    them.
    """
    if isinstance(value, str):
        return value if value.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in value)
    if isinstance(value, Mapping):
        return {_shown(key): _shown(item) for key, item in value.items()}
    return list(map(_shown, value)) if isinstance(value, list) else value


def as_number(value: object) -> float | None:
    """A value of JSON as a float, "inf", "-inf" and "nan" included; None if it is no number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return NONFINITE.get(value) if isinstance(value, str) else None


def _count(value: object) -> float:
    """A number of elements; 0 for an invalid value."""
    number = as_number(value)
    return number if number is not None and 0 <= number < 2**63 else 0.0


def _is_sum(cells: NDArray[Any]) -> bool:
    return bool((np.isfinite(cells) & (cells >= 0)).all())


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


# Lookup tables, and the convolutions that make patches of an image: SwitchBack's embedding layer. A convolution of
# that name inside a numbered block is no embedding.
_EMBEDDING = re.compile(
    r"(?:^|[._])(?:wte|wpe|emb|embed\w*|\w*_emb(?:ed\w*)?|patch_embed\w*)(?:[._]|$)|^(?:[a-z_]+\.){0,2}conv(?:1|_proj)\.",
    re.IGNORECASE,
)


def is_embedding(name: str) -> bool:
    """Whether a name is that of an embedding's weight, of tokens, positions or patches."""
    return bool(_EMBEDDING.search(name)) and "norm" not in name.lower() and not name.endswith("bias")


class LiveReader:
    """Reads a growing file of records into a history.

    Args:
        run: the file, or the folder that it is or will be in.

    Attributes:
        history: what was read so far; a new one after the file began again.
        exists: whether the file was there at the last read.
    """

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self._run = Path(run)
        self._file: tuple[int, int] | None = None
        self.exists = False
        self.history, self._lines = History(), LineReader()

    def read(self) -> bool:
        """Read what is new.

        Returns:
            Whether there are new records, or the file appeared, disappeared or began again.

        Raises:
            OSError: if the file exists and cannot be read.
        """
        before = (self.exists, self._file, self.history.count, self.history.damage)
        try:
            with records_file(self._run).open("rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                if identity != self._file or status.st_size < self._lines.offset:
                    self.history, self._lines = History(), LineReader()
                self.exists, self._file = True, identity
                file.seek(self._lines.offset)
                for record in self._lines.read(file.read()):
                    self.history.add(record)
                self.history.damage = self._lines.damage
        except FileNotFoundError:
            self.exists = False
        return (self.exists, self._file, self.history.count, self.history.damage) != before
