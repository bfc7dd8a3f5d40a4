"""Tables of the state codecs, the numbers of the page's sentences, and the picture: error against steps."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from matplotlib.figure import Figure

from studies.shared import pictures
from studies.shared.pictures import INK, Line
from studies.shared.tables import Results, fill_in, per, significant, table
from studies.state_codecs.bench import exploded

LABELS = {
    "one scale": "(a) one scale",
    "six decades": "(b) six decades",
    "sparse rows": "(c) sparse rows",
    "sparse elements": "(c) sparse elements",
    "down 30": "(d) down 30",
    "up 30": "(d) up 30",
}
SIMULATED = ("finalists", "blocks")
THREE = ("one scale", "six decades", "sparse rows")
BOTH = " + hand-over + stochastic v"
FORMS = {"": "plain", " + hand-over": "hand-over", " + stochastic v": "stochastic v", BOTH: "both"}
RULES = {"sgd": "SGD with momentum", "lamb": "LAMB", "lion": "Lion"}
# The candidates that the picture shows; the rest are in the tables.
LINES = {
    "8bit": Line("the 8-bit paper's pair", "series-1", (), 1.8, "o"),
    "FlashOptim": Line("FlashOptim's pair, groups of 32", "series-5", (6, 2), 1.8, "o"),
    "COAT": Line("COAT's float8, groups of 128", "series-4", (2, 1.5), 1.8, "o"),
    "relative 1.5": Line("m over √v, v as its root, dynamic", "series-3", (8, 2, 1.5, 2), 1.8, "o"),
    "log4 log8": Line("m as log4, v as log8", "series-2", (), 1.8, "o"),
    "torchao 4-bit": Line("torchao's 4 bits", "series-6", (2, 1.5), 1.8, "o"),
    "log4": Line("log4", "series-2", (4, 1.5), 2.4, "o"),
    "log8": Line("log8", "ink", (), 2.6, "o"),
}
# Facts: candidates and cases by what they are called there, and single ones by part, candidate and case.
SHORT = {
    "paper": "8bit", "flash": "FlashOptim", "root": "root log8", "log": "log log8", "float8": "float8 log8",
    "e2m1": "e2m1 log8", "log8": "log8", "exact": "exact ends", "half": "log4 log8", "log4": "log4",
    "two4": "log4 powers of two", "parts4": "log4 128ths", "fourbit": "torchao 4-bit",
}  # fmt: skip
COSTS = {
    "fp32": "fp32", "paper": "8bit", "flash": "FlashOptim", "log8": "log8", "root": "root log8",
    "float8": "float8 log8", "exact": "exact ends", "v": "v as log8, stochastic; m fp32",
    "v_exact": "v between exact ends, stochastic; m fp32", "random": "random bits",
}  # fmt: skip
ERRORS = {
    "nearest_exact": ("variants", "exact ends + hand-over", "six decades"),
    "nearest_log8": ("variants", "log8 + hand-over", "six decades"),
    "m_six": ("alone", "m log8 + hand-over", "six decades"),
    "v_six": ("alone", "v log8 + stochastic v", "six decades"),
    "dropped": ("alone", "m dropped + hand-over", "one scale"),
    "m8_kept": ("alone", "m log8", "one scale"),
    "m8_handed": ("alone", "m log8 + hand-over", "one scale"),
    "m4_kept": ("alone", "m log4", "one scale"),
    "m4_handed": ("alone", "m log4 + hand-over", "one scale"),
    **{f"nearest_{case.replace(' ', '_')}": ("finalists", "log8 + hand-over", case) for case in LABELS},
    **{f"stochastic_{case.replace(' ', '_')}": ("finalists", "log8", case) for case in LABELS},
}
WORST = {
    "worst_stochastic": ("m linear in 4 bits, stochastic", "six decades"),
    "worst_nearest": ("m e2m1 + hand-over", "six decades"),
    "worst_64": ("m log, linear up to 64 times the smallest", "sparse rows"),
    "worst_8": ("m log, linear up to 8 times the smallest", "sparse rows"),
}
INFINITE = float("inf")
Errors = Sequence[float | None]


def cell(errors: Errors | None, form: str = "{}") -> str:
    """An error, or with "{} ({})" the worst element too; bold if it exploded."""
    if errors is None:
        return ""
    text = form.format(*("not finite" if x is None else significant(x, 2) for x in errors))
    return f"**{text}**" if exploded(errors[1]) else text


def both(errors: Errors) -> str:
    """An error, and the worst element."""
    return cell(errors, "{} ({})")


def last(marks: Results) -> Errors:
    """The errors at the last mark."""
    return marks[max(marks, key=int)]


def _titled(results: Results, part: str) -> tuple[str, object]:
    """A column with the names of the candidates; a dagger for the library's own optimizer."""
    library = () if part in SIMULATED else results["library"]
    return "", lambda name: f"`{name}`" + " †" * (name in library)


def _costs(results: Results) -> list[tuple[str, object, str]]:
    """Columns: instructions over those of fp32 moments, and gathers; blank where they were not counted."""
    counts, keys = results.get("kernels") or {}, ("instructions", "gathers")
    return [(key, lambda name, key=key: counts.get(name, {}).get(key), ".0f") for key in keys]


def candidates(results: Results) -> str:
    """Every candidate: what it is, what it costs, and the usual simulation."""
    found, every = results["parts"]["reference"], results["candidates"]

    def what(name: str) -> str:
        hand_over, by_chance = every[name].get("best", (False, False))
        parts = ["hand-over"] * hand_over + ["stochastic v"] * by_chance
        return every[name]["says"] + ("; " + ", ".join(parts) if parts else "")

    return table(
        every,
        _titled(results, "reference"),
        ("m and v", what),
        ("bytes", lambda name: every[name]["bytes"]["256"], ".3f"),
        *_costs(results),
        *per(THREE[:2], LABELS.get, ("", lambda case, name: both(last(found[name][case])))),
        words=2,
    )


def _cases(part: str, results: Results) -> str:
    """All cases, or tensors, at the end of a part."""
    found = results["parts"][part]
    segments = list(next(iter(found.values())))
    columns = per(segments, lambda x: LABELS.get(x, f"`{x}`"), ("", lambda x, name: both(last(found[name][x]))))
    return table(found, _titled(results, part), *columns)


def _over_steps(part: str, cases: Sequence[str], results: Results) -> str:
    """Some cases at all marks."""
    found = results["parts"][part]
    places = [(case, mark) for case in cases for mark in next(iter(found.values()))[cases[0]]]
    return table(
        found,
        _titled(results, part),
        *per(
            places,
            lambda place: f"{LABELS[place[0]][:3]} {int(place[1]):,}",
            ("", lambda place, name: cell(found[name][place[0]][place[1]])),
        ),
    )


def variants(results: Results) -> str:
    """Each pair with and without its two helps."""
    found = results["parts"]["variants"]

    def shown(place: tuple[str, str], name: str) -> str:
        each = found.get(name + place[1])
        return cell(each and last(each[place[0]]))

    places = [(case, form) for case in THREE for form in FORMS]
    columns = per(places, lambda place: f"{LABELS[place[0]][:3]} {FORMS[place[1]]}", ("", shown))
    return table(results["candidates"], ("", "`{}`".format), *columns)


def blocks(results: Results) -> str:
    """Block sizes."""
    found = results["parts"]["blocks"]
    sizes = next(iter(results["candidates"].values()))["bytes"]
    places = [(case, size) for case in THREE[:2] for size in sizes]
    return table(
        found,
        _titled(results, "blocks"),
        *per(
            places,
            lambda place: f"{LABELS[place[0]][:3]} {place[1]}",
            ("", lambda place, name: cell(last(found[name]["{} {}".format(*place)]))),
        ),
    )


def rules(results: Results) -> str:
    """SGD, LAMB and Lion."""
    rows = [(rule, name) for rule in RULES for name in results["parts"][rule]]
    return table(
        rows,
        ("rule", lambda row: RULES[row[0]]),
        ("states", lambda row: f"`{row[1]}`"),
        *per(
            list(LABELS)[:4],
            LABELS.get,
            ("", lambda case, row: both(last(results["parts"][row[0]][row[1]][case]))),
        ),
        words=2,
    )


def instructions(results: Results) -> str:
    """What log8 costs, part by part: the kernels that are no candidates."""
    candidates = (*results["candidates"], "fp32", "random bits")
    names = [name for name in results["kernels"] if name not in candidates]
    (_, count, how), gathers = _costs(results)
    columns = (("step of AdamW", str), ("instructions an element", count, how), gathers)
    return table(["8bit", "FlashOptim", *names], *columns)


def origin(results: Results) -> str:
    """What was run, on what."""
    return fill_in(
        results,
        "`{command}`: {minutes:.0f} minutes, {machine}, seed {training[seed]}. {size[reference]:,} elements a case "
        "for the usual simulation, {size[numel]:,} for the rest; trainings of {size[recorded]:,} steps, "
        "{training[model]} model, learning rate {training[lr]:g}.",
    )


def facts(results: Results) -> dict[str, str]:
    """Numbers of the page's sentences, of the committed results."""
    parts, kernels = results["parts"], results["kernels"]

    def at(part: str, name: str, case: str = "one scale", digits: int = 2) -> str:
        return significant(last(parts[part][name][case])[0] or INFINITE, digits)

    def early(part: str, name: str) -> str:
        found = parts[part][name]["one scale"]
        return significant(found[min(found, key=int)][0], 2)

    def range_of(part: str, name: str) -> str:
        errors = [last(marks)[0] or INFINITE for marks in parts[part][name].values()]
        return f"{significant(min(errors), 2)} to {significant(max(errors), 2)}"

    def worst(name: str, case: str) -> str:
        return significant(max(errors[1] or INFINITE for errors in parts["alone"][name][case].values()), 2)

    cost = {short: kernels[name]["instructions"] for short, name in COSTS.items()}
    facts = {
        "bytes": f"{results['candidates']['log8']['bytes']['256']:.3f}",
        "bytes_exact": f"{results['candidates']['exact ends']['bytes']['256']:.3f}",
        "fp32": f"{last(parts['reference']['fp32']['one scale'])[0]:.0e}",
        "steps": f"{results['size']['marks'][-1]:,}",
        "most_steps": f"{int(max(parts['all']['log8']['one scale'], key=int)):,}",
        "adagrad_steps": f"{int(max(parts['adagrad']['log8']['one scale'], key=int)):,}",
        "saved": f"{cost['exact'] - cost['log8']:.0f}",
        "corrected": early("alone", "log8, handed over with the bias correction"),
        "right": early("all", "log8"),
    }
    facts |= {f"cost_{short}": f"{count:.0f}" for short, count in cost.items()}
    facts |= {name: at(*place) for name, place in ERRORS.items()}
    facts |= {name: worst(*place) for name, place in WORST.items()}
    for short, name in SHORT.items():
        for case, key in zip(THREE, ("one", "six", "rows"), strict=True):
            if case in parts["reference"][name]:
                facts[f"{short}_{key}"] = at("reference", name, case, 3 if key == "one" else 2)
            facts[f"{short}_{key}_later"] = at("all", name, case)
            if name in parts["finalists"]:
                facts[f"{short}_{key}_last"] = at("finalists", name, case)
        facts |= {f"{part}_{short}": range_of(part, name) for part in ("gpt", "clip")}
    return facts


def error_over_steps(results: Results) -> Figure:
    """Relative error of the displacement, a panel a case, both scales logarithmic."""
    figure, grid = pictures.figure(12.5, 8.2, 2, 2, sharex=True, sharey=True)
    marks, part = results["size"]["marks"], results["parts"]["finalists"]
    for axis, (case, title) in zip(grid.flat, list(LABELS.items())[:4], strict=True):
        for name, line in LINES.items():
            errors = pictures.numbers(part[name][case][str(mark)][0] for mark in marks)
            axis.plot(marks, errors, **line.style(markersize=4, label=line.label))
        axis.set(xscale="log", yscale="log")
        axis.set_title(title, color=INK)
        pictures.ticks(axis.xaxis, marks, ",.0f")
        pictures.ticks(axis.yaxis, None)
    for axis in grid[-1]:
        axis.set_xlabel("steps")
    for axis in grid[:, 0]:
        axis.set_ylabel("relative error of the displacement", color=INK)
    pictures.below(figure, grid[0, 0], 4)
    return figure


PICTURES = {"": error_over_steps}
TABLES = {
    "origin": origin, "candidates": candidates, "variants": variants, "blocks": blocks, "rules": rules,
    "instructions": instructions, "steps": functools.partial(_over_steps, "finalists", THREE[:2]),
    "adagrad": functools.partial(_over_steps, "adagrad", THREE),
    **{part: functools.partial(_cases, part) for part in ("all", "finalists", "alone", "gpt", "clip")},
}  # fmt: skip
