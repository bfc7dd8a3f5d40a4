"""A file of records that grows: what is new in it, and what became of it.

A training appends; between two looks there may be nothing new, a hundred lines, or half a line, whose rest is
waited for. A file that has become shorter, or is another one under the same name, is a run that was started anew or
resumed from an earlier step: it is read from its beginning. A file that is not there yet is waited for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from narrowgauge.gauges._history import History
from narrowgauge.gauges._records import Records, _take, records_file


class Follower:
    """Reads a growing file of records into a history.

    Args:
        run: the file, or the folder that it is or will be in.

    Attributes:
        history: what was read so far; another one after the file began anew.
        exists: whether the file was there at the last look.
    """

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self._run = Path(run)
        self._file: tuple[int, int] | None = None
        self.exists = False
        self._begin()

    def _begin(self) -> None:
        self.history = History()
        self._offset = self._lines = 0
        self._read = Records()

    def look(self) -> bool:
        """Read what is new.

        Returns:
            Whether anything changed: there are new records, or the file came, went or began anew.

        Raises:
            OSError: if the file is there and cannot be read.
        """
        before = (self.exists, self._file, self.history.count, self.history.damage)
        try:
            file = records_file(self._run).open("rb")
        except FileNotFoundError:
            self.exists = False
        else:
            with file:
                self._look_into(file)
        return (self.exists, self._file, self.history.count, self.history.damage) != before

    def _look_into(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        if identity != self._file or status.st_size < self._offset:
            self._begin()
        self.exists, self._file = True, identity
        if self.history.damage is not None:
            return
        file.seek(self._offset)
        # The last piece has no end yet: its rest comes later.
        for line in file.read().split(b"\n")[:-1]:
            self._lines += 1
            why = _take(line, self._read)
            if why is not None:
                self.history.damage = f"line {self._lines} (byte {self._offset}): {why}"
                return
            self.history.add(self._read[-1])
            # Only whether there was a first record matters from now on.
            del self._read[1:]
            self._offset += len(line) + 1
