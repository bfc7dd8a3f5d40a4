"""bill.html: what `narrowgauge fit` chose, what it costs, and what the neighbors would have cost, as one page.

The page is for a reader who does not know the words. It begins with the result in one sentence. Below the figure it
explains bytes, loss, noise and the names of formats. All numbers are those of the recipe.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from narrowgauge import recipes
from narrowgauge.cli._charts import INK, MUTED, PALETTE, SERIES, page_figure, printable
from narrowgauge.cli._report._page import MISSING, Table, definitions, write_page
from narrowgauge.cli._report._run_drawing import without_common
from narrowgauge.recipes import FittedRecipe
from narrowgauge.recipes._choices import Choice, Computed, Kept

# What the bill is set beside: mixed precision, and the narrow recipe that is chosen without a measurement.
MIXED, NARROW = "D", "adamw8bit-split8"
_BARS, _SMALL = 24, 0.005  # groups that have a row in the figure, and the least share of the elements for one
_LABEL = 34  # letters of a name in the figure
_LEAST, _MOST = 1e-7, 1.0  # ends of the scale of losses, in nats

_WEIGHTS = {
    "plain": "the weight alone, in the format that the model computes in",
    "master": "a bf16 weight and a copy in fp32",
    "kahan": "a bf16 weight, and what rounding has cut off so far",
    "stochastic": "a bf16 weight that is rounded up or down at random",
    "expansion": "two bf16 numbers, whose sum is the weight",
    "split": "a bf16 weight and 16 further bits: exactly the fp32 number",
    "split8": "a bf16 weight and 8 further bits: 24 bits together",
    "split4": "a bf16 weight and 4 further bits, rounded up or down at random: 20 bits together",
}
_STATES = {
    "fp32": "32 bits, as usual",
    "bf16": "16 bits, 8 of them for the digits",
    "expansion": "two bf16 numbers, whose sum is the value",
    "log8": "8 bits on a logarithmic scale, and a scale for each block",
    "log4": "4 bits on a logarithmic scale, and a scale for each block",
    "8bit": "8 bits by a table of values, and a scale for each block",
    "factored": "a number for each row and each column of a matrix",
}


def write_bill(
    recipe: FittedRecipe, path: Path, *, checked: str = "", checked_page: str = "", commands: Sequence[str] = ()
) -> None:
    """Write the page at once and whole.

    Args:
        recipe: of at least one choice.
        path: the file to write, in a folder that exists.
        checked: what training beside D found, in a sentence; empty if that was not done.
        checked_page: where its page is, from this page.
        commands: what to type next.
    """
    choices = sorted(recipe.choices, key=lambda choice: -choice.elements)
    bars = list(_bars(choices))
    write_page(
        path,
        "bill.html.j2",
        recipe=recipe,
        summary=summary(recipe),
        checked=checked,
        checked_page=checked_page,
        commands=commands,
        figure=_figure(bars),
        legend={bar.way: bar.color for bar in bars},
        tolerance=None if (most := recipe.facts.get("tolerance")) is None else nats(most),
        choices=[_row(choice, recipe) for choice in choices],
        total=_total(recipe),
        layers=_layers(recipe),
        facts=definitions(recipe.facts),
        words=_words(choices),
    )


def summary(recipe: FittedRecipe) -> str:
    """The result in a sentence, and the limit."""
    whole, eight = (recipes.get(name).bytes_per_parameter() for name in (MIXED, NARROW))
    bill = recipe.bill()
    text = (
        f"Training this model takes {bill.bytes:.2f} bytes a parameter, where fp32 master weights and moments "
        f"({MIXED}) take {whole:.2f} and {NARROW} takes {eight:.2f}; rounding is estimated to move the "
        f"loss at the end by {nats(bill.loss)} nats, up or down"
    )
    if bill.over:
        text += f", which is over the tolerance of {nats(bill.facts['tolerance'])}"
    limit = recipe.facts.get("limit")
    return f"{text}." if limit is None else f"{text}. The limit: {limit}."


def mean_bytes(choices: Sequence[Choice]) -> float:
    """Bytes a parameter, over all groups."""
    return sum(c.elements * c.chosen.bytes for c in choices) / sum(c.elements for c in choices)


def way(kept: Kept) -> str:
    """How parameters are kept: "split8, m log4, v log8"."""
    if len(set(kept.states.values())) == 1:
        return f"{kept.weights}, moments {next(iter(kept.states.values()))}"
    return ", ".join([kept.weights, *(f"{slot} {name}" for slot, name in kept.states.items())])


def percent(share: float) -> str:
    """A share with two digits that count; the number and its sign stay on one line."""
    if math.isnan(share):
        return "not known"
    if share > 1e4:
        return "more than 1,000,000\u00a0%"
    value = 100 * share
    return f"{value:,.0f}\u00a0%" if value >= 100 else f"{float(f'{value:.2g}'):.6g}\u00a0%"


def nats(loss: float) -> str:
    """A loss with two digits that count."""
    if math.isnan(loss):
        return "not known"
    if math.isinf(loss):
        return "∞"
    if 0 < loss < 1e-6:
        return "less than 0.000001"
    return f"{float(f'{loss:.2g}'):.7f}".rstrip("0").rstrip(".") if loss < 100 else f"{loss:.2g}"


@dataclass(frozen=True)
class _Bar:
    """A row of the figure: a group, or all that are too small for a row. `color` is a name of the palette."""

    name: str
    way: str
    color: str
    bytes: float
    loss: float
    narrower: float | None


def _bars(choices: Sequence[Choice]) -> Iterator[_Bar]:
    """The rows of the figure: groups with their shares of all elements, then the small ones together."""
    whole = sum(choice.elements for choice in choices)
    large = [c for c in choices if c.elements >= _SMALL * whole][:_BARS]
    # A color for each way, the narrowest first.
    ways = dict.fromkeys(way(c.chosen) for c in sorted(large, key=lambda c: c.chosen.bytes))
    colors = {name: SERIES[number % len(SERIES)] for number, name in enumerate(ways)}
    for name, c in zip(_labels(large), large, strict=True):
        how, narrower = way(c.chosen), None if c.narrower is None else c.narrower.loss
        share = percent(c.elements / whole)
        yield _Bar(f"{name} ({share})", how, colors[how], c.chosen.bytes, c.chosen.loss, narrower)
    if rest := [c for c in choices if c not in large]:
        share = percent(sum(c.elements for c in rest) / whole)
        name = f"{len(rest)} smaller group{'s together' if len(rest) > 1 else ''} ({share})"
        yield _Bar(name, "small groups", "muted", mean_bytes(rest), sum(c.chosen.loss for c in rest), None)


def _figure(bars: Sequence[_Bar]) -> Markup:
    """Bytes of each group as bars, and beside them its loss, with that of the next narrower choice."""
    title = "Bytes a parameter and loss of each group of parameters"
    grid: dict[str, Any] = {"sharey": True, "width_ratios": (3, 2)}
    with page_figure("bill", title, 80 + 48 * len(bars), 1, 2, **grid) as drawn:
        left, right = drawn.axes
        whole = recipes.get(MIXED).bytes_per_parameter()
        right.set_xscale("log")
        for row, bar in enumerate(bars):
            left.text(0, row - 0.27, bar.name, va="bottom", fontsize=13, color=INK, zorder=5)
            left.barh(row, bar.bytes, 0.42, color=PALETTE[bar.color][0])
            spot: dict[str, Any] = {"textcoords": "offset points", "va": "center", "color": INK, "fontsize": 13}
            left.annotate(f"{bar.bytes:.2f}", (bar.bytes, row), (5, 0), **spot)
            if bar.narrower is not None:
                ends = [_place(bar.loss), _place(bar.narrower)]
                right.plot(ends, [row, row], color=MUTED, linewidth=1, zorder=2)
                right.plot(ends[1], row, "o", color=MUTED, markersize=7, markerfacecolor="none", zorder=3)
            right.plot(_place(bar.loss), row, "o", color=PALETTE[bar.color][0], markersize=8, zorder=4)
        left.axvline(whole, color=MUTED, linewidth=1.2, linestyle=(0, (4, 2)), zorder=0)
        left.set(xlim=(0, 1.16 * max([whole, *(bar.bytes for bar in bars)])), yticks=[], xticks=[0, 4, 8, 12, 16])
        left.set_ylim(len(bars) - 0.45, -0.85)
        left.set_title("bytes a parameter", color=INK)
        right.set(xlim=(_LEAST / 2, 2 * _MOST))
        right.set_xticks([1e-6, 1e-4, 1e-2, 1], ["10⁻⁶", "0.0001", "0.01", "1"])
        right.minorticks_off()
        right.set_title("loss, nats", color=INK)
        for axis in (left, right):
            axis.grid(False, axis="y")
            axis.spines["left"].set_visible(False)
    return drawn.svg


def _place(loss: float) -> float:
    """Where a loss is drawn: inside the scale."""
    return _MOST if math.isnan(loss) else min(max(loss, _LEAST), _MOST)


def _labels(choices: Sequence[Choice]) -> list[str]:
    """Names of groups, of which the middle is left out where they are long: towers and parts of blocks stay."""
    found = []
    for name, choice in zip(without_common([c.parameters[0] for c in choices]), choices, strict=True):
        head, more = name.partition(".")[0], len(choice.parameters) - 1
        room = _LABEL - (len(f" and {more} more") if more else 0)
        if len(name) > room:
            head = head[: room // 2]
            name = f"{head}…{name[len(head) + 1 - room :]}"
        found.append(printable(name) + (f" and {more} more" if more else ""))
    return found


def _breakable(name: str) -> Markup:
    """A name that a narrow column breaks after its dots and underscores."""
    return Markup("<wbr>").join(re.split(r"(?<=[._])", name))


def _cell(kept: Kept | None) -> tuple[str, str]:
    """How parameters are kept, and what that costs."""
    if kept is None:
        return MISSING, ""
    costs = [f"{kept.bytes:.2f} bytes", f"loss\u00a0{nats(kept.loss)}"]
    return way(kept), ", ".join([*costs, *([] if kept.ms is None else [f"{kept.ms:.3g}\u00a0ms"])])


def _row(choice: Choice, recipe: FittedRecipe) -> dict[str, Any]:
    whole = sum(each.elements for each in recipe.choices)
    lost = choice.lost
    return {
        "names": Markup(", ").join(map(_breakable, choice.parameters)),
        "size": f"{choice.elements:,} in {choice.tensors:,} tensor{'s' if choice.tensors != 1 else ''}",
        "share": f"{percent(choice.elements / whole)} of\u00a0all",
        "cells": [_cell(each) for each in (choice.chosen, choice.narrower, choice.wider)],
        "noise": percent(choice.chosen.noise),
        "lost": MISSING if lost is None else f"{percent(lost[0])} to {percent(lost[1])}",
        "reason": choice.reason,
    }


def _total(recipe: FittedRecipe) -> dict[str, Any]:
    """All groups together."""
    bill = recipe.bill()
    time = [] if bill.ms is None else [f"{bill.ms:.3g}\u00a0ms"]
    costs = ", ".join([f"{bill.bytes:.2f} bytes", f"loss\u00a0{nats(bill.loss)}", *time])
    return {
        "size": f"{bill.elements:,}",
        "costs": costs,
        "loss": nats(bill.loss),
        "noise": percent(bill.noise),
    }


def _layers(recipe: FittedRecipe) -> Table:
    """The linear layers' plans."""

    def cell(computed: Computed | None) -> str:
        if computed is None:
            return MISSING
        parts = [f"{name.replace('_', ' ')} {percent(noise)}" for name, noise in computed.noise.items()]
        parts += [] if computed.ms is None else [f"{computed.ms:.3g}\u00a0ms"]
        return f"{computed.plan.title} ({', '.join(parts)})" if parts else computed.plan.title

    rows = [
        [Markup(", ").join(map(_breakable, each.layers)), f"{each.count}", cell(each.chosen),
         percent(each.chosen.share), cell(each.narrower), cell(each.wider), each.reason]
        for each in recipe.layers
    ]  # fmt: skip
    columns = ["Layers", "Count", "Chosen", "Worst error", "Next narrower", "Next wider", "Why"]
    remark = (
        "In parentheses: the error of each multiply in eight bits, as a share of its result. The worst of them is "
        "given over the share that noise has in the weights' gradient: below 100 % the batch disturbs it more."
    )
    return Table(columns, rows, remark)


def _words(choices: Sequence[Choice]) -> Iterator[tuple[str, str]]:
    """The names of formats on the page, and what they mean."""
    every = [k for c in choices for k in (c.chosen, c.narrower, c.wider) if k is not None]
    for kind, meanings, used in (
        ("weights", _WEIGHTS, {kept.weights for kept in every}),
        ("moments", _STATES, {name for kept in every for name in kept.states.values()}),
    ):
        for name, meaning in meanings.items():
            if name in used:
                yield f"{name} ({kind})", meaning
