"""Steps of optimizers: docs/speed.md and its pictures, from the results of `narrowgauge bench optimizers`.

A section for each file `optimizers_DEVICE.json`, with a table for each list; they stand between `<!-- steps -->`
and `<!-- end -->`. The rows come in the groups that the benchmark names, ours in bold beside the peers that keep
about as much. In the picture each optimizer is a bar, as long as its share of the memory limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from _pages import Results, by_device, commands, markdown, packages, replaced, short
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MultipleLocator

from narrowgauge.cli._charts import INK, MUTED, PALETTE, drawing

# A column's title, whether it is for GPUs only, and what stands in it.
_COLUMNS: tuple[tuple[str, bool, Callable[[Results], str]], ...] = (
    ("state B", False, lambda row: f"{row['state_bytes']:.2f}"),
    ("moved B", False, lambda row: f"{row['moved_bytes']:.2f}"),
    ("extra B", True, lambda row: f"{row['peak_extra_bytes']:.2f}"),
    ("ms", False, lambda row: short(row["ms"])),
    ("host ms", True, lambda row: short(row["host_ms"])),
    ("device ms", True, lambda row: short(row["device_ms"]) if row.get("device_ms") is not None else "–"),
    ("ms / 10⁹", False, lambda row: short(row["ms_per_1e9"])),
    ("of limit", False, lambda row: f"{100 * row['share']:.1f} %"),
    ("first step", False, lambda row: f"{row['first_step_seconds']:.2f} s"),
)
_SHOWN = ("big", "gpt2-medium")  # the lists that stand for large tensors and for a real model
_COLORS = {"narrowgauge": PALETTE["series-2"][0], "torch": "#808a94", "other libraries": PALETTE["series-1"][0]}
_WIDTH, _NAMES = 10.4, 3.45  # inches of the picture, and of the names in it
_ROW, _ABOVE, _BELOW = 0.27, 0.75, 0.95  # inches of a row, and of what is above and below them
_TYPE = 11.5


def found(folder: Path) -> dict[str, Results]:
    """The results in a folder by the picture that is drawn of them, GPUs' first."""
    return {f"speed_{device}.png": results for device, results in by_device(folder, "optimizers").items()}


def rendered(text: str, results: Mapping[str, Results]) -> str:
    """A page with its sections drawn anew."""
    sections = "\n".join(section(of, picture) for picture, of in results.items())
    return replaced(text, "steps", f"\n{sections}\n")


def section(results: Results, picture: str) -> str:
    """What was measured on a device: where and with what, the picture, the tables."""
    parts = [f"## {results['environment']['device']}", _origin(results), f"![{alternative(results)}]({picture})"]
    for of in results["lists"].values():
        tensors = f"{of['tensors']:,} tensor{'s' if of['tensors'] > 1 else ''}"
        parts += [f"### {of['title'][0].upper()}{of['title'][1:]}"]
        parts += [f"{of['parameters']:,} parameters in {tensors}.", _table(of["rows"])]
        if failed := [f"- {name}: {row['failed']}" for name, row in of["rows"].items() if "failed" in row]:
            parts += ["Not measured:", "\n".join(failed)]
    return "\n\n".join(parts) + "\n"


def _origin(results: Results) -> str:
    """The command, the versions, and the speed of a copy."""
    speed = results["copy_bytes_per_second"]
    shown = f"{speed / 1e12:.2f} TB/s" if speed >= 1e12 else f"{speed / 1e9:.1f} GB/s"
    return (
        f"{commands(results)}: {packages(results)}. A large tensor is copied at **{shown}**, "
        "reads and writes counted: that is the limit."
    )


def alternative(results: Results) -> str:
    """The picture in words."""
    named = {"narrowgauge": "ours", "torch": "torch's"}
    *some, last = (named.get(name, "other libraries'") for name in _families(results))
    device = results["environment"]["device"]
    return f"Steps as shares of the memory limit on {device}: {', '.join(some)}{' and ' if some else ''}{last}"


def _families(results: Results) -> list[str]:
    """Whose optimizers there are: ours, torch's, and all that are other libraries'."""
    of = {row["of"] for rows in results["lists"].values() for row in rows["rows"].values()}
    return [name for name in _COLORS if name in of] + (["other libraries"] if of - _COLORS.keys() else [])


def _table(rows: Mapping[str, Results]) -> str:
    """The rows of a list, those that failed left out."""
    measured = {name: row for name, row in rows.items() if "failed" not in row}
    on_gpu = any("host_ms" in row for row in measured.values())
    without = {"device ms"} if all(row.get("device_ms") is None for row in measured.values()) else set()
    columns = [(title, show) for title, gpu, show in _COLUMNS if (on_gpu or not gpu) and title not in without]
    lines, group = [], None
    for name, row in measured.items():
        if row["group"] != group:
            group = row["group"]
            lines.append([f"*{group}*" + " |" * len(columns)])
        shown = f"**{name}**" if row["of"] == "narrowgauge" else name
        lines.append([f"{shown}<br>{row['what']}", *(show(row) for _, show in columns)])
    return markdown(["optimizer", *(title for title, _ in columns)], lines).rstrip()


def draw(results: Results, path: Path) -> None:
    """Write a PNG: a panel a list, bars from the top in the order of the rows, a heading a group."""
    known = results["lists"]
    lists = [known[name] for name in _SHOWN if name in known] or list(known.values())[:2]
    places = _places(lists[0]["rows"])
    rows = max(places.values()) + 1
    height = _ABOVE + _ROW * rows + _BELOW
    middle = (_NAMES + (_WIDTH - _NAMES) / 2) / _WIDTH
    with drawing():
        figure = Figure((_WIDTH, height), facecolor="white")
        each = (_WIDTH - _NAMES - 0.15) / len(lists)
        furthest = max(row.get("share", 0) for of in lists for row in of["rows"].values())
        for i, of in enumerate(lists):
            left = _NAMES + i * each
            box = (left / _WIDTH, _BELOW / height, (each - 0.4) / _WIDTH, _ROW * rows / height)
            axis = figure.add_axes(box)
            axis.set(xlim=(0, max(1.04, 1.04 * furthest)), ylim=(rows - 0.5, -0.5), yticks=[])
            _panel(axis, of, places, names=i == 0)
        what = "share of the memory limit; in numbers: ms per 10⁹ parameters"
        figure.text(middle, 0.42 / height, what, ha="center", color=MUTED, fontsize=_TYPE)
        handles = [Patch(color=_COLORS[name], label=name) for name in _families(results)]
        figure.legend(
            handles=handles, loc="lower center", ncols=3, frameon=False, fontsize=_TYPE,
            bbox_to_anchor=(middle, 0.0),
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


def _panel(axis: Any, of: Results, places: Mapping[str, int], names: bool) -> None:
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
        axis.barh(at, row["share"], 0.74, color=_COLORS.get(row["of"], _COLORS["other libraries"]), zorder=2)
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
    """A number after a short bar, or at the end of a long one, left of the limit's line if that is near."""
    if end <= 0.3 * widest:
        _text(axis, end + 0.012 * widest, at, label, color=INK)
        return
    end = 1.0 if 1.0 < end < 1.0 + 0.13 * widest else end
    _text(axis, end - 0.012 * widest, at, label, ha="right", color="white", weight="bold")


def _text(axis: Any, x: float, y: float, text: str, **style: Any) -> None:
    axis.text(x, y, text, **{"va": "center_baseline", "fontsize": _TYPE, "zorder": 4, **style})
