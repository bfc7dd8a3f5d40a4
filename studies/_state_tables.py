"""Tables of the state codecs in Markdown, and the numbers of the page's sentences."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from _state_bench import exploded
from _tables import Results, cross_check, markdown, significant

LABELS = {
    "one scale": "(a) one scale",
    "six decades": "(b) six decades",
    "sparse rows": "(c) sparse rows",
    "sparse elements": "(c) sparse elements",
    "down 30": "(d) down 30",
    "up 30": "(d) up 30",
}
THREE = ("one scale", "six decades", "sparse rows")
FORMS = {
    "": "plain",
    " + hand-over": "hand-over",
    " + stochastic v": "stochastic v",
    " + hand-over + stochastic v": "both",
}
RULES = {"sgd": "SGD with momentum", "lamb": "LAMB", "lion": "Lion"}
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


def _title(results: Results, name: str) -> str:
    return f"`{name}`" + " †" * (name in results["library"])


def _cost(results: Results, name: str) -> tuple[str, str]:
    """Instructions and gathers of both moments, random bits included; blank where one was not counted."""
    candidate, kernels = results["candidates"][name], results["kernels"] or {}
    wanted = candidate["kernels"] + ["random bits"] * candidate["best"][1]
    if not kernels.keys() >= set(wanted):
        return "", ""
    return tuple(f"{sum(kernels[kernel][key] for kernel in wanted):.0f}" for key in ("instructions", "gathers"))


def candidates(results: Results) -> str:
    """Every candidate: what it is, what it costs, and the usual simulation."""
    found, rows = results["parts"]["reference"], []
    for name, candidate in results["candidates"].items():
        form = FORMS[" + hand-over" * candidate["best"][0] + " + stochastic v" * candidate["best"][1]]
        what = candidate["says"] + {"plain": "", "both": "; hand-over, stochastic v"}.get(form, f"; {form}")
        errors = [both(last(found[name][case])) for case in ("one scale", "six decades")]
        rows.append(
            (_title(results, name), what, f"{candidate['bytes']['256']:.3f}", *_cost(results, name), *errors)
        )
    head = ("", "m and v", "bytes", "instructions", "gathers", LABELS["one scale"], LABELS["six decades"])
    return markdown(head, rows, 2)


def _cases(part: str, results: Results) -> str:
    """All cases at the end of a part."""
    found = results["parts"][part]
    rows = [(_title(results, name), *(both(last(found[name][case])) for case in LABELS)) for name in found]
    return markdown(("", *LABELS.values()), rows)


def _over_steps(part: str, cases: Sequence[str], results: Results) -> str:
    """Some cases at all marks."""
    found = results["parts"][part]
    marks = list(next(iter(found.values()))[cases[0]])
    head = [f"{LABELS[case][:3]} {int(mark):,}" for case in cases for mark in marks]
    rows = [
        (_title(results, name), *(cell(found[name][case][mark]) for case in cases for mark in marks))
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
            _title(results, name),
            *(cell(last(found[name][f"{case} {size}"])) for case in THREE[:2] for size in sizes),
        )
        for name in found
    ]
    return markdown(("", *(f"{LABELS[case][:3]} {size}" for case in THREE[:2] for size in sizes)), rows)


def _tensors(part: str, results: Results) -> str:
    """A training, by tensor."""
    found = results["parts"][part]
    tensors = list(next(iter(found.values())))
    rows = [(_title(results, name), *(both(last(found[name][tensor])) for tensor in tensors)) for name in found]
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
    """The cost of each codec alone."""
    kernels = results["kernels"] or {}
    rows = [(name, f"{count['instructions']:.1f}", f"{count['gathers']:.0f}") for name, count in kernels.items()]
    return markdown(("decode and encode", "instructions an element", "gathers"), rows)


def origin(results: Results) -> str:
    """What was run, on what."""
    environment, size, training = results["environment"], results["size"], results["training"]
    return (
        f"`{results['command']}`: {results['minutes']:.0f} minutes, {environment['device']}, torch "
        f"{environment['torch'].partition('+')[0]}, seed {training['seed']}. {size['reference']:,} elements a case "
        f"for the usual simulation, {size['numel']:,} for the rest; trainings of {size['recorded']:,} steps, "
        f"{training['model']} model, learning rate {training['lr']:g}.\n"
    )


def state_facts(results: Results) -> dict[str, str]:
    """Numbers of the page's sentences."""
    parts, kernels = results["parts"], results["kernels"] or {}

    def usual(name: str, case: str = "one scale", digits: int = 2) -> str:
        return significant(last(parts["reference"][name][case])[0] or 0.0, digits)

    def at(part: str, name: str, case: str) -> str:
        return significant(last(parts[part][name][case])[0] or 0.0, 2)

    return {
        "paper_one": usual("8bit", digits=3),
        "paper_six": usual("8bit", "six decades"),
        "flash_one": usual("FlashOptim", digits=3),
        "flash_six": usual("FlashOptim", "six decades"),
        "log8_one": usual("log8"),
        "log8_six": usual("log8", "six decades"),
        "log8_bytes": f"{results['candidates']['log8']['bytes']['256']:.3f}",
        "fp32_one": f"{last(parts['reference']['fp32']['one scale'])[0]:.0e}",
        "dropped": usual("m dropped + hand-over"),
        "m_only": usual("m k^1.5"),
        "m_only_handed": usual("m k^1.5 + hand-over"),
        "m4_only": usual("m log4"),
        "m4_only_handed": usual("m log4 + hand-over"),
        "random_bits": f"{kernels['random bits']['instructions']:.0f}" if kernels else "?",
        "up_nearest": at("finalists", "log8 + hand-over", "up 30"),
        "up_stochastic": at("finalists", "log8", "up 30"),
        "down_nearest": at("finalists", "log8 + hand-over", "down 30"),
        "down_stochastic": at("finalists", "log8", "down 30"),
        "six_nearest": at("finalists", "log8 + hand-over", "six decades"),
        "six_stochastic": at("finalists", "log8", "six decades"),
        "steps": f"{results['size']['marks'][-1]:,}",
        "most_steps": f"{results['size']['marks'][-2]:,}",
        "stochastic_m_worst": _worst(parts["alone"]["m in 4 bits stochastic"]["six decades"]),
        "corrected": at("alone", "handed over with the bias correction", "one scale"),
        "coarse_worst": _worst(parts["alone"]["m linear up to 64 times the smallest"]["sparse rows"]),
        "fine_worst": _worst(parts["alone"]["m linear up to 8 times the smallest"]["sparse rows"]),
    }


def _worst(marks: Results) -> str:
    return significant(max(errors[1] or float("inf") for errors in marks.values()), 2)


def findings(results: Results) -> dict[str, str]:
    """What one run found, in few numbers, to be compared with another's."""
    found = results["parts"]["finalists"]
    shown = [name for name in ("8bit", "FlashOptim", "COAT", "relative 1.5", "log8", "log4") if name in found]
    steps = f"{results['size']['marks'][-1]:,} steps"
    return {
        f"{_title(results, name)}, {LABELS[case]}, {steps}": cell(last(found[name][case]))
        for name in shown
        for case in THREE[:2]
    }


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
