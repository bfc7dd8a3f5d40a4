"""Tables of the quantization error in Markdown, paper and measured side by side, and the numbers of sentences."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter

from studies.shared import pictures
from studies.shared.pictures import COLORS, INK, Line
from studies.shared.tables import Results, cross_check, origin, percent2, raised, significant, table, with_error

# 8-bit Optimizers via Block-wise Quantization, Table 6: relative Adam error and its standard error in percent,
# absolute error of the first state and its standard error in 1e-10.
TABLE_6 = {
    "linear": (201.0, 17.0, 41.2, 3.1),
    "quantile": (211.9, 0.3, 8.8, 0.9),
    "inverse_dynamic": (216.5, 0.1, 4.6, 0.4),
    "dynamic": (214.8, 0.4, 3.5, 1.1),
}
# The same, Appendix D: mean absolute Adam error of dynamic quantization, tensor-wise and in blocks of 2048.
APPENDIX_D = {("dynamic", "tensor"): "0.0067", ("dynamic", "2048"): "0.0061"}
TITLES = {
    "linear": "linear",
    "quantile": "quantile",
    "quantile_normal": "quantile, of a normal distribution",
    "inverse_dynamic": "inverse dynamic",
    "dynamic": "dynamic",
    "dynamic_tree": "dynamic tree",
    "fp8_e4m3": "float8 e4m3",
}
BLOCKS = ("tensor", "2048", "256")
MAPS = {
    "linear tensor": "linear, tensor-wise",
    "dynamic tensor": "dynamic, tensor-wise",
    "dynamic 2048": "dynamic, blocks of 2048",
}
QUANTITIES = {
    "usage": ("use: share of the updates", "viridis", (-8, -2)),
    "absolute": ("mean |u − u₈|", "magma", (-5, 3)),
    "relative": ("mean |u − u₈| / |u|", "magma", (-3, 3)),
}
RARE = 1e-6  # share of the updates below which the mean error of a code is left out: chance
LINES = {
    "linear tensor": Line("linear", "series-1", (2, 1.5)),
    "quantile tensor": Line("quantile", "series-4", (8, 2, 1.5, 2)),
    "inverse_dynamic tensor": Line("inverse dynamic", "series-3", (4, 1.5)),
    "dynamic tensor": Line("dynamic", "series-2", (6, 2)),
    "dynamic 2048": Line("dynamic, blocks of 2048", "ink"),
}


def absolute_errors(results: Results) -> str:
    """Table 6, right column: the absolute error of m, tensor-wise."""
    error = {name: found["tensor"]["absolute_error_of_m"] for name, found in results["maps"].items()}
    widest = max(results["tensor_by_tensor"].values(), key=lambda tensor: tensor["largest_over_mean_m"])
    widest = widest["absolute_error_of_m"]
    return table(
        TITLES,
        ("map", TITLES.get),
        ("paper, 10⁻¹⁰", TABLE_6.get, lambda paper: f"{paper[2]:.1f} ± {paper[3]:.1f}"),
        ("over dynamic", TABLE_6.get, lambda paper: f"{paper[2] / TABLE_6['dynamic'][2]:.1f}"),
        ("measured, 10⁻⁷", lambda name: with_error(error[name], 2, 1e7)),
        ("over dynamic", lambda name: error[name][0] / error["dynamic"][0], ".1f"),
        ("token embedding, over dynamic", lambda name: widest[name] / widest["dynamic"], ".1f"),
    )


def relative_errors(results: Results) -> str:
    """Table 6, left column: the relative Adam error, tensor-wise, under three readings and three averages."""
    found = {name: results["maps"][name]["tensor"] for name in TITLES}

    def spread(pair: Sequence[float]) -> str:
        return f"{significant(100 * pair[0], 3)} ± {significant(100 * (pair[1] or 0), 2)} %"

    return table(
        TITLES,
        ("map", TITLES.get),
        ("paper", TABLE_6.get, lambda paper: f"{paper[0]:g} ± {paper[1]:g} %"),
        ("m alone", lambda name: found[name]["m"]["relative"], spread),
        ("both, matched ε", lambda name: found[name]["matched"]["relative"], spread),
        ("both, ε = 10⁻⁸", lambda name: found[name]["both"]["relative"], spread),
        ("its median", lambda name: found[name]["both"]["relative_median"], percent2),
        ("its ‖Δu‖ / ‖u‖", lambda name: found[name]["both"]["relative_norm"], percent2),
    )


def adam_errors(results: Results) -> str:
    """Appendix D and Figure 4 in numbers, by map and block."""
    names = ("linear", "quantile", "dynamic", "fp8_e4m3")
    rows = [results["maps"][name][block] | {"of": (name, block)} for name in names for block in BLOCKS]
    two = functools.partial(significant, digits=2)
    return table(
        rows,
        ("map", lambda row: TITLES[row["of"][0]]),
        ("block", lambda row: row["of"][1]),
        ("paper", lambda row: APPENDIX_D.get(row["of"])),
        ("matched ε", "matched.absolute", two),
        ("ε = 10⁻⁸", "both.absolute", two),
        ("without v that became 0", "both.absolute_without_zero_v", two),
        ("v became 0, m did not", "divided_by_eps_alone", percent2),
        (f"errors above {results['limits']['large'][0]:g}", lambda row: row["both"]["large"][0], percent2),
        ("overlap", "both.overlap", percent2),
        words=2,
    )


def facts(results: Results) -> dict[str, str]:
    """The numbers in the sentences of the page."""
    maps, runs = results["maps"], results["two_runs"]
    tensors = results["tensor_by_tensor"].values()
    crest = [tensor["largest_over_mean_m"] for tensor in tensors]
    ratios = {
        name: [tensor["absolute_error_of_m"][name] / tensor["absolute_error_of_m"]["dynamic"] for tensor in tensors]
        for name in ("quantile", "quantile_normal", "inverse_dynamic")
    }
    error = {name: found["tensor"]["absolute_error_of_m"][0] for name, found in maps.items()}
    small = maps["dynamic"]["tensor"]["m"]["small"]
    first, last = runs.values()
    return {
        "tensors": str(results["tensors"]),
        "elements": f"{results['elements'] / 1e6:.3g} million",
        "snapshots": ", ".join(map(str, results["snapshots"][:-1])) + f" and {results['snapshots'][-1]}",
        "matched_eps": _power_of_ten(results["matched_eps"]),
        "size_ratio": significant(error["dynamic"] / (TABLE_6["dynamic"][2] * 1e-10), 2),
        "inverse_ratio": f"{error['inverse_dynamic'] / error['dynamic']:.0f}",
        "inverse_least": f"{min(ratios['inverse_dynamic']):.1f}",
        "quantile_better": str(sum(ratio < 1 for ratio in ratios["quantile"])),
        "normal_least": f"{min(ratios['quantile_normal']):.2f}",
        "typical_crest": f"{statistics.median(crest):.0f}",
        "largest_crest": f"{max(crest):.0f}",
        "small_share": percent2(small[0]),
        "small_sum": percent2(small[1]),
        "overlap_linear": percent2(maps["linear"]["tensor"]["both"]["overlap"]),
        "overlap_dynamic": percent2(maps["dynamic"]["tensor"]["both"]["overlap"]),
        "overlap_blocks": percent2(maps["dynamic"]["2048"]["both"]["overlap"]),
        "matched_ratio": f"{_over(maps, 'matched', 'absolute'):.1f}",
        "own_ratio": f"{_over(maps, 'both', 'absolute'):.0f}",
        "large_ratio": f"{_large(maps, 'tensor') / _large(maps, '2048'):.0f}",
        "steps_apart": " and ".join(runs),
        "apart_mean": f"{percent2(first['relative'])} and {percent2(last['relative'])}",
        "apart_median": f"{percent2(first['relative_median'])} and {percent2(last['relative_median'])}",
        "zero_v_linear": percent2(maps["linear"]["tensor"]["became_zero"]["v"]),
        "zero_v_fp8": percent2(maps["fp8_e4m3"]["tensor"]["became_zero"]["v"]),
        "zero_v_dynamic": percent2(maps["dynamic"]["tensor"]["became_zero"]["v"]),
    }


def _power_of_ten(x: float) -> str:
    mantissa, _, exponent = f"{x:.1e}".partition("e")
    return f"{mantissa} · 10{raised(int(exponent))}"


def _large(maps: Results, block: str) -> float:
    return maps["dynamic"][block]["both"]["large"][0]


def _over(maps: Results, condition: str, key: str) -> float:
    return maps["dynamic"]["tensor"][condition][key] / maps["dynamic"]["2048"][condition][key]


def findings(results: Results) -> dict[str, str]:
    """What one run found, in few numbers, to be compared with another's."""
    maps, training = results["maps"], results["training"]
    base = maps["dynamic"]["tensor"]["absolute_error_of_m"][0]
    found = {"model, steps": f"{training['model']}, {training['steps']}"}
    for name in ("linear", "quantile", "inverse_dynamic"):
        error = maps[name]["tensor"]["absolute_error_of_m"][0]
        found[f"absolute error of m over dynamic's: {TITLES[name]}"] = f"{error / base:.1f}"
    for what, key in (("relative Adam error, median", "relative_median"), ("overlap", "overlap")):
        for name, block in (("linear", "tensor"), ("dynamic", "tensor"), ("dynamic", "2048")):
            found[f"{what}: {TITLES[name]}, {block}"] = percent2(maps[name][block]["both"][key])
    return found


def adam_maps(results: Results, arrays: dict[str, np.ndarray]) -> Figure:
    """Figure 4: use, absolute and relative error of all pairs of codes, for three ways to quantize."""
    figure, grid = pictures.figure(12.5, 11.4, 3, 3, sharex=True, sharey=True)
    for row, (quantity, (title, colors, limits)) in zip(grid, QUANTITIES.items(), strict=True):
        for axis, (name, label) in zip(row, MAPS.items(), strict=True):
            values = arrays[f"{name} both {quantity}"].astype(np.float64).T
            if quantity == "usage":
                values = values - math.log10(results["elements"])
                error = arrays[f"{name} both absolute"].astype(np.float64).T
            values[~np.isfinite(values)] = np.nan
            image = axis.imshow(
                values, origin="lower", extent=(-1, 1, 0, 1), aspect="auto", cmap=colors,
                vmin=limits[0], vmax=limits[1], interpolation="nearest",
            )  # fmt: skip
            axis.grid(False)
            axis.set_facecolor("#f2f4f6")
            if quantity == "usage":
                blocks = name.split()
                overlap = results["maps"][blocks[0]][blocks[1]]["both"]["overlap"]
                axis.set_title(f"{label}\noverlap {100 * overlap:.2g} %", color=INK)
                marks = _mark_worst(axis, error)
        bar = figure.colorbar(image, ax=row[-1], pad=0.02, extend="both" if quantity != "usage" else "neither")
        bar.set_label(title, color=INK)
        bar.ax.yaxis.set_major_locator(FixedLocator(range(limits[0], limits[1] + 1, 2)))
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda power, _: f"10{raised(power)}"))
        bar.outline.set_visible(False)
    for axis in grid[-1]:
        axis.set_xlabel("code of m")
        axis.set(xticks=[-1, 0, 1], xticklabels=["−1", "0", "1"])
    for axis in grid[:, 0]:
        axis.set_ylabel("code of v")
        axis.set(yticks=[0, 1], yticklabels=["0", "1"])
    label = "the worst 5 % of the cells, by mean |u − u₈|; overlap: the share of the updates that fall there"
    figure.legend([marks], [label], loc="outside lower center", frameon=False, markerscale=4)
    return figure


def _mark_worst(axis: Any, error: np.ndarray) -> Any:
    """Dots on the cells with the worst 5 % of the mean absolute errors."""
    known = np.isfinite(error)
    rows, columns = np.nonzero(known & (error >= np.quantile(error[known], 0.95)))
    x, y = (columns + 0.5) / 64 - 1, (rows + 0.5) / 128
    return axis.scatter(x, y, s=3.2, marker="s", color=COLORS["series-1"], linewidths=0)


def errors_by_code(results: Results) -> Figure:
    """Figure 5: the mean absolute Adam error of every code of m, both moments quantized."""
    figure, (left, right) = pictures.figure(12.5, 5.2, 1, 2, sharex=True)
    for name, line in LINES.items():
        for axis, condition in ((left, "m"), (right, "both")):
            found = results["codes"][name][condition]
            usage = np.array(found["usage"])
            error = np.where(usage > RARE, np.array(found["absolute"], float), np.nan)
            place = 2 * np.arange(len(usage)) / np.flatnonzero(usage).max() - 1
            axis.plot(place, error, **line.style(label=line.label))
    for axis, title in (
        (left, "mean |u − u₈|, m alone quantized"),
        (right, "mean |u − u₈|, both quantized, ε = 10⁻⁸"),
    ):
        axis.set_yscale("log")
        axis.set_title(title, color=INK)
        axis.set_xlabel("code of m, by its place: 0 is nearest to zero")
        axis.set(xticks=[-1, -0.5, 0, 0.5, 1], xticklabels=["−1", "−½", "0", "½", "1"])
        pictures.ticks(axis.yaxis, None, lambda value: f"10{raised(math.log10(value))}")
        axis.margins(x=0.01)
    pictures.below(figure, left, 5)
    return figure


TABLES = {
    "origin": origin,
    "absolute_errors": absolute_errors,
    "relative_errors": relative_errors,
    "adam_errors": adam_errors,
    "cross_check": functools.partial(cross_check, findings),
}
PICTURES = {"_maps": adam_maps, "_codes": errors_by_code}
