"""Tables, facts, the picture and the reading of the stability study: who spikes, what it costs, what losses follow.

In readings, spikes are counted over runs that have a partner: the same model, rate, batch and seed under the other
optimizer. Accuracies are of a few hundred held-out pictures, and seeds of one row end further apart than counting
these makes them: a difference below two standard errors, by the larger of the two, says nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from matplotlib.figure import Figure

from narrowgauge.gauges import SpikeMatch, match_spikes
from studies.shared import pictures, readings, tables
from studies.shared.pictures import COLORS, INK, MUTED
from studies.shared.readings import Reading
from studies.shared.tables import Results, fill_in, left_out, mean_of, name_of, per, percent2, significant, table

PLAIN, STABLE, CLIPPED = "AdamW", "StableAdamW", "AdamW, clipped to 1"
LONG, SHORT = 0.999, 0.95
NEAR = 20  # steps after the switch in which a loss spike is put down to it
TENSORS = {"patches": "the patch embedding", "middle": "a layer in the middle", "tokens": "the token embedding"}
PAPER = {"patches": "28 of 30, by chance 1 %", "middle": "none follow", "tokens": ""}
THRESHOLD = 2.3
FOLLOWS = 0.01  # chance of as many loss spikes behind RMS spikes, below which the loss follows
BEYOND = 3  # times what losses do just before the switch, in any run: a jump
ENOUGH = 5  # loss spikes before it is said that they do not follow
VARIED = {"model": ("the model", "Figure 3"), "batch": ("the batch", "Figure 12"),
          "lr": ("the learning rate", "Figure 13")}  # fmt: skip
SPIKE, PATCHES, MIDDLE = (COLORS[name] for name in ("series-1", "series-2", "series-3"))
SHOWN = ((PLAIN, LONG), (STABLE, LONG), (CLIPPED, LONG), (PLAIN, SHORT))
Runs = Sequence[Results]


def made(results: Results) -> list[Results]:
    """All runs that were made."""
    return [run for run in results["runs"] if "failed" not in run]


def runs_of(results: Results, **fields: object) -> list[Results]:
    """Runs that were made and have such fields, by seed; model, rate and batch are the base's if not given."""
    base = {name: results["training"][name] for name in ("model", "lr", "batch")}
    return tables.runs_of(results, **base | {"signal": 1.0} | fields)


def dimmed(results: Results) -> dict[tuple[str, float], list[Results]]:
    """Runs whose signal changes, by way and beta2, each by seed."""
    found: dict[tuple[str, float], list[Results]] = {}
    for run in made(results):
        if run["signal"] != 1.0:
            found.setdefault((run["row"], run["beta2"]), []).append(run)
    return {way: sorted(runs, key=lambda run: run["seed"]) for way, runs in found.items()}


def match(runs: Runs, results: Results, tensor: str) -> SpikeMatch:
    """All loss spikes of some runs against the RMS spikes of a tensor."""
    first = results["training"]["judged_from"]
    return SpikeMatch.total([
        match_spikes(run["rms_spikes"][tensor], run["loss_spikes"], judged=range(first, run["steps_made"] + 1))
        for run in runs
        if run["steps_made"] >= first
    ])  # fmt: skip


def deviation(results: Results) -> float | None:
    """Standard deviation of an accuracy from seed to seed, pooled over the ways at the base."""
    ways = dict.fromkeys((run["row"], run["beta2"]) for run in made(results))
    found = [[run["accuracy"] for run in runs_of(results, row=row, beta2=beta2)] for row, beta2 in ways]
    return readings.chance([x for x in values if x is not None] for values in found)


def unclipped(results: Results) -> list[Results]:
    """The runs that Figures 15, 16 and 20 are of: AdamW, whatever its beta2, at the base and beside it.

    Those that ended before spikes are judged have none.
    """
    runs = [run for run in made(results) if (run["row"], run["signal"]) == (PLAIN, 1.0)]
    return [run for run in runs if run["steps_made"] >= results["training"]["judged_from"]]


def caused(run: Results, switched: int) -> list[int]:
    """Loss spikes soon after the switch."""
    return [step for step in run["loss_spikes"] if switched <= step < switched + NEAR]


def _spikes(runs: Runs) -> str:
    """Loss spikes of each seed, and how many runs diverged."""
    bad = sum(run["diverged"] for run in runs)
    counts = ", ".join(str(len(run["loss_spikes"])) for run in runs)
    return counts + (f"; {bad} of {len(runs)} diverged" if bad else "")


def _rms(key: str, form: str) -> Callable[[Runs], str]:
    return lambda runs: mean_of((x[key] for run in runs if (x := run["rms"].get("patches"))), form)


def _accuracy(runs: Runs) -> str:
    good = [100 * run["accuracy"] for run in runs if run["accuracy"] is not None]
    return f"{tables.several(good, '.1f')} %" if good else ""


FIRST = (("", lambda runs: runs[0]["row"]), ("β2", lambda runs: runs[0]["beta2"], "g"))
LAST = (
    ("training loss", lambda runs: mean_of((run["training_loss"] for run in runs), ".3f")),
    ("zero-shot accuracy", _accuracy),
)


def ways(results: Results) -> str:
    """Ways to meet spikes, at the base."""
    rows = [
        runs_of(results, row=row["name"], beta2=beta2)
        for row in results["rows"]
        for beta2 in sorted({run["beta2"] for run in runs_of(results, row=row["name"])}, reverse=True)
    ]
    return table(
        rows,
        *FIRST,
        ("loss spikes, by seed", _spikes),
        ("RMS spikes", lambda runs: ", ".join(str(len(run["rms_spikes"]["patches"])) for run in runs)),
        ("mean RMS_t", _rms("mean", ".2f")),
        ("largest", _rms("max", ".1f")),
        *LAST,
    )


def shift(results: Results) -> str:
    """What a larger signal of the patch embedding does, by way."""
    switched = results["training"]["switched"]

    def after(read: Callable[[Results], float], form: str) -> Callable[[Runs], str]:
        return lambda runs: mean_of((read(run["after"]) for run in runs if run["after"]), form)

    return table(
        dimmed(results).values(),
        *FIRST,
        ("RMS_t of patches, first step", after(lambda x: x["rms"]["patches"], ".1f")),
        ("of the middle layer", after(lambda x: x["rms"]["middle"], ".1f")),
        ("runs whose loss spikes", lambda runs: f"{sum(bool(caused(r, switched)) for r in runs)} of {len(runs)}"),
        ("largest loss", after(lambda x: x["rise"], "+.2f")),
        ("as much before", after(lambda x: x["quiet"], "+.2f")),
        *LAST,
    )


def varied(field: str, title: str) -> Callable[[Results], str]:
    """AdamW against a field of the training, with a long and a short memory: Figures 13, 12 and 3."""

    def drawn(results: Results) -> str:
        def of(show: Callable[[Runs], str]) -> Callable[[float, Any], str]:
            return lambda beta2, value: show(runs_of(results, row=PLAIN, beta2=beta2, **{field: value}))

        columns = (
            ("loss spikes", of(_spikes)),
            ("largest RMS_t", of(_rms("max", ".1f"))),
            ("accuracy", of(_accuracy)),
        )
        shown = [value for value in values_of(results, field) if runs_of(results, row=PLAIN, **{field: value})]
        return table(
            shown,
            (title, lambda value: value if isinstance(value, str) else f"{value:g}"),
            *per((LONG, SHORT), "β2 {:g}: ", *columns),
        )

    return drawn


def values_of(results: Results, field: str) -> list[Any]:
    """The values that a field of the training has, models by their size."""
    return sorted(
        {run[field] for run in made(results)}, key=results["parameters"].get if field == "model" else float
    )


def matches(results: Results) -> str:
    """Whether loss spikes follow RMS spikes, over all runs of AdamW."""
    runs = unclipped(results)
    return table(
        [(tensor, match(runs, results, tensor)) for tensor in (TENSORS if runs else ())],
        ("RMS_t of", lambda row: TENSORS[row[0]]),
        ("paper", lambda row: PAPER[row[0]]),
        ("RMS spikes", lambda row: sum(len(run["rms_spikes"][row[0]]) for run in runs)),
        ("loss spikes that follow", lambda row: f"{row[1].followed} of {row[1].loss_spikes}"),
        ("chance of one", lambda row: row[1].chance, percent2),
        ("chance of as many", lambda row: significant(row[1].probability, 2)),
        words=2,
    )


def origin(results: Results) -> str:
    """What was run, on what."""
    training = results["training"]
    return fill_in(
        results,
        "`{command}`: {training[model]} of {size:,} parameters, {training[steps]} steps of {training[batch]:,} "
        "pairs, learning rate {training[lr]:g} after {training[warmup]} steps, then a cosine, weight decay "
        "{training[weight_decay]:g}, {dropped:g} % of the patches dropped, computed in {training[autocast]}; "
        "spikes are judged from step {training[judged_from]} on; {machine}. {left}",
        size=results["parameters"][training["model"]],
        dropped=100 * training["patch_dropout"],
        left=left_out(results, lambda run: f"{run['row']}, β2 {run['beta2']:g}"),
    )


def facts(results: Results) -> dict[str, str]:
    """Numbers in sentences, by way and beta2: `accuracy_AdamW_999`."""

    def key(row: str, beta2: float) -> str:
        return f"{name_of(row)}_{tables.digits_of(beta2)}"

    named: dict[str, str] = {}
    for row in results["rows"]:
        for beta2, (accuracy, _) in accuracies(results, row["name"]).items():
            named[f"accuracy_{key(row['name'], beta2)}"] = f"{100 * accuracy:.1f} %"
    if (scatter := deviation(results)) is not None:  # of two means, of two seeds each
        named["margin_accuracy"] = significant(200 * scatter, 2)
    for way, runs in dimmed(results).items():
        if after := [run["after"] for run in runs if run["after"]]:
            named[f"rise_{key(*way)}"] = f"{statistics.fmean(x['rise'] for x in after):+.2f}"
            named[f"rms_{key(*way)}"] = f"{statistics.fmean(x['rms']['patches'] for x in after):.1f}"
    runs = unclipped(results)
    named["spikes_unclipped"] = str(sum(len(run["loss_spikes"]) for run in runs))
    return named | {"runs_unclipped": str(len(runs))}


def reading(results: Results) -> str:
    """Every statement of the paper, and how it reads here."""
    return readings.table([
        *_grow(results), _shorter(results), _too_short(results), _near_one(results), *_follow(results),
        *_removed(results), _stable_is_ahead(results), _schedule(results), *_switch(results),
    ])  # fmt: skip


def _grow(results: Results) -> Iterator[Reading]:
    """Spikes a run against size, batch, rate, with the long memory; a run that diverged is beyond any count."""
    for field, (title, figure) in VARIED.items():
        counts, by_seed, here = [], [], []
        for value in values_of(results, field):
            runs = runs_of(results, row=PLAIN, beta2=LONG, **{field: value})
            if not runs:
                continue
            lost = sum(run["diverged"] for run in runs)
            spikes = statistics.fmean(len(run["loss_spikes"]) for run in runs)
            counts.append((lost / len(runs), spikes))
            by_seed.append({run["seed"]: len(run["loss_spikes"]) for run in runs})
            here.append(f"{spikes:.3g}{', diverged' if lost else ''} ({value})")
        statement, enough = f"The larger {title}, the more spikes a run, β2 {LONG:g}", len(counts) > 1
        holds = _rises(counts, by_seed) if enough else None
        yield Reading(statement, figure, "curves", ", ".join(here) if enough else "", holds)


def _rises(counts: Sequence[tuple[float, float]], by_seed: Sequence[dict[int, int]]) -> bool | None:
    """Whether shares that diverged, or spikes, rise from first to last beyond chance and never fall between."""
    (first, *_, last), seeds = counts, by_seed[0].keys() & by_seed[-1].keys()
    if first[0] != last[0]:
        rises: bool | None = first[0] < last[0]
    else:
        rises = readings.fewer(*(sum(found[seed] for seed in seeds) for found in (by_seed[0], by_seed[-1])))
    return None if rises and list(counts) != sorted(counts) else rises


def _shorter(results: Results) -> Reading:
    pairs = _pairs(results, (PLAIN, SHORT), (PLAIN, LONG))
    statement = f"A shorter memory spikes less: β2 {SHORT:g}, {LONG:g}"
    return _counted(statement, "Figures 3, 12, 13", "no spikes, spikes", pairs)


def _pairs(results: Results, mine: tuple[str, float], other: tuple[str, float]) -> list[tuple[Results, Results]]:
    """Runs of two optimizers that differ in nothing else, with all their steps."""
    fields = ("model", "lr", "batch", "seed", "signal")
    whole = [run for run in made(results) if not run["diverged"] and run["signal"] == 1]
    known = {tuple(run[f] for f in fields): run for run in whole if (run["row"], run["beta2"]) == other}
    rows = [run for run in whole if (run["row"], run["beta2"]) == mine]
    return [(run, known[key]) for run in rows if (key := tuple(run[f] for f in fields)) in known]


def _counted(statement: str, at: str, paper: str, pairs: Sequence[tuple[Results, Results]]) -> Reading:
    less, more = (sum(len(pair[side]["loss_spikes"]) for pair in pairs) for side in (0, 1))
    here = f"{less} spikes, {more}; {len(pairs)} pairs of runs" if pairs else ""
    return Reading(statement, at, paper, here, readings.fewer(less, more) if pairs else None)


def accuracies(results: Results, row: str) -> dict[float, tuple[float, int]]:
    """Zero-shot accuracy and runs it is the mean of, by beta2, at the base."""
    grouped: dict[float, list[float]] = {}
    for run in runs_of(results, row=row):
        if run["accuracy"] is not None:
            grouped.setdefault(run["beta2"], []).append(run["accuracy"])
    return {beta2: (statistics.fmean(values), len(values)) for beta2, values in grouped.items()}


def _percent(found: tuple[float, int]) -> str:
    return f"{100 * found[0]:.1f} %"


def _ahead(results: Results, mine: tuple[float, int], other: tuple[float, int]) -> bool | None:
    """Whether an accuracy is larger by more than two standard errors; None within them or where not known."""
    by_seeds, pictures = deviation(results), results["data"]["held_out"]
    if by_seeds is None:
        return None
    error = math.sqrt(sum(max(share * (1 - share) / pictures, by_seeds**2) / runs for share, runs in (mine, other)))
    difference = mine[0] - other[0]
    return None if abs(difference) <= 2 * error else difference > 0


def _too_short(results: Results) -> Reading:
    found = accuracies(results, PLAIN)
    statement, at = "Too short a memory ends with less accuracy than the best", "Figures 3, 12, 13"
    if len(found) < 2:
        return Reading(statement, at, "curves")
    least, best = min(found), max(found, key=lambda beta2: found[beta2][0])
    here = f"β2 {least:g} {_percent(found[least])}"
    here += f", β2 {best:g} {_percent(found[best])}" if best != least else ", no other has more"
    return Reading(statement, at, "curves", here, _ahead(results, found[best], found[least]))


def _near_one(results: Results) -> Reading:
    largest = {
        beta2: [x["max"] for run in runs_of(results, row=PLAIN, beta2=beta2) if (x := run["rms"].get("patches"))]
        for beta2 in (LONG, SHORT)
    }
    here, holds = "", None
    if all(largest.values()):
        here = ", ".join(f"largest {max(values):.1f} with β2 {beta2:g}" for beta2, values in largest.items())
        holds = max(largest[SHORT]) < THRESHOLD <= max(largest[LONG])
    statement = f"RMS_t of the patch embedding passes {THRESHOLD:g} with the long memory alone, first setting"
    return Reading(statement, "Figure 4", "curves", here, holds)


def _follow(results: Results) -> Iterator[Reading]:
    runs = unclipped(results)
    for tensor, follows in (("patches", True), ("middle", False)):
        what = f"Loss spikes {'' if follows else 'do not '}follow RMS spikes of {TENSORS[tensor]}"
        at = "Section 3.4, Figures 15 and 16" if follows else "Figure 20"
        here, holds = "", None
        if runs:
            found = match(runs, results, tensor)
            here = f"{found.followed} of {found.loss_spikes}; chance of as many {found.probability:.2g}"
            follow = True if found.probability < FOLLOWS else False if found.loss_spikes >= ENOUGH else None
            holds = None if follow is None else follow == follows
        yield Reading(what, at, PAPER[tensor], here, holds)


def _removed(results: Results) -> Iterator[Reading]:
    for name, words in ((STABLE, "StableAdamW has"), (CLIPPED, "Clipping gradients leaves")):
        shared = {run["beta2"] for run in runs_of(results, row=name)}
        pairs = [pair for beta2 in shared for pair in _pairs(results, (name, beta2), (PLAIN, beta2))]
        yield _counted(f"{words} fewer spikes than AdamW, equal β2", "Figure 5", "no spikes, spikes", pairs)


def _stable_is_ahead(results: Results) -> Reading:
    found = {name: accuracies(results, name) for name in (STABLE, CLIPPED, PLAIN)}
    statement = "StableAdamW ends with more accuracy than clipping and AdamW, each with its best β2"
    if not all(found.values()):
        return Reading(statement, "Figure 5", "curves")
    best = {name: max(values.values()) for name, values in found.items()}
    here = ", ".join(f"{name} {_percent(value)}" for name, value in best.items())
    each = [_ahead(results, best[STABLE], best[name]) for name in (CLIPPED, PLAIN)]
    holds = None if None in each and False not in each else all(each)
    return Reading(statement, "Figure 5", "curves", here, holds)


def _schedule(results: Results) -> Reading:
    fixed = accuracies(results, PLAIN).values()
    names = [row["name"] for row in results["rows"] if "t^" in row["name"]]
    rising = [value for name in names for value in accuracies(results, name).values()]
    statement = "A β2 that rises ends with no more accuracy than the best fixed one"
    if not fixed or not rising:
        return Reading(statement, "Figure 14", "curves")
    best, other = max(rising), max(fixed)
    ahead = _ahead(results, best, other)
    here = f"{_percent(best)}, fixed {_percent(other)}"
    return Reading(statement, "Figure 14", "curves", here, None if ahead is None else not ahead)


def _switch(results: Results) -> Iterator[Reading]:
    """A changed learning signal, which the paper describes and this study provokes."""
    switched, every = results["training"]["switched"], dimmed(results)
    afters = [run["after"] for runs in every.values() for run in runs if run["after"]]
    noise = max((abs(after["quiet"]) for after in afters), default=math.inf)
    for name, jumps in ((PLAIN, True), (STABLE, False)):
        runs = every.get((name, LONG), [])
        after = [run["after"] for run in runs if run["after"]]
        jumped = sum(
            bool(caused(run, switched)) or bool(run["after"] and run["after"]["rise"] > BEYOND * noise)
            for run in runs
        )
        here = f"{jumped} of {len(runs)} runs" if runs else ""
        if after:
            rise, quiet = (statistics.fmean(x[key] for x in after) for key in ("rise", "quiet"))
            here += f"; loss {rise:+.2f}, just before {quiet:+.2f}"
        verb = "jumps" if jumps else "does not jump"
        statement = f"The loss of {name}, β2 {LONG:g}, {verb} when the signal of the patch embedding grows"
        holds = {len(runs): jumps, 0: not jumps}.get(jumped) if runs else None
        yield Reading(statement, "Section 3.4", "no figure", here, holds)


def losses_and_rms(results: Results) -> Figure:
    """Figures 4, 5 and 20: a column a way, seed 0; two rows where the signal changes, two where it does not."""
    base = {name: results["training"][name] for name in ("model", "lr", "batch")}
    whole = [run for run in results["runs"] if base.items() <= run.items() and "losses" in run]
    groups = [
        {(run["row"], run["beta2"]): run for run in whole if (run["signal"] != 1.0) == changed}
        for changed in (True, False)
    ]
    groups = [runs for runs in groups if runs]
    figure, grid = pictures.figure(
        13, 0.8 + 5.4 * max(1, len(groups)), 2 * max(1, len(groups)), len(SHOWN),
        sharex=True, sharey="row", squeeze=False,
    )  # fmt: skip
    for place, runs in enumerate(groups):
        changed = any(run["signal"] != 1.0 for run in runs.values())
        for column, way in enumerate(SHOWN):
            top, bottom = grid[2 * place][column], grid[2 * place + 1][column]
            if way in runs:
                _draw(top, bottom, runs[way], results)
            top.set_title(f"{way[0]}, β2 {way[1]:g}" + "\nsignal changes" * changed, color=INK, fontsize=12)
        grid[2 * place][0].set_ylabel("loss", color=INK)
        grid[2 * place + 1][0].set_ylabel("RMS_t", color=INK)
    for axis in grid[-1]:
        axis.set_xlabel("step")
    (dot,) = grid[0][0].plot([], [], "o", color=SPIKE, markersize=6)
    pictures.below(figure, grid[1][0], 3, (dot, "start of a loss spike"))
    return figure


def _draw(top: Any, bottom: Any, run: Results, results: Results) -> None:
    steps = range(1, len(run["losses"]) + 1)
    top.plot(steps, pictures.numbers(run["losses"]), color=INK, linewidth=1.0)
    for step in run["loss_spikes"]:
        top.plot(step, run["losses"][step - 1], "o", color=SPIKE, markersize=6, zorder=4)
    for name, label, color in (("patches", "patch embedding", PATCHES), ("middle", TENSORS["middle"], MIDDLE)):
        bottom.plot(steps, pictures.numbers(run["rms_t"][name]), color=color, linewidth=1.0, label=label)
    if run["signal"] != 1.0:
        for axis in (top, bottom):
            axis.axvline(results["training"]["switched"], color=MUTED, linewidth=1.0)
    bottom.axhline(THRESHOLD, color=SPIKE, linewidth=1.2, linestyle=(0, (1, 1.5)))
    bottom.set_yscale("log")
    pictures.ticks(bottom.yaxis, [0.2, 0.5, 1, 2.3, 5, 10, 20])


TABLES = {
    "shift": shift, "ways": ways, "rates": varied("lr", "learning rate"), "batches": varied("batch", "batch"),
    "sizes": varied("model", "model"), "matches": matches, "origin": origin, "reading": reading,
}  # fmt: skip
PICTURES = {"": losses_and_rms}
