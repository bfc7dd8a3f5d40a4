"""Tables, Figure 4 and the reading of throughput and peak memory against option D: the paper's figures beside ours.

Ratios are worked out: a step of n micro-batches takes n times forward and backward and once the optimizer. The pass
is the same work under all options with bf16 weights, and its least time among them stands for all: what they
differ by is the host's, which a step of a small model waits for. In readings a measured ratio within `NOISE` of 1
is not taken for a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure

from studies.collage_throughput.run import MODELS, TOY
from studies.memory_plans.run import GIB, TABLE_12
from studies.shared import pictures, readings
from studies.shared.pictures import INK, Line
from studies.shared.readings import Reading
from studies.shared.tables import Results, fill_in, machine, per, place_of, span, table

REFERENCE = "D"
OTHER_PASS = {"torch fused, fp32"}  # fp32 weights under autocast: a pass of its own
GB = 1e9
ACCUMULATED = 16
NOISE = 0.02
KEPT = 0.9  # of the speed of A that C has to keep: the paper's C keeps 0.93 to 0.97 of it
OFF = 0.05  # of the measured peak, by which a plan may be off
GPTS = ("GPT-1.3B", "GPT-2.7B", "GPT-6.7B")
LARGEST = "GPT-6.7B"
# Table 7: times as fast as D. GPT-125M is not in it.
PAPER = {
    "A": {"GPT-1.3B": 1.78, "GPT-2.7B": 2.59, "GPT-6.7B": 3.82, "OpenLLaMA-7B": 3.15},
    "B": {"GPT-1.3B": 1.74, "GPT-2.7B": 2.57, "GPT-6.7B": 3.74, "OpenLLaMA-7B": 3.14},
    "C": {"GPT-1.3B": 1.67, "GPT-2.7B": 2.48, "GPT-6.7B": 3.57, "OpenLLaMA-7B": 3.05},
    "D": {"GPT-1.3B": 1.0, "GPT-2.7B": 1.0, "GPT-6.7B": 1.0, "OpenLLaMA-7B": 1.0},
}
LINES = (
    Line("D", "ink", (), None, "o"), Line("C", "series-1", (6, 2), None, "s"),
    Line("B", "series-2", (8, 2, 1.5, 2), None, "^"), Line("A", "series-4", (2, 1.5), None, "v"),
    Line("adamw8bit-split8", "series-3", (4, 1.5), None, "D"),
    Line("torch fused, fp32", "series-5", (1, 1.5), None, "P"),
)  # fmt: skip


def models(results: Results) -> list[str]:
    """The models that there are measurements of, small ones first."""
    there = {run["kind"] for run in results["runs"] if "failed" not in run}
    return [name for name in (*MODELS, TOY) if name in there]


def found(results: Results, model: str, row: str) -> Results | None:
    """A measurement, whether it fitted or not."""
    runs = (run for run in results["runs"] if (run["kind"], run["row"]) == (model, row) and "failed" not in run)
    return next(runs, None)


def fitted(results: Results, model: str, row: str) -> Results | None:
    """A measurement of what fitted."""
    run = found(results, model, row)
    return run if run and not run["out_of_memory"] else None


def shared_pass(results: Results, model: str) -> float:
    """Milliseconds of forward and backward with bf16 weights: the least median among the options that fitted."""
    rows = (row["name"] for row in results["rows"] if row["name"] not in OTHER_PASS)
    return min(run["forward_backward_ms"] for name in rows if (run := fitted(results, model, name)))


def speed_up(results: Results, model: str, row: str, accumulated: int = 1) -> float | None:
    """Times as fast as D; None where one of the two is missing or did not fit."""
    run, reference = fitted(results, model, row), fitted(results, model, REFERENCE)
    if run is None or reference is None:
        return None
    shared = accumulated * shared_pass(results, model)
    mine = accumulated * run["forward_backward_ms"] if row in OTHER_PASS else shared
    return float((shared + reference["optimizer_ms"]) / (mine + run["optimizer_ms"]))


def saved(results: Results, model: str, row: str) -> float | None:
    """D's peak minus an option's, in bytes; None where either was not measured, and for D itself."""
    mine, whole = ((found(results, model, name) or {}).get("peak_memory") for name in (row, REFERENCE))
    return None if row == REFERENCE or mine is None or whole is None else whole - mine


def _fits(results: Results, show: Callable[[Results], str], instead: str = "") -> Callable[[str, Results], str]:
    """A function of a measurement, or what stands there if the model did not fit."""

    def shown(model: str, row: Results) -> str:
        run = found(results, model, row["name"])
        return "" if run is None else instead if run["out_of_memory"] else show(run)

    return shown


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}×"


def _gigabytes(size: float | None) -> str:
    return "" if size is None else f"{size / GB:.2f}"


def speed(results: Results) -> str:
    """Table 7."""

    def times(accumulated: int) -> Callable[[str, Results], str]:
        return _fits(
            results, lambda run: _times(speed_up(results, run["kind"], run["row"], accumulated)), "does not fit"
        )

    columns = per(
        models(results), "{}: ",
        ("paper", lambda model, row: _times(PAPER.get(row["name"], {}).get(model))),
        ("here", times(1)), (f"{ACCUMULATED} accumulated", times(ACCUMULATED)),
    )  # fmt: skip
    return table(results["rows"], ("option", "name"), ("bytes", "bytes", ".2f"), *columns)


def milliseconds(results: Results) -> str:
    """Forward and backward, and the optimizer's step, of every option and model; tokens a second."""
    tokens = results["training"]["batch"] * results["training"]["sequence"]

    def speed(run: Results) -> str:
        return f"{tokens / float((run['forward_backward_ms'] + run['optimizer_ms']) / 1e3):,.0f}"

    columns = per(
        models(results), "{}: ",
        ("forward, backward", _fits(results, lambda run: f"{run['forward_backward_ms']:.1f}", "does not fit")),
        ("optimizer", _fits(results, lambda run: f"{run['optimizer_ms']:.2f}")), ("tokens/s", _fits(results,
        speed)),
    )  # fmt: skip
    return table(results["rows"], ("option", "name"), *columns)


def memory(results: Results) -> str:
    """Figure 4 and Table 12: peaks, measured and planned, and what is saved against D."""

    def planned(model: str, row: Results) -> str:
        run = found(results, model, row["name"])
        return _gigabytes(run and run["planned"])

    def paper(model: str, row: Results) -> str:
        less = TABLE_12.get(model, {}).get(row["name"])
        return "" if less is None or row["name"] == REFERENCE else f"{-less * GIB / GB:.1f}"

    columns = per(
        models(results), "{}: ", ("planned GB", planned),
        ("measured", _fits(results, lambda run: _gigabytes(run["peak_memory"]), "does not fit")),
        ("saved", _fits(results, lambda run: _gigabytes(saved(results, run["kind"], run["row"])))),
        ("paper: saved", paper),
    )  # fmt: skip
    return table(results["rows"], ("option", "name"), *columns)


def origin(results: Results) -> str:
    """What was run, on what."""
    size, left = results["device_memory"], len(results["unfinished"])
    notes = [f"{left} measurements were left out for want of time."] if left else []
    notes += [f"{r['kind']}, {r['row']}: {r['failed']}." for r in results["runs"] if "failed" in r]
    where = machine(results).replace(", torch", f" of {size / GB:.0f} GB, torch" if size else ", torch", 1)
    sentence = (
        "`{command}`: {training[batch]} × {training[sequence]:,} random tokens, medians of {training[steps]} "
        "steps; {where}."
    )
    return fill_in(results, " ".join([sentence, *notes]), where=where)


def facts(results: Results) -> dict[str, str]:
    """Numbers in sentences: `speed_C_GPT_6_7B`, `accumulated_…`, `saved_…` in GiB, and a plan's worst error."""
    named = {}
    for model in models(results):
        for row in (row["name"] for row in results["rows"]):
            key = place_of(f"{row}_{model}")
            for prefix, n in (("speed", 1), ("accumulated", ACCUMULATED)):
                if (ratio := speed_up(results, model, row, n)) is not None:
                    named[f"{prefix}_{key}"] = f"{ratio:.2f}"
            if (less := saved(results, model, row)) is not None:
                named[f"saved_{key}"] = f"{less / 2**30:.1f}"
    errors = plan_errors(results)
    return named | ({"plan_error": f"{100 * max(errors):.1f} %"} if errors else {})


def plan_errors(results: Results) -> list[float]:
    """How far plans are off the peak, as a share of it."""
    runs = [run for run in results["runs"] if None not in (run.get("planned"), run.get("peak_memory"))]
    return [abs(run["planned"] / run["peak_memory"] - 1) for run in runs]


def reading(results: Results) -> str:
    """Every statement of the paper, and how it reads here."""
    return readings.table([*_speeds(results), *_peaks(results)])


def _range(ratios: list[float]) -> str:
    return span(ratios, _times)


def _speeds(results: Results) -> Iterator[Reading]:
    for option in "ABC":
        paper = PAPER[option]
        ratios = [ratio for model in paper if (ratio := speed_up(results, model, option)) is not None]
        here = f"{_range(ratios)}, {len(ratios)} of {len(paper)} models" if ratios else ""
        holds = readings.every(ratio > 1 + NOISE for ratio in ratios) if len(ratios) > 1 else None
        yield Reading(
            f"`{option}` is faster than D at every size", "Table 7", _range([*paper.values()]), here, holds
        )
    by_size = {m: ratio for m in GPTS if (ratio := speed_up(results, m, "C")) is not None}
    here = ", ".join(f"{_times(ratio)} ({model})" for model, ratio in by_size.items())
    rising = all(x * (1 + NOISE) < y for x, y in pairwise(by_size.values())) if len(by_size) == len(GPTS) else None
    paper = ", ".join(_times(PAPER["C"][model]) for model in GPTS)
    yield Reading("The larger the model, the more `C` gains", "Table 7", paper, here, rising)
    paper = _range([PAPER["C"][model] / PAPER["A"][model] for model in PAPER["C"]])
    both = [(speed_up(results, model, "C"), speed_up(results, model, "A")) for model in PAPER["C"]]
    shares = [c / a for c, a in both if c is not None and a is not None]
    holds = readings.every(share >= KEPT for share in shares)
    yield Reading("`C` keeps nearly all of `A`'s speed", "Section 5.3", paper, _range(shares), holds)


def _peaks(results: Results) -> Iterator[Reading]:
    runs = [[fitted(results, model, option) for option in "ABCD"] for model in models(results)]
    peaks = [[run and run["peak_memory"] for run in each] for each in runs]
    orders = [all(x < y for x, y in pairwise(each)) for each in peaks if None not in each]
    here = f"{sum(orders)} of {len(orders)} models" if orders else ""
    statement = "Peaks rise from `A` to `B`, `C` and D, at every size"
    yield Reading(statement, "Figure 4", "curves", here, readings.every(orders))
    for option in "BC":
        paper = f"{-TABLE_12[LARGEST][option] * GIB / GB:.1f} GB, on 8 GPUs"
        less = saved(results, LARGEST, option)
        here, holds = ("", None) if less is None else (f"{less / GB:.1f} GB", less > 0)
        yield Reading(f"`{option}` saves memory against D, {LARGEST}", "Table 12", paper, here, holds)
    errors = plan_errors(results)
    here = f"off by {100 * max(errors):.1f} % at most, {len(errors)} plans" if errors else ""
    statement = f"A plan is within {100 * OFF:g} % of the peak"
    holds = readings.every(error <= OFF for error in errors)
    yield Reading(statement, "this library's `plan_memory`", "", here, holds)


def peaks(results: Results) -> Figure:
    """Figure 4: peaks measured (filled) and planned (hollow), and the milliseconds of an optimizer step."""
    figure, (memory, step) = pictures.figure(13, 5, 1, 2)

    def plot(axis: Any, runs: list[Results], key: str, scale: float, **style: Any) -> None:
        shown = [run for run in runs if run[key] is not None]
        axis.plot([run["parameters"] / 1e6 for run in shown], [run[key] / scale for run in shown], **style)

    for line in LINES:
        fits = [run for model in models(results) if (run := fitted(results, model, line.label))]
        style = line.style(markersize=7)
        plot(memory, fits, "peak_memory", GB, label=line.label, **style)
        plot(memory, fits, "planned", GB, **style | {"markersize": 12, "fillstyle": "none", "linestyle": "none"})
        plot(step, fits, "optimizer_ms", 1, label=line.label, **style)
    memory.set_title("peak memory, GB (hollow: planned)", color=INK)
    step.set_title("optimizer step, ms", color=INK)
    for axis in (memory, step):
        axis.set(xscale="log", yscale="log", xlabel="parameters, millions")
        for one in (axis.xaxis, axis.yaxis):
            pictures.plain_numbers(one)
    pictures.below(figure, step, 6, handlelength=2.6)
    return figure


TABLES = {
    "speed": speed, "milliseconds": milliseconds, "memory": memory, "origin": origin, "reading": reading,
}  # fmt: skip
PICTURES = {"": peaks}
