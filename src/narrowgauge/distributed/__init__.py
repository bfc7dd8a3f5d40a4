"""Training on many processes with torch's own engine: compressed gradients, crash-safe checkpoints, CPU offload."""

from narrowgauge.distributed._checkpoint_export import export_checkpoint
from narrowgauge.distributed._checkpoint_format import DamagedCheckpointError
from narrowgauge.distributed._checkpoint_load import LoadedCheckpoint, latest_checkpoint, load_checkpoint
from narrowgauge.distributed._checkpoint_save import PendingCheckpoint, save_checkpoint, save_checkpoint_async
from narrowgauge.distributed._compressed import compressed_allreduce_hook
from narrowgauge.distributed._compressed_hook import CompressedAllReduce
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
