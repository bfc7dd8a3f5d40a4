"""Where records go: made, looked at for alarms and written by a thread of their own, in order.

Hundreds of records are made at a due step, and writing them as JSON takes longer than measuring them did. The loop
need not wait for that: it hands over numbers that have arrived on the host, and a thread makes records of them
while the loop launches and waits for the device. What the user asked to be called with is called by the loop's own
thread, when it next comes by: a callback may stop the training, or change it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from narrowgauge.gauges._alarms import Alarms
from narrowgauge.gauges._records import LOG, Record, Writer
from narrowgauge.gauges._tensorboard import Board

_MOST = 64  # batches that may wait: a disk that is too slow holds the loop up, not the memory


class Outlet:
    """Takes records as they come.

    Args:
        writer: of the file, if there is one.
        board: TensorBoard's, if there is one.
        keeps: whether records are kept in memory, in `rows`.
        alarms: what is raised by records; None where another rank raises them.

    Attributes:
        writer: the same.
        rows: the records that are kept.
    """

    def __init__(self, writer: Writer | None, board: Board | None, keeps: bool, alarms: Alarms | None) -> None:
        self.writer, self.rows = writer, list[Record]()
        self._board, self._keeps, self._alarms = board, keeps, alarms
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="narrowgauge.gauges")
        self._waiting: deque[Future[None]] = deque()

    def begin(self, header: Record) -> None:
        """Take the first record, which a file that is continued has already.

        Raises:
            OSError: where the file cannot be written.
        """
        if self.writer is not None:
            self.writer.write([] if self.writer.continues else [header])
        elif self._keeps:
            self.rows.append(header)
        if self._board is not None:
            self._board.add(header)

    def put(self, make: Callable[[], Iterable[Record]]) -> None:
        """Hand over what makes records; it runs in the thread, behind what was handed over before.

        Raises:
            Exception: whatever an earlier one or a callback raised.
        """
        while self._waiting and (self._waiting[0].done() or len(self._waiting) >= _MOST):
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(self._take, make))
        self.call_out()

    def call_out(self) -> None:
        """Call the user's function with alarms that were raised since."""
        if self._alarms is not None:
            self._alarms.call_out()

    def settle(self) -> None:
        """Wait until all that was handed over has been written."""
        while self._waiting:
            self._waiting.popleft().result()
        self.call_out()

    def close(self) -> None:
        """Settle, and close what was written to."""
        try:
            self.settle()
        finally:
            self._thread.shutdown()
            for output in (self.writer, self._board):
                if output is not None:
                    output.close()

    def _take(self, make: Callable[[], Iterable[Record]]) -> None:
        records: list[Record] = []
        for record in make():
            records.append(record)
            if self._alarms is not None and "step" in record:
                records += self._alarms.of(record)
        if self.writer is not None:
            self._write(self.writer, records)
        elif self._keeps:
            self.rows += records
        if self._board is not None:
            for record in records:
                self._board.add(record)

    @staticmethod
    def _write(writer: Writer, records: list[Record]) -> None:
        try:
            writer.write(records)
        except OSError as error:
            LOG.error("%s: %s; no more records, the training goes on", writer.path, error)
