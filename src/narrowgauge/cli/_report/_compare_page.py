"""report.html: a comparison as one page that needs nothing but itself.

The page opens with what was found, in words computed from the numbers. Those words claim no more than the numbers
carry: a difference between recipes is stated with its spread over the seeds, one whose 95 % interval contains 0
"may be chance", and where there is one seed the page says that no spread is known. A recipe that diverged anywhere
has no validation loss and takes no part in the comparison of losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from narrowgauge._text import listed
from narrowgauge.cli._report import _compare_charts as charts
from narrowgauge.cli._report._page import MISSING, definitions, fact, write_page
from narrowgauge.trainers._compare_results import may_be_chance

Json = dict[str, Any]
# A sentence names this many recipes; it sums up the others.
NAMED = 4


def write_report(results: Json, path: Path) -> None:
    """Write the page at once and whole: a reader finds the old one or the new one.

    Args:
        results: the content of results.json.
        path: the file to write, in a folder that exists.
    """
    figures = (charts.loss, charts.edq, charts.lost_updates, charts.memory, charts.speed)
    write_page(
        path,
        "compare.html.j2",
        results=results,
        created=results["created"].replace("T", " ").replace("Z", " UTC"),
        # A number and its sign stay on one line.
        summary=" ".join(_summary(results)).replace(" %", "\u00a0%"),
        missing=_missing(results),
        columns=_columns(results),
        rows=[_row(name, results) for name in results["recipes"]],
        details={
            title: definitions(results[title.lower()])
            for title in ("Settings", "Data", "Model", "Environment")
            if results[title.lower()]
        },
        notes=results.get("notes", []),
        plots={figure.__name__: figure(results) for figure in figures},
        looks=charts.looks(results),
        parts=charts.PARTS,
    )


def _measure(results: Json) -> str:
    """What recipes are compared by; in results of before there was validation only."""
    return str(results.get("measure", "validation_loss"))


def _columns(results: Json) -> list[str]:
    reference, perplexity = results["reference"], ["Perplexity"] if results.get("perplexity", True) else []
    return [
        _measure(results).replace("_", " ").capitalize(), *perplexity,
        f"Difference to {reference}" if reference else "Difference",
        "Bytes per parameter", "Peak memory", "Optimizer ms", "Step ms", "EDQ %", "Lost updates %",
    ]  # fmt: skip


def _row(name: str, results: Json) -> Json:
    """A recipe in the table. Cells are pairs: the value, and what has to be said about it (or nothing)."""
    recipe, is_reference = results["recipes"][name], name == results["reference"]
    measured = recipe["bytes"]["measured"]
    cells = [
        _loss(recipe, _measure(results)),
        *([(_number(recipe["perplexity"], ",.2f"), "")] if results.get("perplexity", True) else []),
        ("reference", "") if is_reference else _difference(recipe),
        (_number(recipe["bytes_per_parameter"], ".4g"), f"measured {measured['total']:.4g}" if measured else ""),
        (_size(recipe["peak_memory_bytes"]), ""),
        _time(recipe, "optimizer", ",.2f"),
        _time(recipe, "step", ",.1f"),
        (_percent(recipe["edq"]), ""),
        (_percent(recipe["lost_updates"]), ""),
    ]
    settings = ", ".join(f"{key} {fact(value)}" for key, value in recipe.get("settings", {}).items())
    alias = ", ".join(filter(None, (recipe["recipe"] if recipe["recipe"] != name else "", settings)))
    return {"name": name, "alias": alias, "title": recipe["title"], "is_reference": is_reference, "cells": cells}


def _loss(recipe: Json, measure: str) -> tuple[str, str]:
    count, diverged = len(recipe["seeds"]), sum(seed["diverged"] for seed in recipe["seeds"])
    if recipe["diverged"]:
        return "diverged", f"{diverged} of {count} seeds" if count > 1 else ""
    return _number(recipe[measure], ".4f"), ""


def _time(recipe: Json, part: str, spec: str) -> tuple[str, str]:
    quartiles = recipe.get(f"{part}_ms_quartiles")
    remark = "" if quartiles is None else "–".join(format(each, spec) for each in quartiles)
    mark = " ~" if recipe.get(f"{part}_overlaps") else ""
    return _number(recipe[f"{part}_ms"], spec) + mark, remark


def _difference(recipe: Json) -> tuple[str, str]:
    difference = recipe["difference"]
    if difference is None or recipe["diverged"]:
        return MISSING, ""
    spread = "?" if difference["spread"] is None else f"{difference['spread']:.5f}"
    note = "within the reference’s spread" if difference.get("within_reference_spread") else ""
    return f"{_signed(difference['mean'])} ± {spread}", "may be chance" if may_be_chance(difference) else note


def _summary(results: Json) -> Iterable[str]:
    """Sentences: what ran, what diverged, losses, lost updates, bytes; each only if there is something to say."""
    recipes, settings, model = results["recipes"], results["settings"], results["model"]
    counts = {len(recipe["seeds"]) for recipe in recipes.values()} or {0}
    upto = "up to " if len(counts) > 1 else ""
    size = f" of {model['parameters']:,} parameters" if "parameters" in model else ""
    steps = f" for {settings['steps']:,} steps" if "steps" in settings else ""
    trained = f"The same model{size} was trained{steps} under {len(recipes)} recipes"
    if len(recipes) == 1:
        trained = f"A model{size} was trained{steps} under one recipe, {next(iter(recipes))}"
    yield f"{trained}, with {upto}{max(counts)} seeds each." if max(counts) > 1 else f"{trained}, with one seed."
    diverged = [name for name, recipe in recipes.items() if recipe["diverged"]]
    if diverged:
        yield f"{_all(diverged)} diverged, and {'has' if len(diverged) == 1 else 'have'} no loss to compare."
    yield from _summary_of_losses(results)
    yield from _summary_of_lost_updates(recipes)
    yield from _summary_of_bytes(recipes, results["reference"])


def _summary_of_losses(results: Json) -> Iterable[str]:
    recipes, reference = results["recipes"], results["reference"]
    measure = _measure(results)
    if reference is None or recipes[reference][measure] is None:
        if len(recipes) > 1:
            lacking = (
                "No recipe served as reference" if reference is None else f"{reference}, the reference, has no loss"
            )
            yield f"{lacking}, so no differences are given."
        return
    found = {n: r["difference"] for n, r in recipes.items() if r["difference"] is not None and not r["diverged"]}
    if not found:
        return
    within = [name for name, difference in found.items() if may_be_chance(difference)]
    beyond = sorted(set(found) - set(within), key=lambda name: (-abs(found[name]["mean"]), name))
    named, clauses = _first(beyond), []
    for side, sign in (("higher", 1), ("lower", -1)):
        names = [name for name in named if (found[name]["mean"] < 0) == (sign < 0)]
        amounts = [f"{name} by {_amount(found[name])}" for name in names]
        if amounts:
            amounts[0] = f"{names[0]} ended {side} by {_amount(found[names[0]])}"
            clauses.append(_all(amounts))
    if len(beyond) > len(named):
        most = abs(found[beyond[len(named)]]["mean"])
        clauses.append(f"the other {len(beyond) - len(named)} differ by at most {_at_most(most, 5)}")
    what = "a validation loss" if measure == "validation_loss" else "a mean training loss, over the last tenth,"
    yield f"{reference}, the reference, reached {what} of {recipes[reference][measure]:.4f}."
    if clauses:
        yield f"Against it, {'; '.join(clauses)}."
    if within:
        yield f"By the spread over the seeds these may differ by chance: {_all(within)}."
    close = [name for name in beyond if found[name].get("within_reference_spread")]
    if close:
        yield f"Apart by less than two seeds of {reference} are: {_all(close)}."
    if any(found[name]["mean"] < 0 for name in named):
        yield "A loss below the reference's does not mean better arithmetic: coarser states make other steps."
    if any(difference["spread"] is None for difference in found.values()):
        one_seed = all(len(recipe["seeds"]) == 1 for recipe in recipes.values())
        where = "With one seed" if one_seed else "Where only one seed can be compared"
        yield f"{where}, no spread is known: small differences may be chance."


def _amount(difference: Json) -> str:
    spread = difference["spread"]
    return f"{abs(difference['mean']):.5f}" + ("" if spread is None else f" ± {spread:.5f}")


def _summary_of_lost_updates(recipes: Json) -> Iterable[str]:
    lost = {name: recipe["lost_updates"] for name, recipe in recipes.items() if recipe["lost_updates"] is not None}
    names = sorted(lost, key=lambda name: (-lost[name], name))
    named = _first([name for name in names if lost[name] >= 0.01])
    if named:
        rest = [name for name in names if name not in named]
        others = f"; no other lost more than {_at_most(100 * lost[rest[0]], 1)} %" if rest else ""
        shares = [f"{name} {_percent(lost[name])} %" for name in named]
        shares[0] = f"{named[0]} lost {_percent(lost[named[0]])} % of its updates"
        yield f"{_all(shares)}{others}."
    elif names:
        yield f"No recipe lost more than {_at_most(100 * lost[names[0]], 1)} % of its updates."


def _summary_of_bytes(recipes: Json, reference: str | None) -> Iterable[str]:
    kept = {name: recipe["bytes_per_parameter"] for name, recipe in recipes.items()}
    names = sorted(kept, key=lambda name: (kept[name], name))
    if reference is not None:
        most = kept[reference]
        less = [name for name in names if kept[name] < most]
        named = [f"{name} {kept[name]:.4g} ({100 * (1 - kept[name] / most):.0f} % less)" for name in less]
        if named:
            shown = _first(named)
            others = f"; {len(named) - len(shown)} others keep less than it, too" if len(named) > len(shown) else ""
            yield f"{reference} keeps {most:.4g} bytes per parameter, {_all(shown)}{others}."
    elif len(names) > 1:
        least, most = names[0], names[-1]
        yield f"Bytes per parameter run from {kept[least]:.4g} ({least}) to {kept[most]:.4g} ({most})."


def _all(names: list[str]) -> str:
    return listed(names, len(names))


def _first(items: list[str]) -> list[str]:
    """The NAMED first; all, if only one would be left."""
    return items if len(items) <= NAMED + 1 else items[:NAMED]


def _missing(results: Json) -> list[str]:
    """What was asked for and is not in the results: recipes, and seeds of recipes."""
    settings, recipes = results["settings"], results["recipes"]
    wanted, seeds = settings.get("recipes"), settings.get("seeds")
    missing = [name for name in wanted if name not in recipes] if isinstance(wanted, list) else []
    if isinstance(seeds, int):
        short = {name: seeds - len(recipe["seeds"]) for name, recipe in recipes.items()}
        missing += [f"{name} ({count} of {seeds} seeds)" for name, count in short.items() if count > 0]
    return missing


def _number(value: float | None, spec: str) -> str:
    return MISSING if value is None else format(value, spec)


def _percent(share: float | None) -> str:
    """A share in per cent with one decimal, and no 0.0 for what is not nothing."""
    if share is None:
        return MISSING
    return "<0.1" if 0 < share < 0.0005 else f"{100 * share:.1f}"


def _at_most(value: float, places: int) -> str:
    """Rounded up, after the noise of binary fractions is off."""
    return f"{math.ceil(round(value * 10**places, 6)) / 10**places:.{places}f}"


def _signed(value: float) -> str:
    text = f"{value:+.5f}"
    return "0.00000" if float(text) == 0 else text.replace("-", "−")


def _size(count: int | None) -> str:
    if count is None:
        return MISSING
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
