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
    "HIGH_PRECISION": (None, None, None, False),  # Algorithm 5
}
AXIS = {"row": 1, "column": 0, "tensor": None}
LARGEST = {"int8": 127.0, "e4m3": 448.0, "e5m2": 57344.0}
FLOATS = {"e4m3": formats.FP8_E4M3, "e5m2": formats.FP8_E5M2}


class Coded(NamedTuple):
    codes: np.ndarray  # float64, whole or float8 values
    scale: np.ndarray  # float32


def code(x: np.ndarray, scaling: str, form: str) -> Coded:
    """Equation 1, for finite x."""
    x = x.astype(np.float32)
    absmax = np.abs(x).max(axis=AXIS[scaling], keepdims=True)
    largest = np.float32(LARGEST[form])
    inverse = np.divide(largest, absmax, out=np.zeros_like(absmax), where=absmax > 0)
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
    scale = (left.scale * right.scale).astype(np.float64)
    return Product((left.codes @ right.codes) * scale, (np.abs(left.codes) @ np.abs(right.codes)) * scale)


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
