"""Tables, facts and the picture of the stability study: who spikes, what it costs, and what the loss follows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure

from narrowgauge.gauges import SpikeMatch, match_spikes
from studies.shared import pictures, readings, tables
from studies.shared.pictures import COLORS, INK, MUTED
from studies.shared.tables import Results, left_out, machine, mean_of, name_of, percent2, significant, table

PLAIN, STABLE = "AdamW", "StableAdamW"
LONG, SHORT = 0.999, 0.95
NEAR = 20  # steps after the switch in which a loss spike is put down to it
TENSORS = {"patches": "the patch embedding", "middle": "a layer in the middle", "tokens": "the token embedding"}
PAPER = {"patches": "28 of 30, by chance 1 %", "middle": "none follow", "tokens": ""}
THRESHOLD = 2.3
SPIKE, PATCHES, MIDDLE = (COLORS[name] for name in ("series-1", "series-2", "series-3"))
SHOWN = ((PLAIN, LONG), (STABLE, LONG), ("AdamW, clipped to 1", LONG), (PLAIN, SHORT))


def runs_of(results: Results, **fields: object) -> list[Results]:
    """Runs that were made and have such fields, by seed; model, rate and batch are the base's if not given."""
    base = {name: results["training"][name] for name in ("model", "lr", "batch")}
    return tables.runs_of(results, **base | {"signal": 1.0} | fields)


def dimmed(results: Results) -> dict[tuple[str, float], list[Results]]:
    """Runs whose signal changes, by way and beta2."""
    found: dict[tuple[str, float], list[Results]] = {}
    for run in results["runs"]:
        if "failed" not in run and run["signal"] != 1.0:
            found.setdefault((run["row"], run["beta2"]), []).append(run)
    return found


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


def unclipped(results: Results) -> list[Results]:
    """The runs that Figures 15, 16 and 20 are of: AdamW, whatever its beta2, at the base and beside it.

    Those that ended before spikes are judged have none.
    """
    runs = [run for run in results["runs"] if "failed" not in run and (run["row"], run["signal"]) == (PLAIN, 1.0)]
    return [run for run in runs if run["steps_made"] >= results["training"]["judged_from"]]


def caused(run: Results, switched: int) -> list[int]:
    """Loss spikes soon after the switch."""
    return [step for step in run["loss_spikes"] if switched <= step < switched + NEAR]


def _spikes(runs: Sequence[Results]) -> str:
    """Loss spikes of each seed, and how many runs diverged."""
    bad = sum(run["diverged"] for run in runs)
    counts = ", ".join(str(len(run["loss_spikes"])) for run in runs)
    return counts + (f"; {bad} of {len(runs)} diverged" if bad else "")


def _mean(key: str, form: str) -> Callable[[Sequence[Results]], str]:
    return lambda runs: mean_of((run[key] for run in runs), form)


def _rms(key: str, form: str) -> Callable[[Sequence[Results]], str]:
    return lambda runs: mean_of((x[key] for run in runs if (x := run["rms"].get("patches"))), form)


def _accuracy(runs: Sequence[Results]) -> str:
    good = [100 * run["accuracy"] for run in runs if run["accuracy"] is not None]
    return f"{tables.several(good, '.1f')} %" if good else ""


def ways(results: Results) -> str:
    """Ways to meet spikes, at the base."""
    rows = [
        runs_of(results, row=row["name"], beta2=beta2)
        for row in results["rows"]
        for beta2 in sorted({run["beta2"] for run in runs_of(results, row=row["name"])}, reverse=True)
    ]
    return table(
        rows,
        ("", lambda runs: runs[0]["row"]),
        ("β2", lambda runs: runs[0]["beta2"], "g"),
        ("loss spikes, by seed", _spikes),
        ("RMS spikes", lambda runs: ", ".join(str(len(run["rms_spikes"]["patches"])) for run in runs)),
        ("mean RMS_t", _rms("mean", ".2f")),
        ("largest", _rms("max", ".1f")),
        ("training loss", _mean("training_loss", ".3f")),
        ("zero-shot accuracy", _accuracy),
    )


def shift(results: Results) -> str:
    """What a larger signal of the patch embedding does, by way."""
    switched = results["training"]["switched"]

    def after(read: Callable[[Results], float], form: str) -> Callable[[Sequence[Results]], str]:
        return lambda runs: mean_of((read(run["after"]) for run in runs if run["after"]), form)

    return table(
        [sorted(runs, key=lambda run: run["seed"]) for runs in dimmed(results).values()],
        ("", lambda runs: runs[0]["row"]),
        ("β2", lambda runs: runs[0]["beta2"], "g"),
        ("RMS_t of patches, first step", after(lambda x: x["rms"]["patches"], ".1f")),
        ("of the middle layer", after(lambda x: x["rms"]["middle"], ".1f")),
        ("runs whose loss spikes", lambda runs: f"{sum(bool(caused(r, switched)) for r in runs)} of {len(runs)}"),
        ("largest loss", after(lambda x: x["rise"], "+.2f")),
        ("as much before", after(lambda x: x["quiet"], "+.2f")),
        ("training loss", _mean("training_loss", ".3f")),
        ("zero-shot accuracy", _accuracy),
    )


def varied(field: str, title: str) -> Callable[[Results], str]:
    """AdamW against a field of the training, with a long and a short memory: Figures 13, 12 and 3."""

    def drawn(results: Results) -> str:
        order = results["parameters"].get if field == "model" else float
        values = sorted({run[field] for run in results["runs"]}, key=order)

        def of(beta2: float, show: Callable[[Sequence[Results]], str]) -> Callable[[Any], str]:
            return lambda value: show(runs_of(results, row=PLAIN, beta2=beta2, **{field: value}))

        columns = [
            column
            for beta2 in (LONG, SHORT)
            for column in (
                (f"β2 {beta2:g}: loss spikes", of(beta2, _spikes)),
                ("largest RMS_t", of(beta2, _rms("max", ".1f"))),
                ("accuracy", of(beta2, _accuracy)),
            )
        ]
        shown = [value for value in values if runs_of(results, row=PLAIN, **{field: value})]
        return table(shown, (title, lambda value: value if isinstance(value, str) else f"{value:g}"), *columns)

    return drawn


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
    notes = left_out(results, lambda run: f"{run['row']}, β2 {run['beta2']:g}")
    return (
        f"`{results['command']}`: {training['model']} of {results['parameters'][training['model']]:,} parameters, "
        f"{training['steps']} steps of {training['batch']:,} pairs, learning rate {training['lr']:g} after "
        f"{training['warmup']} steps, then a cosine, weight decay {training['weight_decay']:g}, "
        f"{100 * training['patch_dropout']:g} % of the patches dropped, computed in {training['autocast']}; spikes "
        f"are judged from step {training['judged_from']} on; {machine(results)}. {notes}\n"
    )


def facts(results: Results) -> dict[str, str]:
    """Numbers in sentences."""
    named = {"runs": str(len(results["runs"])), "seeds": str(results["training"]["seeds"])}
    for row in results["rows"]:
        for beta2 in {run["beta2"] for run in runs_of(results, row=row["name"])}:
            runs, key = runs_of(results, row=row["name"], beta2=beta2), _key(row["name"], beta2)
            named[f"spikes_{key}"] = str(sum(len(run["loss_spikes"]) for run in runs))
            named[f"made_{key}"] = str(len(runs))
            if accuracy := mean_of((run["accuracy"] and 100 * run["accuracy"] for run in runs), ".1f"):
                named[f"accuracy_{key}"] = f"{accuracy} %"
    if (scatter := deviation(results)) is not None:  # of two means, of two seeds each
        named["margin_accuracy"] = significant(200 * scatter, 2)
    for (row, beta2), runs in dimmed(results).items():
        key, after = _key(row, beta2), [run["after"] for run in runs if run["after"]]
        named[f"caused_{key}"] = str(sum(bool(caused(run, results["training"]["switched"])) for run in runs))
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
            named[f"chance_{tensor}"] = percent2(found.chance)
            named[f"probability_{tensor}"] = significant(found.probability, 2)
    return named


def _key(row: str, beta2: float) -> str:
    return f"{name_of(row)}_{tables.digits_of(beta2)}"


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
    "sizes": varied("model", "model"), "matches": matches, "origin": origin,
}  # fmt: skip
PICTURES = {"": losses_and_rms}
