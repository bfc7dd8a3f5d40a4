"""Tables and facts of the CLIPs with 8-bit linear layers: the paper's figures beside ours.

A run is compared with that of bf16 of the same model, learning rate, addition and seed, from the same weights and
pictures. Accuracies are zero-shot, of held-out pictures, in per cent; their differences are in points.

Runs that differ in any rounding part, and end a little apart, by chance. How much is seen in how differences of one
row change from seed to seed, pooled over all rows of a model, learning rate and addition: additions differ in how
far they let runs part. A mean that is further from zero than three standard errors of that is no chance. A nearer
one is a finding of no difference only where three standard errors are less than what the paper takes for behind.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence

from studies.clip_precision.rows import ADDED, NOTHING, REFERENCE, ROWS, STEADY, TENSORWISE
from studies.shared import readings
from studies.shared.tables import Results, markdown, significant

PAPER = {row.name: row.paper for row in ROWS}
BECOMES = {added.name: added.paper for added in ADDED}
DROP = 0.059  # of accuracy: LLM.int8() below bf16 in the paper, what there is to be seen


def places(results: Results) -> list[tuple[str, float]]:
    """Models and learning rates that there are runs of: the one where everything is trained comes first."""
    training = results["training"]
    found = {(run["model"], run["lr"]) for run in results["runs"]}
    wanted = [(model, lr) for lr in training["rates"] for model in training["models"]]
    return [place for place in wanted if place in found]


def runs_of(results: Results, place: tuple[str, float], row: str, added: str) -> list[Results]:
    """Runs that were made, by seed."""
    found = [
        run
        for run in results["runs"]
        if (run["model"], run["lr"], run["row"], run["added"]) == (*place, row, added) and "failed" not in run
    ]
    return sorted(found, key=lambda run: run["seed"])


def differences(results: Results, place: tuple[str, float], row: str, added: str, key: str) -> list[float]:
    """A figure of runs minus that of bf16's with the same seed, where neither diverged."""
    reference = {run["seed"]: run[key] for run in _good(runs_of(results, place, REFERENCE, added))}
    return [
        run[key] - reference[run["seed"]]
        for run in _good(runs_of(results, place, row, added))
        if run["seed"] in reference
    ]


def _good(runs: Sequence[Results]) -> list[Results]:
    return [run for run in runs if run["diverged"] is None]


def margin(results: Results, place: tuple[str, float], added: str, key: str, runs: int) -> float | None:
    """What the mean difference from bf16 of so many runs has to exceed; None with too few runs to say."""
    others = [row["name"] for row in results["rows"] if row["name"] != REFERENCE]
    deviation = readings.chance(differences(results, place, row, added, key) for row in others)
    return readings.margin(deviation, runs)


def figure_1(results: Results) -> str:
    """Nothing added: accuracy and loss of every row, and minus bf16's, place by place."""
    return _rows_with(results, NOTHING)


def steady(results: Results) -> str:
    """The same with layer norms on keys and queries, which keep runs together."""
    return _rows_with(results, STEADY)


def _rows_with(results: Results, added: str) -> str:
    columns = places(results)
    head = ["linear layers", "paper: points"]
    for model, lr in columns:
        head += [f"{model}, lr {lr:g}: accuracy", "points", "loss − bf16"]
    lines = []
    for row in results["rows"]:
        name = row["name"]
        line = [name, PAPER.get(name, "")]
        for place in columns:
            line.append(_accuracy(runs_of(results, place, name, added)))
            line += ["", ""] if name == REFERENCE else _both(results, place, name, added)
        lines.append(line)
    last = [f"*{readings.CERTAIN:g} standard errors of a difference*", ""]
    for place in columns:
        most = max(len(runs_of(results, place, row["name"], added)) for row in results["rows"])
        points, loss = (margin(results, place, added, key, most) for key in ("accuracy", "validation_loss"))
        last += ["", "" if points is None else f"{100 * points:.1f}", "" if loss is None else f"{loss:.4f}"]
    return markdown(head, [*lines, last])


def _both(results: Results, place: tuple[str, float], row: str, added: str) -> list[str]:
    points = [100 * x for x in differences(results, place, row, added, "accuracy")]
    return [_signed(points, 1), _signed(differences(results, place, row, added, "validation_loss"), 4)]


def figure_2(results: Results) -> str:
    """Bf16 and tensor-wise float8 with what is added: how they end, place by place."""
    columns = places(results)
    head = ["added", "paper, ViT-Large: float8"]
    for model, lr in columns:
        head += [f"{model}, lr {lr:g}: bf16", "float8", "loss − bf16"]
    lines = []
    for added in ADDED:
        line = [added.name, added.paper]
        for place in columns:
            line += [_accuracy(runs_of(results, place, row, added.name)) for row in (REFERENCE, TENSORWISE)]
            line.append(_signed(differences(results, place, TENSORWISE, added.name, "validation_loss"), 4))
        lines.append(line)
    return markdown(head, lines)


def grid(results: Results) -> str:
    """Every row with everything added, at the first place: accuracy, and loss minus bf16's."""
    place = places(results)[0]
    head = ["linear layers"]
    for added in ADDED:
        head += [f"{added.name}: accuracy", "loss − bf16"]
    lines = []
    for row in results["rows"]:
        line = [row["name"]]
        for added in ADDED:
            line.append(_accuracy(runs_of(results, place, row["name"], added.name)))
            found = differences(results, place, row["name"], added.name, "validation_loss")
            line.append("" if row["name"] == REFERENCE else _signed(found, 4))
        lines.append(line)
    return markdown(head, lines)


def _accuracy(runs: Sequence[Results]) -> str:
    """Mean over the seeds, in per cent, and how many diverged."""
    good = [100 * run["accuracy"] for run in _good(runs)]
    bad = len(runs) - len(good)
    words = [] if not good else [f"{statistics.fmean(good):.1f}"]
    if len(good) > 1:
        words[0] += f" ({min(good):.1f} … {max(good):.1f})"
    return ", ".join([*words, *([f"{bad} of {len(runs)} diverged"] if bad else [])])


def _signed(values: Sequence[float], digits: int) -> str:
    if not values:
        return ""
    mean = f"{statistics.fmean(values):+.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):+.{digits}f} … {max(values):+.{digits}f})"


def separated(results: Results, place: tuple[str, float], row: str, added: str) -> bool | None:
    """Whether a row parts from bf16: its mean loss differs by more than `margin`, or it alone diverged.

    None where there are too few runs to say, and where chance alone would hide what the paper sees.
    """
    reference = {run["seed"]: run for run in runs_of(results, place, REFERENCE, added)}
    pairs = [
        (run, reference[run["seed"]]) for run in runs_of(results, place, row, added) if run["seed"] in reference
    ]
    if any(run["diverged"] is not None and other["diverged"] is None for run, other in pairs):
        return True if len(pairs) > 1 else None
    values = differences(results, place, row, added, "validation_loss")
    most = margin(results, place, added, "validation_loss", len(values))
    if most is None:
        return None
    if abs(statistics.fmean(values)) > most:
        return True
    return False if sees(results, place, added, len(values)) else None


def sees(results: Results, place: tuple[str, float], added: str, runs: int) -> bool:
    """Whether so many runs would tell the paper's `DROP` in accuracy from chance."""
    points = margin(results, place, added, "accuracy", runs)
    return points is not None and points < DROP


def separation(results: Results) -> str:
    """What parts from bf16, what does not, and what cannot be told, where there are enough runs to ask."""
    lines = []
    for place in places(results):
        for added in ADDED:
            told: dict[bool | None, list[str]] = {True: [], False: [], None: []}
            for row in results["rows"]:
                if row["name"] != REFERENCE and runs_of(results, place, row["name"], added.name):
                    told[separated(results, place, row["name"], added.name)].append(row["name"])
            if margin(results, place, added.name, "validation_loss", 1) is not None or told[True]:
                cells = [", ".join(told[key]) or "none" for key in (True, False, None)]
                lines.append([f"{place[0]}, lr {place[1]:g}", added.name, *cells])
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
    """Means over the seeds."""
    cells = []
    for when in (0, -1):
        for block in (0, None, -1):
            values = [
                mean[len(mean) // 2 if block is None else block]
                for run in runs
                if (mean := run["magnitudes"]["mean"][when])
            ]
            cells.append(_mean(values))
    return [*cells, _mean([run["magnitudes"]["absmax"][-1][-1] for run in runs])]


def _mean(values: Sequence[float | None]) -> str:
    """To three digits; of a run that diverged features may be no numbers."""
    finite = [x for x in values if x is not None]
    return significant(statistics.fmean(finite), 3) if finite else "not finite"


def origin(*runs: Results) -> str:
    """What was run, on what."""
    return "\n".join(map(_origin, runs))


def _origin(results: Results) -> str:
    training, environment, data = results["training"], results["environment"], results["data"]
    torch = environment["torch"].partition("+")[0]
    sizes = ", ".join(f"{name} of {count:,} parameters" for name, count in results["parameters"].items())
    return (
        f"`{results['command']}`: {sizes}; {training['steps']} steps of {training['batch']} pairs of "
        f"{data['source']} ({data['images']:,} pictures with {data['captions']:,} captions; {data['held_out']} "
        f"held out, each to be told from {data['prompts']} captions), {100 * training['patch_dropout']:.0f} % of "
        f"the patches dropped; {training['recipe']}, bf16 by autocast, learning rate {training['lr']:g} after "
        f"{training['warmup']} steps, a cosine to {training['final_lr']:g} of it, β2 {training['beta2']:g}, weight "
        f"decay {training['weight_decay']:g}; {environment['device']}, torch {torch}. {left_out(results)}\n"
    )


def left_out(results: Results) -> str:
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
    named = {"runs": str(len(results["runs"])), "seeds": str(results["training"]["seeds"])}
    named |= {"steps": str(results["training"]["steps"]), "batch": str(results["training"]["batch"])}
    if not places(results):
        return named
    place = places(results)[0]
    seeds = results["training"]["seeds"]
    for added in ADDED:
        if (loss := margin(results, place, added.name, "validation_loss", seeds)) is not None:
            points = margin(results, place, added.name, "accuracy", seeds)
            named[_key("margin", added.name)] = f"{loss:.4f}"
            named[_key("margin_points", added.name)] = f"{100 * (points or 0):.1f}"
        for row in results["rows"]:
            if runs := runs_of(results, place, row["name"], added.name):
                named |= _facts_of(results, place, row["name"], added.name, runs)
    return named


def _facts_of(
    results: Results, place: tuple[str, float], row: str, added: str, runs: Sequence[Results]
) -> dict[str, str]:
    good = [100 * run["accuracy"] for run in _good(runs)]
    found = {"diverged": f"{len(runs) - len(good)} of {len(runs)}"}
    if good:
        found["accuracy"] = f"{statistics.fmean(good):.1f}"
    for name, key, scale, digits in (("points", "accuracy", 100, 1), ("loss", "validation_loss", 1, 4)):
        if row != REFERENCE and (values := differences(results, place, row, added, key)):
            found[name] = f"{scale * statistics.fmean(values):+.{digits}f}"
    apart = separated(results, place, row, added)
    found["apart"] = "cannot tell" if apart is None else "yes" if apart else "no"
    *_, first, _, last, _ = _blocks(runs)
    found |= {"first": first, "last": last}
    return {_key(f"{name}_{row}", added): value for name, value in found.items()}


def _key(name: str, added: str) -> str:
    whole = name if added == NOTHING else f"{name}_{added}"
    return "_".join(filter(None, "".join(c if c.isalnum() else "_" for c in whole).split("_")))


TABLES: dict[str, Callable[..., str]] = {
    "figure_1": figure_1,
    "steady": steady,
    "figure_2": figure_2,
    "grid": grid,
    "separation": separation,
    "magnitudes": magnitudes,
    "origin": origin,
}
