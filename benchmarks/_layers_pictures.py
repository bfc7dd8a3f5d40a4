"""Times of linear layers as pictures: speed-ups of layers, and the operations that they are made of.

The second is Figure 6 (left) and Figure 7 (left) of Wortsman et al. 2023 for another device; below the first is
Figure 6 (right).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _layers import BASELINE, cells_of
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from narrowgauge.cli._charts import INK, MUTED, PALETTE, SERIES, drawing

Results = Mapping[str, Any]
_WIDTH, _NAMES = 10.0, 2.6  # inches of a picture, and of the names in it
_ROW, _TYPE, _MARKERS = 0.3, 11.5, "osD^vP"
_BLUE, _ORANGE, _GREEN = (PALETTE[f"series-{i}"][0] for i in (2, 1, 3))
# Multiplies dark to light, what eight bits cost in warm colors, the rest grey.
_OPERATIONS = {
    "output": (_BLUE, 1.0), "grad_input": (_BLUE, 0.72), "grad_weight": (_BLUE, 0.45),
    "quantize X": (_ORANGE, 1.0), "quantize W": (_ORANGE, 0.72), "quantize G": (_ORANGE, 0.45),
    "dequantize": (_GREEN, 0.8), "bias": ("#808a94", 1.0),
}  # fmt: skip
_OTHER = ("#c3c9cf", 1.0)


def draw_speed(results: Results, path: Path) -> None:
    """Write a PNG: a row a layer with a mark a shape; below it speed-ups by dim, a panel a plan, a line a size."""
    shapes, grid = results.get("shapes", {}), results.get("grid", {})
    layers = [name for name in dict.fromkeys(n for rows in shapes.values() for n in rows) if name != BASELINE]
    above, below = _ROW * max(len(layers), 1), 3.0 if grid else 0.0
    height = 1.35 + above + below
    with drawing():
        figure = Figure((_WIDTH, height), facecolor="white")
        box = (_NAMES / _WIDTH, (below + 0.95) / height, (_WIDTH - _NAMES - 0.3) / _WIDTH, above / height)
        _dots(figure.add_axes(box), shapes, layers, results["layers"])
        handles = [
            Line2D([], [], color=_color(i), marker=_marker(i), linestyle="", label=_times(name))
            for i, name in enumerate(shapes)
        ]
        figure.legend(
            handles=handles, loc="upper center", ncols=3, frameon=False, fontsize=_TYPE - 0.5,
            bbox_to_anchor=((_NAMES + (_WIDTH - _NAMES) / 2) / _WIDTH, (below + 0.7) / height), handletextpad=0.1,
        )  # fmt: skip
        if grid:
            _grid(figure, grid, height, below)
        figure.savefig(path, format="png", dpi=130)


def _dots(axis: Any, shapes: Results, layers: Sequence[str], about: Results) -> None:
    axis.set(ylim=(len(layers) - 0.5, -0.5), yticks=range(len(layers)))
    axis.set_yticklabels(layers, fontsize=_TYPE)
    for label, name in zip(axis.get_yticklabels(), layers, strict=True):
        ours = about[name]["of"] == "narrowgauge"
        label.set(color=INK, fontweight="bold" if ours else "normal")
    for i, rows in enumerate(shapes.values()):
        for at, name in enumerate(layers):
            row = rows.get(name, {})
            if "speedup" in row:
                speedup = row.get("graph_speedup", row["speedup"])
                axis.plot(speedup, at, _marker(i), color=_color(i), markersize=7, zorder=3, alpha=0.9)
    axis.axvline(1, color=INK, linewidth=1.6, linestyle=(0, (4, 2)), zorder=2)
    axis.set_xlim(left=0)
    axis.set_title("times as fast as nn.Linear, forward and backward", color=INK, fontsize=_TYPE + 1.5)
    axis.tick_params(labelsize=_TYPE)


def _grid(figure: Figure, grid: Results, height: float, below: float) -> None:
    sides = [cells_of(name) for name in grid]
    dims, tokens = sorted({dim for _, dim in sides}), sorted({count for count, _ in sides})
    plans = [name for name in next(iter(grid.values())) if name != BASELINE]
    each = (_WIDTH - 0.75) / len(plans)
    highest = max(row.get("speedup", 0) for rows in grid.values() for row in rows.values())
    for i, plan in enumerate(plans):
        box = ((0.6 + i * each) / _WIDTH, 0.85 / height, (each - 0.35) / _WIDTH, (below - 1.35) / height)
        axis = figure.add_axes(box)
        for j, count in enumerate(tokens):
            found = [(dim, grid.get(f"{count}x{dim}", {}).get(plan, {}).get("speedup")) for dim in dims]
            known = [(dims.index(dim), speedup) for dim, speedup in found if speedup is not None]
            axis.plot(*zip(*known, strict=True), color=_color(j), marker=_marker(j), markersize=5, linewidth=1.6)
        axis.axhline(1, color=INK, linewidth=1.6, linestyle=(0, (4, 2)), zorder=2)
        axis.set(ylim=(0, 1.08 * max(highest, 1)), xticks=range(len(dims)), xlim=(-0.3, len(dims) - 0.7))
        axis.set_xticklabels(dims)
        axis.set_title(plan, color=INK, fontsize=_TYPE + 0.5)
        axis.tick_params(labelsize=_TYPE - 1.5, labelleft=i == 0)
    text = "dim: a layer from dim to 4 dim and one back"
    figure.text(0.5, 0.46 / height, text, ha="center", color=MUTED, fontsize=_TYPE)
    handles = [
        Line2D([], [], color=_color(j), marker=_marker(j), label=f"{count:,} tokens")
        for j, count in enumerate(tokens)
    ]
    figure.legend(handles=handles, loc="lower center", ncols=len(tokens), frameon=False, fontsize=_TYPE - 0.5)


def draw_operations(results: Results, path: Path) -> None:
    """Write a PNG: operations stacked, as a share of `nn.Linear`'s, by dim; beside it the share of quantization."""
    cells = results["operations"]
    of_grid = next(iter(results.get("grid", {}).values()), None) or next(iter(cells.values()))
    layers = [name for name in next(iter(cells.values())) if name in of_grid]
    rows = [(cell, name) for cell in cells for name in layers if "failed" not in cells[cell][name]]
    places = {row: at + list(cells).index(row[0]) for at, row in enumerate(rows)}
    height = 1.9 + _ROW * (len(rows) + len(cells))
    with drawing():
        figure = Figure((_WIDTH, height), facecolor="white")
        wide, tall = 4.6, _ROW * (len(rows) + len(cells))
        axis = figure.add_axes((_NAMES / _WIDTH, 1.25 / height, wide / _WIDTH, tall / height))
        for (cell, name), at in places.items():
            _stack(axis, cells[cell], name, at + 1)
        for cell in cells:
            first = min(at for (of, _), at in places.items() if of == cell)
            axis.text(
                -0.012, first, f"dim {cells_of(cell)[1]}", transform=axis.get_yaxis_transform(), ha="right",
                va="center_baseline", color=MUTED, style="italic", fontsize=_TYPE,
            )  # fmt: skip
        ticks = {at + 1: name for (_, name), at in places.items()}
        axis.set(ylim=(len(rows) + len(cells) - 0.4, -0.5), yticks=list(ticks))
        axis.set_yticklabels(ticks.values(), fontsize=_TYPE, color=INK)
        axis.axvline(1, color=INK, linewidth=1.6, linestyle=(0, (4, 2)), zorder=3)
        axis.grid(False, axis="y")
        axis.tick_params(labelsize=_TYPE)
        tokens = cells_of(next(iter(cells)))[0]
        axis.set_title(f"time over nn.Linear's, {tokens:,} tokens", color=INK, fontsize=_TYPE + 1.5)
        left = _NAMES + wide + 0.75
        side = figure.add_axes((left / _WIDTH, (1.25 + max(tall - 3.2, 0)) / height, (_WIDTH - left - 0.2) / _WIDTH,
                                min(tall, 3.2) / height))  # fmt: skip
        _shares(side, cells, [name for name in layers if name != BASELINE])
        seen = {name for cell, of in rows for name in cells[cell][of]["operations"]}
        handles = [
            Patch(color=color, alpha=alpha, label=name)
            for name, (color, alpha) in (*_OPERATIONS.items(), ("other", _OTHER))
            if name in seen or (name == "other" and seen - _OPERATIONS.keys())
        ]
        figure.legend(handles=handles, loc="lower center", ncols=5, frameon=False, fontsize=_TYPE - 0.5)
        figure.savefig(path, format="png", dpi=130)


def _stack(axis: Any, rows: Results, name: str, at: int) -> None:
    whole, start = rows[BASELINE]["ms"], 0.0
    known = rows[name]["operations"]
    for operation in (*_OPERATIONS, *(other for other in known if other not in _OPERATIONS)):
        if operation in known:
            color, alpha = _OPERATIONS.get(operation, _OTHER)
            share = known[operation] / whole
            axis.barh(at, share, 0.74, start, color=color, alpha=alpha, linewidth=0, zorder=2)
            start += share


def _shares(axis: Any, cells: Results, layers: Sequence[str]) -> None:
    dims = [cells_of(cell)[1] for cell in cells]
    for i, name in enumerate(layers):
        known = [(at, 100 * rows[name]["quantize_share"]) for at, rows in enumerate(cells.values())
                 if "failed" not in rows[name]]  # fmt: skip
        axis.plot(*zip(*known, strict=True), color=_color(i), marker=_marker(i), markersize=5, label=name)
    axis.set(ylim=(0, None), xticks=range(len(dims)), xlim=(-0.3, len(dims) - 0.7))
    axis.set_xticklabels(dims, rotation=45 if len(dims) > 4 else 0)
    axis.set_title("quantization, %", color=INK, fontsize=_TYPE + 1.5)
    axis.tick_params(labelsize=_TYPE - 1.5)
    axis.legend(frameon=False, fontsize=_TYPE - 2.5, loc="upper center", bbox_to_anchor=(0.45, -0.2))


def _color(i: int) -> str:
    return PALETTE[SERIES[i % len(SERIES)]][0]


def _marker(i: int) -> str:
    return _MARKERS[i % len(_MARKERS)]


def _times(shape: str) -> str:
    return shape.replace("x", " × ")
