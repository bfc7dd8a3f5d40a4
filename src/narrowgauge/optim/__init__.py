"""Optimizers: any rule, any weight storage, any state storage, through one `torch.optim.Optimizer`."""

from narrowgauge.optim._adamw import AdamW, AdamW8bit, CollageAdamW
from narrowgauge.optim._describe import Description
from narrowgauge.optim._optimizer import NarrowOptimizer
from narrowgauge.optim._stats import UpdateStats

__all__ = ["AdamW", "AdamW8bit", "CollageAdamW", "Description", "NarrowOptimizer", "UpdateStats"]
