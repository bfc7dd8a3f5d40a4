"""Tables, facts and the picture of the magnitudes in a training."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from studies.shared import pictures, tables
from studies.shared.pictures import INK, Line
from studies.shared.tables import Results, fill_in, per, significant, table
from studies.training_magnitudes.run import MODELS

DECAY = 0.9  # of the moving average: the default of `LinearPlan.with_moving_average`
GRADIENT, FEATURES = "feed-forward gradient", ("first block", "last block")
Ratios = Callable[[str], list[float]]


def runs_of(results: Results, kind: str) -> list[Results]:
    """Those of a kind that were made, by seed."""
    return tables.runs_of(results, kind=kind)


def rows_of(results: Results) -> list[Results]:
    """The models that there are runs of."""
    return [row for row in results["rows"] if runs_of(results, row["name"])]


def over(results: Results, kind: str, upper: str, lower: str) -> list[float]:
    """A series over another, at every point of every seed."""
    return [a / b for run in runs_of(results, kind) for a, b in zip(run[upper], run[lower], strict=True)]


def gradient_ratios(results: Results, kind: str, of: str) -> list[float]:
    """Largest element of the embedding's gradient over the median or the largest of other matrices', by step."""
    return over(results, kind, "embedding_gradient", f"{of}_gradient")


def averages_before(values: list[float]) -> Iterator[float]:
    """The moving average as it stands before each step."""
    average = values[0]
    for value in values:
        yield average
        average = DECAY * average + (1 - DECAY) * value


def overs(results: Results, kind: str, series: str) -> list[float]:
    """Largest magnitudes over the moving average of those before, of all seeds, after the warm-up."""
    first = max(1, results["training"][kind]["warmup"])
    return [
        value / average
        for values in (run[f"{series}, max"] for run in runs_of(results, kind))
        for value, average in list(zip(values, averages_before(values), strict=True))[first:]
    ]


def jumps(results: Results, kind: str, series: str) -> list[float]:
    """Largest magnitude over that of the step before, after the warm-up."""
    first = max(1, results["training"][kind]["warmup"])
    return [
        values[t] / values[t - 1]
        for values in (run[f"{series}, max"] for run in runs_of(results, kind))
        for t in range(first, len(values))
    ]


def spans(results: Results, kind: str, of: str) -> list[float]:
    """Orders of magnitude of second moments at the looks after the warm-up, all seeds; `of`: median or most."""
    return [
        orders
        for run in runs_of(results, kind)
        for step, orders in zip(run["looked"], run[f"second_moment_orders, {of}"], strict=True)
        if step > results["training"][kind]["warmup"]
    ]


def of(show: Callable[[list[float]], Any], ratios: Ratios) -> Callable[[Results], Any]:
    """A cell: a figure of the ratios of a row's model."""
    return lambda row: show(ratios(row["name"]))


def beyond(limit: float) -> Callable[[list[float]], float]:
    """The share of the values beyond a limit."""
    return lambda values: sum(r > limit for r in values) / len(values)


def norms(results: Results) -> str:
    """Weights beside updates (Collage, Figure 2)."""
    median = statistics.median

    def ratios(kind: str) -> list[float]:
        return over(results, kind, "weight_norm", "update_norm")

    def ends(read: Callable[[Results], float]) -> Callable[[Results], float]:
        return lambda row: statistics.fmean(map(read, runs_of(results, row["name"])))

    return table(
        rows_of(results),
        ("", lambda row: f"{row['title']}, {row['parameters']:,} parameters"),
        ("‖θ‖, end", ends(lambda run: run["weight_norm"][-1]), ".1f"),
        ("‖Δθ‖, largest", ends(lambda run: max(run["update_norm"])), ".3f"),
        ("‖θ‖ / ‖Δθ‖, least", of(min, ratios), ",.0f"), ("median", of(median, ratios), ",.0f"),
        ("largest", of(max, ratios), ",.0f"),
    )  # fmt: skip


def gradients(results: Results) -> str:
    """Embeddings beside other matrices (8-bit optimizers, Appendix C)."""
    titles = {"median": "over the median matrix: ", "largest": "over the largest other matrix: "}

    def shown(show: Callable[[list[float]], float]) -> Callable[[str, Results], float]:
        return lambda of, row: show(gradient_ratios(results, row["name"], of))

    return table(
        rows_of(results),
        ("", "title"),
        *per(titles, titles.get, ("median step", shown(statistics.median), ".1f"), ("largest", shown(max), ".1f")),
        ("steps in which it is the largest", lambda row: shown(beyond(1))("largest", row), ".0%"),
    )


def averages(results: Results) -> str:
    """Largest magnitudes, one step beside the last ones (SwitchBack, Section 2.3)."""
    rows = [
        (f"{row['title']}: {series}", overs(results, row["name"], series), jumps(results, row["name"], series))
        for row in rows_of(results)
        for series in (GRADIENT, *FEATURES)
    ]
    return table(
        rows,
        ("absmax of", lambda row: row[0]),
        ("one step to the next, median", lambda row: statistics.median(max(j, 1 / j) for j in row[2]), ".2f"),
        ("largest rise", lambda row: max(row[2]), ".2f"),
        ("steps above the average", lambda row: beyond(1)(row[1]), ".0%"),
        ("1.5 times above it", lambda row: beyond(1.5)(row[1]), ".1%"),
        ("furthest above", lambda row: max(row[1]), ".2f"),
    )


def second_moments(results: Results) -> str:
    """Orders of magnitude of v (8-bit optimizers, Section 2.2)."""
    median = statistics.median

    def middle(kind: str) -> list[float]:
        return spans(results, kind, "median")

    def most(kind: str) -> list[float]:
        return spans(results, kind, "most")

    return table(
        rows_of(results),
        ("", "title"), ("median matrix: least", of(min, middle), ".1f"), ("median look", of(median, middle), ".1f"),
        ("most", of(max, middle), ".1f"), ("widest matrix: median look", of(median, most), ".1f"),
        ("most", of(max, most), ".1f"),
    )  # fmt: skip


def origin(results: Results) -> str:
    """What was run, on what."""
    told = []
    for row in rows_of(results):
        training, seeds = results["training"][row["name"]], len(runs_of(results, row["name"]))
        told.append(
            "{row[model]} of {row[parameters]:,} parameters, {seeds}, {training[steps]} steps of "
            "{training[batch]} × "
            "{training[sequence]:,} tokens, learning rate {training[lr]:g} after {training[warmup]} steps".format(
                row=row, training=training, seeds="1 seed" if seeds == 1 else f"{seeds} seeds"
            )
        )
    return fill_in(
        results,
        "`{command}`: {told}; {data[source]}; AdamW in fp32, β2 0.999, norm of gradients at most "
        "{training[causal][clip]:g}; {machine}.",
        told="; ".join(told),
    )


def facts(results: Results) -> dict[str, str]:
    """Every number in the page's sentences."""
    found: dict[str, str] = {"seeds": str(results["training"]["seeds"])}
    for kind in MODELS:
        if runs_of(results, kind):
            found |= {f"{name}_{kind}": value for name, value in _of_kind(results, kind).items()}
    return found


def _of_kind(results: Results, kind: str) -> dict[str, str]:
    ratios = over(results, kind, "weight_norm", "update_norm")
    middle, beside = (gradient_ratios(results, kind, of) for of in ("median", "largest"))
    features = [r for series in FEATURES for r in overs(results, kind, series)]
    steady = [max(j, 1 / j) - 1 for series in FEATURES for j in jumps(results, kind, series)]
    gradient, moves = overs(results, kind, GRADIENT), jumps(results, kind, GRADIENT)
    training = results["training"][kind]
    found = {
        "tokens": f"{training['batch'] * training['sequence']:,}",
        "norms": significant(statistics.median(ratios), 2),
        "norms_least": significant(min(ratios), 2),
        "embedding": f"{statistics.median(middle):.0f}",
        "embedding_most": f"{max(middle):.0f}",
        "embedding_beside": f"{max(beside):.0f}",
        "steps": f"{beyond(1)(beside):.0%}",
        "features": f"{statistics.median(steady):.0%}",
        "features_over": f"{max(features):.2f}",
        "gradient": f"{statistics.median(max(m, 1 / m) - 1 for m in moves):.0%}",
        "gradient_over": f"{max(gradient):.1f}",
        "gradient_far": f"{beyond(1.5)(gradient):.0%}",
    }
    if "second_moment_orders, median" in runs_of(results, kind)[0]:  # later than the first results
        orders = spans(results, kind, "median")
        found["orders"] = f"{min(orders):.1f} to {max(orders):.1f}"
        found["orders_most"] = f"{max(spans(results, kind, 'most')):.1f}"
    return found


def magnitudes(results: Results) -> Figure:
    """Weights and updates, embeddings and others, a largest magnitude and its average: a row a model, seed 0."""
    rows = rows_of(results)
    figure, grid = pictures.figure(13, 3.9 * len(rows), len(rows), 3, squeeze=False)
    for row, panels in zip(rows, grid, strict=True):
        run = runs_of(results, row["name"])[0]
        steps, values = range(1, len(run["loss"]) + 1), run["last block, max"]
        dashed, dotted = (6, 2), (2, 1.5)
        shown = (
            (f"{row['title']}: norm of all weights, and of a step's update", run["looked"], (
                (Line("weights", "ink", (), None), run["weight_norm"]),
                (Line("update", "series-1", dashed, None), run["update_norm"]),
            )),
            ("largest element of the gradient", steps, (
                (Line("token embedding", "series-1", (), 1.2), run["embedding_gradient"]),
                (Line("largest other", "series-3", dashed, 1.2), run["largest_gradient"]),
                (Line("median matrix", "series-2", dotted, 1.2), run["median_gradient"]),
            )),
            ("what the last block gives out", steps, (
                (Line("largest magnitude", "ink", (), 1.2), values),
                (Line("its moving average", "series-1", dashed, 1.2), list(averages_before(values))),
                (Line("mean magnitude", "series-2", dotted, 1.2), run["last block, mean"]),
            )),
        )  # fmt: skip
        for axis, (title, at, series) in zip(panels, shown, strict=True):
            for line, found in series:
                axis.plot(at, found, **line.style(label=line.label))
            axis.set_title(title, color=INK, fontsize=11)
            axis.set(yscale="log", xlabel="step")
            axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
            pictures.ticks(axis.yaxis, None)
            axis.legend(frameon=False, fontsize=10, loc="best")
    return figure


TABLES = {
    "norms": norms, "gradients": gradients, "averages": averages, "second_moments": second_moments,
    "origin": origin,
}  # fmt: skip
PICTURES = {"": magnitudes}
