"""Tables of the state codecs, the numbers of the page's sentences, and the picture: error against steps."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from matplotlib.figure import Figure

from studies.shared import pictures
from studies.shared.pictures import INK, Line
from studies.shared.tables import Results, cross_check, machine, markdown, significant
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
FORMS = {
    "": "plain",
    " + hand-over": "hand-over",
    " + stochastic v": "stochastic v",
    " + hand-over + stochastic v": "both",
}
# Candidates that the page's sentences name.
SHORT = {
    "paper": "8bit",
    "flash": "FlashOptim",
    "root": "root log8",
    "log": "log log8",
    "linear": "linear log8",
    "float8": "float8 log8",
    "e2m1": "e2m1 log8",
    "log8": "log8",
    "exact": "exact ends",
    "half": "log4 log8",
    "log4": "log4",
    "two4": "log4 powers of two",
    "parts4": "log4 128ths",
    "fourbit": "torchao 4-bit",
}
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
Errors = Sequence[float | None]


def cell(errors: Errors | None) -> str:
    """An error; bold if it exploded."""
    if errors is None:
        return ""
    error, worst = errors
    text = "not finite" if error is None else significant(error, 2)
    return f"**{text}**" if exploded(worst) else text


def both(errors: Errors) -> str:
    """An error, and the worst element."""
    error, worst = ("not finite" if x is None else significant(x, 2) for x in errors)
    return f"**{error} ({worst})**" if exploded(errors[1]) else f"{error} ({worst})"


def last(marks: Results) -> Errors:
    """The errors at the last mark."""
    return marks[max(marks, key=int)]


def _title(results: Results, part: str, name: str) -> str:
    return f"`{name}`" + " †" * (part not in SIMULATED and name in results["library"])


def _cost(results: Results, name: str) -> tuple[str, str]:
    """Instructions over those of fp32 moments, and gathers; blank where they were not counted."""
    count = (results["kernels"] or {}).get(name)
    return (f"{count['instructions']:.0f}", f"{count['gathers']:.0f}") if count else ("", "")


def candidates(results: Results) -> str:
    """Every candidate: what it is, what it costs, and the usual simulation."""
    found, rows = results["parts"]["reference"], []
    for name, candidate in results["candidates"].items():
        form = FORMS[" + hand-over" * candidate["best"][0] + " + stochastic v" * candidate["best"][1]]
        what = candidate["says"] + {"plain": "", "both": "; hand-over, stochastic v"}.get(form, f"; {form}")
        errors = [both(last(found[name][case])) for case in ("one scale", "six decades")]
        title, size = _title(results, "reference", name), f"{candidate['bytes']['256']:.3f}"
        rows.append((title, what, size, *_cost(results, name), *errors))
    head = ("", "m and v", "bytes", "instructions", "gathers", LABELS["one scale"], LABELS["six decades"])
    return markdown(head, rows, 2)


def _cases(part: str, results: Results) -> str:
    """All cases at the end of a part."""
    found = results["parts"][part]
    rows = [(_title(results, part, name), *(both(last(found[name][case])) for case in LABELS)) for name in found]
    return markdown(("", *LABELS.values()), rows)


def _over_steps(part: str, cases: Sequence[str], results: Results) -> str:
    """Some cases at all marks."""
    found = results["parts"][part]
    marks = list(next(iter(found.values()))[cases[0]])
    head = [f"{LABELS[case][:3]} {int(mark):,}" for case in cases for mark in marks]
    rows = [
        (_title(results, part, name), *(cell(found[name][case][mark]) for case in cases for mark in marks))
        for name in found
    ]
    return markdown(("", *head), rows)


def variants(results: Results) -> str:
    """Each pair with and without its two helps."""
    found, rows = results["parts"]["variants"], []
    for name in results["candidates"]:
        errors = [found.get(name + form) for form in FORMS]
        rows.append((f"`{name}`", *(cell(each and last(each[case])) for case in THREE for each in errors)))
    head = [f"{LABELS[case][:3]} {form}" for case in THREE for form in FORMS.values()]
    return markdown(("", *head), rows)


def blocks(results: Results) -> str:
    """Block sizes."""
    found = results["parts"]["blocks"]
    sizes = list(next(iter(results["candidates"].values()))["bytes"])
    rows = [
        (
            _title(results, "blocks", name),
            *(cell(last(found[name][f"{case} {size}"])) for case in THREE[:2] for size in sizes),
        )
        for name in found
    ]
    return markdown(("", *(f"{LABELS[case][:3]} {size}" for case in THREE[:2] for size in sizes)), rows)


def _tensors(part: str, results: Results) -> str:
    """A training, by tensor."""
    found = results["parts"][part]
    tensors = list(next(iter(found.values())))
    rows = [(_title(results, part, name), *(both(last(each[t])) for t in tensors)) for name, each in found.items()]
    return markdown(("", *(f"`{tensor}`" for tensor in tensors)), rows)


def rules(results: Results) -> str:
    """SGD, LAMB and Lion."""
    cases = list(LABELS)[:4]
    rows = [
        (title, f"`{name}`", *(both(last(segments[case])) for case in cases))
        for rule, title in RULES.items()
        for name, segments in results["parts"][rule].items()
    ]
    return markdown(("rule", "states", *(LABELS[case] for case in cases)), rows, 2)


def instructions(results: Results) -> str:
    """What log8 costs, part by part: the kernels that are no candidates."""
    kernels = results["kernels"] or {}
    names = [name for name in kernels if name not in results["candidates"] and name not in ("fp32", "random bits")]
    rows = [(name, *_cost(results, name)) for name in ["8bit", "FlashOptim", *names]]
    return markdown(("step of AdamW", "instructions an element", "gathers"), rows)


def origin(results: Results) -> str:
    """What was run, on what."""
    size, training = results["size"], results["training"]
    return (
        f"`{results['command']}`: {results['minutes']:.0f} minutes, {machine(results)}, seed "
        f"{training['seed']}. {size['reference']:,} elements a case "
        f"for the usual simulation, {size['numel']:,} for the rest; trainings of {size['recorded']:,} steps, "
        f"{training['model']} model, learning rate {training['lr']:g}.\n"
    )


def facts(results: Results) -> dict[str, str]:
    """Numbers of the page's sentences."""
    parts, kernels = results["parts"], results["kernels"] or {}

    def at(part: str, name: str, case: str = "one scale", digits: int = 2) -> str:
        return significant(last(parts[part][name][case])[0] or float("inf"), digits)

    def early(name: str) -> str:
        found = parts["all" if name in parts["all"] else "alone"][name]["one scale"]
        return significant(found[min(found, key=int)][0], 2)

    def range_of(part: str, name: str) -> str:
        errors = [last(marks)[0] or float("inf") for marks in parts[part][name].values()]
        return f"{significant(min(errors), 2)} to {significant(max(errors), 2)}"

    def worst(name: str, case: str) -> str:
        marks = parts["alone"][name][case]
        return significant(max(errors[1] or float("inf") for errors in marks.values()), 2)

    def cost(name: str) -> str:
        return f"{kernels[name]['instructions']:.0f}" if name in kernels else "?"

    facts = {
        "bytes": f"{results['candidates']['log8']['bytes']['256']:.3f}",
        "fp32": f"{last(parts['reference']['fp32']['one scale'])[0]:.0e}",
        "steps": f"{results['size']['marks'][-1]:,}",
        "most_steps": f"{int(max(parts['all']['log8']['one scale'], key=int)):,}",
        "adagrad_steps": f"{int(max(parts['adagrad']['log8']['one scale'], key=int)):,}",
        "cost_fp32": cost("fp32"),
        "cost_paper": cost("8bit"),
        "cost_flash": cost("FlashOptim"),
        "cost_log8": cost("log8"),
        "cost_root": cost("root log8"),
        "cost_float8": cost("float8 log8"),
        "cost_exact": cost("exact ends"),
        "saved": f"{kernels['exact ends']['instructions'] - kernels['log8']['instructions']:.0f}"
        if kernels
        else "?",
        "cost_v": cost("v as log8, stochastic; m fp32"),
        "cost_v_exact": cost("v between exact ends, stochastic; m fp32"),
        "bytes_exact": f"{results['candidates']['exact ends']['bytes']['256']:.3f}",
        "nearest_exact": at("variants", "exact ends + hand-over", "six decades"),
        "nearest_log8": at("variants", "log8 + hand-over", "six decades"),
        "cost_random": cost("random bits"),
        "m_six": at("alone", "m log8 + hand-over", "six decades"),
        "v_six": at("alone", "v log8 + stochastic v", "six decades"),
        "corrected": early("log8, handed over with the bias correction"),
        "right": early("log8"),
        "dropped": at("alone", "m dropped + hand-over"),
    }
    for short, name in SHORT.items():
        for case, key in (("one scale", "one"), ("six decades", "six"), ("sparse rows", "rows")):
            if case in parts["reference"][name]:
                facts[f"{short}_{key}"] = at("reference", name, case, 3 if key == "one" else 2)
            facts[f"{short}_{key}_later"] = at("all", name, case)
            if name in parts["finalists"]:
                facts[f"{short}_{key}_last"] = at("finalists", name, case)
        facts |= {f"{part}_{short}": range_of(part, name) for part in ("gpt", "clip")}
    for short, name in {"nearest": "log8 + hand-over", "stochastic": "log8"}.items():
        for case in LABELS:
            facts[f"{short}_{case.replace(' ', '_')}"] = at("finalists", name, case)
    for short, name in {"m8": "m log8", "m4": "m log4"}.items():
        facts |= {f"{short}_kept": at("alone", name), f"{short}_handed": at("alone", f"{name} + hand-over")}
    facts["worst_stochastic"] = worst("m linear in 4 bits, stochastic", "six decades")
    facts["worst_nearest"] = worst("m e2m1 + hand-over", "six decades")
    facts["worst_64"] = worst("m log, linear up to 64 times the smallest", "sparse rows")
    facts["worst_8"] = worst("m log, linear up to 8 times the smallest", "sparse rows")
    return facts


def findings(results: Results) -> dict[str, str]:
    """What one run found, in few numbers, to be compared with another's."""
    found = results["parts"]["finalists"]
    shown = [name for name in ("8bit", "FlashOptim", "COAT", "log8", "log4") if name in found]
    steps = f"{results['size']['marks'][-1]:,} steps"
    return {
        f"`{name}`, {LABELS[case]}, {steps}": cell(last(found[name][case])) for name in shown for case in THREE[:2]
    }


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
    "origin": origin,
    "candidates": candidates,
    "all": functools.partial(_cases, "all"),
    "finalists": functools.partial(_cases, "finalists"),
    "steps": functools.partial(_over_steps, "finalists", THREE[:2]),
    "variants": variants,
    "alone": functools.partial(_cases, "alone"),
    "blocks": blocks,
    "gpt": functools.partial(_tensors, "gpt"),
    "clip": functools.partial(_tensors, "clip"),
    "adagrad": functools.partial(_over_steps, "adagrad", THREE),
    "rules": rules,
    "instructions": instructions,
    "cross_check": functools.partial(cross_check, findings),
}
