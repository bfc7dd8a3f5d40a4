"""Rows of fitted recipes beside uniform ones: which is better, and by how much.

A difference is the loss of a row minus that of D with the same seed, which starts with the same weights and trains
on the same batches. The **control** shows how large differences are by chance alone: `split` stores the same fp32
numbers as D, as two words, and rounds ties differently. Its largest difference over the seeds is the **paired
spread** of a setting (model, learning rate, β2). A row has **fp32 quality** if its mean difference is within the
larger of 0.001 and that spread.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from studies.fit.rows import BYTES, CONTROL, REFERENCE, TOLERANCES, by_bytes, by_tolerance
from studies.shared.tables import Results, apart

DEFAULT = by_tolerance(TOLERANCES[0])
QUALITY = 0.001  # nats from D
SAME = 0.05  # bytes a parameter; a smaller difference counts as the same
LEAST_SPREAD = 1e-4  # nats; a spread of a few seeds may be zero by chance
Cell = tuple[str, float, float]  # model, learning rate, β2


@dataclass(frozen=True)
class Row:
    """One row in one setting."""

    name: str
    kind: str  # uniform, fitted or random
    bytes: float  # measured, a parameter
    differences: list[float]  # from D, by seed
    by_seed: dict[int, float]  # losses
    diverged: int

    @property
    def mean(self) -> float | None:
        """The mean difference from D; None where a seed diverged."""
        return statistics.fmean(self.differences) if self.differences and not self.diverged else None

    def behind(self, other: Row) -> list[float]:
        """By seed, the loss minus that of another row."""
        return [loss - other.by_seed[seed] for seed, loss in self.by_seed.items() if seed in other.by_seed]


def cells(results: Results) -> list[Cell]:
    """The settings that have a training of D, in the order of the page."""
    runs = [run for run in results["runs"] if run["row"] == REFERENCE and "failed" not in run]
    return list(dict.fromkeys(cell_of(run) for run in sorted(runs, key=order)))


def cell_of(run: Results) -> Cell:
    """A run's setting."""
    return run["model"], run["lr"], run["beta2"]


def order(run: Results) -> tuple[Any, ...]:
    """A run's place on the page."""
    places = {"micro": 0, "llama-micro": 1, "bert-micro": 2, "clip-micro": 3}
    return places.get(run["model"], 4), run["model"], run["beta2"], -run["lr"]


def fits(results: Results) -> list[Results]:
    """The fits, in the order of the page."""
    return sorted((run for run in results["runs"] if run["row"] == "fit" and "failed" not in run), key=order)


def found(results: Results, cell: Cell) -> list[Row]:
    """All rows of a setting, by bytes, the fewest first."""
    uniform = {row["name"] for row in results["rows"] if row["uniform"]}
    by_row: dict[str, list[Results]] = defaultdict(list)
    for run in results["runs"]:
        if cell_of(run) == cell and run["row"] != "fit" and "failed" not in run:
            by_row[run["row"]].append(run)
    rows = []
    for name, runs in by_row.items():
        good = {run["seed"]: run["validation_loss"] for run in runs if run["validation_loss"] is not None}
        rows.append(Row(
            name, "uniform" if name in uniform else name.split(" ")[0].rstrip(","),
            statistics.fmean(run["bytes"]["total"] for run in runs), apart(runs, by_row[REFERENCE]), good,
            sum(run["diverged"] for run in runs),
        ))  # fmt: skip
    return sorted(rows, key=lambda row: row.bytes)


def spread(rows: Sequence[Row]) -> float:
    """The largest difference of the control from D over the seeds."""
    control = next((row.differences for row in rows if row.name == CONTROL), [])
    return max(LEAST_SPREAD, *map(abs, control)) if control else LEAST_SPREAD


def margin(rows: Sequence[Row]) -> float:
    """How far from D a mean may be for fp32 quality."""
    return max(QUALITY, spread(rows))


def is_good(row: Row | None, rows: Sequence[Row]) -> bool:
    """Whether a row has fp32 quality."""
    return row is not None and row.mean is not None and abs(row.mean) <= margin(rows)


def narrowest(rows: Sequence[Row], kind: str) -> Row | None:
    """The row of a kind with the fewest bytes that has fp32 quality."""
    return next((row for row in rows if row.kind == kind and is_good(row, rows)), None)


def saved(results: Results) -> list[float | None]:
    """By setting, how many bytes the narrowest fitted row of fp32 quality saves against the narrowest uniform one.

    None if either kind has no row of that quality.
    """
    pairs = [(narrowest(rows, "uniform"), narrowest(rows, "fitted")) for rows in _settings(results)]
    return [mine and theirs and theirs.bytes - mine.bytes for theirs, mine in pairs]


def _settings(results: Results) -> Iterator[list[Row]]:
    return (found(results, cell) for cell in cells(results))


@dataclass(frozen=True)
class Duel:
    """A fitted row against another one that takes no more bytes, by their losses or by their distances from D."""

    fitted: Row
    other: Row
    limit: float
    distance: bool = False

    @property
    def verdict(self) -> str:
        """`below`, `above` or `alike`.

        Losses differ if the mean difference over the seeds is more than the paired spread and all seeds have the
        same sign. Distances of the means from D differ if they do by more than fp32 quality allows; a distance
        within that counts as that.
        """
        if self.distance:
            mine, theirs = (max(abs(row.mean or 0.0), self.limit) for row in (self.fitted, self.other))
            return "alike" if abs(mine - theirs) <= self.limit else "above" if mine > theirs else "below"
        costs = self.fitted.behind(self.other)
        mean = statistics.fmean(costs) if costs else 0.0
        if abs(mean) <= self.limit or min(costs) * max(costs) < 0:
            return "alike"
        return "above" if mean > 0 else "below"


def _duel(mine: Row, theirs: Sequence[Row], rows: Sequence[Row], distance: bool) -> Iterator[Duel]:
    """A row against the best of others, if there are any."""
    able = [row for row in theirs if row.mean is not None]
    if able and mine.mean is not None:
        other = min(able, key=lambda row: abs(row.mean or 0.0) if distance else row.mean or 0.0)
        yield Duel(mine, other, margin(rows) if distance else spread(rows), distance)


def of_the_same_bytes(results: Results, distance: bool) -> Iterator[Duel]:
    """Every fitted row against the widest uniform one of no more bytes; of several such, the best."""
    for rows in _settings(results):
        for mine in (row for row in rows if row.kind == "fitted"):
            able = _uniform(rows, mine.bytes)
            most = max((row.bytes for row in able), default=0.0)
            yield from _duel(mine, [row for row in able if row.bytes > most - SAME], rows, distance)


def under_a_limit(results: Results, distance: bool) -> Iterator[Duel]:
    """At each limit of bytes without a uniform row of fp32 quality, the fitted row against the best uniform one."""
    for rows in _settings(results):
        good = narrowest(rows, "uniform")
        named = {row.name: row for row in rows}
        for each in BYTES:
            if by_bytes(each) in named and (good is None or each < good.bytes - SAME):
                yield from _duel(named[by_bytes(each)], _uniform(rows, each), rows, distance)


def against_random(results: Results, distance: bool) -> Iterator[Duel]:
    """The fitted row against every random choice of its bytes."""
    for rows in _settings(results):
        named = {row.name: row for row in rows}
        for row in rows:
            mine = named.get(f"fitted, {row.name.partition(', ')[2]}")
            if row.kind == "random" and mine is not None:
                yield from _duel(mine, [row], rows, distance)


def _uniform(rows: Sequence[Row], most: float) -> list[Row]:
    return [r for r in rows if r.kind == "uniform" and r.mean is not None and r.bytes <= most + SAME]


def counts(duels: Iterable[Duel]) -> dict[str, int]:
    """How many duels have each verdict."""
    verdicts = [duel.verdict for duel in duels]
    return {word: verdicts.count(word) for word in ("below", "alike", "above")}
