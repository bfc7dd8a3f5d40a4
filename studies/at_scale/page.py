"""Tables, facts and pictures of the proof at scale.

A difference from the reference is taken seed by seed, at equal tokens, from runs with the same learning rate, start
and windows. All tables of losses but `rates` are of the learning rate at which the reference ended lowest with seed
0. What chance makes of such a difference is pooled over all rows: the standard deviation of a row's
differences about their mean, with as many degrees of freedom as there are rows times seeds but one. A mean is
"apart" beyond three standard errors of it (`shared/readings.py`), "within" otherwise; nothing is said where the
pooled deviation has fewer than `readings.FREE` degrees of freedom. Where a run ends more than `STUCK` nats above
the reference, each run of its row gets a row of its own: it would dominate the mean and the pooled deviation.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from studies.at_scale.run import PACKAGES, REFERENCE, best_rate
from studies.shared import pictures, readings
from studies.shared.pictures import Line
from studies.shared.readings import Beside
from studies.shared.tables import (
    Results,
    fill_in,
    left_out,
    machine,
    mean_of,
    per,
    percent,
    place_of,
    runs_of,
    several,
    sizes,
    span,
    table,
)

TENTHS = (0.1, 0.25, 0.5, 0.75, 1.0)  # of the tokens, in the table of the curve
SETTLED = 0.29  # share of the steps after which, in these runs, the rows that train stay close to the reference
STUCK = 1.0  # nats above the reference
AFTER = (0, 100, 200, 600, 1000)  # steps from the lowest training loss of a run that got stuck
COUNTS = {1: "one", 2: "two", 3: "three"}  # runs of a row, in names of facts
CLOSE = 0.02  # nats up to which the picture's scale is linear, and logarithmic beyond
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 1), (1, 1), (6, 1, 1, 1), (2, 2), (8, 2))
STYLES = [Line("", f"series-{1 + i % 6}", DASHES[(i + 2 * (i // 6)) % 6]) for i in range(18)]


def at_the_rate(make: Callable[[Results], Any]) -> Callable[[Results], Any]:
    """`make`, given the runs at the reference's best learning rate; `_with_stuck` says in which rows."""

    @functools.wraps(make)
    def made(results: Results) -> Any:
        rate = best_rate(results)
        return make(_with_stuck(results | {"runs": [run for run in results["runs"] if run["lr"] == rate]}))

    return made


def _with_stuck(results: Results) -> Results:
    """Rows of which a run got stuck, replaced by a row for each of their runs."""
    found, rows, runs = beside(results), [], []
    for row in results["rows"]:
        mine = found.runs(row["name"])
        if row["name"] == REFERENCE or max(found.apart(row["name"]), default=0.0) <= STUCK:
            rows.append(row)
            runs += mine
        else:
            names = [f"{row['name']}, seed {run['seed']}" for run in mine]
            rows += [row | {"name": name, "of": row["name"], "family": ""} for name in names]
            runs += [run | {"row": name} for run, name in zip(mine, names, strict=True)]
    return results | {"rows": rows, "runs": runs}


def beside(results: Results) -> Beside:
    """The runs beside the reference's."""
    return Beside(results, REFERENCE)


def names(results: Results, but: str | None = None) -> list[str]:
    """Rows that have a run, in the order of the study."""
    return [row["name"] for row in results["rows"] if row["name"] != but and runs_of(results, row=row["name"])]


def at(run: Results, share: float) -> float | None:
    """The validation loss after a share of the tokens: of the last whole step before it, as validations are."""
    step = math.floor(share * run["validation"][-1][0])
    return next((loss for number, loss in run["validation"] if number >= step), None)


def apart_at(results: Results, name: str, share: float) -> list[float]:
    """Differences from the reference after a share of the tokens, by seed."""
    known = {run["seed"]: at(run, share) for run in runs_of(results, row=REFERENCE) if not run["diverged"]}
    pairs = [(at(run, share), known.get(run["seed"])) for run in runs_of(results, row=name) if not run["diverged"]]
    return [mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None]


def speeds(results: Results, name: str) -> list[float]:
    """Tokens a second of a row's runs on the GPU that the file's environment names."""
    runs, device = beside(results).runs(name), results.get("environment", {}).get("device")
    here = (run["tokens_per_second"] for run in runs if run.get("device", device) == device)
    return [speed for speed in here if speed is not None]


def margin_at(results: Results, runs: int, share: float) -> float | None:
    """What the mean of so many differences after a share of the tokens has to exceed."""
    deviation = readings.chance(apart_at(results, name, share) for name in names(results, REFERENCE))
    return readings.margin(deviation, runs)


def by_chance(runs: Sequence[int]) -> dict[str, float]:
    """How often chance makes rows of so many runs "apart" from the reference if all runs vary alike. Simulated.

    By a row's number of runs ("one", "two", "three"), and for any of the rows. All rows share the reference's runs.
    """
    counts, seeds = np.array(runs), np.arange(max(runs))
    noise = np.random.default_rng(0).standard_normal((100_000, len(runs) + 1, max(runs)))
    here = seeds < counts[:, None]
    apart = np.where(here, noise[:, :-1] - noise[:, -1:], 0.0)
    means = apart.sum(2) / counts
    squares = np.where(here, (apart - means[..., None]) ** 2, 0.0).sum(2)
    free = (counts - 1).sum()
    beyond = abs(means) > readings.CERTAIN * np.sqrt(squares.sum(1, keepdims=True) / free / counts)
    odds = {COUNTS[count]: float(beyond[:, counts == count].mean()) for count in sorted({*runs})}
    return odds | {"any": float(beyond.any(1).mean())}


def verdict(results: Results, name: str) -> str:
    """Whether a row's end is apart from the reference's."""
    found, lost = beside(results), beside(results).lost(name)
    differences = found.apart(name)
    if lost:
        return f"{lost} diverged"
    limit = found.margin(len(differences))
    if name == REFERENCE or not differences:
        return "reference" if name == REFERENCE else ""
    if limit is None:
        return "cannot tell"
    return f"{'yes' if abs(statistics.fmean(differences)) > limit else 'not shown'} (± {limit:.4f})"


@at_the_rate
def rows(results: Results) -> str:
    """Every row at the end: bytes, loss, its difference from D, what chance makes of one, speed."""
    found = beside(results)
    titles = {row["name"]: row["title"] for row in results["rows"]}
    families = {row["name"]: row["family"] for row in results["rows"]}
    timed = speeds(results, REFERENCE)
    return table(
        names(results),
        ("row", lambda name: f"`{name}`" if families[name] == "ours" else name),
        ("what is kept", titles.__getitem__),
        ("bytes", lambda name: mean_of((r["bytes"]["total"] for r in found.runs(name)), ".2f")),
        ("seeds", lambda name: len(found.runs(name))),
        ("loss", lambda name: mean_of((r["validation_loss"] for r in found.runs(name)), ".4f")),
        ("loss − D", lambda name: "–" if name == REFERENCE else several(found.apart(name))),
        *([("apart from D?", lambda name: verdict(results, name))] if found.margin(1) is not None else []),
        *([("tokens/s", lambda name: mean_of(speeds(results, name), ",.0f"))] if timed else []),
        words=2,
    )


@at_the_rate
def curve(results: Results) -> str:
    """The difference from D along the way, and what it is held against."""
    counts = [len(apart_at(results, name, 1.0)) for name in names(results, REFERENCE)]
    several_runs = [count for count in counts if count > 1]
    runs = max(several_runs, key=several_runs.count, default=1)
    limits = {share: margin_at(results, runs, share) for share in TENTHS}
    known = ["" if limit is None else f"± {limit:.4f}" for limit in limits.values()]
    return table(
        names(results, REFERENCE),
        ("row", "".__add__),
        *per(
            TENTHS, lambda share: f"{100 * share:.0f} % of the tokens",
            ("", lambda share, name: several(apart_at(results, name, share))),
        ),
        last=[f"three standard errors, {runs} runs", *known] if any(known) else None,
    )  # fmt: skip


def stopped(results: Results) -> str:
    """Rows that the time ended before their last step: losses along the way, as differences from D's below it."""
    runs = {run["row"]: run for run in results["runs"]}
    loss = {name: dict(map(tuple, run["validation"])) for name, run in runs.items()}
    trained = {name: dict(map(tuple, run["curve"])) for name, run in runs.items()}
    steps, own = results["training"]["steps"], loss[REFERENCE]
    common = [step for step in own if all(step in of for of in loss.values())]
    seen = [min(common, key=lambda step: abs(step - share * steps)) for share in (0.05, 0.1, 0.25, 0.5, 0.75, 0.95)]
    late = [
        step for step in trained[REFERENCE] if step > 0.9 * steps and all(step in of for of in trained.values())
    ]

    def beside(name: str, value: float, reference: float) -> str:
        return f"{value:.4f}" if name == REFERENCE else f"{value - reference:+.4f}"

    def lately(name: str) -> float:
        return statistics.fmean(trained[name][step] for step in late)

    return table(
        (row["name"] for row in results["rows"]),
        ("row", lambda name: f"`{name}`"),
        ("bytes", lambda name: runs[name]["bytes"]["total"], ".2f"),
        ("steps", lambda name: f"{runs[name]['steps']:,} of {steps:,}"),
        *per(
            seen, lambda step: f"{100 * step / steps:.0f} %",
            ("", lambda step, name: beside(name, loss[name][step], own[step])),
        ),
        ("training loss, last tenth", lambda name: beside(name, lately(name), lately(REFERENCE))),
    )  # fmt: skip


@at_the_rate
def tasks(results: Results) -> str:
    """Right answers by task, over the seeds; chance, and the standard error of one run's share, below."""
    runs = [run for name in names(results) for run in runs_of(results, row=name) if run.get("tasks")]
    asked = {name: found for run in runs for name, found in run["tasks"].items()}

    def right(task: str, name: str) -> str:
        shares = [run["tasks"][task]["right"] for run in runs if run["row"] == name and task in run["tasks"]]
        return span(shares, percent)

    chance = ["chance", *(percent(found["chance"]) for found in asked.values())]
    errors = " and ".join(dict.fromkeys(f"{50 / found['questions'] ** 0.5:.1f}" for found in asked.values()))
    made = table(
        names(results),
        ("row", "".__add__),
        *((task, lambda name, task=task: right(task, name)) for task in asked),
        last=chance,
    )
    counts = ", ".join(f"{name} {found['questions']}" for name, found in asked.items())
    return made + f"\nQuestions: {counts}. The standard error of a share is at most {errors} points.\n"


def seen(results: Results, name: str, key: str, begin: float = 0.75, end: float = 1.0) -> float | None:
    """The mean of a row's gauge over a stretch of its runs; the last quarter, if no other is asked for."""
    values = [
        value
        for run in runs_of(results, row=name)
        if "gauges" in run
        for step, value in zip(run["gauges"]["step"], run["gauges"][key], strict=True)
        if begin * run["steps"] < step <= end * run["steps"] and value is not None
    ]
    return statistics.fmean(values) if values else None


@at_the_rate
def gauges(results: Results) -> str:
    """What the gauges saw, over the last quarter of a run, and what they warned of beside how the run ended."""
    kept = [name for name in names(results) if any("gauges" in run for run in runs_of(results, row=name))]

    def warned(name: str) -> str:
        found = [
            f"{urgency}: {rule}"
            for run in runs_of(results, row=name)
            for urgency, rule, _ in run.get("advice", ())
            if urgency != "note"
        ]
        return "; ".join(dict.fromkeys(found)) or "nothing"

    return table(
        kept,
        ("row", "".__add__),
        ("[descent quality](../gauges.md)", lambda name: seen(results, name, "edq"), ".4f"),
        ("updates lost", lambda name: seen(results, name, "lost"), percent),
        ("not visible at once", lambda name: seen(results, name, "visible_lost"), percent),
        ("RMS_t", lambda name: seen(results, name, "rms"), ".3f"),
        ("warned of", warned),
        ("loss − D", lambda name: "–" if name == REFERENCE else several(beside(results).apart(name))),
        words="lrrrrlr",
    )


def _stuck(results: Results) -> list[Results]:
    """The runs that got stuck."""
    found = beside(results)
    return [
        run
        for row in results["rows"]
        if "of" in row and max(found.apart(row["name"]), default=0.0) > STUCK
        for run in found.runs(row["name"])
    ]


def _turn(run: Results) -> tuple[int, float]:
    """The step of the lowest training loss, and that."""
    step, loss = min(run["curve"], key=lambda point: point[1])
    return step, loss


@at_the_rate
def turns(results: Results) -> str:
    """A run that got stuck and its row's other runs, around the step from which its training loss rises."""
    lines: dict[tuple[int, str], tuple[float, ...]] = {}
    for stuck in _stuck(results):
        of = {row["name"]: row.get("of") for row in results["rows"]}
        for step in (_turn(stuck)[0] + after for after in AFTER):
            for run in (run for run in results["runs"] if of[run["row"]] == of[stuck["row"]] and "gauges" in run):
                losses, gauges = dict(map(tuple, run["curve"])), run["gauges"]
                if step in losses and step in gauges["step"]:
                    at = gauges["step"].index(step)
                    lines[step, run["row"]] = losses[step], *(gauges[key][at] for key in ("lost", "edq", "rms"))
    return table(
        lines,
        ("step", lambda line: line[0], ",d"),
        ("run", lambda line: line[1]),
        ("training loss", lambda line: lines[line][0], ".2f"),
        ("updates lost", lambda line: percent(lines[line][1])),
        ("descent quality", lambda line: lines[line][2], ".4f"),
        ("RMS_t", lambda line: lines[line][3], ".2f"),
        words="rlrrrr",
    )


def rates(results: Results) -> str:
    """The reference by learning rate, with seed 0; beside it rows that were run at another rate than its best."""
    found = {run["lr"]: run for run in runs_of(results, row=REFERENCE, seed=0)}
    others = [
        name
        for name in names(results, REFERENCE)
        if {run["lr"] for run in runs_of(results, row=name, seed=0)} - {best_rate(results)}
    ]

    def loss(lr: float) -> str:
        return "diverged" if found[lr]["diverged"] else f"{found[lr]['validation_loss']:.4f}"

    return table(
        sorted(found),
        ("learning rate", lambda lr: f"{lr:g}"),
        (f"loss of {REFERENCE}", loss),
        *(
            (f"`{name}` − {REFERENCE}", lambda lr, name=name: several(
                Beside(results, REFERENCE, lr=lr, seed=0).apart(name)
            ))
            for name in others
        ),
    )  # fmt: skip


def text(results: Results) -> str:
    """What the text is made of, by kind, and what became of the packages."""
    found = results["data"].get("text")
    if not found:
        return "A text of its own.\n"
    packages = found["packages"]
    total = {key: sum(p[key] for p in packages) for key in ("bytes_read", "bytes_without_copies", "bytes", "files")}
    most = max(p["bytes"] for p in packages) / total["bytes"]
    held = [p["name"] for p in packages if p["held_out"] and p["files"]]
    trained = sum(p["bytes"] for p in packages if not p["held_out"])
    tokens = {part: results["data"][f"{part}_tokens"] for part in ("train", "validation")}
    made = table(
        found["kinds"].items(),
        ("kind", lambda item: item[0]),
        ("files", lambda item: item[1]["files"], ",d"),
        ("megabytes", lambda item: item[1]["bytes"] / 1e6, ",.0f"),
        last=("all", f"{total['files']:,}", f"{total['bytes'] / 1e6:,.0f}"),
    )
    return made + (
        f"\n{len(packages):,} packages had {total['bytes_read'] / 1e6:,.0f} MB of text; "
        f"{total['bytes_without_copies'] / 1e6:,.0f} MB without copies. {total['bytes'] / 1e6:,.0f} MB are kept, "
        f"at most {percent(most)} of them from one package. "
        f"The training text has {tokens['train']:,} tokens, {trained / tokens['train']:.2f} bytes each; the "
        f"validation text {tokens['validation']:,}, {(total['bytes'] - trained) / tokens['validation']:.2f} bytes "
        f"each. Held out: {', '.join(held)}.\n"
    )


def origin(results: Results) -> str:
    """What was run, on what."""
    environment = results["environment"]
    peers = [f"{name} {version}" for name in PACKAGES if (version := environment.get(name, "not"))[:3] != "not"]
    elsewhere: dict[str, list[str]] = {}
    for run in results["runs"]:
        if run.get("device", environment["device"]) != environment["device"]:
            elsewhere.setdefault(run["device"], []).append(f"{run['row']} with seed {run['seed']}")
    others = "".join(f"; on {device}: {', '.join(who)}" for device, who in elsewhere.items())
    return fill_in(
        results,
        "{commands}: {sizes}, vocabulary {data[vocabulary]:,}, {training[steps]:,} steps of {tokens:,} tokens, "
        "learning rate up to {rates} after {training[warmup]} steps, a cosine to {training[final]:g} of it, β2 "
        "{training[beta2]:g}, weight decay {training[weight_decay]:g}, gradients' norm at most {training[clip]:g}; "
        "{where}. {left}",
        commands=" and ".join(f"`{command}`" for command in (results["command"], *results.get("resumed", ()))),
        left=left_out(results, lambda run: f"{run['row']} with seed {run['seed']}"),
        sizes=sizes(results), rates=" or ".join(f"{lr:g}" for lr in sorted(results["training"]["lr"])),
        where=", ".join([machine(results), *peers]) + others,
    )  # fmt: skip


@at_the_rate
def facts(results: Results) -> dict[str, str]:
    """Every number in the page's sentences."""
    training, found = results["training"], beside(results)
    count = results["parameters"][training["model"]]
    named = {
        "parameters": f"{count / 1e9:.1f} billion" if count >= 1e9 else f"{count / 1e6:.0f} million",
        "steps": f"{training['steps']:,}", "rate": f"{best_rate(results):g}",
        "windows": f"{8 * training['windows']:,}", "fewer": f"{training['windows']:,}",
        "tokens": f"{training['steps'] * training['batch'] * training['sequence']:,}",
    }  # fmt: skip
    named["sequence"] = f"{training['sequence']:,}"
    first = [run["validation_loss"] for run in found.runs(REFERENCE) if run["seed"] < 2]
    named["loss_two"] = f"{statistics.fmean(first):.4f}"
    rates = {name: each for name in names(results) if (each := speeds(results, name))}
    slower = {name: 1 - min(each) / max(each) for name, each in rates.items()}
    named |= {f"slower_{place_of(name)}": percent(share) for name, share in slower.items()}
    named |= {"slower_next": percent(sorted(slower.values())[-2])} if len(slower) > 1 else {}
    trains = [row["name"] for row in results["rows"] if "of" not in row and row["name"] != REFERENCE]
    early = [
        apart for name in trains for line in _lines(results, name) for at, apart in line
        if at <= SETTLED * training["steps"]
    ]  # fmt: skip
    apart = [found.apart(name) for name in trains]
    spread = [max(each) - min(each) for each in apart if len(each) > 1]
    if (deviation := readings.chance(apart)) is not None:
        named |= {
            "deviation": f"{deviation:.4f}",
            "pooled": str(len(spread)),
            "free": str(sum(len(each) - 1 for each in apart if each)),
        }
        named |= {"range_least": f"{min(spread):.4f}", "range_next": f"{sorted(spread)[-2]:.4f}"}
        rest = readings.chance(each for each in apart if len(each) > 1 and max(each) - min(each) < max(spread))
        if rest is not None:
            most = max(map(len, apart))
            named |= {"deviation_rest": f"{rest:.4f}", "margin_rest": f"{readings.margin(rest, most):.4f}"}
        counts = [len(each) for each in apart if each]
        named |= {f"chance_{of}": f"{1 / chance:.0f}" for of, chance in by_chance(counts).items() if chance}
        named |= {f"margin_{COUNTS[runs]}": f"{found.margin(runs):.4f}" for runs in {*counts}}
        named["apart_rows"] = str(sum(verdict(results, name).startswith("yes") for name in trains))
    named |= {"early_above": f"{max(early):.2f}", "early_below": f"{-min(early):.2f}"}
    for name in names(results):
        key = place_of(name)
        named[f"bytes_{key}"] = mean_of((run["bytes"]["total"] for run in found.runs(name)), ".2f")
        if (quality := seen(results, name, "edq")) is not None:
            named[f"edq_{key}"] = f"{quality:.3f}"
            named[f"lost_{key}"] = percent(seen(results, name, "lost"))
            named[f"lost_early_{key}"] = percent(seen(results, name, "lost", 0.1, 0.2))
        if name != REFERENCE and found.apart(name):
            named[f"apart_{key}"] = several(found.apart(name))
            named[f"tenth_{key}"] = several(apart_at(results, name, 0.1))
            named[f"widest_{key}"] = f"{max((d for line in _lines(results, name) for _, d in line), key=abs):+.2f}"
            later = [
                abs(apart)
                for line in _lines(results, name)
                for at, apart in line
                if at > SETTLED * training["steps"]
            ]
            named[f"settled_{key}"] = f"{math.ceil(1e3 * max(later)) / 1e3:.3f}"  # a bound
            named[f"range_{key}"] = f"{max(found.apart(name)) - min(found.apart(name)):.4f}"
            if name in rates:
                faster = statistics.fmean(rates[name]) / statistics.fmean(rates[REFERENCE]) - 1
                named[f"faster_{key}"] = f"{100 * faster:.0f} %"
    for run in results["runs"]:
        if still := run.get("all_lost"):
            key = place_of(run["row"])
            named |= {f"still_{key}": str(len(still)), f"still_from_{key}": f"{max(step for step, _ in still):,}"}
        if widened := run.get("widened"):  # GPT-2's names: gains of layer norms, and the weights that are matrices
            key, steps = place_of(run["row"]), [step for step, *_ in widened]
            matrices = [step for step, name, *_ in widened if name.endswith(".weight") and ".ln_" not in name]
            at = {"next": sorted(set(steps))[1], "matrix": min(matrices), "last": max(steps)}
            named |= {f"widened_{which}_{key}": f"{step:,}" for which, step in at.items()}
            named[f"widened_{key}"] = str(len(widened))
    named["cloze_stuck"] = span([run["tasks"]["cloze"]["right"] for run in _stuck(results)], percent)
    right = [[100 * run["tasks"]["brackets"]["right"] for run in found.runs(name)] for name in trains]
    named["brackets_seeds"] = f"{max(max(each) - min(each) for each in right):.1f}"
    named["brackets_all"] = f"{max(map(max, right)) - min(map(min, right)):.1f}"
    for stuck in _stuck(results):
        key, (step, loss) = place_of(stuck["row"]), _turn(stuck)
        named |= {f"turn_{key}": f"{step:,}", f"turn_loss_{key}": f"{loss:.1f}"}
    return named


@at_the_rate
def differences(results: Results) -> Figure:
    """The difference from D along the tokens: the mean of the seeds, and each seed as a faint line.

    Runs that stand alone because their row has one that got stuck share its style and its place in the legend.
    """
    figure, axis = pictures.figure(11.0, 6.2)
    axis.axhline(0, color=pictures.MUTED, linewidth=1)
    per_step = results["training"]["batch"] * results["training"]["sequence"]
    of = {row["name"]: row.get("of", row["name"]) for row in results["rows"]}
    styles = dict(zip(dict.fromkeys(of[name] for name in names(results, REFERENCE)), STYLES, strict=False))
    told: set[str] = set()
    for name in names(results, REFERENCE):
        style, lines = styles[of[name]], _lines(results, name)
        for line in lines:
            axis.plot([step * per_step / 1e6 for step, _ in line], [d for _, d in line], **style.style(alpha=0.25))
        if lines:
            places = [step * per_step / 1e6 for step, _ in lines[0]]
            means = [statistics.fmean(d for _, d in each) for each in zip(*lines, strict=False)]
            label = name if of[name] == name else f"{of[name]}, each seed"
            axis.plot(places[: len(means)], means, label=None if label in told else label, **style.style())
            told.add(label)
    axis.set_yscale("symlog", linthresh=CLOSE, linscale=0.9)
    low, high = axis.get_ylim()
    at = [sign * tick for tick in (0.005, 0.02, 0.05, 0.1, 0.5, 2) for sign in (1, -1)]
    ticks = [0.0, *(y for y in at if low <= y <= high)]
    pictures.ticks(axis.yaxis, ticks, lambda y: f"{y:+g}".replace("-", "−") if y else "0")
    axis.set_xlabel("million tokens")
    axis.set_ylabel(f"validation loss − that of {REFERENCE}, nats a token")
    pictures.below(figure, axis, 3)
    return figure


def _lines(results: Results, name: str) -> list[list[tuple[int, float]]]:
    known = {run["seed"]: dict(map(tuple, run["validation"])) for run in runs_of(results, row=REFERENCE)}
    return [
        [(step, loss - known[run["seed"]][step]) for step, loss in run["validation"] if step in known[run["seed"]]]
        for run in runs_of(results, row=name)
        if run["seed"] in known
    ]


TABLES: dict[str, Any] = {
    "origin": origin, "rows": rows, "curve": curve, "tasks": tasks, "gauges": gauges, "turns": turns,
    "rates": rates, "stopped": stopped, "text": text,
}  # fmt: skip
PICTURES = {"": differences}
