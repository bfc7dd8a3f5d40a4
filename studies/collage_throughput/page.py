"""Tables of throughput and peak memory against option D: the paper's figures beside ours.

Ratios are worked out: a step of n micro-batches takes n times forward and backward and once the optimizer. The pass
is the same work under all options with bf16 weights, and its least time among them stands for all: what they
differ by is the host's, which a step of a small model waits for.
"""

from __future__ import annotations

from collections.abc import Callable

from studies.collage_throughput.run import MODELS, TOY
from studies.memory_plans.run import GIB, TABLE_12
from studies.shared.tables import Results, markdown

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


def models(results: Results) -> list[str]:
    """The models that there are measurements of, small ones first."""
    there = {run["kind"] for run in results["runs"] if "failed" not in run}
    return [name for name in (*MODELS, TOY) if name in there]


def found(results: Results, model: str, row: str) -> Results | None:
    """A measurement, whether it fitted or not."""
    runs = [r for r in results["runs"] if (r["kind"], r["row"]) == (model, row) and "failed" not in r]
    return runs[0] if runs else None


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


def speed(results: Results) -> str:
    """Table 7."""
    names = models(results)
    head = ["option", "bytes"]
    for name in names:
        head += [f"{name}: paper", "here", f"{ACCUMULATED} accumulated"]
    lines = []
    for row in results["rows"]:
        line = [row["name"], f"{row['bytes']:.2f}"]
        for name in names:
            paper = PAPER.get(row["name"], {}).get(name)
            line.append("" if paper is None else f"{paper:.2f}×")
            line += [_times(results, name, row["name"], n) for n in (1, ACCUMULATED)]
        lines.append(line)
    return markdown(head, lines)


def _times(results: Results, model: str, row: str, accumulated: int) -> str:
    run = found(results, model, row)
    if run is not None and run["out_of_memory"]:
        return "does not fit"
    ratio = speed_up(results, model, row, accumulated)
    return "" if ratio is None else f"{ratio:.2f}×"


def milliseconds(results: Results) -> str:
    """Forward and backward, and the optimizer's step, of every option and model; tokens a second."""
    names = models(results)
    head = ["option"]
    for name in names:
        head += [f"{name}: forward, backward", "optimizer", "tokens/s"]
    tokens = results["training"]["batch"] * results["training"]["sequence"]
    lines = []
    for row in results["rows"]:
        line = [row["name"]]
        for name in names:
            run = found(results, name, row["name"])
            if run is None:
                line += ["", "", ""]
            elif run["out_of_memory"]:
                line += ["does not fit", "", ""]
            else:
                line += [f"{run['forward_backward_ms']:.1f}", f"{run['optimizer_ms']:.2f}"]
                line.append(f"{tokens / seconds(run):,.0f}")
        lines.append(line)
    return markdown(head, lines)


def memory(results: Results) -> str:
    """Figure 4 and Table 12: peaks, measured and planned, and what is saved against D."""
    names = models(results)
    head = ["option"]
    for name in names:
        head += [f"{name}: planned GB", "measured", "saved", "paper: saved"]
    lines = []
    for row in results["rows"]:
        line = [row["name"]]
        for name in names:
            line += _memory(results, name, row["name"])
        lines.append(line)
    return markdown(head, lines)


def _memory(results: Results, model: str, row: str) -> list[str]:
    run = found(results, model, row)
    said = TABLE_12.get(model, {}).get(row)
    paper = "" if said is None or row == REFERENCE else f"{-said * GIB / GB:.1f}"
    if run is None:
        return ["", "", "", paper]
    planned = "" if run["planned"] is None else f"{run['planned'] / GB:.2f}"
    if run["out_of_memory"]:
        return [planned, "does not fit", "", paper]
    if run["peak_memory"] is None:
        return [planned, "", "", paper]
    less = saved(results, model, row)
    return [planned, f"{run['peak_memory'] / GB:.2f}", "" if less is None else f"{less / GB:.2f}", paper]


def saved(results: Results, model: str, row: str) -> float | None:
    """D's peak minus an option's, in bytes; None where either was not measured, and for D itself."""
    run, reference = found(results, model, row), found(results, model, REFERENCE)
    if row == REFERENCE or run is None or reference is None:
        return None
    mine, whole = run.get("peak_memory"), reference.get("peak_memory")
    return None if mine is None or whole is None else whole - mine


def origin(results: Results) -> str:
    """What was run, on what."""
    training, environment = results["training"], results["environment"]
    of = f" of {results['device_memory'] / GB:.0f} GB" if results["device_memory"] else ""
    failed = [f"{r['kind']}, {r['row']}: {r['failed']}." for r in results["runs"] if "failed" in r]
    left = (
        f"{len(results['unfinished'])} measurements were left out for want of time."
        if results["unfinished"]
        else ""
    )
    return (
        f"`{results['command']}`: {training['batch']} × {training['sequence']:,} random tokens, medians of "
        f"{training['steps']} steps; {environment['device']}{of}, torch {environment['torch'].partition('+')[0]}. "
        f"{' '.join([left, *failed]).strip()}".rstrip()
        + "\n"
    )


def facts(results: Results) -> dict[str, str]:
    """Numbers in sentences: `speed_C_GPT_6_7B`, `accumulated_…`, `saved_…` in GiB, and a plan's worst error."""
    named = {}
    for name in models(results):
        for row in results["rows"]:
            key = "".join(c if c.isalnum() else "_" for c in f"{row['name']}_{name}")
            for prefix, n in (("speed", 1), ("accumulated", ACCUMULATED)):
                if (ratio := speed_up(results, name, row["name"], n)) is not None:
                    named[f"{prefix}_{key}"] = f"{ratio:.2f}"
            if (less := saved(results, name, row["name"])) is not None:
                named[f"saved_{key}"] = f"{less / 2**30:.1f}"
    errors = [
        abs(run["planned"] / run["peak_memory"] - 1)
        for run in results["runs"]
        if run.get("planned") is not None and run.get("peak_memory") is not None
    ]
    return named | ({"plan_error": f"{100 * max(errors):.1f} %"} if errors else {})


TABLES: dict[str, Callable[..., str]] = {
    "speed": speed,
    "milliseconds": milliseconds,
    "memory": memory,
    "origin": origin,
}
