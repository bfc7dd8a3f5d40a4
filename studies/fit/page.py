"""Tables, facts and the picture of fitted recipes beside uniform ones.

A difference is taken seed by seed from D, which has the same start and the same batches. What chance alone makes of
it is seen in the **control**: `split` keeps D's numbers in other words and rounds ties otherwise. Its largest
difference over the seeds is the **paired spread** of a setting (model, learning rate, β2). A row has **fp32
quality** if its mean is within the larger of 0.001 and that spread.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from studies.shared import pictures
from studies.shared.pictures import COLORS, INK, MUTED
from studies.shared.tables import Results, apart, fill_in, machine, markdown, several, table

REFERENCE, CONTROL, DEFAULT = "D", "split", "fitted, tolerance 0.002"
QUALITY = 0.001  # nats from D
SAVED = 0.5  # bytes a parameter that are asked for
SAME = 0.05  # bytes a parameter that count as none
LEAST_SPREAD = 1e-4  # nats; a spread of a few seeds may be zero by chance
Cell = tuple[str, float, float]


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
        """By seed, how much higher the loss is than another row's."""
        return [loss - other.by_seed[seed] for seed, loss in self.by_seed.items() if seed in other.by_seed]


def cells(results: Results) -> list[Cell]:
    """Model, learning rate and β2 of the settings that have a training of D."""
    runs = [run for run in results["runs"] if run["row"] == REFERENCE and "failed" not in run]
    return list(dict.fromkeys((run["model"], run["lr"], run["beta2"]) for run in sorted(runs, key=_order)))


def _order(run: Results) -> tuple[Any, ...]:
    order = {"micro": 0, "llama-micro": 1, "bert-micro": 2, "clip-micro": 3}
    return order.get(run["model"], 4), run["model"], run["beta2"], -run["lr"]


def found(results: Results, cell: Cell) -> list[Row]:
    """All rows of a setting, by bytes, the fewest first."""
    uniform = {row["name"] for row in results["rows"] if row["uniform"]}
    by_row: dict[str, list[Results]] = defaultdict(list)
    for run in results["runs"]:
        if (run["model"], run["lr"], run["beta2"]) == cell and run["row"] != "fit" and "failed" not in run:
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


def _good(rows: Sequence[Row], kind: str) -> Row | None:
    """The row of a kind with the fewest bytes that has fp32 quality."""
    limit = margin(rows)
    return next((r for r in rows if r.kind == kind and r.mean is not None and abs(r.mean) <= limit), None)


def _best(rows: Sequence[Row], kinds: Sequence[str], most: float, distance: bool = False) -> Row | None:
    """Of the rows of some kinds that take at most so many bytes, that with the lowest loss, or the nearest to D."""
    able = [r for r in rows if r.kind in kinds and r.mean is not None and r.bytes <= most + SAME]
    return min(able, key=lambda row: abs(row.mean or 0.0) if distance else row.mean or 0.0, default=None)


@dataclass(frozen=True)
class Duel:
    """A fitted row against another one that takes no more bytes."""

    fitted: Row
    other: Row
    limit: float
    distance: bool = False  # whether distances from D are compared, in place of losses

    @property
    def verdict(self) -> str:
        """`below`, `above` or `alike`.

        Losses: the mean over the seeds beyond `limit`, all seeds on one side. Distances from D: those of the means,
        beyond `limit`; two rows that are both within it are alike.
        """
        if self.distance:
            mine, theirs = (max(abs(row.mean or 0.0), self.limit) for row in (self.fitted, self.other))
            return "alike" if abs(mine - theirs) <= self.limit else "above" if mine > theirs else "below"
        costs = self.fitted.behind(self.other)
        mean = statistics.fmean(costs) if costs else 0.0
        if abs(mean) <= self.limit or min(costs) * max(costs) < 0:
            return "alike"
        return "above" if mean > 0 else "below"


def duels(results: Results, distance: bool = False) -> Iterator[Duel]:
    """Every fitted row against the uniform one of no more bytes that has the lowest loss, or is nearest to D."""
    for cell in cells(results):
        rows = found(results, cell)
        for row in rows:
            if row.kind == "fitted" and row.mean is not None:
                other = _best(rows, ["uniform"], row.bytes, distance)
                if other is not None:
                    yield Duel(row, other, margin(rows), distance)


def random_duels(results: Results, distance: bool = False) -> Iterator[Duel]:
    """Every random choice against the fitted row of its bytes."""
    for cell in cells(results):
        rows = found(results, cell)
        named = {row.name: row for row in rows}
        for row in rows:
            match = named.get(f"fitted, {row.name.partition(', ')[2]}")
            if row.kind == "random" and match is not None and match.mean is not None and row.mean is not None:
                yield Duel(match, row, margin(rows), distance)


def _title(cell: Cell, several_betas: bool = False) -> str:
    model, lr, beta2 = cell
    return f"{model}, {lr:g}" + (f", β2 {beta2:g}" if several_betas else "")


def _shown(row: Row | None) -> str:
    if row is None:
        return "none"
    return f"{row.name if row.kind == 'fitted' else f'`{row.name}`'}, {row.bytes:.2f}"


def goals(results: Results) -> str:
    """In each setting what fp32 quality costs, and the best loss at a limit that no such uniform recipe fits."""
    lines = []
    for cell in cells(results):
        rows = found(results, cell)
        uniform, fitted = _good(rows, "uniform"), _good(rows, "fitted")
        saved = f"{uniform.bytes - fitted.bytes:+.2f}" if uniform and fitted else ""
        limit = _limit(rows)
        best = _best(rows, ("uniform", "fitted"), limit) if limit else None
        lines.append([
            _title(cell, True), f"{spread(rows):.4f}", _shown(uniform), _shown(fitted), saved,
            f"{limit:.2f}: {_shown(best)}" if limit else "",
        ])  # fmt: skip
    head = ("model, learning rate", "paired spread", "fp32 quality, uniform", "fp32 quality, fitted", "bytes saved",
            "best below that")  # fmt: skip
    return markdown(head, lines, "lrllrl")


def _limit(rows: Sequence[Row]) -> float | None:
    """The most bytes of a fitted row that are fewer than every uniform recipe of fp32 quality takes."""
    uniform = _good(rows, "uniform")
    fewer = [r.bytes for r in rows if r.kind == "fitted" and (uniform is None or r.bytes < uniform.bytes - SAME)]
    return max(fewer, default=None)


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
    return markdown(("row", "bytes", *(_title(cell) for cell in places)), lines)


def _rank(name: str) -> int:
    return 1 if name.startswith("fitted") else 2 if name.startswith("random") else 0


def _range(values: Sequence[float]) -> str:
    ends = [f"{f(values):.2f}" for f in (min, max)]
    return " to ".join(dict.fromkeys(ends))


def _fits(results: Results) -> list[Results]:
    return [run for run in results["runs"] if run["row"] == "fit" and "failed" not in run]


def chosen(results: Results) -> str:
    """What each fit chose: by row the storages, and the share of the numbers that each has."""
    lines = []
    for fit in sorted(_fits(results), key=_order):
        for name, places in fit["chosen"].items():
            if not name.startswith("fitted"):
                continue
            lines.append([
                _title((fit["model"], fit["lr"], fit["beta2"])), name.removeprefix("fitted, "),
                f"{fit['bytes'][name]:.2f}", f"{100 * fit['noise'][name]:.1f} %", _storages(fit, places),
            ])  # fmt: skip
    head = ("model, learning rate", "limit", "bytes", "noise added", "storages, by their share of the numbers")
    return markdown(head, lines, "llrrl")


def _storages(fit: Results, places: Sequence[int]) -> str:
    return ", ".join(f"{way} {100 * share:.0f} %" for way, share in _shares(fit, places)[:4])


def _shares(fit: Results, places: Sequence[int]) -> list[tuple[str, float]]:
    """Ways to keep parameters with the share of the numbers that are kept so, the largest first."""
    total: dict[str, float] = defaultdict(float)
    elements = sum(group["elements"] for group in fit["groups"])
    for group, place in zip(fit["groups"], places, strict=True):
        weights, states, *_ = group["ways"][place]
        total[" ".join(["`" + weights, "/".join(dict.fromkeys(states.values())) + "`"])] += group["elements"]
    return sorted(((way, count / elements) for way, count in total.items()), key=lambda pair: -pair[1])


def planted(results: Results) -> str:
    """The planted cases: what was chosen with and without what was planted, and the figures."""
    return table(
        results["planted"],
        ("case", "name"),
        ("planted", "planted"),
        ("chosen", lambda case: f"`{case['chosen']}`"),
        ("chosen without", lambda case: f"`{case['without']}`"),
        ("figures, with and without", lambda case: "; ".join(
            f"{name} {', '.join('not finite' if x is None else f'{x:.3g}' for x in pair)}"
            for name, pair in case["figures"].items()
        )),
        ("seen", lambda case: "yes" if case["seen"] else "no"),
        words=5,
    )  # fmt: skip


def origin(results: Results) -> str:
    """What was run, on what."""
    fits = _fits(results)
    sizes = ", ".join(f"{model} {count:,}" for model, count in {f["model"]: f["parameters"] for f in fits}.items())
    left = len(results["unfinished"])
    return fill_in(
        results,
        "`{command}`: parameters: {sizes}; {training[steps]} steps of {training[batch]} windows of "
        "{training[sequence]} tokens (CLIP: {training[batch]} pairs), vocabulary {training[vocabulary]}, after "
        "{training[warmup]} steps a cosine to {training[final]:g} of the rate, weight decay "
        "{training[weight_decay]:g}, gradients' norm at most {training[clip]:g}, replays of {replays} steps; "
        "{machine}. {left}",
        sizes=sizes, machine=machine(results), replays=_range_of([f["replay_steps"] for f in fits]),
        left=f"{left} runs were left out for want of time." if left else "All runs were made.",
    )  # fmt: skip


def _range_of(values: Sequence[int]) -> str:
    return " to ".join(str(value) for value in sorted({min(values), max(values)})) if values else "no"


def facts(results: Results) -> dict[str, str]:
    """Every number and every finding in the page's sentences."""
    counts, near = (_counts(duels(results, distance)) for distance in (False, True))
    random, random_near = (_counts(random_duels(results, distance)) for distance in (False, True))
    saved, best = _saved(results), _best_at_limits(results)
    enough = [x for x in saved if x >= SAVED]
    shares = [_shares(fit, fit["chosen"][DEFAULT])[0] for fit in _fits(results) if DEFAULT in fit["chosen"]]
    return {
        "settings": str(len(cells(results))),
        "seeds": str(results["training"]["seeds"]),
        "steps": f"{results['training']['steps']:,}",
        "compared": str(sum(counts.values())),
        "random_compared": str(sum(random.values())),
        **{word: str(count) for word, count in counts.items()},
        **{f"near_{word}": str(count) for word, count in near.items()},
        **{f"random_{word}": str(count) for word, count in random.items()},
        **{f"random_near_{word}": str(count) for word, count in random_near.items()},
        "enough": str(len(enough)),
        "both": str(len(saved)),
        "saved": f"{min(saved):+.2f} to {max(saved):+.2f}" if saved else "no setting with both",
        "limits": str(len(best)),
        "limits_won": str(sum(best)),
        "verdict": _verdict(near, len(enough), len(cells(results))),
        "common": f"{100 * statistics.fmean(share for _, share in shares):.0f} %" if shares else "none",
        "commonest": statistics.mode(way for way, _ in shares) if shares else "none",
    }  # fmt: skip


def _counts(each: Iterable[Duel]) -> dict[str, int]:
    """How many duels ended so."""
    verdicts = [duel.verdict for duel in each]
    return {word: verdicts.count(word) for word in ("below", "alike", "above")}


def _saved(results: Results) -> list[float]:
    """Where both kinds have a row of fp32 quality, the bytes that the fitted one saves."""
    found_rows = [found(results, cell) for cell in cells(results)]
    pairs = [(_good(rows, "uniform"), _good(rows, "fitted")) for rows in found_rows]
    return [uniform.bytes - fitted.bytes for uniform, fitted in pairs if uniform and fitted]


def _best_at_limits(results: Results) -> list[bool]:
    """Where a limit admits no uniform recipe of fp32 quality, whether a fitted row has the best loss below it."""
    won = []
    for cell in cells(results):
        rows = found(results, cell)
        if (limit := _limit(rows)) is not None and (best := _best(rows, ("uniform", "fitted"), limit)) is not None:
            won.append(best.kind == "fitted")
    return won


def _verdict(near: dict[str, int], enough: int, settings: int) -> str:
    """The first sentence, by the counts of distances from D."""
    if near["above"] > near["below"]:
        return "Some uniform recipes of the same bytes are nearer to fp32 training than fitted ones."
    if 2 * enough > settings or near["below"] > near["alike"]:
        return "Fitted recipes are nearer to fp32 training than uniform ones of the same bytes."
    return "The uniform recipes are already at the frontier: fitted ones are about as near to fp32 training."


def bytes_against_loss(results: Results) -> Figure:
    """A panel a setting: the frontier of the uniform recipes, fitted ones with their seeds, random choices."""
    places = cells(results)
    columns = min(len(places), 4 if len(places) > 4 else 2)
    lines = -(-len(places) // columns)
    figure, axes = pictures.figure(4.4 * columns, 4.0 * lines + 0.6, lines, columns, squeeze=False)
    for axis, cell in zip(axes.flat, places, strict=False):
        _panel(axis, found(results, cell))
        axis.set_title(_title(cell, True), fontsize=12)
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
    pictures.ticks(axis.xaxis, (5, 5.5, 6, 6.5, 7, 8, 10, 12, 16))
    axis.set_yscale("symlog", linthresh=limit, linscale=0.9)
    pictures.ticks(axis.yaxis, _places(kinds, limit), lambda y: f"{y:+g}".replace("-", "−") if y else "0")


def _places(kinds: dict[str, list[Row]], limit: float) -> list[float]:
    """Ticks of the losses: zero, and round numbers beyond what counts as none."""
    values = [x for rows in kinds.values() for row in rows for x in row.differences] or [0.0]
    at = [sign * t for t in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3) for sign in (1, -1) if t > 0.7 * limit]
    return [0.0, *(y for y in at if 1.3 * min(values) <= y <= 1.3 * max(values))]


TABLES = {"goals": goals, "losses": losses, "chosen": chosen, "planted": planted, "origin": origin}
PICTURES = {"": bytes_against_loss}
