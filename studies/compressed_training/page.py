"""Tables, facts and the picture of training with compressed gradients.

A run is compared with the uncompressed one of its seed, which has the same weights and batches. Two trainings whose
arithmetic differs in a last bit drift apart, too: how far is what bf16's all-reduce shows. What is nearer than
that, or than a thousandth of a nat, counts as nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from studies.compressed_training.training import BITS, DEFAULT, KINDS, OPTIMIZERS, REFERENCE, ROUNDED
from studies.shared import pictures
from studies.shared.pictures import INK, MUTED, Line
from studies.shared.readings import Beside
from studies.shared.tables import Results, fill_in, left_out, mean_of, per, percent, several, significant, table

LEAST = 1e-3
BEHIND, NEAR, BEFORE, UNCLEAR = "behind", "with it", "ahead", "not told"
LINES = {
    "nearest": Line("to nearest", "series-1", (), 2.2),
    "stochastic": Line("stochastically", "series-2", (2, 1.5), 2.2),
    "feedback": Line("with error feedback", "series-3", (6, 2), 2.2),
}
WIDE = 5  # points of a curve that are averaged


def under(results: Results, optimizer: str) -> Beside:
    """The runs of an optimizer, beside the uncompressed ones."""
    return Beside(results, REFERENCE, optimizer=optimizer)


def verdict(found: Beside, row: str) -> str:
    """Where a row ends: behind or ahead if every seed does by more than nothing, with it if none does.

    Nothing is the largest distance that bf16's all-reduce makes, which is taken for that of rounding alone.
    """
    apart, limit = found.apart(row), max(LEAST, max(map(abs, found.apart(ROUNDED)), default=0.0))
    if not apart:
        return ""
    if len(apart) < len(found.runs(row)) or min(apart) > limit:
        return BEHIND
    if max(apart) < -limit:
        return BEFORE
    return NEAR if max(map(abs, apart)) <= limit else UNCLEAR


def losses(results: Results) -> str:
    """How trainings end, and what travels."""
    found = {optimizer: under(results, optimizer) for optimizer in OPTIMIZERS}
    rows = [
        row | {"first": runs[0]}
        for row in results["rows"]
        if (runs := [run for each in found.values() for run in each.runs(row["name"])])
    ]

    def loss(optimizer: str, row: Results) -> str:
        runs = found[optimizer].runs(row["name"])
        bad = sum(run["validation_loss"] is None for run in runs)
        told = f"{bad} of {len(runs)} diverged" if bad else ""
        return " ".join(filter(None, (mean_of((run["validation_loss"] for run in runs), ".4f"), told)))

    def behind(optimizer: str, row: Results) -> str:
        return "" if row["name"] == REFERENCE else several(found[optimizer].apart(row["name"]))

    def ends(optimizer: str, row: Results) -> str:
        return "" if row["name"] in (REFERENCE, ROUNDED) else verdict(found[optimizer], row["name"])

    return table(
        rows,
        ("", lambda row: f"`{row['name']}`"),
        ("gradients", "title"),
        ("bytes, of fp32's", "first.share", percent),
        ("memory", "first.memory_bytes", lambda size: f"{size / 1e6:.2f} MB"),
        *per(OPTIMIZERS, "{}: ", ("loss", loss), ("− fp32's", behind), ("ends", ends)),
        words=2,
    )


def origin(results: Results) -> str:
    """What was run, on what."""
    return fill_in(
        results,
        "`{command}`: {training[model]} of {parameters:,} parameters, {training[steps]} steps of "
        "{training[batch]} × {training[sequence]:,} tokens of {data[source]} ({data[train_tokens]:,} tokens), "
        "vocabulary {training[vocabulary]:,}, on {training[ranks]} ranks; SGD with momentum 0.9, learning rate "
        "{training[sgd_lr]:g}; AdamW, {training[adamw_lr]:g}, weight decay {training[weight_decay]:g}; {count} "
        "runs in {spent:.0f} s; {machine}. {left}",
        count=len(results["runs"]),
        spent=sum(run["seconds"] for run in results["runs"]),
        left=left_out(results),
    )


def facts(results: Results) -> dict[str, str]:
    """Numbers in sentences: by optimizer in small letters, bits and kind, `sgd_2_nearest`."""
    named = {"runs": str(len(results["runs"])), "seeds": str(results["training"]["seeds"])}
    for optimizer in OPTIMIZERS:
        short, found = optimizer.lower(), under(results, optimizer)
        for row in (*(f"{bits} {kind}" for bits in BITS for kind in KINDS), ROUNDED, DEFAULT):
            if apart := found.apart(row):
                key, farthest = f"{short}_{row.replace(' ', '_')}", max(map(abs, apart))
                named[key] = f"{statistics.fmean(apart):+.4f}"
                named[f"farthest_{key}"] = significant(farthest, 2) if farthest >= 1e-4 else "less than 0.0001"
        most = [x for kind in KINDS for x in found.apart(f"8 {kind}")]
        named |= {f"most_{short}_8": f"{max(most):+.4f}"} if most else {}
        ends = [run["validation_loss"] for run in found.runs(REFERENCE) if not run["diverged"]]
        named |= {f"spread_{short}": f"{max(ends) - min(ends):.4f}"} if len(ends) > 1 else {}
    shares = [run["share"] for run in results["runs"] if run["row"] == "8 nearest"]
    return named | ({"share_8": percent(shares[0])} if shares else {})


def differences(results: Results) -> Figure:
    """Losses less those of uncompressed training, step by step; of one width and optimizer a panel.

    Thick lines are means over seeds, thin ones seeds; the band is how far bf16's all-reduce drifts by rounding.
    """
    figure, grid = pictures.figure(13, 7.6, 2, len(BITS))
    for across, (axes, optimizer) in enumerate(zip(grid, OPTIMIZERS, strict=True)):
        found = under(results, optimizer)
        for axis, bits in zip(axes, BITS, strict=True):
            _band(axis, _above(found, ROUNDED))
            for kind, line in LINES.items():
                _lines(axis, _above(found, f"{bits} {kind}"), line, KINDS[kind])
            axis.axhline(0, color=MUTED, linewidth=1.0)
            axis.set_title(f"{optimizer}, {bits} bits", color=INK)
            axis.margins(x=0.01)
            if across:
                axis.set_xlabel("step")
        axes[0].set_ylabel("training loss − uncompressed", color=INK)
    pictures.below(figure, axis, 4)
    return figure


Curves = Sequence[tuple[list[float], list[float]]]


def _above(found: Beside, row: str) -> Curves:
    """Of each seed steps, and means over some of them of losses less those of the uncompressed run."""
    known = {run["seed"]: run["curve"] for run in found.runs(REFERENCE)}
    curves = []
    for run in found.runs(row):
        pairs = zip(run["curve"], known.get(run["seed"], []), strict=False)
        points = [(step, mine - theirs) for (step, mine), (_, theirs) in pairs if None not in (mine, theirs)]
        smooth = [points[first : first + WIDE] for first in range(0, len(points), WIDE)]
        if smooth:
            steps, losses = ([statistics.fmean(x[i] for x in part) for part in smooth] for i in (0, 1))
            curves.append((steps, losses))
    return curves


def _lines(axis: Any, found: Curves, line: Line, kind: str) -> None:
    for steps, losses in found:
        axis.plot(steps, losses, color=pictures.COLORS[line.color], linewidth=0.6, alpha=0.5)
    if found:
        mean = [statistics.fmean(column) for column in zip(*(losses for _, losses in found), strict=False)]
        axis.plot(found[0][0][: len(mean)], mean, **line.style(label=f"{line.label} ({kind})"))


def _band(axis: Any, found: Curves) -> None:
    if found:
        most = [max(map(abs, column)) for column in zip(*(losses for _, losses in found), strict=False)]
        low, steps = [-x for x in most], found[0][0][: len(most)]
        axis.fill_between(steps, low, most, color=MUTED, alpha=0.2, linewidth=0, label="bf16: rounding alone")


TABLES = {"losses": losses, "origin": origin}
PICTURES = {"": differences}
