"""Linear layers by a plan: which of their three multiplies run in eight bits, how scaled, and what is saved."""

from narrowgauge.linear._attention import LowPrecisionMultiheadAttention
from narrowgauge.linear._float8_weights import to_float8_weights
from narrowgauge.linear._function import linear
from narrowgauge.linear._hold import HeldActivations, hold_activations
from narrowgauge.linear._module import LowPrecisionConv1D, LowPrecisionLinear
from narrowgauge.linear._plan import (
    BLOCKWISE_FP8,
    HIGH_PRECISION,
    LLM_INT8,
    SWITCHBACK,
    SWITCHBACK_M,
    SWITCHBACK_Q,
    TENSORWISE_FP8,
    EightBit,
    LinearPlan,
    named_plan,
)
from narrowgauge.linear._quantize import ScaledCodes, quantize
from narrowgauge.linear._swap import SwapReport, swap_linears
from narrowgauge.linear._tune import tune

__all__ = [
    "BLOCKWISE_FP8",
    "HIGH_PRECISION",
    "LLM_INT8",
    "SWITCHBACK",
    "SWITCHBACK_M",
    "SWITCHBACK_Q",
    "TENSORWISE_FP8",
    "EightBit",
    "HeldActivations",
    "LinearPlan",
    "LowPrecisionConv1D",
    "LowPrecisionLinear",
    "LowPrecisionMultiheadAttention",
    "ScaledCodes",
    "SwapReport",
    "hold_activations",
    "linear",
    "named_plan",
    "quantize",
    "swap_linears",
    "to_float8_weights",
    "tune",
]
