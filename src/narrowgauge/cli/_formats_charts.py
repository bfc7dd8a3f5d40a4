"""Pictures of number formats: what the codes of a codebook mean, and how far apart the numbers of a float are.

Source of the maps: 8-bit Optimizers via Block-wise Quantization, Figure 6.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from narrowgauge.cli._charts import DASHES, INK, MUTED, SERIES, LineStyle, drawing
from narrowgauge.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, FloatFormat, codebook, codebook_map

# The three of Figure 6, to compare any other with.
_MAPS = ("linear", "dynamic", "quantile")
_FLOATS = (FP32, BF16, FP16, FP8_E5M2, FP8_E4M3)
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_DASHES = (*DASHES, (8, 2, 1.5, 2, 1.5, 2))
_NAMED = LineStyle("ink", (), 2.6)


def maps(name: str | None, signed: bool = True, bits: int = 8) -> Figure:
    """Value against code, as in Figure 6; beside it the same values by magnitude, on a logarithmic scale.

    Args:
        name: a codebook to draw beside the three of the figure.
        signed, bits: sign and width of all.
    """
    styles = {known: LineStyle(SERIES[i], DASHES[i], 2.0) for i, known in enumerate(_MAPS)}
    styles = {known: style for known, style in styles.items() if bits in _widths(known, signed)}
    if name is not None:
        styles[name] = _NAMED
    with drawing():
        figure, (left, right) = _panels()
        smallest = 1.0
        for known, style in styles.items():
            values = codebook(known, signed, bits).numpy().astype(np.float64)
            codes = np.linspace(-1.0 if signed else 0.0, 1.0, len(values))
            marker = {"marker": "o", "markersize": 4.5} if len(values) <= 64 else {}
            left.plot(codes, values, label=known, **style.line, **marker)
            positive = values > 0
            right.plot(codes[positive], values[positive], **style.line, **marker)
            smallest = min(smallest, float(values[positive][0]))
        left.set_title(f"value of each code, {bits} bits, {'signed' if signed else 'unsigned'}", color=INK)
        right.set_title("positive values, logarithmic scale", color=INK)
        for axis in (left, right):
            axis.set_xlabel(f"code, scaled to [{'−1' if signed else '0'}, 1]")
        right.set_yscale("log")
        bottom = math.floor(math.log10(smallest))
        step = 1 if bottom >= -7 else 2
        _ticks(right.yaxis, 10, range(0, bottom - 1, -step))
        right.set_ylim(10.0**bottom, 1.6)
        _legend(figure, left)
        return figure


def _widths(name: str, signed: bool) -> tuple[int, ...]:
    found = codebook_map(name)
    return tuple(found.signed_bits if signed else found.unsigned_bits)


def spacing(fmt: FloatFormat) -> Figure:
    """Spacing and largest relative rounding error against magnitude, over the range of a format and a bit beyond.

    Args:
        fmt: the format to draw in front of the well-known ones.
    """
    # Each has its own color and dashes, whichever is in front.
    styles = {other: LineStyle(SERIES[i], _DASHES[i], 1.6) for i, other in enumerate(_FLOATS) if other != fmt}
    lowest, highest = fmt.min_exponent - fmt.mantissa_bits, fmt.max_exponent
    margin = max(3, (highest - lowest + 6) // 7)
    first, last = max(lowest - margin, -1060), min(highest + 1 + margin, 1023)
    with drawing():
        figure, (left, right) = _panels()
        for drawn, style in [*styles.items(), (fmt, _NAMED)]:
            edges, steps, errors = _staircase(drawn)
            left.step(edges, steps, where="post", label=drawn.name, **style.line)
            right.plot(edges, errors, **style.line)
            for axis, ends in ((left, steps), (right, errors)):
                axis.plot(edges[-1:], ends[-1:], "o", color=style.color, markersize=2.4 * style.width)
        left.set_title(f"{fmt.name}: spacing of neighboring numbers (ulp)", color=INK, pad=24)
        right.set_title(f"{fmt.name}: largest relative rounding error", color=INK, pad=24)
        # Low enough that fp32 is seen, at one and above.
        low, high = min(lowest - margin, -25), highest - fmt.mantissa_bits + margin
        left.set_ylim(low, high)
        right.set_ylim(-26, 1)
        _ticks(left.yaxis, 2, _whole(low, high, 7))
        _ticks(right.yaxis, 2, _whole(-26, 1, 7))
        for axis in (left, right):
            axis.set_xlim(first, last)
            axis.set_xlabel("magnitude")
            _ticks(axis.xaxis, 2, _whole(first, last, 7))
            _landmarks(axis, fmt)
        _legend(figure, left)
        return figure


def _staircase(fmt: FloatFormat) -> tuple[Any, Any, Any]:
    """Log2 of: the edges of the binades, the spacing from each on, and the largest relative error at it.

    The worst number of a binade is just above its lower edge, off by half a spacing; below the smallest number's
    half, all is lost. Among subnormals the error grows as the magnitude falls.
    """
    lowest = fmt.min_exponent - fmt.mantissa_bits
    edges = np.arange(lowest - 1, fmt.max_exponent + 2, dtype=np.float64)
    edges[-1] = math.log2(fmt.max)
    spacings = np.maximum(np.floor(edges), fmt.min_exponent) - fmt.mantissa_bits
    return edges, spacings, np.maximum(spacings - 1 - edges, -fmt.mantissa_bits - 1)


def _landmarks(axis: Any, fmt: FloatFormat) -> None:
    """Where the format's numbers begin, are normal, and end."""
    lowest, normal = fmt.min_exponent - fmt.mantissa_bits, fmt.min_exponent
    places = [("smallest", lowest, "right"), ("normal", normal, "left"), ("largest", math.log2(fmt.max), "center")]
    for name, place, side in places:
        axis.axvline(place, color=MUTED, linewidth=0.9, zorder=0.5)
        words = {"va": "bottom", "ha": side, "fontsize": 12, "color": MUTED}
        axis.text(place, 1.01, name, transform=axis.get_xaxis_transform(), **words)


def _panels() -> tuple[Figure, Any]:
    figure = Figure((12.5, 5.6), layout=ConstrainedLayoutEngine(wspace=0.06), facecolor="white")
    return figure, figure.subplots(1, 2)


def _legend(figure: Figure, axis: Any) -> None:
    handles, _ = axis.get_legend_handles_labels()
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, handlelength=3)


def _whole(low: float, high: float, most: int) -> range:
    """At most so many whole numbers from low to high, zero among them if it is between."""
    step = next(s for s in (1, 2, 4, 8, 10, 20, 40, 50, 100, 200, 500) if (high - low) / s <= most)
    return range(math.ceil(low / step) * step, math.floor(high) + 1, step)


def _ticks(axis: Any, base: int, exponents: range) -> None:
    """Ticks at powers, written as such; the axis is logarithmic (base 10) or holds the exponents (base 2)."""
    axis.set_major_locator(FixedLocator([10.0**e if base == 10 else e for e in exponents]))
    axis.set_minor_locator(NullLocator())

    def text(place: float, _: int) -> str:
        exponent = round(math.log10(place)) if base == 10 else round(place)
        return "1" if exponent == 0 else f"{base}{str(exponent).translate(_SUPERSCRIPTS)}"

    axis.set_major_formatter(FuncFormatter(text))
