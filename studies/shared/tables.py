"""A table as its rows and columns, and the runs, differences and numbers that cells are made of.

A column is its heading, what it shows of a row (a path such as `bytes.total`, or a function), and how (a format
such as `.2f`, or a function). What is None leaves the cell empty:

    table(results["recipes"], ("recipe", "name"), ("loss", "validation_loss", ".4f"), ("lost", lost, percent))

`per` repeats columns for each of some keys, and `fill_in` makes the sentence below a table that says what was run.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Results = dict[str, Any]
Column = tuple[str, str | Callable[[Any], Any]] | tuple[str, str | Callable[[Any], Any], str | Callable[[Any], str]]
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], words: int | str = 1) -> str:
    """A table of cells; all columns but the first few are set to the right, or each by its letter, l or r."""
    sides = words if isinstance(words, str) else ("l" * words).ljust(len(head), "r")
    marks = ["---" if side == "l" else "---:" for side in sides]
    return "".join("| " + " | ".join(row) + " |\n" for row in (head, marks, *rows))


def table(rows: Iterable[Any], *columns: Column, words: int | str = 1, last: Sequence[str] | None = None) -> str:
    """A table of rows.

    Args:
        rows: a line each, of any kind that the columns take.
        columns: see the module.
        words: how many columns are set to the left, or the side of each as in `lrl`.
        last: the cells of a line below the rows.
    """
    lines = [[_cell(row, *column[1:]) for column in columns] for row in rows]
    return markdown([column[0] for column in columns], [*lines, *([] if last is None else [last])], words)


def _cell(row: Any, what: str | Callable[[Any], Any], how: str | Callable[[Any], str] = "") -> str:
    value = what(row) if callable(what) else at(row, what)
    if value is None:
        return ""
    return how(value) if callable(how) else format(value, how)


def per(keys: Iterable[Any], head: str | Callable[[Any], str], *columns: Any) -> list[Any]:
    """Columns for each of some keys, shown by functions of the key and the row.

    The first column of a key has the key before its heading: `head` makes it, a format or a function.
    """
    shown = head if callable(head) else head.format
    return [
        (title if place else f"{shown(key)}{title}", functools.partial(show, key), *how)
        for key in keys
        for place, (title, show, *how) in enumerate(columns)
    ]


def at(row: Any, path: str) -> Any:
    """What stands at a path of keys and attributes: `bytes.total`."""
    for name in path.split("."):
        row = row[name] if isinstance(row, dict) else getattr(row, name)
    return row


def runs_of(results: Results, **fields: object) -> list[Results]:
    """The runs that were made and have these fields, by seed."""
    found = [run for run in results["runs"] if "failed" not in run and fields.items() <= run.items()]
    return sorted(found, key=lambda run: run["seed"])


def apart(runs: Iterable[Results], reference: Iterable[Results], key: str = "validation_loss") -> list[float]:
    """A figure of runs minus that of the reference with the same seed, where both have one."""
    known = {run["seed"]: run[key] for run in reference}
    return [
        run[key] - known[run["seed"]]
        for run in runs
        if run[key] is not None and known.get(run["seed"]) is not None
    ]  # fmt: skip


def several(values: Sequence[float], form: str = "+.4f") -> str:
    """A mean, with the smallest and the largest if there are several; nothing for none."""
    if not values:
        return ""
    mean = format(statistics.fmean(values), form)
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} … {max(values):{form}})"


def mean_of(values: Iterable[float | None], form: str) -> str:
    """The mean of those that are there; nothing without any."""
    good = [value for value in values if value is not None]
    return format(statistics.fmean(good), form) if good else ""


def span(values: Iterable[Any], form: str | Callable[[Any], str] = "") -> str:
    """`3 to 7`, or `3` where they are shown alike; nothing for none."""
    each = list(values)
    ends = [form(f(each)) if callable(form) else format(f(each), form) for f in (min, max)] if each else []
    return " to ".join(dict.fromkeys(ends))


def name_of(text: str) -> str:
    """A name for a fact: underscores for all that is no letter or digit, however many there are."""
    return "_".join("".join(c if c.isalnum() else " " for c in text).split())


def place_of(text: str) -> str:
    """A name for a fact: an underscore for each character that is no letter or digit."""
    return "".join(c if c.isalnum() else "_" for c in text)


def digits_of(beta: float) -> str:
    """0.999 is 999 in the name of a fact."""
    return f"{beta:g}".partition(".")[2]


def raised(exponent: float) -> str:
    """An exponent in raised digits."""
    return str(round(exponent)).translate(SUPERSCRIPTS)


def machine(results: Results) -> str:
    """The device and torch's version."""
    environment = results["environment"]
    return f"{environment['device']}, torch {environment['torch'].partition('+')[0]}"


def left_out(results: Results, who: Callable[[Results], str] | None = None) -> str:
    """How many runs there are not, and why others failed, each named by a function of the run."""
    left = len(results["unfinished"])
    many = "1 run was" if left == 1 else f"{left} runs were"
    failed = [run for run in results["runs"] if "failed" in run] if who else []
    notes = [f"{many} left out for want of time."] if left else [] if failed else ["All runs were made."]
    return " ".join([*notes, *(f"{who(run)} failed: {run['failed']}." for run in failed)])


def fill_in(results: Results, sentence: str, **more: Any) -> str:
    """A sentence with figures of the results in braces, `{training[lr]:g}`; `machine` and `tokens` are known."""
    known: Results = {"machine": machine(results)}
    if {"batch", "sequence"} <= results.get("training", {}).keys():
        known["tokens"] = results["training"]["batch"] * results["training"]["sequence"]
    return sentence.format_map(results | known | more) + "\n"


def sizes(results: Results) -> str:
    """`gpt2 of 124,439,808 parameters`, of each model."""
    return ", ".join(f"{name} of {count:,} parameters" for name, count in results["parameters"].items())


def origin(results: Results) -> str:
    """What `shared/gather.py` trained, on what."""
    return fill_in(
        results,
        "`{command}`: {training[model]} model of {parameters:,} parameters, {training[steps]} steps of {tokens:,} "
        "tokens in fp32 on {data[source]}, loss {loss[first]:.2f} to {loss[last]:.2f}, learning rate "
        "{training[lr]:g}, β2 {training[beta2]:g}, seed {training[seed]}; {machine}.",
    )


def percent(share: float, digits: int = 3) -> str:
    """A share in per cent, to some significant digits."""
    return f"{significant(100 * share, digits)} %"


def percent2(share: float) -> str:
    """A share in per cent, to two significant digits."""
    return percent(share, 2)


def significant(x: float, digits: int = 3) -> str:
    """A number to some significant digits, without an exponent up to a million."""
    if x == 0 or not math.isfinite(x):
        return f"{x:g}"
    places = digits - 1 - math.floor(math.log10(abs(x)))
    if not -6 < places < 8:
        return f"{x:.{digits - 1}e}"
    return f"{round(x, places):,.{max(places, 0)}f}"


def with_error(pair: Sequence[float | None], digits: int, scale: float = 1.0) -> str:
    """A mean with its standard error, if it has one."""
    mean, error = pair
    spread = "" if error is None else f" ± {scale * error:.{digits}f}"
    return f"{scale * (mean or 0):.{digits}f}{spread}"


def cross_check(findings: Callable[[Results], dict[str, str]], *runs: Results) -> str:
    """What several runs found, side by side."""
    columns = [findings(run) for run in runs]
    devices = [run["environment"]["device"].partition(" (")[0] for run in runs]
    return markdown(("", *devices), [(title, *(column[title] for column in columns)) for title in columns[0]])
