"""The tables of the loss spikes, and every number in the page's sentences."""

from __future__ import annotations

import statistics
from typing import Any

from narrowgauge.gauges import SpikeMatch, match_spikes
from studies.shared.tables import Results, markdown, percent, significant

NEAR = 20  # steps after the switch in which a loss spike is put down to it
AROUND = 50  # steps before it that the loss is compared with
CLIPPED = "gradients clipped to norm 1"


def name_of(way: dict[str, Any]) -> str:
    """AdamW, β2 0.999."""
    clip = "" if way["clip"] is None else f", gradients clipped to norm {way['clip']:g}"
    return f"{way['optimizer']}, β2 {way['beta2']:g}{clip}"


def by_way(results: Results) -> dict[str, list[Results]]:
    """Runs, one for each seed, by the name of how they were optimized."""
    found: dict[str, list[Results]] = {}
    for run in results["runs"]:
        found.setdefault(name_of(run["way"]), []).append(run)
    return found


def caused(run: Results, results: Results) -> list[list[int]]:
    """The loss spikes soon after the switch: where each starts, and where it is known."""
    switch = results["training"]["switch"]
    return [spike for spike in run["loss_spikes"] if switch < spike[0] <= switch + NEAR]


def rise(run: Results, results: Results) -> float:
    """The largest loss soon after the switch, above the mean before it."""
    switch = results["training"]["switch"]
    return max(run["loss"][switch : switch + NEAR]) - statistics.fmean(run["loss"][switch - AROUND : switch])


def quiet_rise(run: Results, results: Results) -> float:
    """The same for the 20 steps before the switch: what noise alone makes of it."""
    end = results["training"]["switch"]
    return max(run["loss"][end - NEAR : end]) - statistics.fmean(run["loss"][end - NEAR - AROUND : end - NEAR])


def match(runs: list[Results], results: Results, tensor: str) -> SpikeMatch:
    """All loss spikes of some runs against the RMS spikes of a tensor."""
    training = results["training"]
    judged = range(training["judged_from"], training["steps"] + 1)
    return SpikeMatch.total(
        [
            match_spikes(run[f"{tensor}_spikes"], [start for start, _ in run["loss_spikes"]], judged=judged)
            for run in runs
        ]
    )


def optimizers(results: Results) -> str:
    """What the switch does under each optimizer."""
    rows = []
    switch = results["training"]["switch"]
    for name, runs in by_way(results).items():
        spikes = [caused(run, results) for run in runs]
        starts = sorted(spike[0][0] - switch for spike in spikes if spike)
        rows.append(
            [
                name,
                f"{statistics.fmean(run['embedding_rms'][switch] for run in runs):.1f}",
                f"{sum(map(bool, spikes))} of {len(runs)}",
                _steps(starts),
                f"{statistics.fmean(rise(run, results) for run in runs):+.2f}",
                f"{statistics.fmean(max(run['embedding_rms'][switch - AROUND : switch]) for run in runs):.1f}",
            ]
        )
    head = [
        "",
        "RMS_t, first step",
        "runs that spike",
        "from step",
        "largest loss",
        "largest RMS_t, 50 steps before",
    ]
    return markdown(head, rows)


def _steps(starts: list[int]) -> str:
    if not starts:
        return "–"
    return str(starts[0]) if starts[0] == starts[-1] else f"{starts[0]} to {starts[-1]}"


def matches(results: Results) -> str:
    """Whether loss spikes follow RMS spikes, for AdamW with the long memory."""
    runs = by_way(results)["AdamW, β2 0.999"]
    rows = []
    for tensor, name in (("embedding", "the image embedding"), ("middle", "a layer in the middle")):
        found = match(runs, results, tensor)
        rows.append(
            [
                name,
                str(sum(len(run[f"{tensor}_spikes"]) for run in runs)),
                f"{found.followed} of {found.loss_spikes}",
                percent(found.chance, 2),
                significant(found.probability, 2),
            ]
        )
    return markdown(
        ["RMS_t of", "RMS spikes", "loss spikes that follow", "chance of one", "chance of as many"], rows
    )


def origins(results: Results) -> str:
    """What was run."""
    training, environment = results["training"], results["environment"]
    return (
        f"`{results['command']}`: {training['model']}, {results['parameters']:,} parameters, {training['steps']} "
        f"steps, switch after {training['switch']}, brightness {training['brightness']:g}, learning rate "
        f"{training['lr']:g}, ε {training['eps']:g}, weight decay {training['weight_decay']:g}, "
        f"{len(results['runs'])} runs in {results['seconds']:.0f} s; "
        f"{environment['device']}, torch {environment['torch'].partition('+')[0]}.\n"
    )


def facts(results: Results) -> dict[str, str]:
    """Numbers in sentences."""
    switch, ways = results["training"]["switch"], by_way(results)
    adam, stable = ways["AdamW, β2 0.999"], ways["StableAdamW, β2 0.999"]
    by_first = ways["StableAdamW, m² for g², β2 0.999"]
    short, clipped = ways["AdamW, β2 0.95"], ways[f"AdamW, β2 0.999, {CLIPPED}"]
    first = [caused(run, results)[0] for run in adam if caused(run, results)]
    warned = [run for run in adam if switch + 1 in run["embedding_spikes"]]
    early = [[s for s in run["embedding_spikes"] if s <= switch] for run in results["runs"]]
    elsewhere = [[s for s, _ in run["loss_spikes"] if s <= switch] for run in results["runs"]]
    return {
        "seeds": str(len(adam)),
        "runs": str(len(results["runs"])),
        "adam_spikes": str(len(first)),
        "adam_warned": str(len(warned)),
        "lead": _steps(sorted(start - switch - 1 for start, _ in first)),
        "known": _steps(sorted(seen - switch - 1 for _, seen in first)),
        "adam_rise": f"{statistics.fmean(rise(run, results) for run in adam):.2f}",
        "stable_spikes": str(sum(bool(caused(run, results)) for run in stable)),
        "stable_rise": f"{statistics.fmean(rise(run, results) for run in stable):.2f}",
        "quiet_rise": f"{statistics.fmean(quiet_rise(run, results) for run in stable):.2f}",
        "by_first_spikes": str(sum(bool(caused(run, results)) for run in by_first)),
        "by_first_rise": f"{statistics.fmean(rise(run, results) for run in by_first):.2f}",
        "short_spikes": str(sum(bool(caused(run, results)) for run in short)),
        "short_rise": f"{statistics.fmean(rise(run, results) for run in short):.2f}",
        "clipped_spikes": str(sum(bool(caused(run, results)) for run in clipped)),
        "false_alarms": str(sum(map(len, early))),
        "false_loss_alarms": str(sum(map(len, elsewhere))),
        "quiet_steps": f"{len(results['runs']) * (switch + 1 - results['training']['judged_from']):,}",
        "rms": f"{statistics.fmean(run['embedding_rms'][switch] for run in adam):.0f}",
        "seconds": f"{results['seconds']:.0f}",
    }


TABLES = {"optimizers": optimizers, "matches": matches, "origins": origins}
