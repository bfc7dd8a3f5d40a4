"""Where records go: to a file, TensorBoard or memory, by a thread of their own.

A due step has hundreds of records, and writing them as JSON takes longer than measuring them. So the training loop
hands over numbers that have arrived on the host, and a thread makes and writes records, in order, while the loop
goes on. The user's `on_alarm` is called by the loop's own thread at its next step: it may stop or change the
training.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from narrowgauge.gauges._history import storages_by_slot
from narrowgauge.gauges._records import LOG, Record, Writer, read_records
from narrowgauge.gauges._watch._alarms import Alarms
from narrowgauge.gauges._watch._tensorboard import TensorBoardWriter

_MOST = 64  # batches that may wait: a slow disk stops the loop, and does not fill the memory
Path = str | os.PathLike[str]


class RecordSink:
    """Receives records.

    Args:
        path: the file, or an existing folder; None keeps records in memory.
        tensorboard: a folder for TensorBoard's events, or None.
        resume_from: the step after which the file goes on, or None.
        alarms: raised by records.

    Attributes:
        writer: of the file, once it is open.
        rows: the records in memory.
    """

    def __init__(
        self, path: Path | None, tensorboard: Path | None, resume_from: int | None, alarms: Alarms
    ) -> None:
        self._path, self._folder, self._resume_from = path, tensorboard, resume_from
        self._alarms: Alarms | None = alarms
        self.writer: Writer | None = None
        self.rows: list[Record] = []
        self._tensorboard: TensorBoardWriter | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="narrowgauge.gauges")
        self._waiting: deque[Future[None]] = deque()

    def open(self, header: Record, first: bool) -> None:
        """Open the outputs and write the first record; a continued file has one.

        Args:
            header: the first record.
            first: whether this is the first rank: others write nothing and raise no alarms.

        Raises:
            OSError, ValueError: if the file or the folder cannot be written, or the file not be continued.
        """
        if self._path is None:
            self.rows.append(header)
        if not first:
            self._alarms = None
            return
        assert self._alarms is not None
        if self._path is not None:
            self.writer = Writer(self._path, self._resume_from)
        if self._folder is not None:
            self._tensorboard = TensorBoardWriter(self._folder, self._resume_from or 0)
        if self.writer is not None and self.writer.continues:
            before = read_records(self.writer.path)
            self._alarms.begin(before[0])
            changed = _changed_storages(before, header)
            if changed:
                self.writer.write([{"kind": "storages", "step": self._resume_from, "parameters": changed}])
            self._alarms.replay(read_records(self.writer.path) if changed else before)
            return
        self._alarms.begin(header)
        if self.writer is not None:
            self.writer.write([header])

    def submit(self, make: Callable[[], Iterable[Record]]) -> None:
        """Hand over a function that makes records. The thread calls it after those submitted before.

        Raises:
            Exception: of an earlier function, or of `on_alarm`.
        """
        while self._waiting and (self._waiting[0].done() or len(self._waiting) >= _MOST):
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(self._take, make))
        self.notify()

    def notify(self) -> None:
        """Call `on_alarm` with the alarms raised since."""
        if self._alarms is not None:
            self._alarms.notify()

    def flush(self) -> None:
        """Wait until everything submitted has been written."""
        while self._waiting:
            self._waiting.popleft().result()
        self.notify()

    def close(self) -> None:
        """Flush, and close file and TensorBoard."""
        try:
            self.flush()
        finally:
            self._thread.shutdown()
            for output in (self.writer, self._tensorboard):
                if output is not None:
                    output.close()

    def _take(self, make: Callable[[], Iterable[Record]]) -> None:
        records: list[Record] = []
        for record in make():
            records.append(record)
            if self._alarms is not None:
                records += self._alarms.raised_by(record)
        if self._path is None:
            self.rows += records
        elif self.writer is not None:
            try:
                self.writer.write(records)
            except OSError as error:
                LOG.error("%s: %s; no more records are written, the training goes on", self.writer.path, error)
        if self._tensorboard is not None:
            for record in records:
                self._tensorboard.add(record)


def _changed_storages(before: Sequence[Record], header: Record) -> dict[str, dict[str, str]]:
    """By parameter, the storages of a run that goes on, where they are others than those of its last record."""
    known = storages_by_slot(before[0])
    for record in before:
        if record["kind"] == "storages":
            known |= record["parameters"]
    return {name: own for name, own in storages_by_slot(header).items() if known.get(name, {}) != own}
