"""Tables, facts and the first picture of fitted recipes beside uniform ones; `compared.py` defines the words."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from narrowgauge.recipes._fit._replay import GROWS, SHRINKS
from studies.fit import compared, forecast_page
from studies.fit.compared import DEFAULT, SAME, Cell, Row, cells, counts, fits, found, margin, narrowest, spread
from studies.fit.rows import BYTES, REFERENCE, by_bytes
from studies.shared import pictures
from studies.shared.pictures import COLORS, INK, MUTED
from studies.shared.tables import Results, fill_in, left_out, machine, markdown, several, span, table

SAVED = 0.5  # bytes a parameter that are asked for


def title(cell: Cell, several_betas: bool = False) -> str:
    """A setting's name."""
    model, lr, beta2 = cell
    return f"{model}, {lr:g}" + (f", β2 {beta2:g}" if several_betas else "")


def goals(results: Results) -> str:
    """In each setting the bytes of fp32 quality, and losses at a limit without a uniform row of that quality."""
    lines = []
    for cell in cells(results):
        rows = found(results, cell)
        uniform, fitted = narrowest(rows, "uniform"), narrowest(rows, "fitted")
        saved = f"{uniform.bytes - fitted.bytes:+.2f}" if uniform and fitted else ""
        lines.append([title(cell), f"{spread(rows):.4f}", _shown(uniform), _shown(fitted), saved, _at_limit(rows)])
    head = ("model, learning rate", "paired spread", "fp32 quality, uniform", "fp32 quality, fitted", "bytes saved",
            "at a limit below that")  # fmt: skip
    return markdown(head, lines, "lrllrl")


def _shown(row: Row | None) -> str:
    if row is None:
        return "none"
    return f"{_name(row)}, {row.bytes:.2f}"


def _name(row: Row) -> str:
    return row.name if row.kind == "fitted" else f"`{row.name}`"


def _at_limit(rows: Sequence[Row]) -> str:
    """At the highest limit without a uniform row of fp32 quality: the fitted row, and the best uniform one."""
    good, named = narrowest(rows, "uniform"), {row.name: row for row in rows}
    able = [each for each in BYTES if by_bytes(each) in named and (good is None or each < good.bytes - SAME)]
    if not able:
        return ""
    others = [r for r in rows if r.kind == "uniform" and r.mean is not None and r.bytes <= max(able) + SAME]
    best = min(others, key=lambda row: row.mean or 0.0, default=None)
    shown = [f"{_name(row)} {row.mean:+.4f}" for row in (named[by_bytes(max(able))], best) if row and row.mean]
    return f"{max(able):g}: " + ", ".join(shown)


def losses(results: Results) -> str:
    """Every row of every setting: bytes, and the difference from D."""
    places = cells(results)
    by_cell = {cell: {row.name: row for row in found(results, cell)} for cell in places}
    names = [row["name"] for row in results["rows"]]
    sizes = {
        name: [by_cell[c][name].bytes for c in places if name in by_cell[c]] for name in names
    }  # fmt: skip
    shown = sorted((name for name in names if sizes[name]), key=lambda name: (_rank(name), -max(sizes[name])))

    def cell_of(name: str, cell: Cell) -> str:
        row = by_cell[cell].get(name)
        if row is None:
            return ""
        return f"{row.diverged} diverged" if row.diverged else several(row.differences)

    lines = [[name, _range(sizes[name]), *(cell_of(name, cell) for cell in places)] for name in shown]
    return markdown(("row", "bytes", *(title(cell) for cell in places)), lines)


def _rank(name: str) -> int:
    return 1 if name.startswith("fitted") else 2 if name.startswith("random") else 0


def _range(values: Sequence[float]) -> str:
    ends = [f"{f(values):.2f}" for f in (min, max)]
    return " to ".join(dict.fromkeys(ends))


def chosen(results: Results) -> str:
    """By fit and fitted row, the storages and the share of the model's numbers that have them."""
    lines = []
    for fit in fits(results):
        for name, places in fit["chosen"].items():
            if not name.startswith("fitted"):
                continue
            lines.append([
                title((fit["model"], fit["lr"], fit["beta2"])), name.removeprefix("fitted, "),
                f"{fit['bytes'][name]:.2f}", _figure(fit["loss"][name], ".2g"), _figure(fit["noise"][name], ".2f"),
                _storages(fit, places),
            ])  # fmt: skip
    head = (
        "model, learning rate",
        "limit",
        "bytes",
        "loss may move by",
        "noise",
        "storages, by their share of the numbers",
    )
    return markdown(head, lines, "llrrrl")


def _figure(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def _storages(fit: Results, places: Sequence[int]) -> str:
    return ", ".join(f"{way} {100 * share:.0f} %" for way, share in _shares(fit, places)[:4])


def _shares(fit: Results, places: Sequence[int]) -> list[tuple[str, float]]:
    """Ways to keep parameters, each with its share of the model's numbers, the largest first."""
    total: dict[str, float] = defaultdict(float)
    elements = sum(group["elements"] for group in fit["groups"])
    for group, place in zip(fit["groups"], places, strict=True):
        weights, states, *_ = group["ways"][place]
        total[" ".join(["`" + weights, "/".join(dict.fromkeys(states.values())) + "`"])] += group["elements"]
    return sorted(((way, count / elements) for way, count in total.items()), key=lambda pair: -pair[1])


def planted(results: Results) -> str:
    """The planted cases: what was chosen with and without the planted property, and the figures."""
    return table(
        results["planted"],
        ("case", "name"),
        ("planted", "planted"),
        ("chosen", lambda case: f"`{case['chosen']}`"),
        ("chosen without", lambda case: f"`{case['without']}`"),
        ("figures, with and without", lambda case: "; ".join(
            f"{name} {', '.join(_figure(x, '.2g') for x in pair)}"
            for name, pair in case["figures"].items()
        )),
        ("seen", lambda case: "yes" if case["seen"] else "no"),
        words=5,
    )  # fmt: skip


def origin(results: Results) -> str:
    """What was run, on what."""
    made = fits(results)
    sizes = ", ".join(f"{model} {count:,}" for model, count in {f["model"]: f["parameters"] for f in made}.items())
    return fill_in(
        results,
        "`{command}`: parameters: {sizes}; {training[steps]} steps of {training[batch]} windows of "
        "{training[sequence]} tokens (CLIP: {training[batch]} pairs), vocabulary {training[vocabulary]}, after "
        "{training[warmup]} steps a cosine to {training[final]:g} of the rate, weight decay "
        "{training[weight_decay]:g}, gradients' norm at most {training[clip]:g}, replays of {replays} steps; "
        "{machine}. {left}",
        sizes=sizes, machine=machine(results), replays=span([f["replay_steps"] for f in made]),
        left=left_out(results),
    )  # fmt: skip


def facts(results: Results) -> dict[str, str]:
    """Every number and every finding in the page's sentences."""
    settings, saved = len(cells(results)), [x for x in compared.saved(results) if x is not None]
    enough = sum(x >= SAVED for x in saved)
    duels = {
        "same": compared.of_the_same_bytes, "limit": compared.under_a_limit, "random": compared.against_random,
    }  # fmt: skip
    ended = {(name, near): counts(of(results, near)) for name, of in duels.items() for near in (False, True)}
    total = {name: sum(ended[name, False].values()) for name in duels}
    default = [
        compared.is_good(next((row for row in rows if row.name == DEFAULT), None), rows)
        for rows in (found(results, cell) for cell in cells(results))
    ]  # fmt: skip
    shares = [_shares(fit, fit["chosen"][DEFAULT])[0] for fit in fits(results) if DEFAULT in fit["chosen"]]
    return {
        "settings": str(settings),
        "seeds": str(results["training"]["seeds"]),
        "fitted_rows": str(sum(row["name"].startswith("fitted") for row in results["rows"])),
        "uniform_rows": str(sum(row["uniform"] for row in results["rows"])),
        "shrinks": f"{SHRINKS:g}",
        "grows": f"{GROWS:g}",
        "enough": str(enough),
        "quality": str(len(saved)),
        "saved": span(saved, "+.2f") or "no",
        "default_good": str(sum(default)),
        "answer_bytes": _answer(enough, settings),
        "answer_same": "No" if ended["same", False]["above"] or not total["same"] else "Yes",
        "answer_limit": _answer(ended["limit", False]["below"], total["limit"]),
        "common": f"{100 * statistics.fmean(share for _, share in shares):.0f} %" if shares else "none",
        "commonest": statistics.mode(way for way, _ in shares) if shares else "none",
        **{f"{name}_compared": str(count) for name, count in total.items()},
        **{
            f"{name}_{'near_' if near else ''}{word}": str(count)
            for (name, near), words in ended.items()
            for word, count in words.items()
        },
        **forecast_page.facts(results),
    }  # fmt: skip


def _answer(good: int, of: int) -> str:
    """How often a goal is met, in a word."""
    if not of or not good:
        return "No"
    return "Yes" if good == of else "Mostly" if 2 * good > of else "Seldom"


def bytes_against_loss(results: Results) -> Figure:
    """A panel a setting: the frontier of the uniform recipes, fitted ones with their seeds, random choices."""
    places = cells(results)
    columns = min(len(places), 4 if len(places) > 4 else 2)
    lines = -(-len(places) // columns)
    figure, axes = pictures.figure(4.4 * columns, 4.0 * lines + 0.6, lines, columns, squeeze=False)
    for axis, cell in zip(axes.flat, places, strict=False):
        _panel(axis, found(results, cell))
        axis.set_title(title(cell, True), fontsize=12)
    for axis in list(axes.flat)[len(places) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel(f"validation loss − that of {REFERENCE}, nats")
    for axis in axes[-1]:
        axis.set_xlabel("bytes a parameter")
    pictures.below(figure, axes.flat[0], 5)
    return figure


def _panel(axis: Any, rows: Sequence[Row]) -> None:
    limit = margin(rows)
    axis.axhspan(-limit, limit, color=MUTED, alpha=0.16, linewidth=0, label="fp32 quality")
    axis.axhline(0, color=MUTED, linewidth=1)
    kinds = {kind: [r for r in rows if r.kind == kind and r.mean is not None] for kind in
             ("uniform", "random", "fitted")}  # fmt: skip
    lowest: list[Row] = []
    for row in kinds["uniform"]:
        if not lowest or (row.mean or 0.0) < (lowest[-1].mean or 0.0):
            lowest.append(row)
    axis.step(
        [r.bytes for r in lowest] + [20.0], [*(r.mean for r in lowest), lowest[-1].mean if lowest else 0.0],
        where="post", color=COLORS["series-2"], linewidth=1.4, label="lowest loss of uniform recipes",
    )  # fmt: skip
    axis.plot(
        [r.bytes for r in kinds["uniform"]], [r.mean for r in kinds["uniform"]], "s", color=COLORS["series-2"],
        markersize=5, markerfacecolor="white", label="uniform recipes",
    )  # fmt: skip
    axis.plot(
        [r.bytes for r in kinds["random"]], [r.mean for r in kinds["random"]], ".", color=INK, markersize=6,
        label="random choices",
    )  # fmt: skip
    for row in kinds["fitted"]:
        ends = [min(row.differences), max(row.differences)]
        axis.plot([row.bytes] * 2, ends, color=COLORS["series-1"], linewidth=1.5, alpha=0.7)
    axis.plot(
        [r.bytes for r in kinds["fitted"]], [r.mean for r in kinds["fitted"]], "o", color=COLORS["series-1"],
        markersize=6.5, label="fitted recipes",
    )  # fmt: skip
    axis.set_xscale("log")
    every = [row.bytes for group in kinds.values() for row in group]
    axis.set_xlim(min(every, default=5) / 1.04, 17)
    pictures.ticks(axis.xaxis, (5, 5.5, 6, 7, 8, 10, 12, 16))
    axis.set_yscale("symlog", linthresh=limit, linscale=0.9)
    losses = [x for group in kinds.values() for row in group for x in row.differences] or [0.0]
    axis.set_ylim(min(-2 * limit, 1.6 * min(losses)), max(2 * limit, 1.6 * max(losses)))
    pictures.ticks(axis.yaxis, _places(kinds, limit), lambda y: f"{y:+g}".replace("-", "−") if y else "0")


def _places(kinds: dict[str, list[Row]], limit: float) -> list[float]:
    """Ticks of the losses: zero, and round numbers outside the band of fp32 quality."""
    values = [x for rows in kinds.values() for row in rows for x in row.differences] or [0.0]
    at = [sign * t for t in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3) for sign in (1, -1) if t > 0.7 * limit]
    return [0.0, *(y for y in at if 1.3 * min(values) <= y <= 1.3 * max(values))]


TABLES = {
    "goals": goals, "losses": losses, "chosen": chosen, "planted": planted, "origin": origin,
    **forecast_page.TABLES,
}  # fmt: skip
PICTURES = {**forecast_page.PICTURES, "": bytes_against_loss}
