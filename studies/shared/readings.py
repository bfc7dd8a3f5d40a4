"""Statements of a paper beside what was measured, and whether they hold here: made from the numbers by a rule.

What a paper says of many runs is seldom a single figure, so a reading is one of three: the statement holds, it does
not, or these runs cannot tell. "Cannot tell" is what there is where a difference is no larger than chance makes it.
The rules are functions of this module; which one a statement is held to is said on the study's page.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from studies.shared import tables
from studies.shared.tables import Results, markdown

SURE = 0.05  # probability below which a count is not put down to chance
# Standard errors: by chance a mean is further from zero once in 370 times, but once in 59 where the deviation is
# known from 8 degrees of freedom, the fewest in these studies, and once in 25 with as few as `FREE`.
CERTAIN = 3.0
FREE = 4  # degrees of freedom at least, before anything is said of chance
WORDS = {True: "holds", False: "does not hold", None: "cannot tell"}


@dataclass(frozen=True)
class Reading:
    """A statement of a paper, and what became of it here."""

    statement: str
    at: str  # table, figure or section
    paper: str  # its figures
    here: str = ""  # ours, and nothing where it has not been run
    holds: bool | None = None  # None where these runs cannot tell


def table(readings: Iterable[Reading]) -> str:
    """Statement, paper, here, reading."""
    lines = [[f"{r.statement}<br>{r.at}", r.paper, r.here or "not run", verdict(r)] for r in readings]
    return markdown(("statement", "paper", "here", "reading"), lines, words=4)


def verdict(reading: Reading) -> str:
    """The reading in words, nothing for what has not been run."""
    return WORDS[reading.holds] if reading.here else ""


def behind(costs: Sequence[float], spread: float | None, lost: bool = False) -> bool | None:
    """Whether a row costs more than its reference does, by seed `costs` more.

    `spread` is how far chance takes a mean, as the reference's own seeds or `margin` say, None if not known; `lost`
    says whether a run of the row diverged where the reference's did not. True and False are for a mean cost above
    `spread` and below minus that; None between, and where some seeds cost more and others less.
    """
    if lost:
        return True
    if not costs or spread is None or abs(statistics.fmean(costs)) <= spread or min(costs) * max(costs) < 0:
        return None
    return statistics.fmean(costs) > 0


def ends(
    costs: Sequence[float], spread: float | None, lost: int, *, worse: bool, tells: bool = True
) -> bool | None:
    """Whether a row ends behind its reference, as the paper says if `worse`, or where it does."""
    return behind(costs, spread, lost > 0) if worse else alike(costs, spread, lost > 0, tells=tells)


def every(found: Iterable[bool]) -> bool | None:
    """Whether all hold; None for none at all."""
    each = list(found)
    return all(each) if each else None


def alike(costs: Sequence[float], spread: float | None, lost: bool = False, *, tells: bool = True) -> bool | None:
    """Whether a row's mean cost is no larger than chance makes one; None where that is not known.

    One seed may show that it is larger, but not that it is none: a single run may end near by chance. Nor is it a
    finding where chance makes as much as what there is to be seen, `tells` False.
    """
    if lost:
        return False
    if not costs or spread is None:
        return None
    if abs(statistics.fmean(costs)) > spread:
        return False
    return True if tells and len(costs) > 1 else None


def told(costs: str, lost: int, count: int, spread: str, reference: str) -> str:
    """What was measured of a row, in words: its costs and what they are held against, both as printed."""
    if lost:
        return ", ".join(filter(None, (costs, f"{lost} of {count} diverged")))
    if not costs:
        return ""
    return f"{costs}; " + (f"{reference}'s seeds {spread}" if spread else f"one seed of {reference}")


def chance(series: Iterable[Sequence[float]]) -> float | None:
    """Standard deviation of a value about the mean of its series, pooled over all series.

    Runs that differ in any rounding part, and end a little apart, by chance. Two or three seeds of one row say
    badly how far; those of all rows together say it well. None below `FREE` degrees of freedom.
    """
    squares, free = 0.0, 0
    for values in series:
        if len(values) > 1:
            mean = statistics.fmean(values)
            squares += sum((x - mean) ** 2 for x in values)
            free += len(values) - 1
    return math.sqrt(squares / free) if free >= FREE else None


def margin(deviation: float | None, runs: int) -> float | None:
    """What the mean of so many runs has to exceed: `CERTAIN` standard errors of it."""
    return None if deviation is None or not runs else CERTAIN * deviation / math.sqrt(runs)


def fewer(less: int, more: int) -> bool | None:
    """Whether one of two equally long series has fewer events beyond what a fair coin for each does; or more."""
    both = less + more

    def beyond(count: int) -> bool:
        return both > 0 and sum(math.comb(both, k) for k in range(count, both + 1)) < SURE * 2**both

    return True if beyond(more) else False if beyond(less) else None


def rarer(less: int, of_less: int, more: int, of_more: int) -> bool | None:
    """Whether a smaller share of some runs has an event than of others, or a larger: Fisher's test, one-sided."""
    runs, events = of_less + of_more, less + more

    def beyond(found: int, of: int) -> bool:
        ways = [math.comb(of, k) * math.comb(runs - of, events - k) for k in range(found, min(of, events) + 1)]
        return events > 0 and sum(ways) < SURE * math.comb(runs, events)

    return True if beyond(more, of_more) else False if beyond(less, of_less) else None


class Beside:
    """Runs of a study beside those of a reference with the same seed; `fields` say which runs are meant."""

    def __init__(self, results: Results, reference: str, **fields: object) -> None:
        self.results, self.reference, self.fields = results, reference, fields

    def runs(self, row: str) -> list[Results]:
        """A row's runs, by seed."""
        return tables.runs_of(self.results, row=row, **self.fields)

    def apart(self, row: str, key: str = "validation_loss") -> list[float]:
        """A figure minus the reference's, where neither diverged."""
        mine, theirs = ([run for run in self.runs(name) if not run["diverged"]] for name in (row, self.reference))
        return tables.apart(mine, theirs, key)

    def margin(self, runs: int, key: str = "validation_loss") -> float | None:
        """What the mean difference of so many runs has to exceed: by how those of all rows change with the seed."""
        rows = [row["name"] for row in self.results["rows"] if row["name"] != self.reference]
        return margin(chance(self.apart(row, key) for row in rows), runs)

    def lost(self, row: str) -> int:
        """How many runs diverged where the reference's did not."""
        good = {run["seed"] for run in self.runs(self.reference) if not run["diverged"]}
        return sum(bool(run["diverged"]) and run["seed"] in good for run in self.runs(row))
