"""Tables of the noise of inner products, paper and measured side by side, and the numbers of the sentences."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from studies.shared import pictures, tables
from studies.shared.pictures import COLORS, INK, MUTED, Line
from studies.shared.tables import Results, cross_check, origin, percent, percent2, significant, table, with_error

PRODUCTS = {
    "normal": "normal numbers",
    "output": "output",
    "grad_input": "input gradient",
    "grad_weight": "weight gradient",
}
LINES = {
    "grad_weight": Line("weight gradient", "series-1", (), 2.4),
    "grad_input": Line("input gradient", "series-3", (6, 2), 2.4),
    "output": Line("output", "series-2", (2, 1.5), 2.4),
    "normal": Line("normal numbers", "ink", (8, 2, 1.5, 2), 2.4),
}
SCHEMES = {
    "int8 row": "int8, a scale for each vector",
    "int8 tensor": "int8, a scale for the matrix",
    "e4m3 row": "float8 e4m3, a scale for each vector",
}


def _schemes(results: Results, products: Iterable[str]) -> list[tuple[str, str]]:
    """Products with the formats and scales that they were measured in."""
    return [(product, scheme) for product in products for scheme in results["summary"][product] if scheme != "k"]


# The first columns of a table by product and scheme.
NAMED = (
    lambda row: PRODUCTS[row[0]],
    lambda row: row[1].rpartition(" ")[0],
    lambda row: "vector" if row[1].endswith("row") else "matrix",
)


def slopes(results: Results) -> str:
    """How noise and signal grow with k, and where they end."""
    titles = {
        "noise": "noise", "predicted": "Equation 12, measured σ", "signal": "signal", "relative": "noise / signal",
    }  # fmt: skip

    def found(row: tuple[str, str]) -> Results:
        return results["summary"][row[0]][row[1]]

    return table(
        _schemes(results, PRODUCTS),
        *zip(("product", "format", "a scale for each"), NAMED, strict=True),
        ("paper's slope", lambda row: "1"),
        *tables.per(titles, titles.get, ("", lambda key, row: with_error(found(row)[f"{key}_slope"], 2))),
        ("noise over Equation 12", lambda row: found(row)["over_predicted"], ".2f"),
        ("noise over signal", lambda row: found(row)["relative"], percent2),
        words=3,
    )


def comparison(results: Results) -> str:
    """How much noisier the weight's gradient is than the two other products: by k, and measured."""
    summary = results["summary"]
    ends = summary["grad_weight"]

    def ratio(key: str) -> Any:
        return lambda row: significant(ends[row[1]][key] / summary[row[0]][row[1]][key], 3)

    return table(
        _schemes(results, ("output", "grad_input")),
        *zip(("compared with", "format", "a scale for each"), NAMED, strict=True),
        ("paper, CLIP ViT-H, by k", lambda row: "51.2 and 12.8"),
        ("here, by k", lambda row: length_ratio(ends["k"], summary[row[0]]["k"]), ".3g"),
        ("measured, noise / (σ_u² σ_v²)", ratio("normalised")),
        ("measured, noise / signal", ratio("relative")),
        words=3,
    )


def length_ratio(lengths: Sequence[int], others: Sequence[int]) -> float:
    """Geometric mean over the layers of how many times longer the inner products are."""
    return math.exp(statistics.fmean(math.log(a / b) for a, b in zip(lengths, others, strict=True)))


def layers(results: Results) -> str:
    """The weight's gradient layer by layer: where Equation 12 fails in int8."""

    def end(scheme: str, key: str) -> Any:
        return lambda row: row[scheme][key][-1]

    def over(scheme: str) -> Any:
        return lambda row: row[scheme]["noise"][-1] / row[scheme]["predicted"][-1]

    return table(
        [row for row in results["layers"] if row["product"] == "grad_weight"],
        ("layer", lambda row: f"`{row['layer'].removeprefix('transformer.')}`"),
        ("G: largest / RMS", end("int8 row", "crest_a"), ".0f"),
        ("G: became 0", end("int8 row", "zero_a"), percent2),
        ("int8: slope", "int8 row.noise_slope", ".2f"),
        ("over Equation 12", over("int8 row"), ".1f"),
        ("along the signal", end("int8 row", "along_signal"), percent2),
        ("noise / signal", end("int8 row", "relative"), percent2),
        ("e4m3: slope", "e4m3 row.noise_slope", ".2f"),
        ("over Equation 12", over("e4m3 row"), ".1f"),
        ("noise / signal", end("e4m3 row", "relative"), percent2),
    )


def facts(results: Results) -> dict[str, str]:
    """The numbers in the sentences of the page."""
    summary = results["summary"]
    rows = [row["int8 row"] for row in results["layers"] if row["product"] == "grad_weight"]
    *others, worst = sorted(rows, key=lambda row: row["noise_slope"])
    over = [row["noise"][-1] / row["predicted"][-1] for row in others[:-1]]
    weight, output = summary["grad_weight"], summary["output"]
    by_k = length_ratio(weight["k"], output["k"])
    float8 = [
        row["over_predicted"]
        for product, found in summary.items()
        for scheme, row in found.items()
        if product != "normal" and scheme.startswith("e")
    ]
    signals = [summary[product]["int8 row"]["signal_slope"][0] for product in PRODUCTS if product != "normal"]
    return {
        "layers": str(len(weight["k"])),
        "control_over": f"{summary['normal']['int8 tensor']['over_predicted']:.2f}",
        "float8_over": f"{min(float8):.2f} to {max(float8):.2f}",
        "int8_over": " and ".join(
            f"{weight[scheme]['over_predicted']:.1f}" for scheme in ("int8 row", "int8 tensor")
        ),
        "others_over": f"{min(over):.1f} to {max(over):.1f}",
        "vectors": str(results["vectors"]),
        "draws": str(results["draws"]),
        "int8_beyond_k": f"{weight['int8 row']['normalised'] / output['int8 row']['normalised'] / by_k:.0f}",
        "tokens": f"{results['tokens']:,}",
        "signal_slopes": f"{min(signals):.2f} to {max(signals):.2f}",
        "worst_slope": f"{worst['noise_slope']:.1f}",
        "worst_over": f"{worst['noise'][-1] / worst['predicted'][-1]:.0f}",
        "worst_zero": percent(worst["zero_a"][-1], 2),
        "worst_along": percent(worst["along_signal"][-1], 2),
        "int8_weight": percent(weight["int8 row"]["relative"], 2),
        "int8_output": percent(output["int8 row"]["relative"], 2),
        "int8_ratio": f"{weight['int8 row']['relative'] / output['int8 row']['relative']:.1f}",
        "e4m3_ratio": f"{output['e4m3 row']['relative'] / weight['e4m3 row']['relative']:.1f}",
        "crest_weight": f"{weight['int8 row']['crest_a']:.0f}",
        "crest_output": f"{output['int8 row']['crest_a']:.1f}",
        "control_row": f"{summary['normal']['int8 row']['noise_slope'][0]:.2f}",
        "control_tensor": f"{summary['normal']['int8 tensor']['noise_slope'][0]:.2f}",
    }


def findings(results: Results) -> dict[str, str]:
    """What one run found, in few numbers, to be compared with another's."""
    found = {"model, tokens of the weight gradient": f"{results['training']['model']}, {results['tokens']:,}"}
    for what, key in (
        ("slope of the noise", "noise_slope"),
        ("noise over Equation 12", "over_predicted"),
        ("noise over signal", "relative"),
    ):
        for product in ("normal", "output", "grad_weight"):
            for scheme in ("int8 row", "e4m3 row"):
                value = results["summary"][product][scheme][key]
                texts = {"noise_slope": with_error, "over_predicted": significant, "relative": percent}
                text = texts[key](value, 2)
                found[f"{what}: {PRODUCTS[product]}, {scheme.removesuffix(' row')}"] = text
    return found


def noise_against_length(results: Results) -> Figure:
    """Noise and its share of the signal against k: thin lines are layers, thick ones their geometric mean."""
    figure, grid = pictures.figure(12.5, 8.6, 2, 3, sharex=True, sharey="row")
    for column, (scheme, title) in enumerate(SCHEMES.items()):
        for axis, quantity in zip(grid[:, column], ("normalised", "relative"), strict=True):
            for product, line in LINES.items():
                rows = [row for row in results["layers"] if row["product"] == product]
                _curves(axis, [row["k"] for row in rows], [row[scheme][quantity] for row in rows], line)
        grid[0, column].set_title(title, color=INK)
        lengths = np.array([64, results["tokens"]])
        start = results["layers"][-1][scheme]["normalised"][0]
        slope = {"color": MUTED, "linewidth": 1.2, "linestyle": (0, (1, 2)), "label": "slope 1", "zorder": 4}
        grid[0, column].plot(lengths, start * lengths / 64, **slope)
    _name_worst(grid[1, 0], [row for row in results["layers"] if row["product"] == "grad_weight"])
    for axis in grid.flat:
        axis.set(xscale="log", yscale="log")
        axis.xaxis.set_major_locator(FixedLocator([64, 512, 4096, 32768]))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        axis.yaxis.set_major_locator(LogLocator(100 if axis in grid[0] else 10))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"10{tables.raised(math.log10(value))}"))
        for ticks in (axis.xaxis, axis.yaxis):
            ticks.set_minor_locator(NullLocator())
    for axis in grid[1]:
        axis.set_xlabel("k, length of the inner product")
    grid[0, 0].set_ylabel("noise / (σᵤ² σᵥ²)", color=INK)
    grid[1, 0].set_ylabel("noise / signal", color=INK)
    pictures.below(figure, grid[0, 0], 5, handlelength=2.4)
    return figure


def _name_worst(axis: Any, rows: Sequence[Results]) -> None:
    """The name of the layer whose weight gradient is the noisiest in int8, at the end of its curve."""
    worst = max(rows, key=lambda row: row["int8 row"]["relative"][-1])
    end = worst["k"][-1], worst["int8 row"]["relative"][-1]
    name = worst["layer"].removeprefix("transformer.")
    axis.annotate(name, end, (0, 6), textcoords="offset points", ha="right", color=COLORS["series-1"], fontsize=12)


def _curves(axis: Any, lengths: Sequence[Sequence[int]], values: Sequence[Sequence[float]], line: Line) -> None:
    for k, curve in zip(lengths, values, strict=True):
        axis.plot(k, curve, color=COLORS[line.color], linewidth=0.8, alpha=0.45)
    common = [k for k in lengths[0] if all(k in other for other in lengths)]
    mean = [
        math.exp(np.mean([math.log(curve[list(ks).index(k)]) for ks, curve in zip(lengths, values, strict=True)]))
        for k in common
    ]
    axis.plot(common, mean, **line.style(label=line.label, zorder=3))


TABLES = {
    "origin": origin,
    "slopes": slopes,
    "comparison": comparison,
    "layers": layers,
    "cross_check": functools.partial(cross_check, findings),
}
PICTURES = {"": noise_against_length}
