"""Tables, facts, the picture and the reading of the CLIPs with 8-bit linear layers: the paper's figures beside
ours.

A run is compared with that of bf16 of the same model, learning rate, addition and seed, from the same weights and
pictures. Accuracies are zero-shot, of held-out pictures, in per cent; their differences are in points.

Runs that differ in any rounding part, and end a little apart, by chance. How much is seen in how differences of one
row change from seed to seed, pooled over all rows of a model, learning rate and addition: additions differ in how
far they let runs part. A mean that is further from zero than three standard errors of that is no chance. A nearer
one is a finding of no difference only where three standard errors are less than what the paper takes for behind.

Statements of the paper are read place by place, a model with a learning rate, as they depend on the size of the
model: with nothing added, as the paper has them, and with norms on keys and queries, where runs do not part by
chance as far.
"""

from __future__ import annotations

import functools
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from studies.clip_precision.rows import ADDED, NOTHING, REFERENCE, ROWS, STEADY, TENSORWISE
from studies.shared import pictures, readings, tables
from studies.shared.pictures import COLORS, INK, Line
from studies.shared.readings import Beside, Reading
from studies.shared.tables import Results, fill_in, markdown, name_of, per, several, significant, table

Place = tuple[str, float]  # a model and a learning rate
PAPER = {row.name: row.paper for row in ROWS}
DROP = 0.059  # of accuracy: LLM.int8() below bf16 in the paper, what there is to be seen
GROWN = 2.0  # times the first block's magnitude, at which the last block's counts as grown
# What should lie upon bf16 is told apart by dashes, not by color alone.
LINES = (
    Line(REFERENCE, "ink"), Line("SwitchBack int8", "series-2", (6, 2)),
    Line("SwitchBack float8", "series-3", (2, 1.5)), Line("LLM.int8()", "series-1"), Line(TENSORWISE, "series-4"),
    Line("SwitchBackM int8", "series-5", (8, 2, 1.5, 2)), Line("SwitchBackQ int8", "series-6", (4, 1.5)),
)  # fmt: skip
DASHES = dict(zip((added.name for added in ADDED), ((), (6, 2), (2, 1.5), (8, 2, 1.5, 2)), strict=True))


class At(Beside):
    """The runs of a place with something added, beside bf16's."""

    def __init__(self, results: Results, place: Place, added: str) -> None:
        super().__init__(results, REFERENCE, model=place[0], lr=place[1], added=added)

    def separated(self, row: str) -> bool | None:
        """Whether a row parts from bf16: its mean loss differs by more than `margin`, or it alone diverged.

        None where there are too few runs to say, and where chance alone would hide what the paper sees.
        """
        seeds = {run["seed"] for run in self.runs(REFERENCE)}
        if self.lost(row):
            return True if sum(run["seed"] in seeds for run in self.runs(row)) > 1 else None
        values = self.apart(row)
        most = self.margin(len(values))
        if most is None:
            return None
        if abs(statistics.fmean(values)) > most:
            return True
        return False if self.sees(len(values)) else None

    def sees(self, runs: int) -> bool:
        """Whether so many runs would tell the paper's `DROP` in accuracy from chance."""
        points = self.margin(runs, "accuracy")
        return points is not None and points < DROP

    def diverged(self, row: str) -> int:
        """How many runs diverged, whatever bf16's did."""
        return sum(run["diverged"] is not None for run in self.runs(row))

    def accuracy(self, row: str) -> str:
        """Mean over the seeds, in per cent, and how many diverged."""
        bad = f"{self.diverged(row)} of {len(self.runs(row))} diverged" if self.diverged(row) else ""
        return ", ".join(filter(None, (several(self.accuracies(row), ".1f"), bad)))

    def accuracies(self, row: str) -> list[float]:
        """Those of the runs that did not diverge, in per cent."""
        return [100 * run["accuracy"] for run in self.runs(row) if run["diverged"] is None]

    def loss(self, row: str) -> str:
        """Minus bf16's."""
        return "" if row == REFERENCE else several(self.apart(row))

    def points(self, row: str) -> str:
        """The accuracy minus bf16's."""
        return "" if row == REFERENCE else several([100 * x for x in self.apart(row, "accuracy")], "+.1f")


def places(results: Results) -> list[Place]:
    """Models and learning rates that there are runs of: the one where everything is trained comes first."""
    training = results["training"]
    found = {(run["model"], run["lr"]) for run in results["runs"]}
    wanted = [(model, lr) for lr in training["rates"] for model in training["models"]]
    return [place for place in wanted if place in found]


def _titled(place: Place) -> str:
    return f"{place[0]}, lr {place[1]:g}"


def with_added(added: str, results: Results) -> str:
    """Accuracy and loss of every row with the same addition, and minus bf16's, place by place: Figure 1."""
    found = {place: At(results, place, added) for place in places(results)}
    last = [f"*{readings.CERTAIN:g} standard errors of a difference*", ""]
    for each in found.values():
        most = max(len(each.runs(row["name"])) for row in results["rows"])
        points, loss = (each.margin(most, key) for key in ("accuracy", "validation_loss"))
        last += ["", "" if points is None else f"{100 * points:.1f}", "" if loss is None else f"{loss:.4f}"]
    return table(
        results["rows"],
        ("linear layers", "name"),
        ("paper: points", lambda row: PAPER.get(row["name"], "")),
        *per(
            found, lambda place: f"{_titled(place)}: ",
            ("accuracy", lambda place, row: found[place].accuracy(row["name"])),
            ("points", lambda place, row: found[place].points(row["name"])),
            ("loss − bf16", lambda place, row: found[place].loss(row["name"])),
        ),
        last=last,
    )  # fmt: skip


def figure_2(results: Results) -> str:
    """Bf16 and tensor-wise float8 with what is added: how they end, place by place."""
    columns = per(
        places(results), lambda place: f"{_titled(place)}: ",
        ("bf16", lambda place, added: At(results, place, added.name).accuracy(REFERENCE)),
        ("float8", lambda place, added: At(results, place, added.name).accuracy(TENSORWISE)),
        ("loss − bf16", lambda place, added: At(results, place, added.name).loss(TENSORWISE)),
    )  # fmt: skip
    return table(ADDED, ("added", "name"), ("paper, ViT-Large: float8", "paper"), *columns)


def grid(results: Results) -> str:
    """Every row with everything added, at the first place: accuracy, and loss minus bf16's."""
    found = {added.name: At(results, places(results)[0], added.name) for added in ADDED}
    columns = per(
        found, "{}: ",
        ("accuracy", lambda added, row: found[added].accuracy(row["name"])),
        ("loss − bf16", lambda added, row: found[added].loss(row["name"])),
    )  # fmt: skip
    return table(results["rows"], ("linear layers", "name"), *columns)


def separation(results: Results) -> str:
    """What parts from bf16, what does not, and what cannot be told, where there are enough runs to ask."""
    lines = []
    for place in places(results):
        for added in (added.name for added in ADDED):
            found = At(results, place, added)
            told: dict[bool | None, list[str]] = {True: [], False: [], None: []}
            for row in (row["name"] for row in results["rows"]):
                if row != REFERENCE and found.runs(row):
                    told[found.separated(row)].append(row)
            if found.margin(1) is not None or told[True]:
                lines.append([_titled(place), added, *(", ".join(x) or "none" for x in told.values())])
    return markdown(("trained", "added", "parts from bf16", "ends where it does", "cannot tell"), lines, words=5)


def magnitudes(results: Results) -> str:
    """E|x_k| of the first, the middle and the last block of the image tower, before and after training."""
    lines = [
        [place[0], f"{place[1]:g}", row, added.name, *_blocks(runs)]
        for place in places(results)
        for row in (REFERENCE, TENSORWISE)
        for added in ADDED
        if (runs := At(results, place, added.name).runs(row))
    ]
    head = (
        "model", "lr", "linear layers", "added", "start: first block", "middle", "last", "end: first block",
        "middle", "last", "end: largest of the last",
    )  # fmt: skip
    return markdown(head, lines, words=4)


def _blocks(runs: Sequence[Results]) -> list[str]:
    """Means over the seeds, to three digits; of a run that diverged features may be no numbers."""
    found = []
    for when in (0, -1):
        each = [mean for run in runs if (mean := run["magnitudes"]["mean"][when])]
        found += [[mean[0] for mean in each], [mean[len(mean) // 2] for mean in each], [mean[-1] for mean in each]]
    found.append([run["magnitudes"]["absmax"][-1][-1] for run in runs])
    finite = [[x for x in values if x is not None] for values in found]
    return [significant(statistics.fmean(values), 3) if values else "not finite" for values in finite]


def origin(*runs: Results) -> str:
    """What was run, on what."""
    return "\n".join(
        fill_in(
            results,
            "`{command}`: {sizes}; {training[steps]} steps of {training[batch]} pairs of {data[source]} "
            "({data[images]:,} pictures with {data[captions]:,} captions; {data[held_out]} held out, each to be "
            "told from {data[prompts]} captions), {dropped:.0f} % of the patches dropped; {training[recipe]}, "
            "bf16 by autocast, learning rate {training[lr]:g} after {training[warmup]} steps, a cosine to "
            "{training[final_lr]:g} of it, β2 {training[beta2]:g}, weight decay {training[weight_decay]:g}; "
            "{machine}. {left}",
            sizes=tables.sizes(results),
            dropped=100 * results["training"]["patch_dropout"],
            left=_left_out(results),
        )
        for results in runs
    )


def _left_out(results: Results) -> str:
    """Which runs there are not, and how those that diverged did."""
    notes = tables.left_out(results, lambda run: "{model}, {row}, {added}, seed {seed}".format_map(run))
    ways = Counter(way for run in results["runs"] if (way := run.get("diverged")) is not None)
    bad = [f"Of {len(results['runs'])} runs {count} diverged: {way}." for way, count in ways.most_common()]
    return " ".join([*([] if bad and notes == "All runs were made." else [notes]), *bad])


def facts(results: Results) -> dict[str, str]:
    """Numbers in sentences at the first place: by row, and by addition where it is not nothing.

    `accuracy_LLM_int8`, `points_…`, `loss_…`, and `diverged_…` as in `1 of 3`; `first_…` and `last_…` are
    magnitudes of blocks at the end; `margin_…` and `margin_points_…` are what means of all seeds have to exceed.
    """
    named: dict[str, str] = {}
    for added in (added.name for added in ADDED) if places(results) else ():
        at, seeds = At(results, places(results)[0], added), results["training"]["seeds"]
        found: dict[str, str] = {}
        if (loss := at.margin(seeds)) is not None:
            points = at.margin(seeds, "accuracy")
            found |= {"margin": f"{loss:.4f}", "margin_points": f"{100 * (points or 0):.1f}"}
        for row in (row["name"] for row in results["rows"] if at.runs(row["name"])):
            found[f"diverged_{row}"] = f"{at.diverged(row)} of {len(at.runs(row))}"
            if good := at.accuracies(row):
                found[f"accuracy_{row}"] = f"{statistics.fmean(good):.1f}"
            for name, shown in (("points", at.points(row)), ("loss", at.loss(row))):
                found |= {f"{name}_{row}": shown.partition(" ")[0]} if shown else {}
            *_, found[f"first_{row}"], _, found[f"last_{row}"], _ = _blocks(at.runs(row))
        named |= {name_of(key if added == NOTHING else f"{key}_{added}"): value for key, value in found.items()}
    return named


def reading(results: Results) -> str:
    """Every statement of the paper, and how it reads at every place."""
    by_place = [_readings_at(results, place) for place in places(results)]
    head = ["statement", "paper"]
    for place in places(results):
        head += [f"{_titled(place)}: here", "reading"]
    lines = []
    for each in zip(*by_place, strict=True):
        line = [f"{each[0].statement}<br>{each[0].at}", each[0].paper]
        for one in each:
            line += [one.here or "not run", readings.verdict(one)]
        lines.append(line)
    return markdown(head, lines, words=len(head))


def _readings_at(results: Results, place: Place) -> list[Reading]:
    found = {added.name: At(results, place, added.name) for added in ADDED}
    return [
        *(reading for added in (NOTHING, STEADY) for reading in _rows(found[added], added)),
        *(_float8(found[added.name], added.name, added.paper) for added in ADDED),
        _grows(found[NOTHING]),
        _kept_small(found["layer scale"], found[NOTHING]),
    ]


def _rows(at: At, added: str) -> list[Reading]:
    """Rows beside bf16, with the same added: the paper's statements are of nothing added."""
    suffix = "" if added == NOTHING else f", {added} added"
    found = []
    for row in ("SwitchBack int8", "SwitchBack float8", "SwitchBackM int8"):
        apart = at.separated(row)
        where = "Section 2.2.1" if row.startswith("SwitchBackM") else "Figure 1"
        statement = f"{row} ends where bf16 does{suffix}"
        found.append(Reading(statement, where, PAPER[row], _here(at, row), None if apart is None else not apart))
    row = "LLM.int8()"
    values = at.apart(row)
    # Apart by its losses it is behind or ahead; apart without any loss, all its runs diverged.
    behind = not values or statistics.fmean(values) > 0 or at.diverged(row) > 0
    holds = behind if at.separated(row) else None
    found.append(Reading(f"{row} ends behind bf16{suffix}", "Figure 1", PAPER[row], _here(at, row), holds))
    return [*found, _no_gain(at, suffix)]


def _here(at: At, row: str) -> str:
    """How many diverged, and by how much the others' loss and accuracy are off."""
    lost, count = at.diverged(row), len(at.runs(row))
    words = [f"{lost} of {count} diverged"] if lost else []
    if row != REFERENCE and (losses := at.apart(row)):
        points, least = 100 * statistics.fmean(at.apart(row, "accuracy")), at.margin(len(losses))
        beyond = f", {least:.4f} to be sure" if least is not None else ""
        words.append(f"loss {statistics.fmean(losses):+.4f}{beyond}; {points:+.1f} points")
    return ", ".join(words) or (f"0 of {count} diverged" if count else "")


def _no_gain(at: At, suffix: str) -> Reading:
    """Whether scales for each row of the weights are no better than one: by seed, both against bf16."""
    row, other = "SwitchBackQ int8", "SwitchBack int8"
    mine, theirs = at.apart(row), at.apart(other)
    runs = min(len(mine), len(theirs))
    least, holds = at.margin(runs), None
    if least is not None and statistics.fmean(mine) - statistics.fmean(theirs) < -least:
        holds = False
    elif least is not None and at.sees(runs):
        holds = True
    return Reading(f"{row} ends no better than {other}{suffix}", "Section 2.2.1", PAPER[row], _here(at, row), holds)


def _float8(at: At, added: str, paper: str) -> Reading:
    """Tensor-wise float8 where bf16 trains: in the paper it diverges with all additions but one."""
    runs, lost = at.runs(TENSORWISE), at.diverged(TENSORWISE)
    trains = {0: True, len(runs): False}.get(lost) if runs and not at.diverged(REFERENCE) else None
    wanted = paper == "trains"
    statement = f"{TENSORWISE}, {added} added, {'trains' if wanted else 'diverges'}"
    holds = None if trains is None else trains == wanted
    return Reading(statement, "Figure 2, left", paper, _here(at, TENSORWISE), holds)


def _ends(at: At) -> list[tuple[float, float]]:
    """E|x| of the image tower's first and last block at the end of bf16's runs; none where it is no number."""
    found = [run["magnitudes"]["mean"][-1] for run in at.runs(REFERENCE)]
    return [(mean[0], mean[-1]) for mean in found if None not in (mean[0], mean[-1])]


def _grows(at: At) -> Reading:
    ratios = [last / first for first, last in _ends(at)]
    here = f"last block {several(ratios, '.1f')} times the first" if ratios else ""
    holds = readings.every(ratio > GROWN for ratio in ratios)
    return Reading("Features of bf16 grow with depth", "Figure 2, right", "curve, ViT-Huge", here, holds)


def _kept_small(scaled: At, plain: At) -> Reading:
    both = [[last for _, last in _ends(at)] for at in (scaled, plain)]
    here, holds = "", None
    if all(both):
        here = "last block {:.3g} with it, {:.3g} without".format(*map(statistics.fmean, both))
        holds = max(both[0]) * GROWN < min(both[1])
    return Reading("Layer scale from zero keeps them small", "Figure 2, right", "curve, ViT-Huge", here, holds)


def progress(results: Results) -> Figure:
    """Figures 1 and 2: accuracy against steps; how runs end; loss and magnitudes with what is added."""
    place = places(results)[0]
    found = {added.name: At(results, place, added.name) for added in ADDED}
    figure, ((accuracy, ends), (loss, blocks)) = pictures.figure(13, 8.6, 2, 2)
    _draw_accuracy(accuracy, found[NOTHING])
    _draw_ends(ends, found)
    _draw_losses(loss, found)
    _draw_blocks(blocks, found)
    figure.suptitle(f"{place[0]}, learning rate {place[1]:g}", color=INK)
    return figure


def _draw_accuracy(axis: Any, at: At) -> None:
    for line in LINES:
        if runs := [run for run in at.runs(line.label) if run["validation_loss"] is not None]:
            values = zip(*(run["validations"]["zero_shot_top1"] for run in runs), strict=True)
            means = [100 * statistics.fmean(v) for v in values]
            axis.plot(runs[0]["validations"]["step"], means, **line.style(label=line.label))
    axis.set(xlabel="step", ylim=(0, None))
    axis.set_title("zero-shot accuracy, %, nothing added, mean of the seeds", color=INK)
    axis.legend(frameon=False, loc="upper left", handlelength=2.6)


def _draw_ends(axis: Any, found: dict[str, At]) -> None:
    """A dot a run."""
    lines = [line for line in LINES if any(at.runs(line.label) for at in found.values())]
    lost = any(at.diverged(line.label) for at in found.values() for line in lines)
    for offset, at in zip((-0.27, -0.09, 0.09, 0.27), found.values(), strict=True):
        for x, line in enumerate(lines):
            for run in at.runs(line.label):
                axis.plot(
                    [x + offset], [100 * (run["accuracy"] or 0.0)], marker="o" if run["diverged"] is None else "x",
                    markersize=5, linestyle="none", color=COLORS[line.color],
                )  # fmt: skip
    axis.set_xticks(range(len(lines)), [line.label.replace(" ", "\n", 1) for line in lines], fontsize=8)
    axis.set(xlim=(-0.5, len(lines) - 0.5))
    axis.set_ylim(bottom=0)
    axis.set_title(f"at the end; left to right: {', '.join(found)}" + "; × diverged" * lost, color=INK, fontsize=10)


def _draw_losses(axis: Any, found: dict[str, At]) -> None:
    """Training loss of bf16 and float8, with what is added."""
    colors = {line.label: line.color for line in LINES}
    for added, at in found.items():
        for name in (REFERENCE, TENSORWISE):
            if runs := at.runs(name):
                steps, values = zip(*runs[0]["curve"], strict=True)
                line = Line(f"{name}, {added}", colors[name], DASHES[added], 1.4)
                axis.plot(steps, pictures.numbers(values), **line.style(label=line.label))
    axis.set_xlabel("step")
    axis.set_title("training loss, seed 0", color=INK)
    axis.legend(frameon=False, loc="upper right", handlelength=2.6, fontsize=8)


def _draw_blocks(axis: Any, found: dict[str, At]) -> None:
    """E|x_k| against the block, bf16: at the start thin, at the end thick."""
    for number, (added, at) in enumerate(found.items(), start=1):
        runs = at.runs(REFERENCE)
        for when, width, label in ((0, 1.0, "start"), (-1, 2.2, "end")) if runs else ():
            values = runs[0]["magnitudes"]["mean"][when]
            line = Line(f"{added}, {label}", f"series-{number}", DASHES[added] if when else (1, 1.5), width, "o")
            axis.plot(range(1, len(values) + 1), values, **line.style(markersize=2 * width, label=line.label))
    axis.set(xlabel="block of the image tower", ylim=(0, None))
    axis.set_title("E|x|, the mean magnitude of what a block gives: bf16, seed 0", color=INK)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(frameon=False, loc="best", handlelength=2.6, fontsize=8, ncols=2)


TABLES = {
    "figure_1": functools.partial(with_added, NOTHING), "steady": functools.partial(with_added, STEADY),
    "figure_2": figure_2, "grid": grid, "separation": separation, "magnitudes": magnitudes, "origin": origin,
    "reading": reading,
}  # fmt: skip
PICTURES = {"": progress}
