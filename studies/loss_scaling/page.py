"""Tables, facts, the picture and the reading of fp16 and loss scaling.

Losses are compared with those of the same seed, which has the same weights and batches: a format with fp32, a
spike with the same scaler's run without one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from studies.loss_scaling.look import LOW, NORMAL, SCALES, SMALLEST, below
from studies.loss_scaling.rows import FULL, LECTURE
from studies.shared import pictures, readings, tables
from studies.shared.pictures import COLORS, INK, MUTED, Line
from studies.shared.readings import Reading
from studies.shared.tables import Results, apart, left_out, name_of, per, percent2, raised, several, span, table

FORMATS, REFERENCE, QUIET = "formats", "fp32", "none"
MOMENTS = (("series-6", (1, 1.5)), ("series-2", (2, 1.5)), ("series-3", (6, 2)), ("ink", ()))
SCALERS = (
    Line("dynamic", "series-1"), Line("by tensor", "series-2", (6, 2)), Line("whole step", "series-5", (2, 1.5)),
)  # fmt: skip
SPIKES = ("inf × 20", "large × 20")
ABOUT = (0.025, 0.1)  # what "about 5 %" is taken for: half and twice
CLOSE = 1.1  # times the largest scale's error, up to which a smaller scale does as well
LONG = 1000  # good steps: what the paper means by thousands begins here


def power(of_two: float) -> str:
    """2¹⁶ for 65536, 8 for 8."""
    exponent = math.log2(of_two)
    return f"{of_two:,g}" if 1 <= of_two < 2000 or exponent != round(exponent) else f"2{raised(exponent)}"


def runs_of(results: Results, kind: str, row: str) -> list[Results]:
    """Runs that were made, by seed."""
    return tables.runs_of(results, kind=kind, row=row)


def looks(results: Results) -> list[Results]:
    """What was seen of gradients at the moments, none if that run is missing."""
    return next((run["gradients"] for run in runs_of(results, FORMATS, REFERENCE) if "gradients" in run), [])


def together(kinds: dict[str, Results]) -> Results:
    """The histogram of all kinds together."""
    counts = [sum(column) for column in zip(*(found["counts"] for found in kinds.values()), strict=True)]
    return {"zeros": sum(found["zeros"] for found in kinds.values()), "counts": counts}


def shares(results: Results, what: str, limit: float) -> list[float]:
    """By moment, the share of all weights' or outputs' gradients, or of updates, below a power of two."""
    found = [look[what] for look in looks(results)]
    return [below(each if what == "updates" else together(each), limit) for each in found]


def moments(results: Results) -> str:
    """Shares below fp16's powers, moment by moment."""

    def of(what: str, limit: float) -> Any:
        found = dict(zip((look["step"] for look in looks(results)), shares(results, what, limit), strict=True))
        return lambda look: found[look["step"]]

    return table(
        looks(results),
        ("step", "step"),
        ("gradients of weights, < 2⁻¹⁴", of("weights", NORMAL), percent2),
        ("< 2⁻²⁴", of("weights", SMALLEST), percent2),
        ("of layers' outputs, < 2⁻¹⁴", of("outputs", NORMAL), percent2),
        ("< 2⁻²⁴", of("outputs", SMALLEST), percent2),
        ("updates, < 2⁻²⁴", of("updates", SMALLEST), percent2),
    )


def kinds(results: Results) -> str:
    """Shares below the smallest number by kind of tensor, at the last moment, for each scale."""
    found = looks(results)
    if not found:
        return ""
    lines = [
        (f"{title}: {kind}", histogram)
        for what, title in (("weights", "gradients of weights"), ("outputs", "of outputs"))
        for kind, histogram in {**found[-1][what], "all": together(found[-1][what])}.items()
    ]
    return table(
        lines,
        ("", lambda line: line[0]),
        ("< 2⁻¹⁴", lambda line: below(line[1], NORMAL), percent2),
        *per(
            SCALES, lambda scale: "< 2⁻²⁴" if scale == 1 else f"c = {power(scale)}",
            ("", lambda scale, line: below(line[1], SMALLEST - math.log2(scale)), percent2),
        ),
    )  # fmt: skip


def backward(results: Results) -> str:
    """What fp16 makes of a whole gradient, by scale and moment."""

    def of(key: str) -> Any:
        return lambda number, place: looks(results)[number]["fp16"][place][key]

    return table(
        range(len(SCALES)),
        ("c", lambda place: power(SCALES[place])),
        *per(
            range(len(looks(results))), lambda number: f"step {looks(results)[number]['step']}: ",
            ("error", of("error"), percent2), ("vanished", of("vanished"), percent2), ("inf", of("infinite"),
            percent2),
        ),
    )  # fmt: skip


def _with_diverged(text: str, runs: Sequence[Results]) -> str:
    bad = sum(run["diverged"] or run["validation_loss"] is None for run in runs)
    return text + (f" {bad} of {len(runs)} diverged" if bad else "")


def formats(results: Results) -> str:
    """How trainings end in each format."""
    reference = runs_of(results, FORMATS, REFERENCE)
    rows = [row | {"runs": runs} for row in results["rows"] if (runs := runs_of(results, FORMATS, row["name"]))]

    def behind(row: Results) -> str:
        text = "" if row["name"] == REFERENCE else several(apart(row["runs"], reference))
        return _with_diverged(text, row["runs"])

    def scales(row: Results) -> str:
        return ", ".join(map(power, sorted({run["scales"][-1][1] for run in row["runs"] if run["scales"]})))

    return table(
        rows,
        ("", lambda row: f"`{row['name']}`"),
        ("what", "title"),
        ("validation loss", lambda row: tables.mean_of((run["validation_loss"] for run in row["runs"]), ".4f")),
        ("− fp32's", behind),
        ("scale at the end", scales),
        ("steps missed", lambda row: statistics.fmean(run["missed"] for run in row["runs"]), ".3g"),
        words=2,
    )


def spikes(results: Results) -> str:
    """What becomes of scale, steps and loss after a spike."""
    rows = [
        {"spike": injection["title"], "scaler": row["name"], "runs": runs}
        for injection in results["injections"]
        for row in results["rows"]
        if injection["name"] != QUIET and (runs := runs_of(results, injection["name"], row["name"]))
    ]

    def cost(row: Results) -> str:
        quiet = runs_of(results, QUIET, row["scaler"])
        return _with_diverged(several(apart(row["runs"], quiet)), row["runs"])

    return table(
        rows,
        ("spike", "spike"),
        ("scaler", lambda row: f"`{row['scaler']}`"),
        ("steps skipped whole", lambda row: span(run["skipped_steps"] for run in row["runs"])),
        ("updates missed, in steps", lambda row: statistics.fmean(run["missed"] for run in row["runs"]), ".2f"),
        ("scale", lambda row: " to ".join(dict.fromkeys(map(power, (FULL, lowest(row["runs"])))))),
        ("good steps until it is back", lambda row: back(results, row["runs"]), ","),
        ("loss − that without a spike", cost),
        words=2,
    )


def lowest(runs: Sequence[Results]) -> float:
    """The lowest scale of some runs."""
    return min(scale for run in runs for _, scale in run["scales"])


def back(results: Results, runs: Sequence[Results]) -> int:
    """Good steps that take the lowest scale back to where it began: by the rule; runs are too short for it."""
    return round(math.log2(runs[0]["scales"][0][1] / lowest(runs))) * results["training"]["interval"]


def origin(results: Results) -> str:
    """What was run, on what."""
    return tables.fill_in(
        results,
        "`{command}`: {training[model]} of {parameters:,} parameters, {training[steps]} steps of "
        "{training[batch]} × {training[sequence]:,} tokens of {data[source]} ({data[train_tokens]:,} tokens), "
        "vocabulary {training[vocabulary]:,}; AdamW, learning rate {training[lr]:g}, β2 {training[beta2]:g}, "
        "weight decay {training[weight_decay]:g}, gradients' norm at most {training[clip]:g} but not where "
        "there are spikes, which begin at step {training[spiked]}; {machine}. {left}",
        left=left_out(results, lambda run: f"{run['kind']}, {run['row']}"),
    )


def facts(results: Results) -> dict[str, str]:
    """Numbers in sentences; a row's name has underscores for what is no letter or digit."""
    training = results["training"]
    named = {key: str(training[key]) for key in ("seeds", "steps", "spiked")}
    named |= {"runs": str(len(results["runs"])), "tokens": f"{training['batch'] * training['sequence']:,}"}
    reference = runs_of(results, FORMATS, REFERENCE)
    for row in (row["name"] for row in results["rows"]):
        if row != REFERENCE and (found := apart(runs_of(results, FORMATS, row), reference)):
            named[f"loss_{name_of(row)}"] = f"{statistics.fmean(found):+.4f}"
        for injection in (injection["name"] for injection in results["injections"]):
            key, runs = name_of(f"{row} {injection}".replace("×", "")), runs_of(results, injection, row)
            if runs:
                named[f"missed_{key}"] = f"{statistics.fmean(run['missed'] for run in runs):.2f}"
                named[f"scale_{key}"] = power(lowest(runs))
                named[f"back_{key}"] = f"{back(results, runs):,}"
                named[f"end_{key}"] = f"{statistics.fmean(run['validation_loss'] for run in runs):.2f}"
            if injection != QUIET and (change := apart(runs, runs_of(results, QUIET, row))):
                named[f"loss_{key}"] = f"{statistics.fmean(change):+.4f}"
    if (spread := _spread(results)) is not None:
        named["spread"] = f"{spread:.4f}"
    for what in ("weights", "outputs", "updates"):
        named[f"{what}_flushed"] = _percents(shares(results, what, SMALLEST))
    named["outputs_subnormal"] = _percents(shares(results, "outputs", NORMAL))
    found = looks(results)
    attention = [below(look["outputs"]["attention"], SMALLEST) for look in found if "attention" in look["outputs"]]
    named["attention_most"] = percent2(max(attention, default=0.0))
    for place, scale in enumerate(SCALES):
        named[f"error_{scale:g}"] = percent2(max((look["fp16"][place]["error"] for look in found), default=0.0))
    return named


def _percents(found: Sequence[float]) -> str:
    """`3.0 to 12 %`."""
    return " to ".join(percent2(f(found)).removesuffix(" %" if f is min else "") for f in (min, max) if found)


def _spread(results: Results) -> float | None:
    """How far the losses of fp32's seeds lie apart; None for one."""
    losses = [run["validation_loss"] for run in runs_of(results, FORMATS, REFERENCE)]
    good = [loss for loss in losses if loss is not None]
    return max(good) - min(good) if len(good) > 1 else None


def reading(results: Results) -> str:
    """Every statement of the lecture and the SwitchBack paper, and how it reads here."""
    return readings.table([*_gradients(results), *_formats(results), *_spikes(results)])


def _gradients(results: Results) -> Iterator[Reading]:
    found = looks(results)
    updates, outputs = (shares(results, what, SMALLEST) for what in ("updates", "outputs"))
    about = all(ABOUT[0] <= share <= ABOUT[1] for share in updates) if updates else None
    statement = "About 5 % of the values are below 2⁻²⁴: updates"
    yield Reading(statement, "lecture, Reason I", "5 %", span(updates, percent2), about)
    statement = "Most gradients are below 2⁻²⁴: of layers' outputs"
    most = min(outputs) > 0.5 if outputs else None
    yield Reading(statement, "lecture, Loss scaling", "no figure", span(outputs, percent2), most)
    errors = [[look["fp16"][SCALES.index(scale)]["error"] for look in found] for scale in (LECTURE, max(SCALES))]
    small, large = (percent2(max(each, default=0.0)) for each in errors)
    yield Reading(
        f"A scale of {LECTURE:g} does: the gradient is no further off than with a larger one",
        "lecture, Loss scaling", f"c = {LECTURE:g}",
        f"error {small} at most, with {power(max(SCALES))} {large}" if found else "",
        all(mine <= CLOSE * theirs for mine, theirs in zip(*errors, strict=True)) if found else None,
    )  # fmt: skip


def _formats(results: Results) -> Iterator[Reading]:
    reference, spread = runs_of(results, FORMATS, REFERENCE), _spread(results)
    good = {run["seed"] for run in reference if run["validation_loss"] is not None}
    known = "" if spread is None else f"{spread:.4f} apart"
    for name, words, at, paper, worse in (
        ("fp16", "without scaling", "lecture, Figure 5", "falls behind or diverges", True),
        ("fp16, c = 8", "with a scale of 8", "lecture, Loss scaling", "c = 8", False),
        ("fp16, dynamic", "with a dynamic scale", "lecture, Table 2", "accuracy 77.1 and 76.9", False),
        ("fp16 alone, dynamic", "without fp32 master weights", "lecture, FP32 weight copies", "no figure", True),
    ):
        statement = f"fp16 {words} ends {'behind fp32' if worse else 'where fp32 does'}"
        runs = runs_of(results, FORMATS, name)
        costs = apart(runs, reference)
        lost = sum(run["validation_loss"] is None and run["seed"] in good for run in runs)
        here = readings.told(f"loss {several(costs)}" if costs else "", lost, len(runs), known, "fp32")
        yield Reading(statement, at, paper, here, readings.ends(costs, spread, lost, worse=worse))


def _spikes(results: Results) -> Iterator[Reading]:
    at = "SwitchBack, Appendix G"
    dynamic, tensor = (runs_of(results, SPIKES[0], name) for name in ("dynamic", "by tensor"))
    steps = back(results, dynamic) if dynamic else 0
    here = f"{power(FULL)} to {power(lowest(dynamic))}; {steps:,} good steps back" if dynamic else ""
    statement = "A spike takes a dynamic scale thousands of good steps down"
    yield Reading(statement, at, "thousands of steps", here, steps >= LONG if dynamic else None)
    kept = lowest(tensor) if tensor else FULL
    here = f"{power(kept)} throughout" if kept == FULL else f"down to {power(kept)}"
    statement = "A scale that skips tensor by tensor stays"
    yield Reading(statement, at, "as it is built", here if tensor else "", kept == FULL if tensor else None)
    mine, theirs = (_cost(results, SPIKES[0], name) for name in ("by tensor", "dynamic"))
    seeds = sorted(mine.keys() & theirs.keys())
    shown = [several([each[seed] for seed in seeds]) for each in (mine, theirs)]
    here = f"{shown[0]}; dynamic {shown[1]}; {len(seeds)} seed{'s' * (len(seeds) != 1)}" if seeds else ""
    holds = readings.behind([theirs[seed] - mine[seed] for seed in seeds], _parting(results, len(seeds)))
    statement = "Skipping by tensor costs less loss than a dynamic scale, with every seed"
    yield Reading(statement, at, "fp16 ViT-Huge trains", here, holds)


def _parting(results: Results, seeds: int) -> float | None:
    """How far chance takes what one scaler loses more than another by a spike, as a mean over so many seeds.

    By how it changes from seed to seed, pooled over the spikes; with too few of them, what fp32's seeds lie apart.
    """
    spikes = [spike["name"] for spike in results["injections"] if spike["name"] != QUIET]
    pairs = [[_cost(results, spike, row) for row in ("by tensor", "dynamic")] for spike in spikes]
    gaps = ([theirs[seed] - mine[seed] for seed in mine.keys() & theirs.keys()] for mine, theirs in pairs)
    least = readings.margin(readings.chance(gaps), seeds)
    return _spread(results) if least is None else least


def _cost(results: Results, spike: str, row: str) -> dict[int, float]:
    """Validation loss that a spike costs, by seed."""
    quiet = {run["seed"]: [run] for run in runs_of(results, QUIET, row)}
    runs = runs_of(results, spike, row)
    return {run["seed"]: cost for run in runs for cost in apart([run], quiet.get(run["seed"], []))}


def gradients_and_spikes(results: Results) -> Figure:
    """Histograms above; below the loss around the two long spikes, less that of the run without one."""
    figure, (above, under) = pictures.figure(13, 8.4, 2, 2)
    titles = {"weights": "gradients of weights", "outputs": "gradients of layers' outputs"}
    for axis, (what, title) in zip(above, titles.items(), strict=True):
        _histograms(axis, looks(results), what)
        axis.set_title(f"{title}, % of the values by power of two", color=INK)
    for axis, name in zip(under, SPIKES, strict=True):
        _losses(axis, results, name)
        (title,) = [i["title"] for i in results["injections"] if i["name"] == name]
        axis.set_title(f"loss − that without a spike:\n{title}", color=INK)
        axis.set_xlabel("step")
    return figure


def _histograms(axis: Any, found: list[Results], what: str) -> None:
    for look, (color, dashes) in zip(found, MOMENTS, strict=False):
        counts = together(look[what])["counts"]
        total = sum(counts) or 1
        shown = [(k, 100 * count / total) for k, count in enumerate(counts, LOW) if -45 <= k <= 5]
        axis.plot(*zip(*shown, strict=True), label=f"step {look['step']}", **Line("", color, dashes).style())
    axis.axvspan(SMALLEST, NORMAL, color=COLORS["series-5"], alpha=0.12, linewidth=0)
    axis.axvspan(-45, SMALLEST, color=COLORS["series-1"], alpha=0.14, linewidth=0)
    axis.set_xlim(-45, 5)
    top = axis.get_ylim()[1]
    axis.set_ylim(0, 1.12 * top)
    for place, words in ((-44.5, "below fp16's least"), (SMALLEST + 0.4, "subnormal")):
        axis.text(place, 1.03 * top, words, color=MUTED, fontsize=11)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda k, _: power(2.0**k) if k else "1"))
    axis.legend(frameon=False, loc="upper right")


def _losses(axis: Any, results: Results, name: str) -> None:
    for scaler in SCALERS:
        runs = runs_of(results, name, scaler.label)
        lines = [line for run in runs if (line := _above(results, run))]
        if not lines:
            continue
        mean = [statistics.fmean(column) for column in zip(*lines, strict=False)]
        steps = range(runs[0]["around"]["first"], runs[0]["around"]["first"] + len(mean))
        for line in lines:
            axis.plot(steps[: len(line)], line[: len(steps)], color=COLORS[scaler.color], linewidth=0.6, alpha=0.5)
        axis.plot(steps, mean, label=scaler.label, **scaler.style())
    axis.axvline(results["training"]["spiked"], color=MUTED, linewidth=1.0)
    if axis.lines[:-1]:
        box = {"borderaxespad": 0.0, "edgecolor": "none", "framealpha": 0.9}
        axis.legend(loc="upper left", fontsize=12, handlelength=1.8, **box)
    axis.margins(x=0.01)


def _above(results: Results, run: Results) -> list[float]:
    """Losses of a run less those of the same run without a spike."""
    quiet = next((r for r in runs_of(results, QUIET, run["row"]) if r["seed"] == run["seed"]), None)
    pairs = zip(run["around"]["losses"], quiet["around"]["losses"] if quiet else [], strict=False)
    return pictures.numbers(None if a is None or b is None else a - b for a, b in pairs)


TABLES = {
    "moments": moments, "kinds": kinds, "backward": backward, "formats": formats, "spikes": spikes,
    "origin": origin, "reading": reading,
}  # fmt: skip
PICTURES = {"": gradients_and_spikes}
