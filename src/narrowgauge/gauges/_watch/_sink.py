"""Where records go: a thread makes them, raises alarms and writes them, in order.

A due step has hundreds of records, and writing them as JSON takes longer than measuring them. So the training loop
hands over numbers that have arrived on the host, and a thread makes and writes records while the loop goes on. The
user's `on_alarm` is called by the loop's own thread at its next step: it may stop or change the training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from narrowgauge.gauges._records import LOG, Record, Writer
from narrowgauge.gauges._watch._alarms import Alarms
from narrowgauge.gauges._watch._tensorboard import TensorBoardWriter

_MOST = 64  # batches that may wait: a slow disk stops the loop, and does not fill the memory


class RecordSink:
    """Receives records.

    Args:
        writer: of the file, if there is one.
        tensorboard: its writer, if there is one.
        keeps: whether records are kept in `rows`, if there is no file.
        alarms: raised by records; None where another rank raises them.

    Attributes:
        writer: the same.
        rows: the records in memory.
    """

    def __init__(
        self, writer: Writer | None, tensorboard: TensorBoardWriter | None, keeps: bool, alarms: Alarms | None
    ) -> None:
        self.writer, self.rows = writer, list[Record]()
        self._tensorboard, self._keeps, self._alarms = tensorboard, keeps, alarms
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="narrowgauge.gauges")
        self._waiting: deque[Future[None]] = deque()

    def begin(self, header: Record) -> None:
        """Write the first record; a continued file has one.

        Raises:
            OSError: if the file cannot be written.
        """
        if self.writer is not None:
            self.writer.write([] if self.writer.continues else [header])
        elif self._keeps:
            self.rows.append(header)
        if self._tensorboard is not None:
            self._tensorboard.add(header)

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
            if self._alarms is not None and "step" in record:
                records += self._alarms.raised_by(record)
        if self.writer is not None:
            try:
                self.writer.write(records)
            except OSError as error:
                LOG.error("%s: %s; no more records are written, the training goes on", self.writer.path, error)
        elif self._keeps:
            self.rows += records
        if self._tensorboard is not None:
            for record in records:
                self._tensorboard.add(record)
