"""Training on many processes with torch's own engine: compressed gradients, crash-safe checkpoints, CPU offload."""

from narrowgauge.distributed._checkpoint._format import DamagedCheckpointError
from narrowgauge.distributed._checkpoint._load import (
    LoadedCheckpoint,
    export_checkpoint,
    latest_checkpoint,
    load_checkpoint,
)
from narrowgauge.distributed._checkpoint._save import PendingCheckpoint, save_checkpoint, save_checkpoint_async
from narrowgauge.distributed._compressed_allreduce import CompressedAllReduce, compressed_allreduce_hook
from narrowgauge.distributed._offload import CPUOffload

__all__ = [
    "CPUOffload",
    "CompressedAllReduce",
    "DamagedCheckpointError",
    "LoadedCheckpoint",
    "PendingCheckpoint",
    "compressed_allreduce_hook",
    "export_checkpoint",
    "latest_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
    "save_checkpoint_async",
]
