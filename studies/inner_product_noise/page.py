"""Tables of the noise of inner products, paper and measured side by side, and the numbers of the sentences."""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from studies.shared import pictures
from studies.shared.pictures import COLORS, INK, MUTED, Line
from studies.shared.tables import Results, cross_check, markdown, origin, percent, raised, significant, with_error

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


def slopes(results: Results) -> str:
    """How noise and signal grow with k, and where they end."""
    rows = []
    for product, title in PRODUCTS.items():
        found = results["summary"][product]
        for scheme in (key for key in found if key != "k"):
            row = found[scheme]
            format, _, scale = scheme.rpartition(" ")
            rows.append((
                title, format, "vector" if scale == "row" else "matrix", "1",
                *(with_error(row[f"{key}_slope"], 2) for key in ("noise", "predicted", "signal", "relative")),
                f"{row['over_predicted']:.2f}", percent(row["relative"], 2),
            ))  # fmt: skip
    head = (
        "product", "format", "a scale for each", "paper's slope", "noise", "Equation 12, measured σ", "signal",
        "noise / signal", "noise over Equation 12", "noise over signal",
    )  # fmt: skip
    return markdown(head, rows, words=3)


def comparison(results: Results) -> str:
    """How much noisier the weight's gradient is than the two other products: by k, and measured."""
    rows = []
    for other, paper in (("output", "51.2 and 12.8"), ("grad_input", "51.2 and 12.8")):
        ends, base = results["summary"]["grad_weight"], results["summary"][other]
        by_k = length_ratio(ends["k"], base["k"])
        for scheme in (key for key in base if key != "k"):
            format, _, scale = scheme.rpartition(" ")
            ratios = [ends[scheme][key] / base[scheme][key] for key in ("normalised", "relative")]
            rows.append((
                PRODUCTS[other], format, "vector" if scale == "row" else "matrix", paper,
                f"{by_k:.3g}", *(significant(ratio, 3) for ratio in ratios),
            ))  # fmt: skip
    head = (
        "compared with", "format", "a scale for each", "paper, CLIP ViT-H, by k", "here, by k",
        "measured, noise / (σ_u² σ_v²)", "measured, noise / signal",
    )  # fmt: skip
    return markdown(head, rows, words=3)


def length_ratio(lengths: Sequence[int], others: Sequence[int]) -> float:
    """Geometric mean over the layers of how many times longer the inner products are."""
    return math.exp(statistics.fmean(math.log(a / b) for a, b in zip(lengths, others, strict=True)))


def layers(results: Results) -> str:
    """The weight's gradient layer by layer: where Equation 12 fails in int8."""
    rows = []
    for row in (row for row in results["layers"] if row["product"] == "grad_weight"):
        int8, e4m3 = row["int8 row"], row["e4m3 row"]
        rows.append((
            f"`{re.sub(r'^transformer[.]', '', row['layer'])}`",
            f"{int8['crest_a'][-1]:.0f}", percent(int8["zero_a"][-1], 2), f"{int8['noise_slope']:.2f}",
            f"{int8['noise'][-1] / int8['predicted'][-1]:.1f}", percent(int8["along_signal"][-1], 2),
            percent(int8["relative"][-1], 2),
            f"{e4m3['noise_slope']:.2f}", f"{e4m3['noise'][-1] / e4m3['predicted'][-1]:.1f}",
            percent(e4m3["relative"][-1], 2),
        ))  # fmt: skip
    head = (
        "layer", "G: largest / RMS", "G: became 0", "int8: slope", "over Equation 12", "along the signal",
        "noise / signal", "e4m3: slope", "over Equation 12", "noise / signal",
    )  # fmt: skip
    return markdown(head, rows)


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
        "crest_whole": f"{weight['int8 tensor']['crest_a']:.0f}",
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
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"10{raised(math.log10(value))}"))
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


def _curves(
    axis: Any,
    lengths: Sequence[Sequence[int]],
    values: Sequence[Sequence[float]],
    line: Line,
) -> None:
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
