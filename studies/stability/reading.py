"""What the SwitchBack paper says of loss spikes, held against the runs of `stability`.

Spikes are counted over runs that have a partner: the same model, rate, batch and seed under the other optimizer.
Accuracies are of a few hundred held-out pictures, and seeds of one row end further apart than counting these makes
them: a difference below two standard errors, by the larger of the two, says nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from studies.shared import readings
from studies.shared.readings import Reading
from studies.stability.page import (
    LONG,
    PAPER,
    PLAIN,
    SHORT,
    STABLE,
    TENSORS,
    Results,
    caused,
    deviation,
    match,
    runs_of,
    unclipped,
)

CLIPPED, THRESHOLD = "AdamW, clipped to 1", 2.3
FOLLOWS = 0.01  # chance of as many loss spikes behind RMS spikes, below which the loss follows
BEYOND = 3  # times what losses do just before the switch, in any run: a jump
ENOUGH = 5  # loss spikes before it is said that they do not follow
VARIED = {"model": "Figure 3", "batch": "Figure 12", "lr": "Figure 13"}
TITLES = {"model": "the model", "batch": "the batch", "lr": "the learning rate"}
Key = tuple[str, float]


def reading(results: Results) -> str:
    """Every statement of the paper, and how it reads here."""
    return readings.table([
        *_grow(results), _shorter(results), _too_short(results), _near_one(results), *_follow(results),
        *_removed(results), _stable_is_ahead(results), _schedule(results), *_switch(results),
    ])  # fmt: skip


def _grow(results: Results) -> Iterator[Reading]:
    """Spikes a run against size, batch, rate, with the long memory; a run that diverged is beyond any count."""
    for field, figure in VARIED.items():
        values = {run[field] for run in runs_of_any(results, PLAIN, LONG, field)}
        order = results["parameters"].get if field == "model" else float
        found, by_seed = [], []
        for value in sorted(values, key=order):
            runs = runs_of(results, row=PLAIN, beta2=LONG, **{field: value})
            lost = sum(run["diverged"] for run in runs)
            spikes = statistics.fmean(len(run["loss_spikes"]) for run in runs)
            found.append((value, lost / len(runs), spikes))
            by_seed.append({run["seed"]: len(run["loss_spikes"]) for run in runs})
        counts = [(lost, spikes) for _, lost, spikes in found]
        here = ", ".join(f"{spikes:.3g}{', diverged' if lost else ''} ({value})" for value, lost, spikes in found)
        holds = _rises(counts, by_seed) if len(counts) > 1 else None
        yield Reading(
            f"The larger {TITLES[field]}, the more spikes a run, β2 {LONG:g}", figure, "curves",
            here if len(counts) > 1 else "", holds,
        )  # fmt: skip


def _rises(counts: Sequence[tuple[float, float]], by_seed: Sequence[dict[int, int]]) -> bool | None:
    """Whether shares that diverged, or spikes, rise from first to last beyond chance and never fall between."""
    (first, *_, last), seeds = counts, by_seed[0].keys() & by_seed[-1].keys()
    if first[0] != last[0]:
        rises: bool | None = first[0] < last[0]
    else:
        rises = readings.fewer(*(sum(found[seed] for seed in seeds) for found in (by_seed[0], by_seed[-1])))
    return None if rises and list(counts) != sorted(counts) else rises


def runs_of_any(results: Results, row: str, beta2: float, field: str) -> list[Results]:
    """Runs of a way whatever one field is, the others being the base's."""
    values = {run[field] for run in results["runs"] if "failed" not in run}
    return [run for value in values for run in runs_of(results, row=row, beta2=beta2, **{field: value})]


def _shorter(results: Results) -> Reading:
    pairs = _pairs(results, (PLAIN, SHORT), (PLAIN, LONG))
    statement = f"A shorter memory spikes less: β2 {SHORT:g}, {LONG:g}"
    return _counted(statement, "Figures 3, 12, 13", "no spikes, spikes", pairs)


def _pairs(results: Results, mine: Key, other: Key) -> list[tuple[Results, Results]]:
    """Runs of two optimizers that differ in nothing else, with all their steps."""
    fields = ("model", "lr", "batch", "seed", "signal")
    whole = [run for run in results["runs"] if "failed" not in run and not run["diverged"] and run["signal"] == 1]
    known = {tuple(run[f] for f in fields): run for run in whole if (run["row"], run["beta2"]) == other}
    rows = [run for run in whole if (run["row"], run["beta2"]) == mine]
    return [(run, known[key]) for run in rows if (key := tuple(run[f] for f in fields)) in known]


def _counted(statement: str, at: str, paper: str, pairs: Sequence[tuple[Results, Results]]) -> Reading:
    less, more = (sum(len(pair[side]["loss_spikes"]) for pair in pairs) for side in (0, 1))
    here = f"{less} spikes, {more}; {len(pairs)} pairs of runs" if pairs else ""
    return Reading(statement, at, paper, here, readings.fewer(less, more) if pairs else None)


def _too_short(results: Results) -> Reading:
    found = accuracies(results, PLAIN)
    statement, at = "Too short a memory ends with less accuracy than the best", "Figures 3, 12, 13"
    if len(found) < 2:
        return Reading(statement, at, "curves")
    least, best = min(found), max(found, key=lambda beta2: found[beta2][0])
    here = f"β2 {least:g} {_accuracy(found[least])}"
    here += f", β2 {best:g} {_accuracy(found[best])}" if best != least else ", no other has more"
    return Reading(statement, at, "curves", here, _ahead(results, found[best], found[least]))


def accuracies(results: Results, row: str) -> dict[float, tuple[float, int]]:
    """Zero-shot accuracy and runs it is the mean of, by beta2, at the base."""
    runs = [run for run in runs_of(results, row=row) if run["accuracy"] is not None]
    grouped = {run["beta2"]: [r["accuracy"] for r in runs if r["beta2"] == run["beta2"]] for run in runs}
    return {beta2: (statistics.fmean(values), len(values)) for beta2, values in grouped.items()}


def _accuracy(found: tuple[float, int]) -> str:
    return f"{100 * found[0]:.1f} %"


def _ahead(results: Results, mine: tuple[float, int], other: tuple[float, int]) -> bool | None:
    """Whether an accuracy is larger by more than two standard errors; None within them or where not known."""
    by_seeds, pictures = deviation(results), results["data"]["held_out"]
    if by_seeds is None:
        return None
    error = math.sqrt(sum(max(share * (1 - share) / pictures, by_seeds**2) / runs for share, runs in (mine, other)))
    difference = mine[0] - other[0]
    return None if abs(difference) <= 2 * error else difference > 0


def _near_one(results: Results) -> Reading:
    largest = {
        beta2: [x["max"] for run in runs_of(results, row=PLAIN, beta2=beta2) if (x := run["rms"].get("patches"))]
        for beta2 in (LONG, SHORT)
    }
    here = ""
    if all(largest.values()):
        here = ", ".join(f"largest {max(values):.1f} with β2 {beta2:g}" for beta2, values in largest.items())
    holds = max(largest[SHORT]) < THRESHOLD <= max(largest[LONG]) if here else None
    statement = f"RMS_t of the patch embedding passes {THRESHOLD:g} with the long memory alone, first setting"
    return Reading(statement, "Figure 4", "curves", here, holds)


def _follow(results: Results) -> Iterator[Reading]:
    runs = unclipped(results)
    for tensor, follows in (("patches", True), ("middle", False)):
        what = f"Loss spikes {'' if follows else 'do not '}follow RMS spikes of {TENSORS[tensor]}"
        at = f"{'Section 3.4, ' * follows}Figure{'s 15 and 16' if follows else ' 20'}"
        if not runs:
            yield Reading(what, at, PAPER[tensor])
            continue
        found = match(runs, results, tensor)
        here = f"{found.followed} of {found.loss_spikes}; chance of as many {found.probability:.2g}"
        follow = True if found.probability < FOLLOWS else False if found.loss_spikes >= ENOUGH else None
        yield Reading(what, at, PAPER[tensor], here, None if follow is None else follow == follows)


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
    here = ", ".join(f"{name} {_accuracy(value)}" for name, value in best.items())
    each = [_ahead(results, best[STABLE], best[name]) for name in (CLIPPED, PLAIN)]
    holds = None if None in each and False not in each else all(each)
    return Reading(statement, "Figure 5", "curves", here, holds)


def _schedule(results: Results) -> Reading:
    fixed = accuracies(results, PLAIN)
    rising = {
        row["name"]: max(values.values())
        for row in results["rows"]
        if "t^" in row["name"] and (values := accuracies(results, row["name"]))
    }
    statement = "A β2 that rises ends with no more accuracy than the best fixed one"
    if not fixed or not rising:
        return Reading(statement, "Figure 14", "curves")
    best, other = max(rising.values()), max(fixed.values())
    here = f"{_accuracy(best)}, fixed {_accuracy(other)}"
    ahead = _ahead(results, best, other)
    return Reading(statement, "Figure 14", "curves", here, None if ahead is None else not ahead)


def _switch(results: Results) -> Iterator[Reading]:
    """A changed learning signal, which the paper describes and this study provokes."""
    switched = results["training"]["switched"]
    dimmed = [run for run in results["runs"] if "failed" not in run and run["signal"] != 1]
    noise = max((abs(run["after"]["quiet"]) for run in dimmed if run["after"]), default=math.inf)
    for name, jumps in ((PLAIN, True), (STABLE, False)):
        runs = [run for run in dimmed if (run["row"], run["beta2"]) == (name, LONG)]
        after = [run["after"] for run in runs if run["after"]]
        jumped = sum(
            bool(caused(run, switched)) or bool(run["after"] and run["after"]["rise"] > BEYOND * noise)
            for run in runs
        )
        here = f"{jumped} of {len(runs)} runs"
        if after:
            rise, quiet = (statistics.fmean(x[key] for x in after) for key in ("rise", "quiet"))
            here += f"; loss {rise:+.2f}, just before {quiet:+.2f}"
        verb = "jumps" if jumps else "does not jump"
        yield Reading(
            f"The loss of {name}, β2 {LONG:g}, {verb} when the signal of the patch embedding grows", "Section 3.4",
            "no figure", here if runs else "", {len(runs): jumps, 0: not jumps}.get(jumped) if runs else None,
        )  # fmt: skip
