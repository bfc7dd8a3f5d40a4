"""Training on many processes, on torch's own engine: gradients and weights that travel as codes, checkpoints that
survive, states that live on the CPU.
"""

from narrowgauge.distributed._checkpoint_export import export_checkpoint
from narrowgauge.distributed._checkpoint_format import DamagedCheckpointError
from narrowgauge.distributed._checkpoint_load import LoadedCheckpoint, latest_checkpoint, load_checkpoint
from narrowgauge.distributed._checkpoint_save import PendingCheckpoint, save_checkpoint, save_checkpoint_async
from narrowgauge.distributed._compressed import compressed_allreduce_hook
from narrowgauge.distributed._compressed_hook import CompressedAllReduce
from narrowgauge.distributed._gather_codes import gather_codes
from narrowgauge.distributed._offload import CPUOffload

__all__ = [
    "CPUOffload",
    "CompressedAllReduce",
    "DamagedCheckpointError",
    "LoadedCheckpoint",
    "PendingCheckpoint",
    "compressed_allreduce_hook",
    "export_checkpoint",
    "gather_codes",
    "latest_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
    "save_checkpoint_async",
]
