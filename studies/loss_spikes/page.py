"""Tables, facts and the picture of the loss spikes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from narrowgauge.gauges import SpikeMatch, match_spikes
from studies.shared import pictures
from studies.shared.pictures import COLORS, INK, MUTED
from studies.shared.tables import Results, fill_in, percent2, significant, span, table

NEAR = 20  # steps after the switch in which a loss spike is put down to it
AROUND = 50  # steps before it that the loss is compared with
CLIPPED = "gradients clipped to norm 1"
BEFORE, AFTER = 40, 60  # steps of the picture
THRESHOLD = 2.3
SPIKE, CALM, MIDDLE = (COLORS[name] for name in ("series-1", "series-2", "series-3"))


def by_way(results: Results) -> dict[str, list[Results]]:
    """Runs, one for each seed, by the name of how they were optimized: AdamW, β2 0.999."""
    found: dict[str, list[Results]] = {}
    for run in results["runs"]:
        way = run["way"]
        clip = "" if way["clip"] is None else f", gradients clipped to norm {way['clip']:g}"
        found.setdefault(f"{way['optimizer']}, β2 {way['beta2']:g}{clip}", []).append(run)
    return found


def caused(run: Results, results: Results) -> list[list[int]]:
    """The loss spikes soon after the switch: where each starts, and where it is known."""
    switch = results["training"]["switch"]
    return [spike for spike in run["loss_spikes"] if switch < spike[0] <= switch + NEAR]


def rise(run: Results, results: Results, earlier: int = 0) -> float:
    """The largest loss soon after the switch, or some steps earlier, above the mean before it."""
    at = results["training"]["switch"] - earlier
    return max(run["loss"][at : at + NEAR]) - statistics.fmean(run["loss"][at - AROUND : at])


def match(runs: list[Results], results: Results, tensor: str) -> SpikeMatch:
    """All loss spikes of some runs against the RMS spikes of a tensor."""
    judged = range(results["training"]["judged_from"], results["training"]["steps"] + 1)
    return SpikeMatch.total([
        match_spikes(run[f"{tensor}_spikes"], [start for start, _ in run["loss_spikes"]], judged=judged)
        for run in runs
    ])  # fmt: skip


def optimizers(results: Results) -> str:
    """What the switch does under each optimizer."""
    switch = results["training"]["switch"]

    def mean(of: Callable[[Results], float]) -> Callable[[tuple[str, list[Results]]], float]:
        return lambda way: statistics.fmean(map(of, way[1]))

    def starts(way: tuple[str, list[Results]]) -> list[int]:
        return [spikes[0][0] - switch for run in way[1] if (spikes := caused(run, results))]

    return table(
        by_way(results).items(),
        ("", lambda way: way[0]),
        ("RMS_t, first step", mean(lambda run: run["embedding_rms"][switch]), ".1f"),
        ("runs that spike", lambda way: f"{len(starts(way))} of {len(way[1])}"),
        ("from step", lambda way: span(starts(way)) or "–"),
        ("largest loss", mean(lambda run: rise(run, results)), "+.2f"),
        (
            "largest RMS_t, 50 steps before",
            mean(lambda run: max(run["embedding_rms"][switch - AROUND : switch])),
            ".1f",
        ),
    )


def matches(results: Results) -> str:
    """Whether loss spikes follow RMS spikes, for AdamW with the long memory."""
    runs = by_way(results)["AdamW, β2 0.999"]
    names = {"embedding": "the image embedding", "middle": "a layer in the middle"}
    return table(
        [(tensor, match(runs, results, tensor)) for tensor in names],
        ("RMS_t of", lambda row: names[row[0]]),
        ("RMS spikes", lambda row: sum(len(run[f"{row[0]}_spikes"]) for run in runs)),
        ("loss spikes that follow", lambda row: f"{row[1].followed} of {row[1].loss_spikes}"),
        ("chance of one", lambda row: row[1].chance, percent2),
        ("chance of as many", lambda row: significant(row[1].probability, 2)),
    )


def origins(results: Results) -> str:
    """What was run."""
    return fill_in(
        results,
        "`{command}`: {training[model]}, {parameters:,} parameters, {training[steps]} steps, switch after "
        "{training[switch]}, brightness {training[brightness]:g}, learning rate {training[lr]:g}, ε "
        "{training[eps]:g}, weight decay {training[weight_decay]:g}, {count} runs in {seconds:.0f} s; {machine}.",
        count=len(results["runs"]),
    )


def facts(results: Results) -> dict[str, str]:
    """Numbers in sentences."""
    switch, ways, runs = results["training"]["switch"], by_way(results), results["runs"]
    adam = ways["AdamW, β2 0.999"]
    first = [caused(run, results)[0] for run in adam if caused(run, results)]
    named = {
        "adam": adam,
        "stable": ways["StableAdamW, β2 0.999"],
        "by_first": ways["StableAdamW, m² for g², β2 0.999"],
        "short": ways["AdamW, β2 0.95"],
        "clipped": ways[f"AdamW, β2 0.999, {CLIPPED}"],
    }
    spikes = {f"{k}_spikes": str(sum(bool(caused(run, results)) for run in of)) for k, of in named.items()}
    rises = {f"{k}_rise": f"{statistics.fmean(rise(run, results) for run in of):.2f}" for k, of in named.items()}
    quiet = statistics.fmean(rise(run, results, NEAR) for run in named["stable"])
    return spikes | rises | {
        "seeds": str(len(adam)),
        "runs": str(len(runs)),
        "adam_warned": str(sum(switch + 1 in run["embedding_spikes"] for run in adam)),
        "lead": span([start - switch - 1 for start, _ in first]),
        "known": span([seen - switch - 1 for _, seen in first]),
        "quiet_rise": f"{quiet:.2f}",
        "false_alarms": str(sum(step <= switch for run in runs for step in run["embedding_spikes"])),
        "false_loss_alarms": str(sum(step <= switch for run in runs for step, _ in run["loss_spikes"])),
        "quiet_steps": f"{len(runs) * (switch + 1 - results['training']['judged_from']):,}",
        "rms": f"{statistics.fmean(run['embedding_rms'][switch] for run in adam):.0f}",
        "seconds": f"{results['seconds']:.0f}",
    }  # fmt: skip


def around_the_switch(results: Results) -> Figure:
    """Figures 4 and 5: losses above, RMS_t of embedding and middle layer below, a thin line a seed."""
    ways, switch = by_way(results), results["training"]["switch"]
    figure, grid = pictures.figure(3.1 * len(ways), 6.6, 2, len(ways), sharex=True, sharey="row")
    steps = range(switch - BEFORE + 1, switch + AFTER + 1)
    for (top, bottom), (name, runs) in zip(grid.T, ways.items(), strict=True):
        for run in runs:
            _draw(top, bottom, run, results, steps, first=run is runs[0])
        top.set_title(name.replace(", gradients", ",\ngradients").replace(", m²", ",\nm²"), color=INK, fontsize=12)
        for axis in (top, bottom):
            axis.axvline(switch + 0.5, color=MUTED, linewidth=1.0)
        bottom.axhline(THRESHOLD, color=SPIKE, linewidth=1.2, linestyle=(0, (1, 1.5)))
        bottom.set(yscale="log", xlabel="step")
        pictures.ticks(bottom.yaxis, [0.5, 1, 2.3, 5, 10])
        bottom.xaxis.set_major_locator(FixedLocator([switch - BEFORE, switch, switch + AFTER]))
    grid[0, 0].set_ylabel("loss of a sample", color=INK)
    grid[1, 0].set_ylabel("RMS_t", color=INK)
    (dot,) = grid[0, 0].plot([], [], "o", color=SPIKE, markersize=7)
    pictures.below(figure, grid[1, 0], 3, (dot, "start of a loss spike"))
    return figure


def _draw(top: Any, bottom: Any, run: Results, results: Results, steps: Sequence[int], *, first: bool) -> None:
    place = slice(steps[0] - 1, steps[-1])
    style = {"linewidth": 1.8 if first else 0.7, "alpha": 1.0 if first else 0.55}
    # The legend has the first run of each series alone.
    names = ("image embedding", "a layer in the middle") if first else (None, None)
    top.plot(steps, run["loss"][place], color=INK, **style)
    bottom.plot(steps, run["embedding_rms"][place], color=CALM, label=names[0], **style)
    bottom.plot(steps, run["middle_rms"][place], label=names[1], color=MIDDLE, **style, linestyle=(0, (4, 2)))
    for start, _ in caused(run, results):
        top.plot(start, run["loss"][start - 1], "o", color=SPIKE, markersize=7, zorder=4)


TABLES = {"optimizers": optimizers, "matches": matches, "origins": origins}
PICTURES = {"": around_the_switch}
