"""A linear layer in eight bits, in numpy, from the paper's equations.

Which operand is scaled how is written out here by algorithm, apart from the plans under test. Codes are made in
float32 as Equation 1 says and multiplied exactly; float8 rounding is a search among the values of all 256 codes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from narrowgauge import formats

# By algorithm: scaling of (left, right) for output, input gradient, weight gradient; whether X is read from codes.
PAPER = {
    "SWITCHBACK": (("row", "tensor"), ("row", "tensor"), None, False),  # Algorithm 1
    "SWITCHBACK_M": (("row", "tensor"), ("row", "tensor"), None, True),  # Algorithm 3
    "SWITCHBACK_Q": (("row", "row"), ("row", "column"), None, False),  # Algorithm 4, Equation 4
    "LLM_INT8": (("row", "row"), ("row", "column"), ("column", "column"), False),  # Section 2.2.3
    "TENSORWISE_FP8": (("tensor", "tensor"), ("tensor", "tensor"), ("tensor", "tensor"), False),  # Section 2.3
    # DeepSeek-V3 Technical Report, Section 3.3.2: 1 x 128 for X and G, 128 x 128 for W.
    "BLOCKWISE_FP8": (("row128", "tile128"), ("row128", "tile128"), ("column128", "column128"), False),
    "HIGH_PRECISION": (None, None, None, False),  # Algorithm 5
}
AXIS = {"row": 1, "column": 0, "tensor": None}
BLOCKS = {"row128": (1, 128), "column128": (128, 1), "tile128": (128, 128)}
LARGEST = {"int8": 127.0, "e4m3": 448.0, "e5m2": 57344.0}
FLOATS = {"e4m3": formats.FP8_E4M3, "e5m2": formats.FP8_E5M2}


class Coded(NamedTuple):
    codes: np.ndarray  # float64, whole or float8 values
    scale: np.ndarray  # float32


def code(x: np.ndarray, scaling: str, form: str) -> Coded:
    """Equation 1, for finite x; in blocks that of each block."""
    x = x.astype(np.float32)
    high, wide = BLOCKS.get(scaling, (0, 0))
    if high:
        rows, columns = range(0, x.shape[0], high), range(0, x.shape[1], wide)
        absmax = np.array([[np.abs(x[i : i + high, j : j + wide]).max() for j in columns] for i in rows])
    else:
        absmax = np.abs(x).max(axis=AXIS[scaling], keepdims=True)
    largest = np.float32(LARGEST[form])
    inverse = np.divide(largest, absmax, out=np.zeros_like(absmax), where=absmax > 0)
    if high:
        inverse = inverse.repeat(high, 0)[: x.shape[0]].repeat(wide, 1)[:, : x.shape[1]]
    scaled = x * inverse
    assert scaled.dtype == np.float32
    codes = np.rint(scaled).astype(np.float64) if form == "int8" else nearest(scaled, form)
    return Coded(codes, absmax / largest)


def nearest(x: np.ndarray, form: str) -> np.ndarray:
    """The nearest of the values of all codes, ties to the even code."""
    codes = [c for c in range(128) if np.isfinite(FLOATS[form].decode(c))]
    values = np.array([FLOATS[form].decode(c) for c in codes])
    magnitude = np.abs(x.astype(np.float64))
    above = np.searchsorted(values, magnitude).clip(1, len(values) - 1)
    low, high = magnitude - values[above - 1], values[above] - magnitude
    up = (high < low) | ((high == low) & (np.array(codes)[above] % 2 == 0))
    return np.copysign(np.where(up, values[above], values[above - 1]), x)


class Product(NamedTuple):
    value: np.ndarray  # float64, exact but for the scales' float32
    size: np.ndarray  # the sum of the products' magnitudes: what rounding errors are measured by


def multiply(left: Coded, right: Coded) -> Product:
    value, size = np.zeros(()), np.zeros(())
    for i, start in enumerate(range(0, left.codes.shape[1], 128)):
        one, other = left.codes[:, start : start + 128], right.codes[start : start + 128]
        scale = (_scales(left, 0, i) * _scales(right, 1, i)).astype(np.float64)
        value, size = value + (one @ other) * scale, size + (np.abs(one) @ np.abs(other)) * scale
    return Product(value, size)


def _scales(coded: Coded, axis: int, i: int) -> np.ndarray:
    """Those of block i of the sum, a column for the left (0) or a row for the right operand (1)."""
    scale, size = coded.scale, coded.codes.shape[axis]
    scale = scale.take([min(i, scale.shape[1 - axis] - 1)], 1 - axis)
    return scale if scale.shape[axis] in (1, size) else scale.repeat(128, axis).take(range(size), axis)


def plain(left: np.ndarray, right: np.ndarray) -> Product:
    left, right = left.astype(np.float64), right.astype(np.float64)
    return Product(left @ right, np.abs(left) @ np.abs(right))


def layer(name: str, x: np.ndarray, w: np.ndarray, g: np.ndarray, forward: str, gradient: str) -> list[Product]:
    """Output, input gradient and weight gradient."""
    output, grad_input, grad_weight, from_codes = PAPER[name]

    def side(matrix: np.ndarray, scaling: str, form: str, transpose: bool = False) -> Coded:
        made = code(matrix, scaling, form)
        return Coded(made.codes.T, made.scale.T) if transpose else made

    y = (
        plain(x, w.T)
        if output is None
        else multiply(side(x, output[0], forward), side(w, output[1], forward, transpose=True))
    )
    grad_x = (
        plain(g, w)
        if grad_input is None
        else multiply(side(g, grad_input[0], gradient), side(w, grad_input[1], forward))
    )
    if grad_weight is not None:
        grad_w = multiply(side(g, grad_weight[0], gradient, transpose=True), side(x, grad_weight[1], forward))
    elif from_codes:
        kept = code(x, output[0], forward)
        grad_w = plain(g.T, (kept.codes.astype(np.float32) * kept.scale))
    else:
        grad_w = plain(g.T, x)
    return [y, grad_x, grad_w]
