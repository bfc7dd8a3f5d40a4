"""`describe()`: what the hook does with each parameter, as a table."""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.optim._describe import as_text


@dataclass(frozen=True)
class SentRow:
    """One parameter: the hook's name for it, shape and dtype, how its gradient travels, bytes of error feedback on
    this rank, the path taken, and why no faster one or why it is exempt."""

    parameter: str
    shape: tuple[int, ...]
    dtype: str
    sent: str
    memory: int
    path: str
    why: str


@dataclass(frozen=True)
class SentTable:
    """A table of rows that prints as text."""

    rows: tuple[SentRow, ...]

    def __str__(self) -> str:
        head = ("parameter", "shape", "dtype", "sent", "memory", "path", "why")
        return as_text(head, map(_cells, self.rows))


def _cells(row: SentRow) -> tuple[str, ...]:
    shape = "x".join(map(str, row.shape)) or "scalar"
    return row.parameter, shape, row.dtype, row.sent, f"{row.memory:,}", row.path, row.why
