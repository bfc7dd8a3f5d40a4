"""Tables and facts of the stability study: who spikes, whom it costs, and whether the loss follows RMS_t."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from narrowgauge.gauges import SpikeMatch, match_spikes
from studies.shared import readings
from studies.shared.tables import Results, markdown, percent, significant

PLAIN, STABLE = "AdamW", "StableAdamW"
LONG, SHORT = 0.999, 0.95
NEAR = 20  # steps after the switch in which a loss spike is put down to it
TENSORS = {"patches": "the patch embedding", "middle": "a layer in the middle", "tokens": "the token embedding"}
PAPER = {"patches": "28 of 30, by chance 1 %", "middle": "none follow", "tokens": ""}


def runs_of(results: Results, **fields: object) -> list[Results]:
    """Runs that were made and have such fields, by seed; model, rate and batch are the base's if not said."""
    training = results["training"]
    wanted = {name: training[name] for name in ("model", "lr", "batch")} | {"signal": 1.0} | fields
    found = [r for r in results["runs"] if "failed" not in r and wanted.items() <= r.items()]
    return sorted(found, key=lambda run: run["seed"])


def match(runs: Sequence[Results], results: Results, tensor: str) -> SpikeMatch:
    """All loss spikes of some runs against the RMS spikes of a tensor."""
    first = results["training"]["judged_from"]
    return SpikeMatch.total([
        match_spikes(run["rms_spikes"][tensor], run["loss_spikes"], judged=range(first, run["steps_made"] + 1))
        for run in runs
        if run["steps_made"] >= first
    ])  # fmt: skip


def deviation(results: Results) -> float | None:
    """Standard deviation of an accuracy from seed to seed, pooled over the ways at the base."""
    ways = dict.fromkeys((run["row"], run["beta2"]) for run in results["runs"] if "failed" not in run)
    found = [[run["accuracy"] for run in runs_of(results, row=row, beta2=beta2)] for row, beta2 in ways]
    return readings.chance([x for x in values if x is not None] for values in found)


def _mean(values: Sequence[float | None], form: str) -> str:
    good = [value for value in values if value is not None]
    return format(statistics.fmean(good), form) if good else ""


def _spikes(runs: Sequence[Results]) -> str:
    """Loss spikes of each seed, and how many runs diverged."""
    bad = sum(run["diverged"] for run in runs)
    counts = ", ".join(str(len(run["loss_spikes"])) for run in runs)
    return counts + (f"; {bad} of {len(runs)} diverged" if bad else "")


def ways(results: Results) -> str:
    """Ways to meet spikes, at the base."""
    lines = []
    for row in results["rows"]:
        for beta2 in sorted({run["beta2"] for run in runs_of(results, row=row["name"])}, reverse=True):
            runs = runs_of(results, row=row["name"], beta2=beta2)
            rms = [run["rms"]["patches"] for run in runs if run["rms"].get("patches")]
            lines.append([
                row["name"], f"{beta2:g}", _spikes(runs),
                ", ".join(str(len(run["rms_spikes"]["patches"])) for run in runs),
                _mean([x["mean"] for x in rms], ".2f"), _mean([x["max"] for x in rms], ".1f"),
                _mean([run["training_loss"] for run in runs], ".3f"),
                _percent([run["accuracy"] for run in runs]),
            ])  # fmt: skip
    head = (
        "", "β2", "loss spikes, by seed", "RMS spikes", "mean RMS_t", "largest", "training loss",
        "zero-shot accuracy",
    )  # fmt: skip
    return markdown(head, lines)


def shift(results: Results) -> str:
    """What a larger signal of the patch embedding does, by way."""
    lines, switched = [], results["training"]["switched"]
    dimmed = [run for run in results["runs"] if "failed" not in run and run["signal"] != 1.0]
    for row, beta2 in dict.fromkeys((run["row"], run["beta2"]) for run in dimmed):
        runs = sorted(
            (run for run in dimmed if (run["row"], run["beta2"]) == (row, beta2)), key=lambda run: run["seed"]
        )
        after = [run["after"] for run in runs if run["after"]]
        lines.append([
            row, f"{beta2:g}", _mean([x["rms"]["patches"] for x in after], ".1f"),
            _mean([x["rms"]["middle"] for x in after], ".1f"),
            f"{sum(bool(caused(run, switched)) for run in runs)} of {len(runs)}",
            _mean([x["rise"] for x in after], "+.2f"), _mean([x["quiet"] for x in after], "+.2f"),
            _mean([run["training_loss"] for run in runs], ".3f"), _percent([run["accuracy"] for run in runs]),
        ])  # fmt: skip
    head = (
        "", "β2", "RMS_t of patches, first step", "of the middle layer", "runs whose loss spikes", "largest loss",
        "as much before", "training loss", "zero-shot accuracy",
    )  # fmt: skip
    return markdown(head, lines)


def caused(run: Results, switched: int) -> list[int]:
    """Loss spikes soon after the switch."""
    return [step for step in run["loss_spikes"] if switched <= step < switched + NEAR]


def _percent(values: Sequence[float | None]) -> str:
    good = [100 * value for value in values if value is not None]
    if not good:
        return ""
    spread = f" ({min(good):.1f} … {max(good):.1f})" if len(good) > 1 else ""
    return f"{statistics.fmean(good):.1f}{spread} %"


def _varied(results: Results, field: str, title: str) -> str:
    """AdamW against a field of the training, with a long and a short memory."""
    values = sorted({run[field] for run in results["runs"]}, key=_order(results, field))
    lines = []
    for value in values:
        if not runs_of(results, row=PLAIN, **{field: value}):
            continue
        line = [f"{value:g}" if not isinstance(value, str) else value]
        for beta2 in (LONG, SHORT):
            runs = runs_of(results, row=PLAIN, beta2=beta2, **{field: value})
            rms = [run["rms"]["patches"]["max"] for run in runs if run["rms"].get("patches")]
            line += [_spikes(runs), _mean(rms, ".1f"), _percent([run["accuracy"] for run in runs])]
        lines.append(line)
    head = [title]
    for beta2 in (LONG, SHORT):
        head += [f"β2 {beta2:g}: loss spikes", "largest RMS_t", "accuracy"]
    return markdown(head, lines)


def _order(results: Results, field: str) -> Callable[[object], float]:
    return lambda value: results["parameters"][value] if field == "model" else float(value)  # type: ignore[arg-type]


def rates(results: Results) -> str:
    """Figure 13."""
    return _varied(results, "lr", "learning rate")


def batches(results: Results) -> str:
    """Figure 12."""
    return _varied(results, "batch", "batch")


def sizes(results: Results) -> str:
    """Figure 3."""
    return _varied(results, "model", "model")


def unclipped(results: Results) -> list[Results]:
    """The runs that Figures 15, 16 and 20 are of: AdamW, whatever its beta2, at the base and beside it.

    Those that ended before spikes are judged have none.
    """
    runs = [run for run in results["runs"] if "failed" not in run and (run["row"], run["signal"]) == (PLAIN, 1.0)]
    return [run for run in runs if run["steps_made"] >= results["training"]["judged_from"]]


def matches(results: Results) -> str:
    """Whether loss spikes follow RMS spikes, over all runs of AdamW."""
    runs, lines = unclipped(results), []
    for tensor, title in TENSORS.items():
        if not runs:
            break
        found = match(runs, results, tensor)
        lines.append([
            title, PAPER[tensor], str(sum(len(run["rms_spikes"][tensor]) for run in runs)),
            f"{found.followed} of {found.loss_spikes}", percent(found.chance, 2), significant(found.probability, 2),
        ])  # fmt: skip
    head = ("RMS_t of", "paper", "RMS spikes", "loss spikes that follow", "chance of one", "chance of as many")
    return markdown(head, lines, words=2)


def origin(results: Results) -> str:
    """What was run, on what."""
    training, environment = results["training"], results["environment"]
    left = len(results["unfinished"])
    notes = [f"{left} runs were left out for want of time."] if left else ["All runs were made."]
    failed = [run for run in results["runs"] if "failed" in run]
    notes += [f"{run['row']}, β2 {run['beta2']:g} failed: {run['failed']}." for run in failed]
    return (
        f"`{results['command']}`: {training['model']} of {results['parameters'][training['model']]:,} parameters, "
        f"{training['steps']} steps of {training['batch']:,} pairs, learning rate {training['lr']:g} after "
        f"{training['warmup']} steps, then a cosine, weight decay {training['weight_decay']:g}, "
        f"{100 * training['patch_dropout']:g} % of the patches dropped, computed in {training['autocast']}; spikes "
        f"are judged from step {training['judged_from']} on; {environment['device']}, torch "
        f"{environment['torch'].partition('+')[0]}. {' '.join(notes)}\n"
    )


def facts(results: Results) -> dict[str, str]:
    """Numbers in sentences."""
    named = {"runs": str(len(results["runs"])), "seeds": str(results["training"]["seeds"])}
    for row in results["rows"]:
        for run in runs_of(results, row=row["name"]):
            digits = f"{run['beta2']:g}".partition(".")[2]
            key = f"{_name(row['name'])}_{digits}"
            runs = runs_of(results, row=row["name"], beta2=run["beta2"])
            named[f"spikes_{key}"] = str(sum(len(r["loss_spikes"]) for r in runs))
            named[f"made_{key}"] = str(len(runs))
            if accuracy := _mean([r["accuracy"] and 100 * r["accuracy"] for r in runs], ".1f"):
                named[f"accuracy_{key}"] = f"{accuracy} %"
    if (apart := deviation(results)) is not None:  # of two means, of two seeds each
        named["margin_accuracy"] = significant(200 * apart, 2)
    switched = results["training"]["switched"]
    dimmed = [run for run in results["runs"] if "failed" not in run and run["signal"] != 1.0]
    for row, beta2 in dict.fromkeys((run["row"], run["beta2"]) for run in dimmed):
        runs = [run for run in dimmed if (run["row"], run["beta2"]) == (row, beta2)]
        key = f"{_name(row)}_{f'{beta2:g}'.partition('.')[2]}"
        after = [run["after"] for run in runs if run["after"]]
        named[f"caused_{key}"] = str(sum(bool(caused(run, switched)) for run in runs))
        named[f"shifted_{key}"] = str(len(runs))
        if after:
            named[f"rise_{key}"] = f"{statistics.fmean(x['rise'] for x in after):+.2f}"
            named[f"rms_{key}"] = f"{statistics.fmean(x['rms']['patches'] for x in after):.1f}"
            named[f"middle_{key}"] = f"{statistics.fmean(x['rms']['middle'] for x in after):.1f}"
    if runs := unclipped(results):
        named["spikes_unclipped"] = str(sum(len(run["loss_spikes"]) for run in runs))
        named["runs_unclipped"] = str(len(runs))
        for tensor in TENSORS:
            found = match(runs, results, tensor)
            named[f"followed_{tensor}"] = f"{found.followed} of {found.loss_spikes}"
            named[f"chance_{tensor}"] = percent(found.chance, 2)
            named[f"probability_{tensor}"] = significant(found.probability, 2)
    return named


def _name(text: str) -> str:
    return "_".join("".join(c if c.isalnum() else " " for c in text).split())


TABLES: dict[str, Callable[..., str]] = {
    "shift": shift,
    "ways": ways,
    "rates": rates,
    "batches": batches,
    "sizes": sizes,
    "matches": matches,
    "origin": origin,
}
