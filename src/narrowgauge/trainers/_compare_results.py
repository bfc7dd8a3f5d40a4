"""The content of results.json: everything a comparison found, with every setting it was made under.

Differences are paired: recipe minus reference for each seed, then mean and spread (the sample standard
deviation) over seeds. A mean whose 95 % interval contains 0 may be chance. One seed has no spread, and none is
claimed. Pairing cancels what seeds have in common, so a difference may exceed chance and still be far below what
another seed would have changed: whether it lies within the spread of the reference's own loss is stated as well.

Losses that are compared are those of validation; without validation, the mean training losses of the last tenth of
the steps. Times are medians with quartiles. Two recipes whose quartiles overlap are not told apart by them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from narrowgauge._text import listed
from narrowgauge._version import __version__
from narrowgauge.recipes import Recipe
from narrowgauge.trainers._compare_run import Run, Settings, Timing

Json = dict[str, Any]

# The 97.5 % quantile of Student's t, by degrees of freedom from 1 on.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def assemble(
    recipes: Mapping[str, Recipe],
    runs: Mapping[str, list[Run]],
    timings: Mapping[str, Timing],
    settings: Settings,
    facts: Json,
    *,
    interrupted: bool,
) -> Json:
    """The content of results.json.

    Args:
        recipes: by the name that the table calls them by.
        runs: finished runs by the same names.
        timings: seconds of steps, by the same names.
        settings: shared by all recipes.
        facts: command, environment, settings in words, data, model, the name of the reference, ``measure``
            (``"validation_loss"`` or ``"training_loss"``) and ``perplexity`` (whether to give e to the loss).
        interrupted: whether what was asked for is missing.
    """
    reference = facts["reference"] if facts["reference"] in runs else None
    rows = {
        name: _row(recipes[name], finished, timings.get(name, Timing()), settings, facts)
        for name, finished in runs.items()
    }
    for name, row in rows.items():
        row["difference"] = None
        if reference is not None and name != reference:
            row["difference"] = _difference(runs[name], runs[reference], facts["measure"])
            for part in ("optimizer", "step"):
                row[f"{part}_overlaps"] = _overlap(*(of[f"{part}_ms_quartiles"] for of in (row, rows[reference])))
    return {
        "schema": 1,
        "narrowgauge": __version__,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "interrupted": interrupted,
        **facts,
        "reference": reference,
        "notes": notes({name: recipes[name] for name in runs}, settings),
        "recipes": rows,
    }


def notes(recipes: Mapping[str, Recipe], settings: Settings) -> list[str]:
    """What a reader of the table has to know of how recipes were treated."""
    found = []
    shared = {name: r.optimizer.rule.name for name, r in recipes.items() if "lr" not in r.settings}
    rules = list(dict.fromkeys(shared.values()))
    if len(rules) > 1 and settings.lr is not None:
        other = next(name for name, rule in shared.items() if rule == rules[1])
        found.append(
            f"The rules {listed(rules, len(rules))} share the learning rate {settings.lr:g}, and each is best at "
            f"another one: give a recipe its own, as in {other}@lr=RATE."
        )
    if settings.lr is None and len({recipe.optimizer for recipe in recipes.values()}) > 1:
        found.append("No learning rate was given: each optimizer has its default, or its recipe's.")
    given = settings.options.get("betas")
    for name, recipe in recipes.items():
        count = recipe.optimizer.rule.betas
        if given is not None and recipe.takes("betas") and count != len(given) and "betas" not in recipe.settings:
            found.append(f"{name} takes {count} betas, not {len(given)}: it has its optimizer's defaults.")
        asked = recipe.settings.get("arithmetic", settings.arithmetic)
        if settings.arithmetic_of(recipe) != asked:
            found.append(f"{name} has no {asked} arithmetic: it was computed in {settings.arithmetic_of(recipe)}.")
    return found


def _row(recipe: Recipe, runs: list[Run], timing: Timing, settings: Settings, facts: Json) -> Json:
    block_size = {"block_size": 256, **settings.options, **recipe.settings}["block_size"]
    planned = recipe.byte_breakdown(block_size)
    diverged = any(run.diverged for run in runs)
    row: Json = {
        "recipe": recipe.name,
        "title": recipe.title,
        "settings": {name: plain(value) for name, value in recipe.settings.items()},
        "lr": runs[-1].lr,
        "arithmetic": runs[-1].arithmetic,
        "diverged": diverged,
    }
    for measure in ("validation_loss", "training_loss"):
        finished = [loss for run in runs if (loss := getattr(run, measure)) is not None]
        row[measure] = None if diverged else _mean(finished)
        row[f"{measure}_spread"] = statistics.stdev(finished) if not diverged and len(finished) > 1 else None
    stats = [stats for run in runs for stats in run.stats.values()]
    times = {part: _quartiles(getattr(timing, part)) for part in ("optimizer", "step")}
    tokens = facts["settings"].get("batch", 0) * facts["settings"].get("sequence", 0)
    step = times["step"]
    return row | {
        "perplexity": _perplexity(row[facts["measure"]]) if facts["perplexity"] else None,
        "bytes_per_parameter": sum(planned.values()),
        "bytes": {
            "planned": planned | {"total": sum(planned.values())},
            "measured": runs[-1].measured_bytes or None,
        },
        "peak_memory_bytes": max((run.peak_memory for run in runs if run.peak_memory is not None), default=None),
        "optimizer_ms": times["optimizer"] and times["optimizer"][1],
        "optimizer_ms_quartiles": times["optimizer"] and times["optimizer"][::2],
        "step_ms": step and step[1],
        "step_ms_quartiles": step and step[::2],
        "tokens_per_second": 1e3 * tokens / step[1] if step and tokens else None,
        # Means over the measured steps of each step's ratio, so that the large first steps do not hide the rest.
        "edq": _mean(s.effective_descent_quality for s in stats),
        "edq_visible": _mean(s.visible_descent_quality for s in stats),
        "lost_updates": _mean(s.lost_updates for s in stats),
        "lost_visible_updates": _mean(s.lost_visible_updates for s in stats),
        "seeds": [_seed(run, facts["perplexity"]) for run in runs],
    }


def _seed(run: Run, perplexity: bool) -> Json:
    steps = range(1, len(run.loss) + 1)

    def column(read: str) -> list[float | None]:
        return [_finite(getattr(run.stats[step], read)) if step in run.stats else None for step in steps]

    return {
        "seed": run.seed,
        "validation_loss": run.validation_loss,
        "training_loss": run.training_loss,
        "perplexity": _perplexity(run.validation_loss) if perplexity else None,
        "diverged": run.diverged,
        "completed_steps": len(run.loss) - (1 if run.loss and not math.isfinite(run.loss[-1]) else 0),
        "history": {
            "step": list(steps),
            "loss": [_finite(loss) for loss in run.loss],
            "edq": column("effective_descent_quality"),
            "edq_visible": column("visible_descent_quality"),
            "lost_updates": column("lost_updates"),
            "lost_visible_updates": column("lost_visible_updates"),
        },
    }


def _difference(runs: list[Run], reference: list[Run], measure: str) -> Json | None:
    """Recipe minus reference over the seeds that both finished; None if there is none."""
    other = {run.seed: getattr(run, measure) for run in reference}
    pairs = [
        getattr(run, measure) - other[run.seed]
        for run in runs
        if getattr(run, measure) is not None and other.get(run.seed) is not None
    ]
    if not pairs:
        return None
    mean = statistics.fmean(pairs)
    spread = statistics.stdev(pairs) if len(pairs) > 1 else None
    losses = [loss for loss in other.values() if loss is not None]
    own = statistics.stdev(losses) if len(losses) > 1 else None
    return {
        "mean": mean,
        "spread": spread,
        "within_reference_spread": None if own is None else abs(mean) <= own,
        "pairs": len(pairs),
    }


def by_chance(spread: float, pairs: int) -> float:
    """Half of the 95 % interval of the mean of two or more differences, from their spread (Student's t)."""
    free, z = pairs - 1, 1.959964
    if free <= len(_STUDENT):
        quantile = _STUDENT[free - 1]
    else:  # the series of Cornish and Fisher, right to 0.01 from there on
        quantile = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return quantile * spread / math.sqrt(pairs)


def may_be_chance(difference: Json) -> bool:
    """Whether the 95 % interval of a difference contains 0; False for one seed, of which nothing is known."""
    spread, pairs = difference["spread"], difference["pairs"]
    return spread is not None and abs(difference["mean"]) <= by_chance(spread, pairs)


def mark(difference: Json) -> str:
    """What a table puts behind a difference with a spread: " ~", it may be chance, " ≈", another seed does more."""
    return " ~" if may_be_chance(difference) else " ≈" if difference["within_reference_spread"] else ""


def _quartiles(seconds: Sequence[float]) -> list[float] | None:
    """First quartile, median and third quartile in milliseconds; None if nothing was timed."""
    return [1e3 * float(each) for each in np.percentile(seconds, (25, 50, 75))] if seconds else None


def _overlap(one: list[float] | None, other: list[float] | None) -> bool | None:
    """Whether two ranges have a number in common; None without both."""
    if one is None or other is None:
        return None
    return one[0] <= other[1] and other[0] <= one[1]


def _mean(values: Iterable[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(finite) if finite else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _perplexity(loss: float | None) -> float | None:
    # Beyond e^700 a double overflows; such a model has learned nothing that a number could tell.
    return None if loss is None or loss > 700 else math.exp(loss)


def plain(value: Any) -> Any:
    """A setting as JSON has it."""
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)
