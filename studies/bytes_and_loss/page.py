"""Tables, facts and pictures of bytes against loss.

A difference is taken seed by seed, from runs with the same start and the same batches, and its mean is what
counts. What it is held against is the spread: the standard deviation of the reference's own losses over the seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator
from matplotlib.transforms import Bbox

from studies.shared import pictures
from studies.shared.pictures import COLORS, INK, MUTED
from studies.shared.tables import Results, apart, fill_in, left_out, machine, per, place_of, sizes, table

REFERENCE = "D"
PACKAGES = ("bitsandbytes", "torchao", "flashoptim", "torch-optimi")
# Rows of the front page, and their names there.
SHORT = {
    "D": "`master`",
    "split8 + log8": "`adamw8bit-split8`",
    "split4 + log8": "`adamw8bit-split4`",
    "split4 + log4/log8": "`adamw6bit-split4`",
    "stochastic + log4/log8": "`adamw6bit-stochastic`",
    "FlashAdamW": "FlashOptim's FlashAdamW",
    "bitsandbytes AdamW8bit": "bitsandbytes' AdamW8bit",
    "torchao AdamW8bit, stochastic": "torchao's AdamW8bit, stochastic rounding",
    "torchao AdamW4bit, stochastic": "torchao's AdamW4bit, stochastic rounding",
}
# Of the page Start: rows, and what each is for.
CHOICE = {
    "split8 + log8": "everything; nearly the loss of fp32",
    "split4 + log8": "everything; nearly the same training",
    "split4 + log4/log8": "fine-tuning; from scratch see below",
    "stochastic + log4/log8": "from scratch as the row above; fine-tuning may end a little higher",
    "stochastic + log4": "where nothing else fits",
}
# Family: its color and marker. New storages stand out, whatever their weights.
LOOKS = {
    "logarithmic states": ("series-1", "o"),
    "this library's other recipes": ("series-2", "s"),
    "bitsandbytes": ("series-3", "^"),
    "torchao": ("series-4", "v"),
    "flashoptim": ("series-5", "D"),
    "optimi": ("series-6", "P"),
}
TICKS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
RADII = (9, 15, 22, 30, 40, 52, 66, 82)  # points from a marker to its label, the nearest that is free
ANGLES = (0, 180, 90, 270, 30, 330, 150, 210, 60, 300, 120, 240)


@dataclass(frozen=True)
class Found:
    """What became of one row under one setting."""

    # name, title, family, formula: as in the results
    name: str
    title: str
    family: str
    formula: float | None
    bytes: float | None  # measured bytes a parameter; None if no run ended
    gradient: float  # bytes of the gradient among them
    losses: list[float]  # validation losses of the seeds that have one
    differences: list[float]  # from the reference at the same seed, where both are there
    diverged: int  # how many seeds did
    failed: str | None  # why there is no number; None if there is one
    reference: str  # the row that losses are compared with

    @property
    def mean(self) -> float | None:
        """The mean difference."""
        return statistics.fmean(self.differences) if self.differences else None

    def ends(self, form: str) -> str:
        """The smallest and the largest difference, nothing for a single one."""
        few = len(self.differences) < 2
        return "" if few else form.format(f"{min(self.differences):+.4f} … {max(self.differences):+.4f}")


def found(results: Results, setting: int = 0) -> list[Found]:
    """All rows that were run, or could not be, under a setting; by bytes, the heaviest first."""
    runs = [run for run in results["runs"] if run["setting"] == setting]
    ended = [run for run in runs if "failed" not in run]
    rows = []
    for row in results["rows"]:
        mine = [run for run in ended if run["row"] == row["name"]]
        reasons = [run["failed"] for run in runs if run["row"] == row["name"] and "failed" in run]
        if not mine and not reasons:
            continue
        losses = [run["validation_loss"] for run in mine if run["validation_loss"] is not None]
        reference = row.get("reference", REFERENCE)
        rows.append(Found(
            **{key: row[key] for key in ("name", "title", "family", "formula")},
            bytes=statistics.fmean(run["bytes"]["total"] for run in mine) if mine else None,
            gradient=mine[0]["bytes"]["gradients"] if mine else 0.0,
            losses=losses,
            differences=apart(mine, [run for run in ended if run["row"] == reference]),
            diverged=sum(run["diverged"] for run in mine),
            failed=None if mine else reasons[0],
            reference=reference,
        ))  # fmt: skip
    return sorted(rows, key=lambda row: -(row.bytes or 0.0))


def spread(results: Results, setting: int = 0) -> float:
    """Standard deviation of the reference's losses over the seeds; 0 for one seed."""
    losses = next((row.losses for row in found(results, setting) if row.name == REFERENCE), [])
    return statistics.stdev(losses) if len(losses) > 1 else 0.0


def rows(results: Results) -> str:
    """Every row: bytes measured and by formula, difference of each seed's loss."""
    limit = spread(results)

    def verdict(row: Found) -> str:
        if row.mean is None:
            return ""
        word = "reference" if row.name == REFERENCE else "yes" if abs(row.mean) <= limit else "no"
        return word + (f", {row.diverged} diverged" if row.diverged else "")

    def loss(row: Found) -> str:
        if row.bytes is None:
            return f"failed: {row.failed}"
        return f"{row.mean:+.4f}" if row.mean is not None else "diverged" if row.diverged else "no reference"

    return table(
        found(results),
        ("row", lambda row: f"`{row.name}`" if row.family == "ours" else row.name),
        ("what is kept", "title"),
        ("bytes", "bytes", ".2f"),
        ("formula", "formula", ".2f"),
        ("gradient freed", lambda row: row.bytes and row.bytes - row.gradient, ".2f"),
        ("loss − D", loss),
        ("of the seeds", lambda row: row.ends("{}")),
        ("within spread", verdict),
        words=2,
    )


def short(results: Results, tuned: Results) -> str:
    """Few rows, fewer columns: for the front page. From scratch, and fine-tuning."""
    by_name, by_name_tuned = ({row.name: row for row in found(each)} for each in (results, tuned))
    return table(
        [by_name[name] for name in SHORT],
        ("optimizer", lambda row: SHORT[row.name]),
        ("what is kept", "title"),
        ("bytes", "bytes", ".2f"),
        ("loss − that of `master`", lambda row: "–" if row.name == REFERENCE else _difference(row)),
        (
            "fine-tuning",
            lambda row: "–" if row.name == REFERENCE else _difference(by_name_tuned.get(row.name)),
        ),
        words=2,
    )


def choice(*runs: Results) -> str:
    """Which bytes to take: rows of `CHOICE`, their loss minus D's under the setting of each file."""
    every = [{row.name: row for row in found(results)} for results in runs]
    return table(
        CHOICE,
        ("bytes", lambda name: every[0][name].formula, ".2f"),
        ("take", lambda name: SHORT.get(name, f"`{name}`")),
        *(
            (f"{results['training']['model']}, {_what(results)}", lambda name, each=each: f"{each[name].mean:+.4f}")
            for results, each in zip(runs, every, strict=True)
        ),
        ("for", CHOICE.__getitem__),
        words="rl" + "r" * len(runs) + "l",
    )


def anchors(*runs: Results) -> str:
    """The three anchors under every setting of every file."""
    places = [(results, number) for results in runs for number in range(len(results["settings"]))]
    every = [{row.name: row for row in found(*place)} | {"at": place} for place in places]
    return table(
        [each for each in every if REFERENCE in each and each[REFERENCE].losses],
        ("model", lambda each: each["at"][0]["settings"][each["at"][1]]["model"]),
        ("β2", lambda each: each["at"][0]["settings"][each["at"][1]]["beta2"], "g"),
        ("seeds", lambda each: len(each[REFERENCE].losses)),
        ("loss of D", lambda each: statistics.fmean(each[REFERENCE].losses), ".4f"),
        ("its spread", lambda each: spread(*each["at"]), ".4f"),
        ("`split + log8` − D", lambda each: _difference(each.get("split + log8"))),
        ("`split + 8bit` − D", lambda each: _difference(each.get("split + 8bit"))),
    )


def rates(*runs: Results) -> str:
    """Every row under the setting of each file: loss minus its reference's, and the last third's part of that."""
    every = [{row.name: row for row in found(results) if row.mean is not None} for results in runs]
    rows = {name: row for each in reversed(every) for name, row in each.items()}  # of the first file that has it

    def difference(number: int, row: Found) -> str:
        return "–" if row.name == row.reference else _difference(every[number].get(row.name))

    def last_third(number: int, row: Found) -> str:
        ended = [run for run in runs[number]["runs"] if run.get("earlier_loss") and run["validation_loss"]]
        gained = [run | {"gained": run["validation_loss"] - run["earlier_loss"]} for run in ended]
        mine, other = ([run for run in gained if run["row"] == name] for name in (row.name, row.reference))
        values = apart(mine, other, "gained") if row.name != row.reference else []
        return f"{statistics.fmean(values):+.4f}" if values else ""

    reference = next(iter(rows.values())).reference
    return table(
        sorted(rows.values(), key=lambda row: -(row.bytes or 0.0)),
        ("row", lambda row: f"`{row.name}`" if row.family == "ours" else row.name),
        ("bytes", "bytes", ".2f"),
        *per(
            range(len(runs)), lambda number: f"{_what(runs[number])}: ",
            ("loss − D" if reference == REFERENCE else "loss − the first row's", difference),
            ("last third", last_third),
        ),
    )  # fmt: skip


def _what(results: Results) -> str:
    """A setting in a few words."""
    training = results["training"]
    trained = training.get("trained", 0)
    share = training["lr"] / training["trained_lr"] if trained else 1.0
    return f"fine-tuning, 1/{round(1 / share)} of the rate" if trained else "from scratch"


def _difference(row: Found | None) -> str:
    if row is None or row.mean is None:
        return "diverged" if row is not None and row.diverged else "–"
    return f"{row.mean:+.4f}{row.ends(' ({})')}"


def origins(*runs: Results) -> str:
    """What was run, on what."""
    return "\n".join(map(_origin, runs))


def _origin(results: Results) -> str:
    environment = results["environment"]
    peers = [f"{name} {version}" for name in PACKAGES if (version := environment.get(name, "not"))[:3] != "not"]
    return fill_in(
        results,
        "`{command}`: {sizes}, {training[steps]} steps of {tokens:,} tokens on {data[source]} "
        "({data[train_tokens]:,} tokens, vocabulary {training[vocabulary]:,}), learning rate {training[lr]:g} "
        "after {training[warmup]} steps, falling to {training[final]:g} of it, weight decay "
        "{training[weight_decay]:g}, gradients' norm at most {training[clip]:g}{before}; {where}. {left}",
        sizes=sizes(results), before=_before(results), where=", ".join([machine(results), *peers]),
        left=left_out(results),
    )  # fmt: skip


def _before(results: Results) -> str:
    """What the model had been through."""
    training = results["training"]
    if not training.get("trained"):
        return ""
    return ", after {trained:,} steps of AdamW in fp32 at {trained_lr:g} that fell to 0".format(**training)


def facts(results: Results) -> dict[str, str]:
    """Every number in the page's sentences."""
    training = results["training"]
    named = {key: str(training[key]) for key in ("seeds", "steps")} | {"spread": f"{spread(results):.4f}"}
    for row in found(results):
        key = place_of(row.name)
        if row.mean is not None:
            named[f"loss_{key}"] = f"{row.mean:+.4f}"
            named[f"least_{key}"] = f"{min(row.differences):+.4f}"
            named[f"most_{key}"] = f"{max(row.differences):+.4f}"
        if row.bytes is not None:
            named[f"bytes_{key}"] = f"{row.bytes:.2f}"
    return named


def bytes_against_loss(results: Results) -> Figure:
    """A point a row, its seeds as a bar, the spread of the reference as a band.

    The scale of the losses is linear within the band and logarithmic beyond, so that a row a thousandth off and one
    a whole nat off are both to be seen.
    """
    rows = [row for row in found(results) if row.mean is not None]
    band = spread(results) or 0.003
    figure, axis = pictures.figure(12.5, 8.2)
    axis.axhspan(-band, band, color=MUTED, alpha=0.16, linewidth=0, label=f"spread of {REFERENCE} over the seeds")
    axis.axhline(0, color=MUTED, linewidth=1)
    named = set()
    for row in rows:
        family = _family(row)
        name, marker = LOOKS[family]
        color = INK if row.name == REFERENCE else COLORS[name]
        axis.plot(
            [row.bytes] * 2, [min(row.differences), max(row.differences)], color=color, linewidth=1.6, alpha=0.7
        )
        label = family if family not in named and row.name != REFERENCE else None
        axis.plot([row.bytes], [row.mean], marker, color=color, markersize=8, label=label, linestyle="none")
        named |= {family} if label else set()
    _scale(axis, rows, band)
    axis.set_xlabel("bytes a parameter: weight, gradient, and what the optimizer keeps")
    axis.set_ylabel(f"validation loss − that of {REFERENCE}, nats a token")
    above = axis.secondary_xaxis("top", functions=(lambda x: x - 2, lambda x: x + 2))
    above.set_xlabel("with each bf16 gradient freed at once", color=MUTED)
    above.spines["top"].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, handletextpad=0.3)
    _labels(figure, axis, rows)
    return figure


def few_bytes(results: Results) -> Figure:
    """The rows below 7.5 bytes on a linear scale, each with its seeds."""
    rows = [row for row in found(results) if row.mean is not None and (row.bytes or 8.0) < 7.5]
    figure, axis = pictures.figure(12.5, 6.4)
    axis.axhline(0, color=MUTED, linewidth=1)
    named = set()
    for row in rows:
        name, marker = LOOKS[_family(row)]
        ends = min(row.differences), max(row.differences)
        axis.plot([row.bytes] * 2, ends, color=COLORS[name], linewidth=1.6, alpha=0.7)
        label = None if _family(row) in named else _family(row)
        axis.plot([row.bytes], [row.mean], marker, color=COLORS[name], markersize=8, label=label, linestyle="none")
        named.add(_family(row))
    axis.set_xlim(4.8, 8.0)
    axis.set_xlabel("bytes a parameter: weight, gradient, and what the optimizer keeps")
    axis.set_ylabel(f"validation loss − that of {REFERENCE}, nats a token")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, handletextpad=0.3)
    _labels(figure, axis, rows)
    return figure


def _family(row: Found) -> str:
    """The family that a row is drawn as."""
    if row.family != "ours":
        return row.family
    return "logarithmic states" if "log" in row.name else "this library's other recipes"


def _scale(axis: Any, rows: Sequence[Found], band: float) -> None:
    axis.set_yscale("symlog", linthresh=band, linscale=0.9)
    lowest, highest = (f([x for row in rows for x in row.differences]) for f in (min, max))
    axis.set_ylim(min(-2 * band, 1.6 * lowest), max(2 * band, 1.6 * highest))
    low, high = axis.get_ylim()
    at = [0.0, *(s * t for t in TICKS for s in (1, -1) if t > 0.7 * band and low <= s * t <= high)]
    pictures.ticks(axis.yaxis, at, lambda y: f"{y:+g}".replace("-", "−") if y else "0")
    least, most = (f(row.bytes or 0 for row in rows) for f in (min, max))
    axis.set_xlim(least - 0.6, most + 0.9)
    axis.xaxis.set_major_locator(FixedLocator(range(int(least), int(most) + 2)))


def _labels(figure: Figure, axis: Any, rows: Sequence[Found]) -> None:
    """Names beside the points, none on another, on a point or outside: the free place nearest to its point."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    unit = figure.dpi / 72
    inside = axis.get_window_extent(renderer)
    places = [axis.transData.transform((row.bytes, row.mean)) for row in rows]
    taken = [Bbox.from_bounds(x - 5 * unit, y - 5 * unit, 10 * unit, 10 * unit) for x, y in places]
    for row, place in sorted(zip(rows, places, strict=True), key=lambda pair: pair[0].name):
        text = axis.annotate(row.name, place, xycoords="figure pixels", fontsize=11, color=INK)
        size = text.get_window_extent(renderer)
        box, shift = _free(place, (size.width, size.height), taken, inside, unit)
        text.remove()
        taken.append(box)
        far = np.hypot(*shift) > 26
        axis.annotate(
            row.name, (row.bytes, row.mean), shift, textcoords="offset points", fontsize=11, color=INK,
            ha="left" if shift[0] >= 0 else "right", va="center",
            arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.6, "shrinkB": 4} if far else None,
        ).set_in_layout(False)  # fmt: skip


def _free(
    place: Any, size: tuple[float, float], taken: Sequence[Bbox], inside: Bbox, unit: float
) -> tuple[Bbox, tuple[float, float]]:
    """A box for a label of this size in pixels, and its offset from the point in points."""
    width, height = size
    choices = []
    for radius in RADII:
        for angle in ANGLES:
            dx, dy = radius * np.cos(np.radians(angle)), radius * np.sin(np.radians(angle))
            dx = 0.0 if abs(dx) < 1e-9 else dx
            left = place[0] + dx * unit - (0 if dx >= 0 else width)
            box = Bbox.from_bounds(left - 2, place[1] + dy * unit - height / 2 - 1, width + 4, height + 2)
            outside = box.x0 < inside.x0 or box.x1 > inside.x1 or box.y0 < inside.y0 or box.y1 > inside.y1
            hit = sum(1 for other in taken if box.overlaps(other)) + 10 * outside
            if not hit:
                return box, (float(dx), float(dy))
            choices.append((hit, radius, box, (float(dx), float(dy))))
    _, _, box, shift = min(choices, key=lambda choice: choice[:2])
    return box, shift


TABLES = {"rows": rows, "short": short, "anchors": anchors, "origins": origins, "rates": rates, "choice": choice}
PICTURES = {"_few": few_bytes, "": bytes_against_loss}
