"""Tables, facts and the picture of the CLIPs with 8-bit linear layers: the paper's figures beside ours.

A run is compared with that of bf16 of the same model, learning rate, addition and seed, from the same weights and
pictures. Accuracies are zero-shot, of held-out pictures, in per cent; their differences are in points.

Runs that differ in any rounding part, and end a little apart, by chance. How much is seen in how differences of one
row change from seed to seed, pooled over all rows of a model, learning rate and addition: additions differ in how
far they let runs part. A mean that is further from zero than three standard errors of that is no chance. A nearer
one is a finding of no difference only where three standard errors are less than what the paper takes for behind.
"""

from __future__ import annotations

import functools
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from studies.clip_precision.rows import ADDED, NOTHING, REFERENCE, ROWS, STEADY, TENSORWISE
from studies.shared import pictures, readings, tables
from studies.shared.pictures import COLORS, INK, Line
from studies.shared.tables import Results, apart, machine, markdown, name_of, several, significant, table

Place = tuple[str, float]  # a model and a learning rate
PAPER = {row.name: row.paper for row in ROWS}
DROP = 0.059  # of accuracy: LLM.int8() below bf16 in the paper, what there is to be seen
# What should lie upon bf16 is told apart by dashes, not by color alone.
LINES = (
    Line(REFERENCE, "ink"), Line("SwitchBack int8", "series-2", (6, 2)),
    Line("SwitchBack float8", "series-3", (2, 1.5)), Line("LLM.int8()", "series-1"), Line(TENSORWISE, "series-4"),
    Line("SwitchBackM int8", "series-5", (8, 2, 1.5, 2)), Line("SwitchBackQ int8", "series-6", (4, 1.5)),
)  # fmt: skip
DASHES = dict(zip((added.name for added in ADDED), ((), (6, 2), (2, 1.5), (8, 2, 1.5, 2)), strict=True))


def places(results: Results) -> list[Place]:
    """Models and learning rates that there are runs of: the one where everything is trained comes first."""
    training = results["training"]
    found = {(run["model"], run["lr"]) for run in results["runs"]}
    wanted = [(model, lr) for lr in training["rates"] for model in training["models"]]
    return [place for place in wanted if place in found]


def runs_of(results: Results, place: Place, row: str, added: str) -> list[Results]:
    """Runs that were made, by seed."""
    return tables.runs_of(results, model=place[0], lr=place[1], row=row, added=added)


def differences(results: Results, place: Place, row: str, added: str, key: str) -> list[float]:
    """A figure of runs minus that of bf16's with the same seed, where neither diverged."""
    return apart(*(_good(runs_of(results, place, name, added)) for name in (row, REFERENCE)), key)


def _good(runs: Sequence[Results]) -> list[Results]:
    return [run for run in runs if run["diverged"] is None]


def margin(results: Results, place: Place, added: str, key: str, runs: int) -> float | None:
    """What the mean difference from bf16 of so many runs has to exceed; None with too few runs to say."""
    others = [row["name"] for row in results["rows"] if row["name"] != REFERENCE]
    return readings.margin(readings.chance(differences(results, place, row, added, key) for row in others), runs)


def separated(results: Results, place: Place, row: str, added: str) -> bool | None:
    """Whether a row parts from bf16: its mean loss differs by more than `margin`, or it alone diverged.

    None where there are too few runs to say, and where chance alone would hide what the paper sees.
    """
    reference = {run["seed"]: run for run in runs_of(results, place, REFERENCE, added)}
    runs = [run for run in runs_of(results, place, row, added) if run["seed"] in reference]
    if any(run["diverged"] is not None and reference[run["seed"]]["diverged"] is None for run in runs):
        return True if len(runs) > 1 else None
    values = differences(results, place, row, added, "validation_loss")
    most = margin(results, place, added, "validation_loss", len(values))
    if most is None:
        return None
    if abs(statistics.fmean(values)) > most:
        return True
    return False if sees(results, place, added, len(values)) else None


def sees(results: Results, place: Place, added: str, runs: int) -> bool:
    """Whether so many runs would tell the paper's `DROP` in accuracy from chance."""
    points = margin(results, place, added, "accuracy", runs)
    return points is not None and points < DROP


def _accuracy(results: Results, row: str, added: str, place: Place) -> str:
    """Mean over the seeds, in per cent, and how many diverged."""
    runs = runs_of(results, place, row, added)
    good = [100 * run["accuracy"] for run in _good(runs)]
    bad = f"{len(runs) - len(good)} of {len(runs)} diverged" if len(good) < len(runs) else ""
    return ", ".join(filter(None, (several(good, ".1f"), bad)))


def _loss(results: Results, row: str, added: str, place: Place) -> str:
    return "" if row == REFERENCE else several(differences(results, place, row, added, "validation_loss"))


def _points(results: Results, row: str, added: str, place: Place) -> str:
    if row == REFERENCE:
        return ""
    return several([100 * x for x in differences(results, place, row, added, "accuracy")], "+.1f")


def with_added(added: str, results: Results) -> str:
    """Accuracy and loss of every row with the same addition, and minus bf16's, place by place: Figure 1."""
    last = [f"*{readings.CERTAIN:g} standard errors of a difference*", ""]
    columns: list[Any] = []
    for place in places(results):
        shown = ((f"{place[0]}, lr {place[1]:g}: accuracy", _accuracy), ("points", _points), ("loss − bf16", _loss))
        columns += [(head, functools.partial(_of_row, show, results, added, place)) for head, show in shown]
        most = max(len(runs_of(results, place, row["name"], added)) for row in results["rows"])
        points, loss = (margin(results, place, added, key, most) for key in ("accuracy", "validation_loss"))
        last += ["", "" if points is None else f"{100 * points:.1f}", "" if loss is None else f"{loss:.4f}"]
    paper = ("paper: points", lambda row: PAPER.get(row["name"], ""))
    return table(results["rows"], ("linear layers", "name"), paper, *columns, last=last)


def _of_row(show: Callable[..., str], results: Results, added: str, place: Place, row: Results) -> str:
    return show(results, row["name"], added, place)


def figure_2(results: Results) -> str:
    """Bf16 and tensor-wise float8 with what is added: how they end, place by place."""
    columns: list[Any] = []
    for place in places(results):
        for head, show, row in (
            (f"{place[0]}, lr {place[1]:g}: bf16", _accuracy, REFERENCE),
            ("float8", _accuracy, TENSORWISE),
            ("loss − bf16", _loss, TENSORWISE),
        ):
            columns.append((head, lambda added, show=show, row=row, at=place: show(results, row, added.name, at)))
    return table(ADDED, ("added", "name"), ("paper, ViT-Large: float8", "paper"), *columns)


def grid(results: Results) -> str:
    """Every row with everything added, at the first place: accuracy, and loss minus bf16's."""
    place = places(results)[0]
    columns = [
        (head, functools.partial(_of_row, show, results, added.name, place))
        for added in ADDED
        for head, show in ((f"{added.name}: accuracy", _accuracy), ("loss − bf16", _loss))
    ]
    return table(results["rows"], ("linear layers", "name"), *columns)


def separation(results: Results) -> str:
    """What parts from bf16, what does not, and what cannot be told, where there are enough runs to ask."""
    lines = []
    for place in places(results):
        for added in (added.name for added in ADDED):
            told: dict[bool | None, list[str]] = {True: [], False: [], None: []}
            for row in (row["name"] for row in results["rows"]):
                if row != REFERENCE and runs_of(results, place, row, added):
                    told[separated(results, place, row, added)].append(row)
            if margin(results, place, added, "validation_loss", 1) is not None or told[True]:
                lines.append(
                    [f"{place[0]}, lr {place[1]:g}", added, *(", ".join(x) or "none" for x in told.values())]
                )
    return markdown(("trained", "added", "parts from bf16", "ends where it does", "cannot tell"), lines, words=5)


def magnitudes(results: Results) -> str:
    """E|x_k| of the first, the middle and the last block of the image tower, before and after training."""
    lines = [
        [place[0], f"{place[1]:g}", row, added.name, *_blocks(runs)]
        for place in places(results)
        for row in (REFERENCE, TENSORWISE)
        for added in ADDED
        if (runs := runs_of(results, place, row, added.name))
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
    return "\n".join(map(_origin, runs))


def _origin(results: Results) -> str:
    training, data = results["training"], results["data"]
    sizes = ", ".join(f"{name} of {count:,} parameters" for name, count in results["parameters"].items())
    return (
        f"`{results['command']}`: {sizes}; {training['steps']} steps of {training['batch']} pairs of "
        f"{data['source']} ({data['images']:,} pictures with {data['captions']:,} captions; {data['held_out']} "
        f"held out, each to be told from {data['prompts']} captions), {100 * training['patch_dropout']:.0f} % of "
        f"the patches dropped; {training['recipe']}, bf16 by autocast, learning rate {training['lr']:g} after "
        f"{training['warmup']} steps, a cosine to {training['final_lr']:g} of it, β2 {training['beta2']:g}, weight "
        f"decay {training['weight_decay']:g}; {machine(results)}. {_left_out(results)}\n"
    )


def _left_out(results: Results) -> str:
    """Which runs there are not, and how those that diverged did."""
    notes = [f"{len(results['unfinished'])} runs were left out for want of time."] if results["unfinished"] else []
    notes += [
        f"{run['model']}, {run['row']}, {run['added']}, seed {run['seed']} failed: {run['failed']}."
        for run in results["runs"]
        if "failed" in run
    ]
    ways = Counter(way for run in results["runs"] if (way := run.get("diverged")) is not None)
    notes += [f"Of {len(results['runs'])} runs {count} diverged: {way}." for way, count in ways.most_common()]
    return " ".join(notes) or "All runs were made, and none diverged."


def facts(results: Results) -> dict[str, str]:
    """Numbers in sentences at the first place: by row, and by addition where it is not nothing.

    `accuracy_LLM_int8`, `points_…`, `loss_…`, and `diverged_…` as in `1 of 3`; `apart_…` is yes, no or too few;
    `first_…` and `last_…` are magnitudes of blocks at the end; `margin_…` and `margin_points_…` are what means of
    all seeds have to exceed.
    """
    training = results["training"]
    named = {"runs": str(len(results["runs"]))} | {key: str(training[key]) for key in ("seeds", "steps", "batch")}
    if not places(results):
        return named
    place = places(results)[0]
    for added in (added.name for added in ADDED):
        if (loss := margin(results, place, added, "validation_loss", training["seeds"])) is not None:
            points = margin(results, place, added, "accuracy", training["seeds"])
            named[_key("margin", added)] = f"{loss:.4f}"
            named[_key("margin_points", added)] = f"{100 * (points or 0):.1f}"
        for row in (row["name"] for row in results["rows"]):
            if runs := runs_of(results, place, row, added):
                found = _facts_of(results, place, row, added, runs)
                named |= {_key(f"{name}_{row}", added): value for name, value in found.items()}
    return named


def _facts_of(results: Results, place: Place, row: str, added: str, runs: Sequence[Results]) -> dict[str, str]:
    good = [100 * run["accuracy"] for run in _good(runs)]
    found = {"diverged": f"{len(runs) - len(good)} of {len(runs)}"}
    if good:
        found["accuracy"] = f"{statistics.fmean(good):.1f}"
    for name, show in (("points", _points), ("loss", _loss)):
        if shown := show(results, row, added, place):
            found[name] = shown.partition(" ")[0]
    found["apart"] = {None: "cannot tell", True: "yes", False: "no"}[separated(results, place, row, added)]
    *_, first, _, last, _ = _blocks(runs)
    return found | {"first": first, "last": last}


def _key(name: str, added: str) -> str:
    return name_of(name if added == NOTHING else f"{name}_{added}")


def progress(results: Results) -> Figure:
    """Figures 1 and 2: accuracy against steps; how runs end; loss and magnitudes with what is added."""
    place = places(results)[0]
    figure, ((accuracy, ends), (loss, blocks)) = pictures.figure(13, 8.6, 2, 2)
    _draw_accuracy(accuracy, results, place)
    _draw_ends(ends, results, place)
    _draw_losses(loss, results, place)
    _draw_blocks(blocks, results, place)
    figure.suptitle(f"{place[0]}, learning rate {place[1]:g}", color=INK)
    return figure


def _draw_accuracy(axis: Any, results: Results, place: Place) -> None:
    for line in LINES:
        runs = [r for r in runs_of(results, place, line.label, NOTHING) if r["validation_loss"] is not None]
        if runs:
            values = zip(*(run["validations"]["zero_shot_top1"] for run in runs), strict=True)
            means = [100 * statistics.fmean(v) for v in values]
            axis.plot(runs[0]["validations"]["step"], means, **line.style(label=line.label))
    axis.set(xlabel="step", ylim=(0, None))
    axis.set_title("zero-shot accuracy, %, nothing added, mean of the seeds", color=INK)
    axis.legend(frameon=False, loc="upper left", handlelength=2.6)


def _draw_ends(axis: Any, results: Results, place: Place) -> None:
    """A dot a run."""
    lines = [x for x in LINES if any(runs_of(results, place, x.label, added.name) for added in ADDED)]
    lost = False
    for offset, added in zip((-0.27, -0.09, 0.09, 0.27), ADDED, strict=True):
        for at, line in enumerate(lines):
            for run in runs_of(results, place, line.label, added.name):
                good = run["diverged"] is None
                lost = lost or not good
                axis.plot(
                    [at + offset], [100 * (run["accuracy"] or 0.0)], marker="o" if good else "x", markersize=5,
                    linestyle="none", color=COLORS[line.color],
                )  # fmt: skip
    axis.set_xticks(range(len(lines)), [line.label.replace(" ", "\n", 1) for line in lines], fontsize=8)
    axis.set(xlim=(-0.5, len(lines) - 0.5))
    axis.set_ylim(bottom=0)
    dots = ", ".join(added.name for added in ADDED)
    axis.set_title(f"at the end; left to right: {dots}" + "; × diverged" * lost, color=INK, fontsize=10)


def _draw_losses(axis: Any, results: Results, place: Place) -> None:
    """Training loss of bf16 and float8, with what is added."""
    colors = {line.label: line.color for line in LINES}
    for added in (added.name for added in ADDED):
        for name in (REFERENCE, TENSORWISE):
            if runs := runs_of(results, place, name, added):
                steps, values = zip(*runs[0]["curve"], strict=True)
                line = Line(f"{name}, {added}", colors[name], DASHES[added], 1.4)
                axis.plot(steps, pictures.numbers(values), **line.style(label=line.label))
    axis.set_xlabel("step")
    axis.set_title("training loss, seed 0", color=INK)
    axis.legend(frameon=False, loc="upper right", handlelength=2.6, fontsize=8)


def _draw_blocks(axis: Any, results: Results, place: Place) -> None:
    """E|x_k| against the block, bf16: at the start thin, at the end thick."""
    for number, added in enumerate((added.name for added in ADDED), start=1):
        runs = runs_of(results, place, REFERENCE, added)
        for when, width, label in ((0, 1.0, "start"), (-1, 2.2, "end")) if runs else ():
            values = runs[0]["magnitudes"]["mean"][when]
            dashes = DASHES[added] if when else (1, 1.5)
            line = Line(f"{added}, {label}", f"series-{number}", dashes, width, "o")
            axis.plot(range(1, len(values) + 1), values, **line.style(markersize=2 * width, label=line.label))
    axis.set(xlabel="block of the image tower", ylim=(0, None))
    axis.set_title("E|x|, the mean magnitude of what a block gives: bf16, seed 0", color=INK)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(frameon=False, loc="best", handlelength=2.6, fontsize=8, ncols=2)


TABLES = {
    "figure_1": functools.partial(with_added, NOTHING), "steady": functools.partial(with_added, STEADY),
    "figure_2": figure_2, "grid": grid, "separation": separation, "magnitudes": magnitudes, "origin": origin,
}  # fmt: skip
PICTURES = {"": progress}
