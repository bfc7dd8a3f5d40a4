"""Tables and facts of fp16 and loss scaling.

Losses are compared with those of the same seed, which has the same weights and batches: a format with fp32, a
spike with the same scaler's run without one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from studies.loss_scaling.look import LOW, NORMAL, SCALES, SMALLEST, below
from studies.loss_scaling.rows import FULL
from studies.shared.tables import Results, markdown, percent, significant

FORMATS, REFERENCE, QUIET = "formats", "fp32", "none"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def power(of_two: float) -> str:
    """2¹⁶ for 65536, 8 for 8."""
    exponent = math.log2(of_two)
    if 1 <= of_two < 2000 or exponent != round(exponent):
        return f"{of_two:,g}"
    return "2" + str(round(exponent)).translate(SUPERSCRIPTS)


def runs_of(results: Results, kind: str, row: str) -> list[Results]:
    """Runs that were made, by seed."""
    found = [r for r in results["runs"] if (r["kind"], r["row"]) == (kind, row) and "failed" not in r]
    return sorted(found, key=lambda run: run["seed"])


def apart(runs: Sequence[Results], reference: Sequence[Results]) -> list[float]:
    """Validation loss minus that of the reference with the same seed."""
    known = {run["seed"]: run["validation_loss"] for run in reference}
    return [
        run["validation_loss"] - known[run["seed"]]
        for run in runs
        if run["validation_loss"] is not None and known.get(run["seed"]) is not None
    ]


def signed(values: Sequence[float]) -> str:
    """A mean with the smallest and the largest."""
    if not values:
        return ""
    mean = f"{statistics.fmean(values):+.4f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):+.4f} … {max(values):+.4f})"


def looks(results: Results) -> list[Results]:
    """What was seen of gradients at the moments, none if that run is missing."""
    return next((run["gradients"] for run in runs_of(results, FORMATS, REFERENCE) if "gradients" in run), [])


def together(kinds: dict[str, Results]) -> Results:
    """The histogram of all kinds together."""
    counts = [sum(column) for column in zip(*(found["counts"] for found in kinds.values()), strict=True)]
    return {"zeros": sum(found["zeros"] for found in kinds.values()), "counts": counts}


def moments(results: Results) -> str:
    """Shares below fp16's powers, moment by moment."""
    lines = []
    for look in looks(results):
        line = [str(look["step"])]
        for found in (together(look["weights"]), together(look["outputs"])):
            line += [percent(below(found, NORMAL), 2), percent(below(found, SMALLEST), 2)]
        lines.append([*line, percent(below(look["updates"], SMALLEST), 2)])
    head = (
        "step",
        "gradients of weights, < 2⁻¹⁴",
        "< 2⁻²⁴",
        "of layers' outputs, < 2⁻¹⁴",
        "< 2⁻²⁴",
        "updates, < 2⁻²⁴",
    )
    return markdown(head, lines)


def kinds(results: Results) -> str:
    """Shares below the smallest number by kind of tensor, at the last moment, for each scale."""
    found = looks(results)
    if not found:
        return ""
    lines = []
    for what, title in (("weights", "gradients of weights"), ("outputs", "of outputs")):
        every = found[-1][what]
        for kind, histogram in {**every, "all": together(every)}.items():
            shares = [percent(below(histogram, SMALLEST - math.log2(scale)), 2) for scale in SCALES]
            lines.append([f"{title}: {kind}", percent(below(histogram, NORMAL), 2), *shares])
    head = ["", "< 2⁻¹⁴", "< 2⁻²⁴", *(f"c = {power(scale)}" for scale in SCALES[1:])]
    return markdown(head, lines)


def backward(results: Results) -> str:
    """What fp16 makes of a whole gradient, by scale and moment."""
    found = looks(results)
    head = ["c"]
    for look in found:
        head += [f"step {look['step']}: error", "vanished", "inf"]
    lines = []
    for place, scale in enumerate(SCALES):
        line = [power(scale)]
        for look in found:
            made = look["fp16"][place]
            line += [percent(made["error"], 2), percent(made["vanished"], 2), percent(made["infinite"], 2)]
        lines.append(line)
    return markdown(head, lines)


def formats(results: Results) -> str:
    """How trainings end in each format."""
    lines = []
    reference = runs_of(results, FORMATS, REFERENCE)
    for row in results["rows"]:
        runs = runs_of(results, FORMATS, row["name"])
        if not runs:
            continue
        good = [run["validation_loss"] for run in runs if run["validation_loss"] is not None]
        bad = len(runs) - len(good)
        difference = "" if row["name"] == REFERENCE else signed(apart(runs, reference))
        ends = sorted({run["scales"][-1][1] for run in runs if run["scales"]})
        lines.append([
            f"`{row['name']}`", row["title"], f"{statistics.fmean(good):.4f}" if good else "",
            difference + (f" {bad} of {len(runs)} diverged" if bad else ""),
            ", ".join(map(power, ends)), f"{statistics.fmean(run['missed'] for run in runs):.3g}",
        ])  # fmt: skip
    head = ("", "what", "validation loss", "− fp32's", "scale at the end", "steps missed")
    return markdown(head, lines, words=2)


def spikes(results: Results) -> str:
    """What becomes of scale, steps and loss after a spike."""
    lines = []
    for injection in results["injections"]:
        for row in results["rows"]:
            runs = runs_of(results, injection["name"], row["name"])
            if injection["name"] == QUIET or not runs:
                continue
            change = apart(runs, runs_of(results, QUIET, row["name"]))
            bad = sum(run["diverged"] for run in runs)
            lines.append([
                injection["title"], f"`{row['name']}`", _range(run["skipped_steps"] for run in runs),
                f"{statistics.fmean(run['missed'] for run in runs):.2f}",
                " to ".join(dict.fromkeys(map(power, (FULL, lowest(runs))))),
                f"{back(results, runs):,}",
                signed(change) + (f" {bad} of {len(runs)} diverged" if bad else ""),
            ])  # fmt: skip
    head = (
        "spike", "scaler", "steps skipped whole", "updates missed, in steps", "scale",
        "good steps until it is back", "loss − that without a spike",
    )  # fmt: skip
    return markdown(head, lines, words=2)


def _range(values: object) -> str:
    found = sorted(set(values))  # type: ignore[call-overload]
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def lowest(runs: Sequence[Results]) -> float:
    """The lowest scale of some runs."""
    return min(scale for run in runs for _, scale in run["scales"])


def back(results: Results, runs: Sequence[Results]) -> int:
    """Good steps that take the lowest scale back to where it began: by the rule; runs are too short for it."""
    return round(math.log2(runs[0]["scales"][0][1] / lowest(runs))) * results["training"]["interval"]


def origin(results: Results) -> str:
    """What was run, on what."""
    training, environment, data = results["training"], results["environment"], results["data"]
    left = len(results["unfinished"])
    notes = [f"{left} runs were left out for want of time."] if left else ["All runs were made."]
    notes += [f"{run['kind']}, {run['row']} failed: {run['failed']}." for run in results["runs"] if "failed" in run]
    return (
        f"`{results['command']}`: {training['model']} of {results['parameters']:,} parameters, {training['steps']} "
        f"steps of {training['batch']} × {training['sequence']:,} tokens of {data['source']} "
        f"({data['train_tokens']:,} tokens), vocabulary {training['vocabulary']:,}; AdamW, learning rate "
        f"{training['lr']:g}, β2 {training['beta2']:g}, weight decay {training['weight_decay']:g}, gradients' norm "
        f"at most {training['clip']:g} but not where there are spikes, which begin at step {training['spiked']}; "
        f"{environment['device']}, torch {environment['torch'].partition('+')[0]}. {' '.join(notes)}\n"
    )


def facts(results: Results) -> dict[str, str]:
    """Numbers in sentences; a row's name has underscores for what is no letter or digit."""
    training = results["training"]
    named = {"runs": str(len(results["runs"])), "seeds": str(training["seeds"]), "steps": str(training["steps"])}
    named |= {"tokens": f"{training['batch'] * training['sequence']:,}", "spiked": str(training["spiked"])}
    for row in results["rows"]:
        runs = runs_of(results, FORMATS, row["name"])
        if row["name"] != REFERENCE and (found := apart(runs, runs_of(results, FORMATS, REFERENCE))):
            named[f"loss_{_name(row['name'])}"] = f"{statistics.fmean(found):+.4f}"
        for injection in results["injections"]:
            runs = runs_of(results, injection["name"], row["name"])
            if not runs:
                continue
            key = f"{_name(row['name'])}_{_name(injection['name'])}"
            named[f"missed_{key}"] = f"{statistics.fmean(run['missed'] for run in runs):.2f}"
            named[f"scale_{key}"] = power(lowest(runs))
            named[f"back_{key}"] = f"{back(results, runs):,}"
            named[f"end_{key}"] = f"{statistics.fmean(run['validation_loss'] for run in runs):.2f}"
            if injection["name"] != QUIET and (change := apart(runs, runs_of(results, QUIET, row["name"]))):
                named[f"loss_{key}"] = f"{statistics.fmean(change):+.4f}"
    losses = [run["validation_loss"] for run in runs_of(results, FORMATS, REFERENCE) if not run["diverged"]]
    named |= {"spread": f"{max(losses) - min(losses):.4f}"} if len(losses) > 1 else {}
    return named | _of_gradients(results)


def _of_gradients(results: Results) -> dict[str, str]:
    found = looks(results)
    if not found:
        return {}
    named: dict[str, str] = {}
    for what in ("weights", "outputs"):
        shares = [100 * below(together(look[what]), SMALLEST) for look in found]
        named[f"{what}_flushed"] = f"{significant(min(shares), 2)} to {significant(max(shares), 2)} %"
        named[f"{what}_most"] = f"{significant(max(shares), 2)} %"
        scaled = max(100 * below(together(look[what]), SMALLEST - 3) for look in found)
        named[f"{what}_most_8"] = f"{significant(scaled, 2)} %"
        subnormal = [100 * below(together(look[what]), NORMAL) for look in found]
        named[f"{what}_subnormal"] = f"{significant(min(subnormal), 2)} to {significant(max(subnormal), 2)} %"
    attention = max(
        below(look["outputs"]["attention"], SMALLEST) for look in found if "attention" in look["outputs"]
    )
    named["attention_most"] = percent(attention, 2)
    updates = [100 * below(look["updates"], SMALLEST) for look in found]
    named["updates_flushed"] = f"{significant(min(updates), 2)} to {significant(max(updates), 2)} %"
    named["updates_most"] = f"{significant(max(updates), 2)} %"
    for place, scale in enumerate(SCALES):
        errors = [look["fp16"][place]["error"] for look in found]
        named[f"error_{scale:g}"] = percent(max(errors), 2)
    return named


def _name(text: str) -> str:
    return "_".join("".join(c if c.isalnum() else " " for c in text.replace("×", "")).split())


def histogram(found: Results) -> tuple[list[int], list[float]]:
    """Powers of two and the share of the values in each bin, in per cent, zeros left out; ends cut."""
    total = sum(found["counts"]) or 1
    pairs = [(k, 100 * count / total) for k, count in enumerate(found["counts"], LOW)]
    return [k for k, _ in pairs], [share for _, share in pairs]


TABLES: dict[str, Callable[..., str]] = {
    "moments": moments,
    "kinds": kinds,
    "backward": backward,
    "formats": formats,
    "spikes": spikes,
    "origin": origin,
}
