"""Watching a training: what is measured at which step, and how records of it come to the host."""

from narrowgauge.gauges._watch._watch import Watch, watch

__all__ = ["Watch", "watch"]
