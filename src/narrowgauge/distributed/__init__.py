"""Training that is spread over processes: checkpoints that survive them."""

from narrowgauge.distributed._checkpoint_export import export_checkpoint
from narrowgauge.distributed._checkpoint_format import DamagedCheckpointError
from narrowgauge.distributed._checkpoint_load import LoadedCheckpoint, latest_checkpoint, load_checkpoint
from narrowgauge.distributed._checkpoint_save import PendingCheckpoint, save_checkpoint, save_checkpoint_async

__all__ = [
    "DamagedCheckpointError",
    "LoadedCheckpoint",
    "PendingCheckpoint",
    "export_checkpoint",
    "latest_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
    "save_checkpoint_async",
]
