"""What a watched run leaves behind: one JSON object a line, readable while it grows and after it was killed.

Every record is a dictionary with its ``kind`` and, but for the header, the ``step`` it belongs to:

    run                                 the header, first: optimizer, parameters and their shapes, versions
    step                                every step: loss, loss scale, steps skipped so far, seconds since the
                                        last one, RMS_t of a few parameters
    update                              what a step did to a parameter (name "" is the whole model)
    gradient, activation,
    activation_gradient                 a tensor's magnitudes, and what narrower formats would lose of it
    state, adam_error                   what the codes of the optimizer's moments lose
    spike, nonfinite                    an alarm
    missing                             what will not be recorded of some tensors, and why

JSON has no infinities and no NaN, and a gauge must be able to say both: they are written as the strings "inf",
"-inf" and "nan", and read back as floats. Names are text, whatever they are.

A file is written line by line and flushed. A process that is killed leaves half of its last line at worst; a disk
may do worse. What is read is what stands before the damage, and `Records.damage` says where that is.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LOG = logging.getLogger("narrowgauge.gauges")

VERSION = 1
FILE_NAME = "gauges.jsonl"

Record = dict[str, Any]

# What records of kind "missing" are about, in words.
MISSED = {"state": "quantized moments", "activation": "features"}

_STRINGS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_TEXT = {
    "kind",
    "name",
    "slot",
    "format",
    "of",
    "measured",
    "optimizer",
    "device",
    "torch",
    "narrowgauge",
    "started",
}


class Records(list[Record]):
    """Records in the order in which they were written.

    Attributes:
        damage: where reading ended and why, a sentence; None for a file that was read to its end.
    """

    damage: str | None = None


def records_file(path: str | os.PathLike[str]) -> Path:
    """The file of records that a path means: itself, or `FILE_NAME` in a folder."""
    path = Path(path)
    return path / FILE_NAME if path.is_dir() else path


def read_records(path: str | os.PathLike[str]) -> Records:
    """Read the records of a run, up to the first damage if there is any.

    Args:
        path: a file that `watch` writes or has written, or a folder with a ``gauges.jsonl``.

    Returns:
        The records. Kinds and keys that this version does not know are kept.

    Raises:
        FileNotFoundError: if there is no such file.
    """
    records = Records()
    data = records_file(path).read_bytes()
    begin, number = 0, 0
    while begin < len(data):
        number += 1
        end = data.find(b"\n", begin)
        line = data[begin : end if end >= 0 else len(data)]
        why = _take(line, records)
        if why is None and end < 0:
            # Without its newline a number may have lost its last digits and still be one.
            records.pop()
            why = "the line has no end: the run is still writing it, or was killed"
        if why is not None:
            records.damage = f"line {number} (byte {begin}): {why}"
            break
        begin = end + 1
    if not records and records.damage is None:
        records.damage = "line 1 (byte 0): the file is empty"
    return records


def _take(line: bytes, records: Records) -> str | None:
    """Append the record of a line; why not, if it has none."""
    try:
        record = _numbers(json.loads(line.decode("utf-8"), parse_constant=_refuse))
    except (ValueError, RecursionError) as error:  # both kinds of decoding errors are ValueErrors
        return f"no record: {error}"
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return "no record: takes an object with a kind"
    if record["kind"] == "run":
        newer = record.get("version")
        if newer != VERSION:
            return f"version: got {newer!r}, takes {VERSION}"
    elif type(record.get("step")) is not int:
        return f"step: got {record.get('step')!r}, takes an integer"
    if not records and record["kind"] != "run":
        return f"kind: got {record['kind']!r}, takes 'run' in the first line"
    records.append(record)
    return None


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _numbers(value: Any) -> Any:
    """A record with the strings that stand for numbers replaced by those."""
    if isinstance(value, dict):
        return {
            key: item if key in _TEXT and isinstance(item, str) else _numbers(item) for key, item in value.items()
        }
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return _STRINGS.get(value, value) if isinstance(value, str) else value


def rounded(x: Tensor) -> Tensor:
    """Nine digits of each number of a float64 tensor on the host: no gauge is better, and files are half as long.

    Whole numbers, and what is not finite, stay as they are.
    """
    digits = 8 - x.abs().clamp_min(1e-300).log10().floor()
    # A power of ten is a float64 up to the 22nd; dividing by an exact one gives the number that nine digits mean.
    scale = torch.full_like(x, 10.0) ** digits.abs()
    near = torch.where(digits >= 0, (x * scale).round() / scale, (x / scale).round() * scale)
    return torch.where((x == x.round()) | ~torch.isfinite(x) | ~torch.isfinite(near), x, near)


def line_of(record: Mapping[str, Any]) -> str:
    """A record as a line of JSON, its end included."""
    try:
        return json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"
    except ValueError:  # nearly all numbers are finite, and looking for those that are not takes longer
        return json.dumps(_strings(record), allow_nan=False, separators=(",", ":")) + "\n"


def _strings(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _strings(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strings(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


class Writer:
    """Writes records to a file as they come.

    Args:
        path: the file, or an existing folder. Folders above the file are made.
        resume_from: None begins a new file. A step continues one: its records up to that step are kept, those after
            it, which the resumed run takes again, and the damage of a kill are not.

    Where the damage is no half line at the end, the file as it was is kept aside, ``.damaged`` behind its name.

    Raises:
        FileExistsError: if there are records already and nobody said what to do with them.
        ValueError: if the file to continue has no header.
    """

    def __init__(self, path: str | os.PathLike[str], resume_from: int | None) -> None:
        self.path = records_file(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.continues = self._broken = False
        if self.path.exists() and self.path.stat().st_size:
            if resume_from is None:
                raise FileExistsError(
                    f"path: {self.path} has records already; takes a new file, or resume_from=the last step to keep"
                )
            self._keep(resume_from)
            self.continues = True
        self._file = self.path.open("a", encoding="utf-8", newline="\n")

    def _keep(self, step: int) -> None:
        records = read_records(self.path)
        if not records:
            raise ValueError(f"path: {self.path} cannot be continued: {records.damage}")
        if self.path.read_bytes().count(b"\n") > len(records):
            # Not the half line of a kill: behind the damage there are records that nobody asked to lose.
            saved = _free(self.path.with_name(self.path.name + ".damaged"))
            shutil.copyfile(self.path, saved)
            LOG.warning("%s: %s; what stands behind is kept in %s", self.path, records.damage, saved)
        kept = [record for record in records if record.get("step", 0) <= step]
        aside = self.path.with_name(self.path.name + ".new")
        aside.write_text("".join(map(line_of, kept)), encoding="utf-8", newline="\n")
        aside.replace(self.path)

    @property
    def broken(self) -> bool:
        """Whether writing has failed: nothing is written any more."""
        return self._broken

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records and hand them to the system.

        Raises:
            OSError: once, where the system does not take them; later records are dropped.
        """
        text = "".join(map(line_of, records))
        if not text or self._broken:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError:
            self._broken = True
            raise

    def close(self) -> None:
        """Close the file."""
        # What it did not take before it may not take now; that has been said.
        with contextlib.suppress(*([OSError] if self._broken else [])):
            self._file.close()


def _free(path: Path) -> Path:
    """A path that is not taken: this one, or with a number behind it."""
    numbered = (path.with_name(f"{path.name}{number}") for number in itertools.count(2))
    return next(p for p in itertools.chain([path], numbered) if not p.exists())
