"""Figures of a comparison, as SVG for a page that may be light or dark, and one PNG for a README.

Three liberties are taken with the data, and the captions say so. A curve is the mean over the seeds, as far as
the first of them that diverges, smoothed by a centered window. Behind it runs the curve as measured, thinned to
the lowest and the highest value of each stretch, so that no spike goes missing. And the scale of the losses is set
by the recipes that did not diverge, after the first steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from narrowgauge.cli._charts import (
    INK,
    MUTED,
    Floats,
    LineStyle,
    drawing,
    extremes,
    line_styles,
    page_figure,
    printable,
    thin,
)

Results = dict[str, Any]

# Parts of a parameter's bytes, with the opacity that tells them apart.
PARTS = {"weights": 1.0, "gradients": 0.6, "states": 0.28}


@dataclass(frozen=True)
class Curves:
    """One quantity of one recipe, `values[seed, step]`, at the steps where every seed has a value."""

    seeds: tuple[int, ...]
    steps: Floats
    values: Floats

    @classmethod
    def read(cls, recipe: dict[str, Any], quantity: str, scale: float = 1.0) -> Curves:
        histories = {seed["seed"]: seed["history"] for seed in recipe["seeds"]}
        steps = np.unique([step for history in histories.values() for step in history["step"]])
        values = np.full((len(histories), len(steps)), np.nan)
        for row, history in zip(values, histories.values(), strict=True):
            row[np.searchsorted(steps, history["step"])] = np.asarray(history[quantity], float)
        known = np.isfinite(values).all(axis=0)
        return cls(tuple(histories), steps[known], values[:, known] * scale)

    def minus(self, other: Curves) -> Curves:
        """The difference, seed by seed, at the steps that both have."""
        seeds = tuple(seed for seed in self.seeds if seed in other.seeds)
        steps, here, there = np.intersect1d(self.steps, other.steps, return_indices=True)
        ours = self.values[[self.seeds.index(seed) for seed in seeds]][:, here]
        theirs = other.values[[other.seeds.index(seed) for seed in seeds]][:, there]
        return Curves(seeds, steps if seeds else np.empty(0), ours - theirs)


def smooth(rows: Floats) -> Floats:
    """Mean along the last axis over a window of about a twentieth of it.

    The window is centered; at the start, where a loss is steep, it shrinks, and at the end its right is cut off.
    """
    count = rows.shape[-1]
    index = np.arange(count)
    left = np.minimum(index, count // 40)
    right = np.minimum(left, count - 1 - index)
    total = np.concatenate([np.zeros((*rows.shape[:-1], 1)), np.cumsum(rows, axis=-1)], axis=-1)
    return np.asarray((total[..., index + right + 1] - total[..., index - left]) / (left + right + 1))


def looks(results: Results) -> dict[str, LineStyle]:
    """The style of each recipe, by its name."""
    return line_styles(results["recipes"], results["reference"])


def loss(results: Results) -> Markup:
    """Training loss against step; below it, if there is a reference, the difference to the reference's."""
    reference = results["recipes"].get(results["reference"])
    panels = 2 if reference and len(results["recipes"]) > 1 else 1
    grid: dict[str, Any] = {"sharex": True, "squeeze": False, "height_ratios": (3, 2)[:panels]}
    with page_figure("loss", "Training loss against step", (300, 610)[panels - 1], panels, 1, **grid) as drawn:
        axes = drawn.axes[:, 0]
        curves = {name: Curves.read(recipe, "loss") for name, recipe in results["recipes"].items()}
        _lines(axes[0], results, curves, "training loss", skip=10)
        _mark_divergence(axes[0], results, curves)
        if panels == 2:
            _difference(axes[1], results, curves)
            axes[0].set_xlabel("")
    return drawn.svg


def edq(results: Results) -> Markup:
    """Effective descent quality against step."""
    return _shares(results, "edq", "effective descent quality, %")


def lost_updates(results: Results) -> Markup:
    """Share of lost updates against step."""
    return _shares(results, "lost_updates", "lost updates, %")


def _shares(results: Results, quantity: str, title: str) -> Markup:
    with page_figure(quantity, f"{title}, against step", 280) as drawn:
        curves = {name: Curves.read(recipe, quantity, 100) for name, recipe in results["recipes"].items()}
        _lines(drawn.axes, results, curves, title, floor=0.0)
    return drawn.svg


def memory(results: Results) -> Markup:
    """Bytes a parameter, stacked by what they hold; a tick where the measured total lies."""
    with page_figure("memory", "Bytes per parameter of each recipe", 52 + 44 * len(results["recipes"])) as drawn:
        _memory_bars(drawn.axes, results, {})
    return drawn.svg


def speed(results: Results) -> Markup:
    """Milliseconds of the optimizer and of a whole step, side by side, each on its own scale."""
    recipes = results["recipes"]
    with page_figure("speed", "Milliseconds per step of each recipe", 52 + 44 * len(recipes), 1, 2) as drawn:
        left, right = drawn.axes
        colors = [look.color for look in looks(results).values()]
        for axis, key, title in ((left, "optimizer_ms", "optimizer, ms"), (right, "step_ms", "whole step, ms")):
            taken = {name: recipe[key] for name, recipe in recipes.items()}
            spans = {name: recipe.get(f"{key}_quartiles") for name, recipe in recipes.items()}
            ends = {name: max(spans[name] or [value or 0.0]) for name, value in taken.items()}
            labels = ["not measured" if value is None else _short(value) for value in taken.values()]
            _bar_axis(axis, title, ends, labels, {name: name for name in taken if axis is left})
            axis.barh(range(len(ends)), [value or 0.0 for value in taken.values()], 0.4, color=colors)
            for row, span in enumerate(spans.values()):
                axis.plot(span or [], [row] * len(span or []), color=INK, linewidth=1.5)
    return drawn.svg


def save_picture(results: Results, path: Path) -> None:
    """Write a PNG of two panels on white: the difference of the training losses, and bytes with lost updates."""
    with drawing():
        rows = len(results["recipes"])
        figure = Figure((12.5, max(4.8, 1.7 + 0.58 * rows)), layout="constrained", facecolor="white")
        left, right = figure.subplots(1, 2, width_ratios=(6, 5))
        curves = {name: Curves.read(recipe, "loss") for name, recipe in results["recipes"].items()}
        if results["reference"] in curves and rows > 1:
            _difference(left, results, curves)
        else:
            _lines(left, results, curves, "training loss", skip=10)
        lines = [Line2D([], [], label=printable(name), **look.line) for name, look in looks(results).items()]
        figure.legend(
            handles=lines, loc="outside lower center", ncols=min(rows, 7), frameon=False, handlelength=2.6
        )
        lost = {
            name: f" · {100 * recipe['lost_updates']:.1f} % of updates lost"
            for name, recipe in results["recipes"].items()
            if recipe["lost_updates"] is not None
        }
        _memory_bars(right, results, lost)
        right.set_xlabel("dark to light: weights, gradients, states; tick: measured")
        figure.savefig(path, format="png", dpi=130, bbox_inches="tight", pad_inches=0.15)


def _difference(axis: Any, results: Results, curves: dict[str, Curves]) -> None:
    reference = curves[results["reference"]]
    below = {name: curve.minus(reference) for name, curve in curves.items() if name != results["reference"]}
    axis.axhline(0, color=INK, linewidth=2.2)
    _lines(axis, results, below, f"training loss − that of {printable(results['reference'])}", skip=8, floor=0.0)


def _lines(
    axis: Any, results: Results, curves: dict[str, Curves], title: str, skip: int = 0, floor: float | None = None
) -> None:
    """Draw every curve, and scale the axis to the sound ones from the `skip`-th part of their steps on."""
    styles, seen = looks(results), [] if floor is None else [floor]
    sound = [n for n in curves if not results["recipes"][n]["diverged"] and len(curves[n].steps)] or list(curves)
    for name, curve in curves.items():
        if not len(curve.steps):
            continue
        raw, look = curve.values.mean(axis=0), styles[name]
        smoothed, rough, few = smooth(raw), extremes(raw), thin(len(raw))
        axis.plot(curve.steps[rough], raw[rough], color=look.color, linewidth=0.7, alpha=0.22)
        if len(curve.seeds) > 1:
            rows = smooth(curve.values)[:, few]
            band = {"color": look.color, "alpha": 0.15, "linewidth": 0}
            axis.fill_between(curve.steps[few], rows.min(axis=0), rows.max(axis=0), **band)
        dot = "o" if len(few) == 1 else None
        axis.plot(curve.steps[few], smoothed[few], **look.line, marker=dot, zorder=3)
        if name in sound:
            settled = smoothed[len(smoothed) // skip if skip else 0 :]
            seen += [float(settled.min()), float(settled.max())]
    axis.set_title(title, color=INK)
    axis.set_xlabel("step")
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(5))
    if len(seen) < 2:
        axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color=MUTED)
        axis.set(xticks=[], yticks=[])
        return
    margin = 0.06 * (max(seen) - min(seen)) or 0.05 * (abs(seen[0]) or 1.0)
    axis.set_ylim(min(seen) - margin, max(seen) + margin)
    axis.margins(x=0.02)


def _mark_divergence(axis: Any, results: Results, curves: dict[str, Curves]) -> None:
    """A cross where the curve of a diverged recipe ends, at the top of the axis if its loss ran out of it."""
    top = axis.get_ylim()[1]
    for name, look in looks(results).items():
        if results["recipes"][name]["diverged"] and len(curves[name].steps):
            end = curves[name].steps[-1], min(curves[name].values[:, -1].mean(), top)
            axis.plot(*end, "X", color=look.color, markersize=9, clip_on=False, zorder=4)


def _memory_bars(axis: Any, results: Results, remarks: dict[str, str]) -> None:
    kept = {name: recipe["bytes"] for name, recipe in results["recipes"].items()}
    measured = {name: b["measured"]["total"] for name, b in kept.items() if b["measured"]}
    planned = {name: b["planned"]["total"] for name, b in kept.items()}
    ends = {name: max(total, measured.get(name, 0.0)) for name, total in planned.items()}
    names = {name: name + remarks.get(name, "") for name in kept}
    _bar_axis(axis, "bytes per parameter", ends, [f"{total:.4g}" for total in planned.values()], names)
    for row, (name, look) in enumerate(looks(results).items()):
        start = 0.0
        for part, opacity in PARTS.items():
            axis.barh(row, kept[name]["planned"][part], 0.4, start, color=look.color, alpha=opacity, linewidth=0)
            start += kept[name]["planned"][part]
        if name in measured:
            axis.plot([measured[name]] * 2, [row - 0.25, row + 0.25], color=INK, linewidth=2.2)


def _bar_axis(axis: Any, title: str, ends: dict[str, float], labels: list[str], names: dict[str, str]) -> None:
    """An axis for one bar a row, with its name above it and its value after its end."""
    longest = max(ends.values(), default=0.0) or 1.0
    axis.set(xlim=(0, 1.2 * longest), ylim=(len(ends) - 0.6, -0.75), yticks=[])
    axis.set_title(title, color=INK)
    axis.spines["left"].set_visible(False)
    # Bars are translucent, and every bar carries its number.
    axis.grid(False)
    axis.xaxis.set_major_locator(MaxNLocator(4))
    for row, (name, end) in enumerate(ends.items()):
        axis.text(0, row - 0.26, printable(names.get(name, "")), va="bottom", fontsize=13)
        color = INK if end else MUTED
        axis.annotate(labels[row], (end, row), (6, 0), textcoords="offset points", va="center", color=color)


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
