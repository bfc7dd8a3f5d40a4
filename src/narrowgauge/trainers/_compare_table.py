"""A comparison as text: what each recipe reached, what it cost, and how to read that."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from narrowgauge.trainers._compare_results import mark

Json = dict[str, Any]
Columns = Mapping[str, Callable[[Json], str]]

MISSING = "–"
# Up to this width the table is in two parts, or numbers would be cut.
_WIDE = 140


def tables(results: Json, width: int | None = None) -> str:
    """One table, or two on a narrow terminal: what each recipe reached, and what it cost.

    Args:
        results: the content of results.json.
        width: of the terminal, in characters; None for that of this one.
    """
    width = shutil.get_terminal_size((_WIDE, 24)).columns if width is None else width
    rows: dict[str, Json] = results["recipes"]
    reference, measure = results["reference"], results["measure"]
    reached: dict[str, Callable[[Json], str]] = {
        f"{measure.removesuffix('_loss')}\nloss": lambda row: _loss(row, measure),
        "perplex-\nity": lambda row: _number(row["perplexity"], 2),
        f"minus {reference}" if reference else "difference": lambda row: (
            "(reference)" if reference and row is rows[reference] else _difference(row)
        ),
        "EDQ\n%": lambda row: _number(row["edq"], 1, 100),
        "lost\n%": lambda row: _number(row["lost_updates"], 1, 100),
    }
    if not results["perplexity"]:
        del reached["perplex-\nity"]
    cost: dict[str, Callable[[Json], str]] = {
        "bytes/param\nplanned": lambda row: _number(row["bytes_per_parameter"], 2),
        "\nmeasured": lambda row: _number((row["bytes"]["measured"] or {}).get("total"), 2),
        "peak\nMiB": lambda row: _number(row["peak_memory_bytes"], 1, 2.0**-20),
        "optimizer\nms (quartiles)": lambda row: _time(row, "optimizer"),
        "step\nms (quartiles)": lambda row: _time(row, "step"),
    }
    parts = [reached | cost] if width >= _WIDE else [reached, cost]
    return "\n\n".join(_table(rows, columns) for columns in parts)


def legend(results: Json, width: int | None = None) -> str:
    """How to read the table, and what its reader has to know of this comparison."""
    width = shutil.get_terminal_size((_WIDE, 24)).columns if width is None else width
    reference, rows = results["reference"], results["recipes"].values()
    lines = [
        *(f"{name}: {row['title']}." for name, row in results["recipes"].items() if row.get("title")),
        "EDQ: how far what is stored moved along the intended update (100%: nothing is missing along it). Lost "
        "updates: intended changes that left what is stored as it was.",
    ]
    if results["measure"] == "training_loss":
        lines.append("Training loss: mean over the last tenth of the steps; there were no validation batches.")
    if max(len(row["seeds"]) for row in rows) > 1:
        lines.append(
            "±: standard deviation over seeds, of the loss and of the paired difference. ~ marks a difference that "
            f"may be chance (its 95 % interval contains 0), ≈ another one within the spread of {reference}'s loss."
        )
    else:
        lines.append("One seed: differences have no spread to be compared with (three seeds give one).")
    if any(row["step_ms"] is not None for row in rows):
        text = "ms: median and quartiles of steps that were timed in turns."
        if any(row.get("step_overlaps") or row.get("optimizer_overlaps") for row in rows):
            text += f" ~ marks quartiles that overlap {reference}'s: these times do not tell the two apart."
        lines.append(text)
    lines += results["notes"]
    if results["interrupted"]:
        lines.append("Interrupted: what was not complete is missing.")
    folded = textwrap.TextWrapper(max(40, width), break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(folded.fill, lines))


def _table(rows: Mapping[str, Json], columns: Columns) -> str:
    """Columns under their headings of one or two lines, the first aligned left."""
    heads = [["", "recipe"], *(["", *name.split("\n")][-2:] for name in columns)]
    cells = [[name, *(read(row) for read in columns.values())] for name, row in rows.items()]
    lines: Sequence[Sequence[str]] = [*zip(*heads, strict=True), *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        " ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _loss(row: Json, measure: str) -> str:
    if row["diverged"]:
        return "diverged"
    spread = row[f"{measure}_spread"]
    return _number(row[measure], 4) + ("" if spread is None else f" ± {spread:.4f}")


def _difference(row: Json) -> str:
    difference = row["difference"]
    if difference is None or row["diverged"]:
        return MISSING
    text = f"{difference['mean']:+.5f}"
    if difference["spread"] is None:
        return text
    return f"{text} ± {difference['spread']:.5f}{mark(difference)}"


def _time(row: Json, part: str) -> str:
    if row[f"{part}_ms"] is None:
        return MISSING
    low, high = row[f"{part}_ms_quartiles"]
    mark = "  " if not row.get(f"{part}_overlaps") else " ~"
    return f"{milliseconds(row[f'{part}_ms'])} ({milliseconds(low)}–{milliseconds(high)}){mark}"


def milliseconds(value: float) -> str:
    """Three digits that count."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return MISSING if value is None else f"{value * scale:.{digits}f}"
