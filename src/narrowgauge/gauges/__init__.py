"""Gauges: what narrow numbers lose, as pure functions of tensors."""

from narrowgauge.gauges._quantization import AdamErrorMap, QuantizationError, adam_error_map, quantization_error
from narrowgauge.gauges._updates import effective_descent_quality, lost_updates

__all__ = [
    "AdamErrorMap",
    "QuantizationError",
    "adam_error_map",
    "effective_descent_quality",
    "lost_updates",
    "quantization_error",
]
