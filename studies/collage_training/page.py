"""Tables, facts and the picture of Collage's precision strategies: the paper's figures beside ours.

A loss is compared with D's of the same beta2 and seed, from the same weights and batches; a mean difference is held
against three of its standard errors, from how differences change from seed to seed, pooled over all rows with that
beta2. Quality and loss of updates are means over the second half of a run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure

from studies.shared import pictures, readings, tables
from studies.shared.pictures import INK, Line
from studies.shared.tables import Results, apart, digits_of, machine, percent, percent2, place_of, several, table

REFERENCE = "D"
GB = 1e9

# Train and validation perplexity by beta2. GPT-125M: Table 6, global batch 1024, whose first column is Table 5's.
# BERT-base (phase 1) and RoBERTa-base: Table 3, one figure each.
PAPER: dict[str, dict[str, dict[float, tuple[float, ...]]]] = {
    "gpt2": {
        "A": {0.95: (14.73, 15.64), 0.99: (14.88, 15.80), 0.999: (17.29, 18.17)},
        "B": {0.95: (14.01, 15.03), 0.99: (14.01, 15.03), 0.999: (14.88, 15.80)},
        "C": {0.95: (14.01, 15.03), 0.99: (14.01, 15.03), 0.999: (14.15, 15.18)},
        "D": {0.95: (13.87, 15.03), 0.99: (14.01, 15.03), 0.999: (14.01, 15.03)},
    },
    "bert": {
        "A": {0.999: (8.67,), 0.98: (3.82,)},
        "B": {0.999: (5.99,), 0.98: (3.49,)},
        "C": {0.999: (5.26,), 0.98: (3.49,)},
        "D-MW": {0.999: (6.23,), 0.98: (3.82,)},
        "D": {0.999: (5.26,), 0.98: (3.46,)},
    },
}
LINES = (
    Line("D", "ink"), Line("fp32", "ink", (1, 1.5)), Line("A", "series-4"), Line("kahan", "series-3", (6, 2)),
    Line("B", "series-2", (8, 2, 1.5, 2)), Line("C", "series-1", (4, 1.5)),
    Line("adamw8bit-split8", "series-5", (2, 1.5)),
)  # fmt: skip
OPTION = ("option", lambda row: f"`{row['name']}`")


def betas(results: Results) -> list[float]:
    """The decay rates that there are runs of, from small to large."""
    return sorted({run["beta2"] for run in results["runs"]})


def runs_of(results: Results, row: str, beta2: float) -> list[Results]:
    """Runs that were made, by seed."""
    return tables.runs_of(results, row=row, beta2=beta2)


def differences(results: Results, row: str, beta2: float) -> list[float]:
    """Validation loss minus D's of the same seed."""
    return apart(runs_of(results, row, beta2), runs_of(results, REFERENCE, beta2))


def margin(results: Results, beta2: float, runs: int) -> float | None:
    """What the mean difference from D of so many runs has to exceed; None where there are too few runs to say."""
    others = [row["name"] for row in results["rows"] if row["name"] != REFERENCE]
    return readings.margin(readings.chance(differences(results, row, beta2) for row in others), runs)


def first_of(results: Results, row: str, beta2: float) -> Results | None:
    """The run with seed 0, which every row has: means over other seeds are no comparison."""
    return next((run for run in runs_of(results, row, beta2) if run["seed"] == 0), None)


def late(run: Results, key: str) -> list[float]:
    """What gauges found in the second half of a run's measured steps."""
    values = [value for value in run["gauges"][key] if value is not None]
    return values[len(values) // 2 :]


def _late(results: Results, row: str, beta2: float, key: str) -> float | None:
    runs = runs_of(results, row, beta2)
    return statistics.fmean(x for run in runs for x in late(run, key)) if runs and late(runs[0], key) else None


def _by_beta(results: Results, columns: Callable[[float], Sequence[Any]]) -> list[Any]:
    return [column for beta2 in betas(results) for column in columns(beta2)]


def perplexity(results: Results) -> str:
    """Train and validation perplexity with seed 0, the paper's and ours, by decay rate."""
    paper = PAPER.get(results["training"]["model"], {})

    def shown(run: Results | None) -> str:
        if run is None or run["diverged"]:
            return "" if run is None else "diverged"
        return " / ".join(f"{math.exp(run[key]):.2f}" for key in ("training_loss", "validation_loss"))

    columns = _by_beta(results, lambda beta2: (
        (f"β2 {beta2:g}: paper", lambda row: " / ".join(
            f"{x:.2f}" for x in paper.get(row["name"], {}).get(beta2, ()))),
        ("here", lambda row: shown(first_of(results, row["name"], beta2))),
    ))  # fmt: skip
    return table(results["rows"], OPTION, ("what is kept", "title"), ("bytes", "bytes", ".2f"), *columns, words=2)


def losses(results: Results) -> str:
    """Validation loss minus D's, seed by seed."""
    rows = [row["name"] for row in results["rows"]]
    least = ["" if (x := margin(results, beta2, 1)) is None else f"{x:.4f}" for beta2 in betas(results)]
    drawn = table(
        [name for name in rows if name != REFERENCE],
        ("loss − D", lambda name: f"`{name}`"),
        *_by_beta(
            results, lambda beta2: [(f"β2 {beta2:g}", lambda name: several(differences(results, name, beta2)))]
        ),
        last=[f"*{readings.CERTAIN:g} standard errors of a run's difference*", *least],
    )
    bad = [
        f"{name} with β2 {beta2:g} and seed {run['seed']}"
        for name in rows
        for beta2 in betas(results)
        for run in runs_of(results, name, beta2)
        if run["diverged"]
    ]
    return drawn + (f"\n*Diverged: {', '.join(bad)}.*\n" if bad else "")


def updates(results: Results) -> str:
    """Effective descent quality and lost updates in the second half of a run, by decay rate."""
    columns = _by_beta(results, lambda beta2: (
        (f"β2 {beta2:g}: EDQ", lambda row: _late(results, row["name"], beta2, "edq"), ".4f"),
        ("lost", lambda row: _late(results, row["name"], beta2, "lost"), percent2),
        ("not seen by the model", lambda row: _late(results, row["name"], beta2, "visible_lost"), percent2),
    ))  # fmt: skip
    return table(results["rows"], OPTION, *columns)


def cost(results: Results) -> str:
    """Memory of a run. Speed is for `collage_throughput`: runs here may share a GPU."""
    beta2 = results["training"]["betas"][0]
    rows = [row | {"run": runs[0]} for row in results["rows"] if (runs := runs_of(results, row["name"], beta2))]
    return table(
        rows,
        OPTION,
        ("bytes a parameter", "bytes", ".2f"),
        ("found in tensors", "run.bytes.total", ".2f"),
        ("peak, GB", "run.peak_memory", lambda peak: f"{peak / GB:.2f}"),
    )


def origin(*runs: Results) -> str:
    """What was run, on what."""
    return "\n".join(map(_origin, runs))


def _origin(results: Results) -> str:
    training = results["training"]
    return (
        f"`{results['command']}`: {training['model']} of {results['parameters']:,} parameters, {training['steps']} "
        f"steps of {training['batch']} × {training['sequence']:,} tokens of {text(results['data'])}, vocabulary "
        f"{training['vocabulary']:,}; learning rate {training['lr']:g} after {training['warmup']} steps, a cosine "
        f"to {training['final']:g} of it, weight decay {training['weight_decay']:g}, gradients' norm at most "
        f"{training['clip']:g}; {machine(results)}. {_left_out(results)}\n"
    )


def text(data: Results) -> str:
    """The text of a results file, in words."""
    return (
        f"{data['source']} ({data['train_tokens']:,} tokens, {data['validation_tokens']:,} to validate on, of "
        f"whose longer lines {percent(data['shared_lines'], 2)} stand in the training text too)"
    )


def _left_out(results: Results) -> str:
    notes = [f"{len(results['unfinished'])} runs were left out for want of time."] if results["unfinished"] else []
    notes += [f"{run['row']} failed: {run['failed']}." for run in results["runs"] if "failed" in run]
    return " ".join(notes) or "All runs were made."


def facts(results: Results) -> dict[str, str]:
    """Numbers in sentences: by row and beta2, as in `loss_adamw8bit_split8_999`."""
    named = {"runs": str(len(results["runs"])), "seeds": str(results["training"]["seeds"])}
    named |= {"steps": str(results["training"]["steps"]), "tokens": f"{results['data']['train_tokens']:,}"}
    for beta2 in betas(results):
        key = digits_of(beta2)
        if (found := margin(results, beta2, 1)) is not None:
            named[f"margin_{key}"] = f"{found:.4f}"
        for row in (row["name"] for row in results["rows"]):
            name = place_of(row)
            if values := differences(results, row, beta2):
                named[f"loss_{name}_{key}"] = f"{statistics.fmean(values):+.4f}"
            if (quality := _late(results, row, beta2, "edq")) is not None:
                named[f"edq_{name}_{key}"] = f"{quality:.3f}"
                named[f"lost_{name}_{key}"] = percent2(_late(results, row, beta2, "lost") or 0.0)
    return named


def progress(results: Results) -> Figure:
    """Figure 3: four panels at the first decay rate, seed 0; the last shows what perplexities do not."""
    beta2 = results["training"]["betas"][0]
    reference = first_of(results, REFERENCE, beta2)
    figure, ((lost, quality), (perplexities, above)) = pictures.figure(13, 8, 2, 2)
    for line in LINES:
        run = first_of(results, line.label, beta2)
        if run is None:
            continue
        style, gauges = line.style(label=line.label), run["gauges"]
        lost.plot(*pictures.points((s, x and 100 * x) for s, x in _pairs(gauges, "lost")), **style)
        perplexities.plot(
            *pictures.points((step, loss and math.exp(min(loss, 50.0))) for step, loss in run["curve"]), **style
        )
        quality.plot(*pictures.points(_pairs(gauges, "edq")), **style)
        if reference is not None:
            pairs = zip(run["curve"], reference["curve"], strict=False)
            above.plot(
                *pictures.points(
                    (step, None if loss is None or other is None else loss - other)
                    for (step, loss), (_, other) in pairs
                ),
                **style,
            )
    lost.set_title("lost updates, %", color=INK)
    quality.set_title("effective descent quality", color=INK)
    perplexities.set_title("training perplexity", color=INK)
    perplexities.set_yscale("log")
    pictures.plain_numbers(perplexities.yaxis)
    above.set_title("training loss − that of D", color=INK)
    for axis in (perplexities, above):
        axis.set_xlabel("step")
    pictures.below(figure, perplexities, 7, handlelength=2.6)
    return figure


def _pairs(gauges: Results, key: str) -> Any:
    return zip(gauges["step"], gauges[key], strict=True)


TABLES = {"perplexity": perplexity, "losses": losses, "updates": updates, "cost": cost, "origin": origin}
PICTURES = {"": progress}
