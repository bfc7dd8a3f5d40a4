"""What the lecture and the SwitchBack paper say of fp16, held against the runs of `loss_scaling`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from studies.loss_scaling.look import SCALES, SMALLEST, below
from studies.loss_scaling.page import (
    FORMATS,
    QUIET,
    REFERENCE,
    Results,
    apart,
    back,
    looks,
    lowest,
    power,
    runs_of,
    together,
)
from studies.loss_scaling.rows import FULL, LECTURE
from studies.shared import readings
from studies.shared.readings import Reading
from studies.shared.tables import percent, percent2, several, span

ABOUT = (0.025, 0.1)  # what "about 5 %" is taken for: half and twice
CLOSE = 1.1  # times the largest scale's error, up to which a smaller scale does as well
LONG = 1000  # good steps: what the paper means by thousands begins here
SPIKE = "inf × 20"


def reading(results: Results) -> str:
    """Every statement, and how it reads here."""
    return readings.table([*_gradients(results), *_formats(results), *_spikes(results)])


def _gradients(results: Results) -> Iterator[Reading]:
    found = looks(results)
    updates = [below(look["updates"], SMALLEST) for look in found]
    outputs = [below(together(look["outputs"]), SMALLEST) for look in found]
    yield Reading(
        "About 5 % of the values are below 2⁻²⁴: updates", "lecture, Reason I", "5 %", _shares(updates),
        all(ABOUT[0] <= share <= ABOUT[1] for share in updates) if updates else None,
    )  # fmt: skip
    yield Reading(
        "Most gradients are below 2⁻²⁴: of layers' outputs", "lecture, Loss scaling", "no figure", _shares(outputs),
        min(outputs) > 0.5 if outputs else None,
    )  # fmt: skip
    errors = [[look["fp16"][SCALES.index(scale)]["error"] for look in found] for scale in (LECTURE, max(SCALES))]
    small, large = (percent(max(each, default=0.0), 2) for each in errors)
    yield Reading(
        f"A scale of {LECTURE:g} does: the gradient is no further off than with a larger one",
        "lecture, Loss scaling", f"c = {LECTURE:g}",
        f"error {small} at most, with {power(max(SCALES))} {large}" if found else "",
        all(mine <= CLOSE * theirs for mine, theirs in zip(*errors, strict=True)) if found else None,
    )  # fmt: skip


def _shares(shares: Sequence[float]) -> str:
    return span(shares, percent2)


def _formats(results: Results) -> Iterator[Reading]:
    for name, words, at, paper, worse in (
        ("fp16", "without scaling", "lecture, Figure 5", "falls behind or diverges", True),
        ("fp16, c = 8", "with a scale of 8", "lecture, Loss scaling", "c = 8", False),
        ("fp16, dynamic", "with a dynamic scale", "lecture, Table 2", "accuracy 77.1 and 76.9", False),
        ("fp16 alone, dynamic", "without fp32 master weights", "lecture, FP32 weight copies", "no figure", True),
    ):
        statement = f"fp16 {words} ends {'behind fp32' if worse else 'where fp32 does'}"
        runs, reference = runs_of(results, FORMATS, name), runs_of(results, FORMATS, REFERENCE)
        costs = apart(runs, reference)
        good = {run["seed"]: run["validation_loss"] for run in reference if run["validation_loss"] is not None}
        spread = max(good.values()) - min(good.values()) if len(good) > 1 else None
        lost = sum(run["validation_loss"] is None and run["seed"] in good for run in runs)
        here = f"loss {several(costs, '+.4f')}" if costs else ""
        known = "" if spread is None else f"{spread:.4f} apart"
        here = readings.told(here, lost, len(runs), known, "fp32")
        rule = readings.behind if worse else readings.alike
        yield Reading(statement, at, paper, here, rule(costs, spread, lost > 0))


def _spikes(results: Results) -> Iterator[Reading]:
    dynamic, tensor = (runs_of(results, SPIKE, name) for name in ("dynamic", "by tensor"))
    steps = back(results, dynamic) if dynamic else 0
    here = f"{power(FULL)} to {power(lowest(dynamic))}; {steps:,} good steps back" if dynamic else ""
    yield Reading(
        "A spike takes a dynamic scale thousands of good steps down", "SwitchBack, Appendix G",
        "thousands of steps", here, steps >= LONG if dynamic else None,
    )  # fmt: skip
    kept = lowest(tensor) if tensor else FULL
    yield Reading(
        "A scale that skips tensor by tensor stays", "SwitchBack, Appendix G", "as it is built",
        f"{power(kept)} throughout" if tensor and kept == FULL else f"down to {power(kept)}" if tensor else "",
        kept == FULL if tensor else None,
    )  # fmt: skip
    costs = [_cost(results, runs, name) for runs, name in ((tensor, "by tensor"), (dynamic, "dynamic"))]
    seeds = sorted(costs[0].keys() & costs[1].keys())
    shown = [several([each[seed] for seed in seeds], "+.4f") for each in costs]
    of = f"; {len(seeds)} seed{'s' * (len(seeds) != 1)}"
    yield Reading(
        "Skipping by tensor costs less loss than a dynamic scale, with every seed",
        "SwitchBack, Appendix G", "fp16 ViT-Huge trains", f"{shown[0]}; dynamic {shown[1]}{of}" if seeds else "",
        readings.behind([costs[1][seed] - costs[0][seed] for seed in seeds], _parting(results, len(seeds))),
    )  # fmt: skip


def _parting(results: Results, seeds: int) -> float | None:
    """How far chance takes what one scaler loses more than another by a spike, as a mean over so many seeds.

    By how it changes from seed to seed, pooled over the spikes; with too few of them, what fp32's seeds lie apart.
    """
    spikes = [spike["name"] for spike in results["injections"] if spike["name"] != QUIET]
    rows = ("by tensor", "dynamic")
    pairs = [[_cost(results, runs_of(results, spike, row), row) for row in rows] for spike in spikes]
    gaps = ([theirs[seed] - mine[seed] for seed in mine.keys() & theirs.keys()] for mine, theirs in pairs)
    if (least := readings.margin(readings.chance(gaps), seeds)) is not None:
        return least
    losses = [run["validation_loss"] for run in runs_of(results, FORMATS, REFERENCE)]
    good = [loss for loss in losses if loss is not None]
    return max(good) - min(good) if len(good) > 1 else None


def _cost(results: Results, runs: Sequence[Results], name: str) -> dict[int, float]:
    """Validation loss that the spike costs, by seed."""
    quiet = {run["seed"]: run["validation_loss"] for run in runs_of(results, QUIET, name)}
    return {
        run["seed"]: run["validation_loss"] - quiet[run["seed"]]
        for run in runs
        if run["validation_loss"] is not None and quiet.get(run["seed"]) is not None
    }
