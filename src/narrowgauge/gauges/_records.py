"""The records of a watched run: one JSON object a line, readable while the file grows and after a kill.

Every record is a dictionary with its ``kind`` and, except for the header, the ``step`` it belongs to:

    run                                 the header, first: optimizer, parameters and their shapes, versions
    step                                every step: loss, loss scale, steps skipped so far, seconds since the
                                        last one, RMS_t of a few parameters
    update                              what a step did to a parameter (name "" is the whole model)
    gradient, activation,
    activation_gradient                 a tensor's magnitudes, and what narrower formats would lose of it
    state, adam_error                   what the codes of the optimizer's moments lose
    spike, nonfinite, lost              an alarm
    adapted                             a storage that `train --adapt` widened, or a layer whose plan it removed
    storages                            parameters that came or changed their storages since the last measured step
    missing                             what will not be recorded of some tensors, and why

JSON has no infinities and no NaN: they are written as the strings "inf", "-inf" and "nan", and read back as floats.
A map of 256 by 256 cells would be a megabyte of text: it is packed, and one line unpacks it, in other languages
too:

    numpy.frombuffer(zlib.decompress(base64.b64decode(value["zlib"])), value["type"]).reshape(value["shape"])

Each line is flushed. A killed process leaves at worst half of its last line; a disk may do worse. Reading ends at
the first damage, and `Records.damage` says where that is.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import math
import os
import shutil
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from narrowgauge._files import free_path, write_whole

LOG = logging.getLogger("narrowgauge.gauges")

VERSION = 1
FILE_NAME = "gauges.jsonl"

Record = dict[str, Any]

# What records of kind "missing" are about.
MISSED = {"state": "quantized moments", "activation": "features"}

NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
# Keys whose strings are text, whatever they are.
_TEXT = {
    "kind", "name", "slot", "format", "of", "measured", "optimizer", "device", "torch", "narrowgauge", "started",
}  # fmt: skip
_PACKED_TYPES = ("<u4", "<f4")


class Records(list[Record]):
    """Records in the order in which they were written.

    Attributes:
        damage: where reading ended and why; None for a file that was read to its end.
    """

    damage: str | None = None


def records_file(path: str | os.PathLike[str]) -> Path:
    """The file of records at a path: itself, or `FILE_NAME` in a folder. A new path without suffix is a folder."""
    path = Path(path)
    return path if (path.suffix or path.exists()) and not path.is_dir() else path / FILE_NAME


def read_records(path: str | os.PathLike[str]) -> Records:
    """Read the records of a run, up to the first damage if there is any.

    Args:
        path: a file that `watch` writes or has written, or a folder with a ``gauges.jsonl``.

    Returns:
        The records. Kinds and keys that this version does not know are kept.

    Raises:
        FileNotFoundError: if there is no such file.
    """
    data, lines = records_file(path).read_bytes(), LineReader()
    records = Records(lines.read(data))
    records.damage = lines.damage
    if records.damage is None and lines.offset < len(data):
        # Without its newline a number may lack its last digits.
        records.damage = f"{lines.place}: the line has no end: the run is still writing it, or was killed"
    elif not data:
        records.damage = f"{lines.place}: the file is empty"
    return records


class LineReader:
    """Reads records from lines, up to the first damage.

    Attributes:
        offset: number of bytes read.
        damage: where reading ended and why.
    """

    def __init__(self) -> None:
        self.offset, self._lines = 0, 0
        self.damage: str | None = None

    @property
    def place(self) -> str:
        """Where the next line begins."""
        return f"line {self._lines + 1} (byte {self.offset})"

    def read(self, data: bytes) -> Iterator[Record]:
        """The records of the complete lines in what comes next; call it again from `offset` when there is more."""
        for line in data.split(b"\n")[:-1] if self.damage is None else ():
            try:
                record = _record(line, first=self._lines == 0)
            except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
                self.damage = f"{self.place}: no record: {error}"
                return
            self._lines += 1
            self.offset += len(line) + 1
            yield record


def _record(line: bytes, first: bool) -> Record:
    record = _numbers(json.loads(line.decode("utf-8"), parse_constant=_refuse))
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise ValueError("must be an object with a kind")
    if record["kind"] == "run":
        if record.get("version") != VERSION:
            raise ValueError(f"version must be {VERSION}, got {record.get('version')!r}")
    elif type(record.get("step")) is not int:
        raise ValueError(f"step must be an integer, got {record.get('step')!r}")
    elif first:
        raise ValueError(f"kind must be 'run' in the first line, got {record['kind']!r}")
    return record


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _numbers(value: Any) -> Any:
    """A value of JSON with "nan", "inf" and "-inf" as floats."""
    if isinstance(value, dict):
        return {
            key: item if key in _TEXT and isinstance(item, str) else _numbers(item) for key, item in value.items()
        }
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return NONFINITE.get(value, value) if isinstance(value, str) else value


def rounded(x: Tensor) -> Tensor:
    """A float64 tensor on the host, rounded to nine digits: no gauge is better, and files are half as long.

    Integers, inf and NaN stay as they are.
    """
    digits = 8 - x.abs().clamp_min(1e-300).log10().floor()
    # Powers of ten up to 10^22 are exact in float64: dividing by one gives the number that the nine digits mean.
    scale = torch.full_like(x, 10.0) ** digits.abs()
    near = torch.where(digits >= 0, (x * scale).round() / scale, (x / scale).round() * scale)
    return torch.where((x == x.round()) | ~torch.isfinite(x) | ~torch.isfinite(near), x, near)


def line_of(record: Mapping[str, Any]) -> str:
    """A record as a line of JSON, with its newline."""
    try:
        return json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"
    except ValueError:  # a number is inf or NaN: rare, and looking for one takes longer than encoding
        return json.dumps(_strings(record), allow_nan=False, separators=(",", ":")) + "\n"


def _strings(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _strings(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strings(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def packed(array: NDArray[Any]) -> dict[str, Any]:
    """An array of 32-bit numbers as JSON: shape, numpy's name of the dtype, and the bytes, zlib's as base64."""
    data = base64.b64encode(zlib.compress(array.tobytes(), 1)).decode("ascii")
    return {"shape": list(array.shape), "type": array.dtype.str, "zlib": data}


def unpacked(value: object, shape: tuple[int, ...]) -> NDArray[Any] | None:
    """The packed array of that shape; None of anything else, however large it would be."""
    if not isinstance(value, Mapping) or value.get("type") not in _PACKED_TYPES:
        return None
    text, size = value.get("zlib"), 4 * int(np.prod(shape))
    if value.get("shape") != list(shape) or not isinstance(text, str):
        return None
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size + 1)
    except (ValueError, zlib.error):
        return None
    return np.frombuffer(data, value["type"]).reshape(shape) if len(data) == size else None


class Writer:
    """Appends records to a file, or to the one in an existing folder. Parent folders are made.

    Without `resume_from` the file is new. With it the file goes on: records up to that step stay; later ones, which
    the resumed run measures again, and the half line of a kill are removed. If the damage is more than half a line
    at the end, a copy of the file is kept, with ``.damaged`` after its name.

    Raises:
        FileExistsError: if the file has records and `resume_from` is None.
        ValueError: if the file to continue has no header.
    """

    def __init__(self, path: str | os.PathLike[str], resume_from: int | None) -> None:
        self.path = records_file(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.continues = self._broken = False
        if self.path.exists() and self.path.stat().st_size:
            if resume_from is None:
                if any(other.path.samefile(self.path) for other in _WRITERS if other.path.exists()):
                    raise FileExistsError(
                        f"path must be a file of its own for each watch: another of this process writes {self.path}"
                    )
                raise FileExistsError(
                    f"path must be a new file, or resume_from the last step to keep: {self.path} has records"
                )
            self._keep(resume_from)
            self.continues = True
        elif resume_from:
            LOG.warning("%s: no records to go on with: they begin after step %d", self.path, resume_from)
        self._file = self.path.open("a", encoding="utf-8", newline="\n")
        _WRITERS.add(self)

    def _keep(self, step: int) -> None:
        records = read_records(self.path)
        if not records:
            raise ValueError(f"path {self.path} cannot be continued: {records.damage}")
        if self.path.read_bytes().count(b"\n") > len(records):
            # Not the half line of a kill: there may be more records after the damage.
            saved = free_path(self.path.with_name(self.path.name + ".damaged"))
            shutil.copyfile(self.path, saved)
            LOG.warning("%s: %s; the whole file is kept as %s", self.path, records.damage, saved)
        kept = [record for record in records if record.get("step", 0) <= step]
        last = max(record.get("step", 0) for record in kept)
        if last < step:
            LOG.warning("%s: the records end at step %d and go on after step %d", self.path, last, step)
        write_whole(self.path, "".join(map(line_of, kept)))

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records and flush them.

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
        _WRITERS.discard(self)
        # A file that could not be written before may fail again; the log has said so.
        with contextlib.suppress(*([OSError] if self._broken else [])):
            self._file.close()


_WRITERS: weakref.WeakSet[Writer] = weakref.WeakSet()  # those that are open
