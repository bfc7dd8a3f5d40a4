"""A run's records as columns: what the report, the terminal page and the advice read from.

Records come one by one, each a small dictionary about one tensor at one step. Whoever reads a run asks the other
way round: how did this number of this tensor go over the steps? A history takes records as they come, in any order,
and keeps each number in a column of its own, so that a run that still grows can be read again and again.

Nothing here raises because of a record. A killed run, a newer version and a hand that edited the file all leave
records that lack a number or have one of another type: what cannot be read as a number is no value, a record
without a step or a name is counted in `ignored`. What is not finite is a value.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from narrowgauge.gauges._packed import unpacked

Floats = NDArray[np.float64]
Record = Mapping[str, Any]

# What of a record is not a number of its tensor.
_NOT_COLUMNS = {"kind", "step", "name", "usage", "error", "sums"}
_CODES = 256
# Records have numbers in numbers at most so deep ("formats.e4m3.underflow"); what nests on is none of ours.
_DEEPEST = 4
_MOST_MAPS = 16  # this library writes one
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

# SwitchBack leaves the first 1000 of 20 000 steps out when it looks for spikes (Section 3.2, Appendix E): there
# the learning rate is low and the moments are young. The same share of a shorter run.
_START, _SHARE = 1000, 20


class Series(NamedTuple):
    """A number over the steps where it was measured: ascending steps (n,), values (n,), perhaps not all finite."""

    steps: NDArray[np.int64]
    values: Floats

    def since(self, step: int) -> Series:
        """The part from a step on."""
        late = self.steps >= step
        return Series(self.steps[late], self.values[late])

    def until(self, step: int) -> Series:
        """The part before a step."""
        early = self.steps < step
        return Series(self.steps[early], self.values[early])

    @property
    def finite(self) -> Series:
        """The part that is finite."""
        sound = np.isfinite(self.values)
        return Series(self.steps[sound], self.values[sound])


class History:
    """Columns of a run's records.

    Args:
        records: as `read_records` or a watch's `rows()` gives them.
        damage: what the reader said of a damaged file, if it was one.

    Attributes:
        header: the first record of kind "run", empty if there was none.
        runs: how many headers there were: more than one for a run that was resumed into the same file.
        count: how many records were taken.
        ignored: how many had no step, counted from 1, no name, or a map that is none or one too many.
        missing: what was not recorded and why: (kind, reason), and the names of which.
        alarms: the records of what was raised while training: kinds "spike" and "nonfinite", in order.
        memo: what was worked out of the records so far, by name; emptied by every record that is added.
    """

    def __init__(self, records: Iterable[Record] = (), damage: str | None = None) -> None:
        self.header: dict[str, Any] = {}
        self.damage = damage
        self.runs = self.count = self.ignored = self.last_step = 0
        self.alarms: list[Record] = []
        self.missing: dict[tuple[str, str], list[str]] = {}
        self.memo: dict[str, Any] = {}
        self._columns: dict[tuple[str, str, str], tuple[array[int], array[float]]] = {}
        self._names: dict[str, dict[str, None]] = {}
        self._usage: dict[tuple[str, str], Floats] = {}
        self._maps: dict[str, tuple[Floats, Floats]] = {}
        self._formats: dict[tuple[str, str], str] = {}
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Take one more record."""
        if not isinstance(record, Mapping):
            raise TypeError(f"records: got {type(record).__name__} for one, takes mappings")
        self.count += 1
        self.memo.clear()
        kind, step = record.get("kind"), record.get("step")
        if kind == "run":
            self.runs += 1
            self.header = self.header or _shown(record)
            return
        name = _shown(record.get("name", ""))
        if not isinstance(kind, str) or not _is_count(step) or step < 1 or not isinstance(name, str):
            self.ignored += 1
            return
        self.last_step = max(self.last_step, step)
        if kind in ("spike", "nonfinite"):
            self.alarms.append(_shown(record))
            return
        if kind == "missing":
            self._add_missing(_shown(record))
            return
        if kind == "state":
            slot = _shown(str(record.get("slot", "?")))
            self._add_usage((name, slot), record.get("usage"))
            self._formats[name, slot] = _shown(str(record.get("format", "")))
            name = f"{name} [{slot}]"
        elif kind == "adam_error":
            self._add_map(name, record)
        elif kind == "step" and "rms" in record:
            self._add_ratios(step, record["rms"])
            record = {key: value for key, value in record.items() if key != "rms"}
        self._names.setdefault(kind, {}).setdefault(name)
        self._add_numbers((kind, name), "", step, record)

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
        """RMS_t of a few tensors, taken between due steps: one series with that of due ones."""
        for name, ratio in ratios.items() if isinstance(ratios, Mapping) else ():
            if isinstance(name, str):
                self._names.setdefault("update", {}).setdefault(_shown(name))
                self._add_numbers(("update", _shown(name)), "", step, {"rms": ratio})

    def _add_usage(self, key: tuple[str, str], usage: object) -> None:
        if isinstance(usage, Sequence) and not isinstance(usage, str):
            counts = np.array([_count(value) for value in usage])
            old = self._usage.get(key)
            self._usage[key] = counts if old is None or len(old) != len(counts) else old + counts

    def _add_map(self, name: str, record: Record) -> None:
        """Both halves or none, and no more names than somebody would look at."""
        usage, error = (unpacked(record.get(key), (_CODES, _CODES)) for key in ("usage", "error"))
        fits = name in self._maps or len(self._maps) < _MOST_MAPS
        if not fits or usage is None or error is None or not (_is_sum(usage) and _is_sum(error)):
            self.ignored += 1
            return
        total = self._maps.setdefault(name, (np.zeros((_CODES, _CODES)), np.zeros((_CODES, _CODES))))
        total[0][:] += usage
        total[1][:] += error

    def names(self, kind: str) -> list[str]:
        """Tensors of which there are records of a kind, in the order of the model or the records; "" is none."""
        order = {name: place for place, name in enumerate(self.parameters)}
        found = [name for name in self._names.get(kind, ()) if name]
        return sorted(found, key=lambda name: order.get(name, len(order)))

    def series(self, kind: str, field: str, name: str = "") -> Series:
        """A number of a tensor over the steps; of a step measured twice (a resumed run), the later record."""
        columns = self._columns.get((kind, name, field))
        if columns is None:
            return Series(np.empty(0, np.int64), np.empty(0))
        steps, values = np.array(columns[0], np.int64), np.array(columns[1], np.float64)
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
        last = np.append(steps[1:] != steps[:-1], True)
        return Series(steps[last], values[last])

    def fields(self, kind: str, name: str) -> list[str]:
        """Which numbers of a tensor there are; those of formats are called "formats.e4m3.underflow"."""
        return [field for k, n, field in self._columns if (k, n) == (kind, name)]

    def matrix(self, kind: str, field: str) -> tuple[list[str], NDArray[np.int64], Floats]:
        """A number of all tensors: names (r,), steps (c,), values (r, c), NaN where it was not measured."""
        found = {name: self.series(kind, field, name) for name in self.names(kind)}
        found = {name: series for name, series in found.items() if len(series.steps)}
        if not found:
            return [], np.empty(0, np.int64), np.empty((0, 0))
        steps = np.unique(np.concatenate([series.steps for series in found.values()]))
        values = np.full((len(found), len(steps)), np.nan)
        for row, series in zip(values, found.values(), strict=True):
            row[np.searchsorted(steps, series.steps)] = series.values
        return list(found), steps, values

    @property
    def parameters(self) -> dict[str, list[int]]:
        """Names and shapes from the header; a shape that is none is empty."""
        if "parameters" not in self.memo:
            found = self.header.get("parameters")
            self.memo["parameters"] = {
                name: list(shape) if isinstance(shape, list) and all(map(_is_count, shape)) else []
                for name, shape in (found.items() if isinstance(found, dict) else ())
            }
        shapes: dict[str, list[int]] = self.memo["parameters"]
        return shapes

    def is_embedding(self, name: str) -> bool:
        """Whether a parameter is an embedding's weight: the header says so, or its name does."""
        known = self.header.get("embeddings")
        return (isinstance(known, list) and name in known) or is_embedding(name)

    @property
    def loss(self) -> Series:
        """The loss of every step of which it is known."""
        return self.series("step", "loss")

    @property
    def settled(self) -> int:
        """The first step that counts: a twentieth of the run is left out at its start, 1000 steps at most."""
        return min(_START, self.last_step // _SHARE) + 1

    @property
    def usage(self) -> dict[tuple[str, str], Floats]:
        """How often each code was used, by (tensor, slot), all records together."""
        return self._usage

    @property
    def state_formats(self) -> dict[tuple[str, str], str]:
        """The number format by (tensor, slot)."""
        return self._formats

    @property
    def maps(self) -> dict[str, tuple[Floats, Floats]]:
        """Usage and sums of relative errors of Adam's updates by codes, two (256, 256), by tensor; "" is all."""
        return self._maps


def _shown(value: Any) -> Any:
    """A value whose text can be shown: control characters, and halves of characters, are replaced.

    A name is what its user, or whoever edited the file, made it. A terminal obeys control characters, and neither
    a page nor a drawing can hold them.
    """
    if isinstance(value, str):
        return value if value.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in value)
    if isinstance(value, Mapping):
        return {_shown(key): _shown(item) for key, item in value.items()}
    return list(map(_shown, value)) if isinstance(value, list) else value


def as_number(value: object) -> float | None:
    """A float of what JSON has for one, the words for what is not finite included; None if it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return _WORDS.get(value) if isinstance(value, str) else None


def _count(value: object) -> float:
    """A number of elements, or a sum of errors over them; nothing for what cannot be one."""
    number = as_number(value)
    return number if number is not None and 0 <= number < 2**63 else 0.0


def _is_sum(cells: NDArray[Any]) -> bool:
    return bool((np.isfinite(cells) & (cells >= 0)).all())


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


# Tables of vectors looked up, and the convolutions that make patches of an image: what SwitchBack calls the
# embedding layer. A convolution of that name inside of a numbered block is none.
_EMBEDDING = re.compile(
    r"(?:^|[._])(?:wte|wpe|emb|embed\w*|\w*_emb(?:ed\w*)?|patch_embed\w*)(?:[._]|$)|^(?:[a-z_]+\.){0,2}conv(?:1|_proj)\.",
    re.IGNORECASE,
)


def is_embedding(name: str) -> bool:
    """Whether a parameter's name is that of an embedding's weight, of tokens, positions or patches."""
    return bool(_EMBEDDING.search(name)) and "norm" not in name.lower() and not name.endswith("bias")
