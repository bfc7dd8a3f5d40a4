"""Gauges: what narrow numbers lose, as pure functions of tensors and of a run's numbers."""

from narrowgauge.gauges._features import FeatureStats, FormatLoss, feature_stats
from narrowgauge.gauges._formats import TARGETS, Target
from narrowgauge.gauges._matches import SpikeMatch, match_spikes
from narrowgauge.gauges._quantization import AdamErrorMap, QuantizationError, adam_error_map, quantization_error
from narrowgauge.gauges._spikes import LossSpikes, RmsSpikes, Spike, find_rms_spikes, find_spikes
from narrowgauge.gauges._updates import (
    effective_descent_quality,
    lost_updates,
    relative_descent_quality,
    rms_ratio,
)

__all__ = [
    "TARGETS",
    "AdamErrorMap",
    "FeatureStats",
    "FormatLoss",
    "LossSpikes",
    "QuantizationError",
    "RmsSpikes",
    "Spike",
    "SpikeMatch",
    "Target",
    "adam_error_map",
    "effective_descent_quality",
    "feature_stats",
    "find_rms_spikes",
    "find_spikes",
    "lost_updates",
    "match_spikes",
    "quantization_error",
    "relative_descent_quality",
    "rms_ratio",
]
