"""Tables of throughput and peak memory against option D, and Figure 4: the paper's figures beside ours.

Ratios are worked out: a step of n micro-batches takes n times forward and backward and once the optimizer. The pass
is the same work under all options with bf16 weights, and its least time among them stands for all: what they
differ by is the host's, which a step of a small model waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from studies.collage_throughput.run import MODELS, TOY
from studies.memory_plans.run import GIB, TABLE_12
from studies.shared import pictures
from studies.shared.pictures import INK, Line
from studies.shared.tables import Results, machine, place_of, table

REFERENCE = "D"
OTHER_PASS = {"torch fused, fp32"}  # fp32 weights under autocast: a pass of its own
GB = 1e9
ACCUMULATED = 16
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


def seconds(run: Results, accumulated: int = 1, forward_backward_ms: float | None = None) -> float:
    """Of a step of so many micro-batches, with the pass that was measured, or another."""
    one = run["forward_backward_ms"] if forward_backward_ms is None else forward_backward_ms
    return float((accumulated * one + run["optimizer_ms"]) / 1e3)


def shared_pass(results: Results, model: str) -> float | None:
    """Milliseconds of forward and backward with bf16 weights: the least median among the options that fitted."""
    rows = (row["name"] for row in results["rows"] if row["name"] not in OTHER_PASS)
    runs = (found(results, model, name) for name in rows)
    return min((run["forward_backward_ms"] for run in runs if run and not run["out_of_memory"]), default=None)


def speed_up(results: Results, model: str, row: str, accumulated: int = 1) -> float | None:
    """Times as fast as D; None where one of the two is missing or did not fit."""
    run, reference = found(results, model, row), found(results, model, REFERENCE)
    if run is None or reference is None or run["out_of_memory"] or reference["out_of_memory"]:
        return None
    one = shared_pass(results, model)
    mine = seconds(run, accumulated, None if row in OTHER_PASS else one)
    return seconds(reference, accumulated, one) / mine


def saved(results: Results, model: str, row: str) -> float | None:
    """D's peak minus an option's, in bytes; None where either was not measured, and for D itself."""
    run, reference = found(results, model, row), found(results, model, REFERENCE)
    if row == REFERENCE or run is None or reference is None:
        return None
    mine, whole = run.get("peak_memory"), reference.get("peak_memory")
    return None if mine is None or whole is None else whole - mine


def _by_model(results: Results, *shown: tuple[str, Callable[[str, str], Any]], more: tuple[Any, ...] = ()) -> str:
    """A table of options; a group of columns a model, of functions of the model and the option."""
    columns = [
        (f"{model}: {title}" if not place else title, lambda row, show=show, model=model: show(model, row["name"]))
        for model in models(results)
        for place, (title, show) in enumerate(shown)
    ]
    return table(results["rows"], ("option", "name"), *more, *columns)


def _fits(results: Results, show: Callable[[Results], str], instead: str = "") -> Callable[[str, str], str]:
    """A function of a measurement, or what stands there if the model did not fit."""

    def shown(model: str, row: str) -> str:
        run = found(results, model, row)
        return "" if run is None else instead if run["out_of_memory"] else show(run)

    return shown


def speed(results: Results) -> str:
    """Table 7."""

    def times(accumulated: int) -> Callable[[str, str], str]:
        def shown(model: str, row: str) -> str:
            ratio = speed_up(results, model, row, accumulated)
            return "" if ratio is None else f"{ratio:.2f}×"

        return lambda model, row: _fits(results, lambda _: shown(model, row), "does not fit")(model, row)

    def paper(model: str, row: str) -> str | None:
        said = PAPER.get(row, {}).get(model)
        return said and f"{said:.2f}×"

    columns = ("paper", paper), ("here", times(1)), (f"{ACCUMULATED} accumulated", times(ACCUMULATED))
    return _by_model(results, *columns, more=(("bytes", "bytes", ".2f"),))


def milliseconds(results: Results) -> str:
    """Forward and backward, and the optimizer's step, of every option and model; tokens a second."""
    tokens = results["training"]["batch"] * results["training"]["sequence"]
    return _by_model(
        results,
        ("forward, backward", _fits(results, lambda run: f"{run['forward_backward_ms']:.1f}", "does not fit")),
        ("optimizer", _fits(results, lambda run: f"{run['optimizer_ms']:.2f}")),
        ("tokens/s", _fits(results, lambda run: f"{tokens / seconds(run):,.0f}")),
    )


def memory(results: Results) -> str:
    """Figure 4 and Table 12: peaks, measured and planned, and what is saved against D."""

    def gigabytes(size: float | None) -> str:
        return "" if size is None else f"{size / GB:.2f}"

    def planned(model: str, row: str) -> str:
        run = found(results, model, row)
        return gigabytes(run and run["planned"])

    def less(model: str, row: str) -> str:
        return _fits(results, lambda _: gigabytes(saved(results, model, row)))(model, row)

    def paper(model: str, row: str) -> str:
        said = TABLE_12.get(model, {}).get(row)
        return "" if said is None or row == REFERENCE else f"{-said * GIB / GB:.1f}"

    measured = _fits(results, lambda run: gigabytes(run["peak_memory"]), "does not fit")
    columns = ("planned GB", planned), ("measured", measured), ("saved", less), ("paper: saved", paper)
    return _by_model(results, *columns)


def origin(results: Results) -> str:
    """What was run, on what."""
    training, left = results["training"], len(results["unfinished"])
    size = results["device_memory"]
    device = machine(results).replace(", torch", f" of {size / GB:.0f} GB, torch" if size else ", torch", 1)
    notes = [f"{left} measurements were left out for want of time."] if left else []
    notes += [f"{r['kind']}, {r['row']}: {r['failed']}." for r in results["runs"] if "failed" in r]
    return (
        f"`{results['command']}`: {training['batch']} × {training['sequence']:,} random tokens, medians of "
        f"{training['steps']} steps; {device}. {' '.join(notes)}".rstrip()
        + "\n"
    )  # fmt: skip


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


def peaks(results: Results) -> Figure:
    """Figure 4: peaks measured (filled) and planned (hollow), and the milliseconds of an optimizer step."""
    figure, (memory, step) = pictures.figure(13, 5, 1, 2)

    def plot(axis: Any, runs: list[Results], key: str, scale: float, **style: Any) -> None:
        shown = [run for run in runs if run[key] is not None]
        axis.plot([run["parameters"] / 1e6 for run in shown], [run[key] / scale for run in shown], **style)

    for line in LINES:
        runs = [run for model in models(results) if (run := found(results, model, line.label)) is not None]
        fits = [run for run in runs if not run["out_of_memory"]]
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


TABLES = {"speed": speed, "milliseconds": milliseconds, "memory": memory, "origin": origin}
PICTURES = {"": peaks}
