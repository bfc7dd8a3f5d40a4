"""A checkpoint as one file, whatever it was sharded over: for another tool, for torch's optimizers, to hand on."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import torch

from narrowgauge.distributed._checkpoint_blocks import whole_blocks
from narrowgauge.distributed._checkpoint_files import sync_folder
from narrowgauge.distributed._checkpoint_folder import flaws
from narrowgauge.distributed._checkpoint_format import DTYPES, DamagedCheckpointError, decode_value
from narrowgauge.distributed._checkpoint_read import open_checkpoint, read_into
from narrowgauge.distributed._checkpoint_state import optimizer_state_dict


def export_checkpoint(path: str | Path, file: str | Path) -> Path:
    """Write a checkpoint as one unsharded file, in one process, without the model.

    `torch.load(file)` (with its `weights_only=True`) gives a dict: `model` and `optimizer` are what
    `model.load_state_dict` and `optimizer.load_state_dict` take, `step` and `extra` what was saved with them. Names
    are without wrappers. Needs memory for all of it.

    Args:
        path: a checkpoint, as `save_checkpoint` and `latest_checkpoint` return it.
        file: a new file.

    Returns:
        The file.

    Raises:
        ValueError: if `file` exists; for a checkpoint of another version.
        DamagedCheckpointError: (a ValueError) if the checkpoint is not what was written.
    """
    folder, target = Path(path), Path(file)
    if target.exists():
        raise ValueError(f"file: got {target}, which exists, takes the name of a new file")
    manifest = open_checkpoint(folder)
    for flaw in flaws(folder, manifest):
        raise DamagedCheckpointError(flaw)
    tensors = {
        key: torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="cpu")
        for key, stored in manifest.tensors.items()
    }
    said = manifest.values["optimizer"]
    blocks = {} if said is None else whole_blocks(folder, manifest, said)
    read_into(folder, manifest, {key: tensor for key, tensor in tensors.items() if key not in blocks})
    tensors |= blocks
    content = {
        "model": decode_value(manifest.values["model"], tensors),
        "optimizer": None if said is None else optimizer_state_dict(said, None, tensors),
        "step": manifest.step,
        "extra": decode_value(manifest.values["extra"], tensors),
    }
    beside = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        torch.save(content, beside)
        with beside.open("rb") as written:
            os.fsync(written.fileno())
        beside.rename(target)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(target.parent)
    return target
