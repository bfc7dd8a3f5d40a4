"""Training on many processes, on torch's own engine: gradients that travel as codes."""

from narrowgauge.distributed._compressed import compressed_allreduce_hook
from narrowgauge.distributed._compressed_hook import CompressedAllReduce

__all__ = ["CompressedAllReduce", "compressed_allreduce_hook"]
