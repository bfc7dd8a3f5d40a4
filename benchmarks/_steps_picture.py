"""Times of steps as a picture: a bar for each optimizer, as long as its share of the memory limit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _steps import families, short
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MultipleLocator

from narrowgauge.cli._charts import INK, MUTED, PALETTE, drawing

_SHOWN = ("big", "gpt2-medium")  # the lists that stand for large tensors and for a real model
_COLOURS = {
    "narrowgauge": PALETTE["series-2"][0],
    "torch": "#808a94",
    "other libraries": PALETTE["series-1"][0],
}
_WIDTH, _NAMES = 10.4, 3.45  # inches of the picture, and of the names in it
_ROW, _ABOVE, _BELOW = 0.27, 0.75, 0.95  # inches of a row, and of what is above and below them
_TYPE = 11.5


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: a panel a list, bars from the top in the order of the rows, a heading a group."""
    found = results["lists"]
    lists = [found[name] for name in _SHOWN if name in found] or list(found.values())[:2]
    places = _places(lists[0]["rows"])
    rows = max(places.values()) + 1
    height = _ABOVE + _ROW * rows + _BELOW
    with drawing():
        figure = Figure((_WIDTH, height), facecolor="white")
        each = (_WIDTH - _NAMES - 0.15) / len(lists)
        furthest = max(row.get("share", 0) for of in lists for row in of["rows"].values())
        for i, of in enumerate(lists):
            box = (_NAMES + i * each, _BELOW, each - 0.4, _ROW * rows)
            axis = figure.add_axes((box[0] / _WIDTH, box[1] / height, box[2] / _WIDTH, box[3] / height))
            axis.set(xlim=(0, max(1.04, 1.04 * furthest)), ylim=(rows - 0.5, -0.5), yticks=[])
            _panel(axis, of, places, names=i == 0)
        figure.text(
            (_NAMES + (_WIDTH - _NAMES) / 2) / _WIDTH, 0.42 / height,
            "share of the memory limit; in numbers: ms per 10⁹ parameters", ha="center", color=MUTED,
            fontsize=_TYPE,
        )  # fmt: skip
        present = families(results)
        handles = [Patch(color=colour, label=name) for name, colour in _COLOURS.items() if name in present]
        figure.legend(
            handles=handles, loc="lower center", ncols=3, frameon=False, fontsize=_TYPE,
            bbox_to_anchor=((_NAMES + (_WIDTH - _NAMES) / 2) / _WIDTH, 0.0),
        )  # fmt: skip
        figure.savefig(path, format="png", dpi=130)


def _places(rows: Mapping[str, Any]) -> dict[str, int]:
    """Where each row stands, a free place before each group for its heading."""
    places, group, at = {}, None, 0
    for name, row in rows.items():
        at += row["group"] != group
        group = row["group"]
        places[name] = at
        at += 1
    return places


def _panel(axis: Any, of: Mapping[str, Any], places: Mapping[str, int], names: bool) -> None:
    widest, group = axis.get_xlim()[1], None
    for name, row in of["rows"].items():
        if (at := places.get(name)) is None:
            continue
        if names:
            ours = row["of"] == "narrowgauge"
            _text(axis, -0.015 * widest, at, name, ha="right", color=INK, weight="bold" if ours else "normal")
            if row["group"] != group:
                group = row["group"]
                blank = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
                _text(axis, 0, at - 0.92, group, color=MUTED, style="italic", bbox=blank)
        if "failed" in row:
            _text(axis, 0.01 * widest, at, "failed", color=MUTED)
            continue
        colour = _COLOURS.get(row["of"], _COLOURS["other libraries"])
        axis.barh(at, row["share"], 0.74, color=colour, zorder=2)
        _number(axis, row["share"], at, short(row["ms_per_1e9"]), widest)
    axis.axvline(1, color=INK, linewidth=1.6, linestyle=(0, (4, 2)), zorder=3)
    _text(axis, 1, -0.7, "limit", ha="right" if widest < 1.3 else "center", va="bottom", color=INK)
    axis.set_title(of["title"], color=INK, fontsize=_TYPE + 1.5, pad=22)
    axis.xaxis.set_major_locator(MultipleLocator(0.25 if widest < 1.3 else 0.5))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:.0f} %"))
    axis.tick_params(labelsize=_TYPE)
    axis.spines["left"].set_visible(False)
    axis.grid(False, axis="y")


def _number(axis: Any, end: float, at: int, label: str, widest: float) -> None:
    """A number behind a short bar, or at the end of a long one, left of the limit's line if that is near."""
    if end <= 0.3 * widest:
        _text(axis, end + 0.012 * widest, at, label, color=INK)
        return
    end = 1.0 if 1.0 < end < 1.0 + 0.13 * widest else end
    _text(axis, end - 0.012 * widest, at, label, ha="right", color="white", weight="bold")


def _text(axis: Any, x: float, y: float, text: str, **style: Any) -> None:
    axis.text(x, y, text, **{"va": "center_baseline", "fontsize": _TYPE, "zorder": 4, **style})
