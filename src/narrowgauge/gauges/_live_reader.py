"""Reads a file of records while a training writes it.

Between two reads the file may have grown by nothing, by a hundred lines, or by half a line, which is read when its
rest is there. A file that became shorter, or was replaced, belongs to a run that was started again or resumed from
an earlier step: it is read from the beginning. A file that does not exist yet is waited for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from narrowgauge.gauges._history import History
from narrowgauge.gauges._records import Records, append_line, records_file


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
        self._begin()

    def _begin(self) -> None:
        self.history = History()
        self._offset = self._lines = 0
        self._records = Records()

    def read(self) -> bool:
        """Read what is new.

        Returns:
            Whether there are new records, or the file appeared, disappeared or began again.

        Raises:
            OSError: if the file exists and cannot be read.
        """
        before = (self.exists, self._file, self.history.count, self.history.damage)
        try:
            file = records_file(self._run).open("rb")
        except FileNotFoundError:
            self.exists = False
        else:
            with file:
                self._read_from(file)
        return (self.exists, self._file, self.history.count, self.history.damage) != before

    def _read_from(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        if identity != self._file or status.st_size < self._offset:
            self._begin()
        self.exists, self._file = True, identity
        if self.history.damage is not None:
            return
        file.seek(self._offset)
        for line in file.read().split(b"\n")[:-1]:  # what follows the last newline is read later
            self._lines += 1
            why = append_line(self._records, line)
            if why is not None:
                self.history.damage = f"line {self._lines} (byte {self._offset}): {why}"
                return
            self.history.add(self._records[-1])
            del self._records[1:]  # the header tells that there was a first record
            self._offset += len(line) + 1
