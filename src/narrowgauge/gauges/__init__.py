"""Gauges: what narrow numbers lose, as pure functions of tensors."""

from narrowgauge.gauges._updates import effective_descent_quality, lost_updates

__all__ = ["effective_descent_quality", "lost_updates"]
