"""Tables, facts, the picture and the reading of Collage's precision strategies: the paper's figures beside ours.

A loss is compared with D's of the same beta2 and seed, from the same weights and batches; a mean difference is held
against three of its standard errors, from how differences change from seed to seed, pooled over all rows with that
beta2. Quality and loss of updates are means over the second half of a run.

The paper's perplexities of an option and of D give a difference in loss, the logarithm of their ratio. In one
column these are either under 0.01 or at least `BEHIND`, rounded; `APART` lies between, and says which the paper
takes for behind.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure

from studies.shared import pictures, readings, tables
from studies.shared.pictures import INK, Line
from studies.shared.readings import Beside, Reading
from studies.shared.tables import Results, digits_of, left_out, per, percent, percent2, place_of, several, table

REFERENCE = "D"
GB = 1e9
APART, BEHIND = 0.02, 0.04  # nats
EQUAL = 0.02  # of effective descent quality
PLACES = {"gpt2": "Table 6", "bert": "Table 3"}
LETTERS = ("A", "B", "C", "D-MW", "A strict", "B strict", "C strict")

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
OPTION, BETA = ("option", lambda row: f"`{row['name']}`"), "β2 {:g}"


def betas(results: Results) -> list[float]:
    """The decay rates that there are runs of, from small to large."""
    return sorted({run["beta2"] for run in results["runs"]})


def beside(results: Results, beta2: float) -> Beside:
    """The runs with a decay rate, beside D's."""
    return Beside(results, REFERENCE, beta2=beta2)


def first_of(results: Results, row: str, beta2: float) -> Results | None:
    """The run with seed 0, which every row has: means over other seeds are no comparison."""
    return next((run for run in beside(results, beta2).runs(row) if run["seed"] == 0), None)


def late(results: Results, row: str, beta2: float, key: str) -> float | None:
    """The mean of what gauges found in the second half of the runs' measured steps."""
    values = [[x for x in run["gauges"][key] if x is not None] for run in beside(results, beta2).runs(row)]
    found = [x for each in values for x in each[len(each) // 2 :]]
    return statistics.fmean(found) if found else None


def perplexity(results: Results) -> str:
    """Train and validation perplexity with seed 0, the paper's and ours, by decay rate."""
    figures = PAPER.get(results["training"]["model"], {})

    def paper(beta2: float, row: Results) -> str:
        return " / ".join(f"{x:.2f}" for x in figures.get(row["name"], {}).get(beta2, ()))

    def here(beta2: float, row: Results) -> str:
        run = first_of(results, row["name"], beta2)
        if run is None or run["diverged"]:
            return "" if run is None else "diverged"
        return " / ".join(f"{math.exp(run[key]):.2f}" for key in ("training_loss", "validation_loss"))

    columns = per(betas(results), f"{BETA}: ", ("paper", paper), ("here", here))
    return table(results["rows"], OPTION, ("what is kept", "title"), ("bytes", "bytes", ".2f"), *columns, words=2)


def losses(results: Results) -> str:
    """Validation loss minus D's, seed by seed."""
    rows = [row["name"] for row in results["rows"]]
    found = {beta2: beside(results, beta2) for beta2 in betas(results)}
    least = ["" if (x := each.margin(1)) is None else f"{x:.4f}" for each in found.values()]
    drawn = table(
        [name for name in rows if name != REFERENCE],
        ("loss − D", "`{}`".format),
        *per(found, BETA, ("", lambda beta2, name: several(found[beta2].apart(name)))),
        last=[f"*{readings.CERTAIN:g} standard errors of a run's difference*", *least],
    )
    bad = [
        f"{name} with β2 {beta2:g} and seed {run['seed']}"
        for name in rows
        for beta2, each in found.items()
        for run in each.runs(name)
        if run["diverged"]
    ]
    return drawn + (f"\n*Diverged: {', '.join(bad)}.*\n" if bad else "")


def updates(results: Results) -> str:
    """Effective descent quality and lost updates in the second half of a run, by decay rate."""
    columns = per(
        betas(results), f"{BETA}: ",
        ("EDQ", lambda beta2, row: late(results, row["name"], beta2, "edq"), ".4f"),
        ("lost", lambda beta2, row: late(results, row["name"], beta2, "lost"), percent2),
        ("not seen by the model", lambda beta2, row: late(results, row["name"], beta2, "visible_lost"), percent2),
    )  # fmt: skip
    return table(results["rows"], OPTION, *columns)


def cost(results: Results) -> str:
    """Memory of a run. Speed is for `collage_throughput`: runs here may share a GPU."""
    found = beside(results, results["training"]["betas"][0])
    rows = [row | {"run": runs[0]} for row in results["rows"] if (runs := found.runs(row["name"]))]
    return table(
        rows,
        OPTION,
        ("bytes a parameter", "bytes", ".2f"),
        ("found in tensors", "run.bytes.total", ".2f"),
        ("peak, GB", "run.peak_memory", lambda peak: f"{peak / GB:.2f}"),
    )


def origin(*runs: Results) -> str:
    """What was run, on what."""
    return "\n".join(
        tables.fill_in(
            results,
            "`{command}`: {training[model]} of {parameters:,} parameters, {training[steps]} steps of "
            "{training[batch]} × {training[sequence]:,} tokens of {text}, vocabulary {training[vocabulary]:,}; "
            "learning rate {training[lr]:g} after {training[warmup]} steps, a cosine to {training[final]:g} of "
            "it, weight decay {training[weight_decay]:g}, gradients' norm at most {training[clip]:g}; "
            "{machine}. {left}",
            text=text(results["data"]),
            left=left_out(results, lambda run: run["row"]),
        )
        for results in runs
    )


def text(data: Results) -> str:
    """The text of a results file, in words."""
    return (
        f"{data['source']} ({data['train_tokens']:,} tokens, {data['validation_tokens']:,} to validate on, of "
        f"whose longer lines {percent(data['shared_lines'], 2)} stand in the training text too)"
    )


def facts(results: Results) -> dict[str, str]:
    """Numbers in sentences: by row and beta2, as in `loss_adamw8bit_split8_999`."""
    named = {}
    for beta2 in betas(results):
        key, found = digits_of(beta2), beside(results, beta2)
        if (least := found.margin(1)) is not None:
            named[f"margin_{key}"] = f"{least:.4f}"
        for row in (row["name"] for row in results["rows"]):
            name = place_of(row)
            if values := found.apart(row):
                named[f"loss_{name}_{key}"] = f"{statistics.fmean(values):+.4f}"
            if (quality := late(results, row, beta2, "edq")) is not None:
                named[f"edq_{name}_{key}"] = f"{quality:.3f}"
                named[f"lost_{name}_{key}"] = percent2(late(results, row, beta2, "lost") or 0.0)
    return named


def reading(results: Results) -> str:
    """Every statement of the paper on the model of these results, and how it reads here."""
    return readings.table([*_perplexities(results), *_figure_3(results)])


def _perplexities(results: Results) -> Iterator[Reading]:
    model = results["training"]["model"]
    paper = PAPER.get(model, {})
    for beta2 in betas(results):
        for name in LETTERS:
            says, reference = (paper.get(row, {}).get(beta2) for row in (name.removesuffix(" strict"), REFERENCE))
            made = beside(results, beta2).runs(name)
            if says is None or reference is None or (name.endswith("strict") and not made):
                continue
            worse = math.log(says[-1] / reference[-1])
            figures = f"perplexity {says[-1]:.2f}, D {reference[-1]:.2f}: loss {worse:+.4f}"
            yield _against_d(results, name, beta2, worse > APART, PLACES[model], figures)


def _against_d(results: Results, name: str, beta2: float, worse: bool, at: str, figures: str) -> Reading:
    verb = "ends behind D" if worse else "ends where D does"
    found = beside(results, beta2)
    costs, lost = found.apart(name), found.lost(name)
    least, here = found.margin(len(costs)), several(costs)
    if costs:
        here += f"; {least:.4f} to be sure" if least is not None else "; too few seeds to be sure"
    if lost:
        here = ", ".join(filter(None, (here, f"{lost} of {len(found.runs(name))} diverged")))
    # Where chance alone makes what the paper takes for behind, an equal end is no finding.
    tells = least is not None and least < BEHIND
    holds = readings.ends(costs, least, lost, worse=worse, tells=tells)
    return Reading(f"`{name}` {verb}, β2 {beta2:g}", at, figures, here, holds)


def _figure_3(results: Results) -> Iterator[Reading]:
    """The three panels, at the decay rate of the paper's, which comes first."""
    beta2, paper = results["training"]["betas"][0], "curve, BERT"
    lost = late(results, "A", beta2, "lost")
    here = "" if lost is None else percent2(lost)
    yield Reading("`A` loses most of its updates", "Figure 3, left", paper, here, (lost or 0.0) > 0.5)
    yield _against_d(results, "kahan", beta2, True, "Figure 3, middle", paper)
    yield _against_d(results, "fp32", beta2, False, "Figure 3, middle", paper)
    found = [late(results, letter, beta2, "edq") for letter in "ABCD"]
    statement = "Descent quality of `A` is below `B`'s, that below `C`'s, and that is D's"
    if None in found:
        yield Reading(statement, "Figure 3, right", paper)
        return
    a, b, c, d = found
    holds = a < b - EQUAL and b < c - EQUAL and abs(c - d) <= EQUAL
    yield Reading(statement, "Figure 3, right", paper, f"{a:.3f}, {b:.3f}, {c:.3f}, {d:.3f}", holds)


def progress(results: Results) -> Figure:
    """Figure 3: four panels at the first decay rate, seed 0; the last shows what perplexities do not."""
    beta2 = results["training"]["betas"][0]
    reference = first_of(results, REFERENCE, beta2)
    figure, ((lost, quality), (perplexities, above)) = pictures.figure(13, 8, 2, 2)

    def plot(axis: Any, pairs: Any, line: Line) -> None:
        axis.plot(*pictures.points(pairs), **line.style(label=line.label))

    for line in LINES:
        run = first_of(results, line.label, beta2)
        if run is None:
            continue
        gauges = run["gauges"]
        plot(lost, ((s, x and 100 * x) for s, x in zip(gauges["step"], gauges["lost"], strict=True)), line)
        plot(perplexities, ((step, loss and math.exp(min(loss, 50.0))) for step, loss in run["curve"]), line)
        plot(quality, zip(gauges["step"], gauges["edq"], strict=True), line)
        if reference is not None:
            pairs = zip(run["curve"], reference["curve"], strict=False)
            differences = ((s, None if None in (x, other) else x - other) for (s, x), (_, other) in pairs)
            plot(above, differences, line)
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


TABLES = {
    "perplexity": perplexity, "losses": losses, "updates": updates, "cost": cost, "origin": origin,
    "reading": reading,
}  # fmt: skip
PICTURES = {"": progress}
