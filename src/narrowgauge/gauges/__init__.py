"""Gauges: what narrow numbers lose, as functions of tensors and of a run's records, and while training."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from narrowgauge.gauges._advice import Advice, advise
from narrowgauge.gauges._formats import TARGETS, Target
from narrowgauge.gauges._magnitudes import FeatureStats, FormatLoss, feature_stats
from narrowgauge.gauges._metrics import (
    effective_descent_quality,
    lost_updates,
    relative_descent_quality,
    rms_ratio,
)
from narrowgauge.gauges._quantization import AdamErrorMap, QuantizationError, adam_error_map, quantization_error
from narrowgauge.gauges._records import Records, read_records
from narrowgauge.gauges._report import write_report
from narrowgauge.gauges._rules import Evidence
from narrowgauge.gauges._spike_matching import SpikeMatch, match_spikes
from narrowgauge.gauges._spikes import LossSpikes, RmsSpikes, Spike, find_rms_spikes, find_spikes
from narrowgauge.gauges._watch import Watch, watch

if TYPE_CHECKING:
    from narrowgauge.gauges._huggingface import HuggingFaceCallback as HuggingFaceCallback
    from narrowgauge.gauges._lightning import LightningCallback as LightningCallback

__all__ = [
    "TARGETS",
    "AdamErrorMap",
    "Advice",
    "Evidence",
    "FeatureStats",
    "FormatLoss",
    "LossSpikes",
    "QuantizationError",
    "Records",
    "RmsSpikes",
    "Spike",
    "SpikeMatch",
    "Target",
    "Watch",
    "adam_error_map",
    "advise",
    "effective_descent_quality",
    "feature_stats",
    "find_rms_spikes",
    "find_spikes",
    "lost_updates",
    "match_spikes",
    "quantization_error",
    "read_records",
    "relative_descent_quality",
    "rms_ratio",
    "watch",
    "write_report",
]

# Callbacks of frameworks are imported on first use: the library needs neither framework.
_PLUGINS = {
    "HuggingFaceCallback": ("narrowgauge.gauges._huggingface", "transformers"),
    "LightningCallback": ("narrowgauge.gauges._lightning", "lightning"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLUGINS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, package = _PLUGINS[name]
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ModuleNotFoundError(
            f"{name} needs the package {package}: pip install {package}", name=package
        ) from error
