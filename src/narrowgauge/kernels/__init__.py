"""Kernels on raw tensors. The only room that imports triton: import it where a kernel is launched, not before."""

from narrowgauge.kernels._quantiles import mean_subset_quantiles

__all__ = ["mean_subset_quantiles"]
