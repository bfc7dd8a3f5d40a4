"""A checkpoint as one file, however it was sharded: for another tool or torch's optimizers."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgauge.distributed._checkpoint._directory import flaws, open_checkpoint
from narrowgauge.distributed._checkpoint._files import sync_folder
from narrowgauge.distributed._checkpoint._format import DTYPES, DamagedCheckpointError, Manifest, decode_value
from narrowgauge.distributed._checkpoint._load import read_into, saved_boxes
from narrowgauge.distributed._checkpoint._state import block_keys, block_sizes, is_split, optimizer_state_dict
from narrowgauge.optim._sharded_state import Chunks, whole_state


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
        ValueError: if `file` exists; for a checkpoint of another version; if shards do not begin with blocks.
        DamagedCheckpointError: (a ValueError) if the checkpoint is not what was written.
    """
    folder, target = Path(path), Path(file)
    if target.exists():
        raise ValueError(f"file must be the name of a new file, got {target}, which exists")
    manifest = open_checkpoint(folder)
    for flaw in flaws(folder, manifest):
        raise DamagedCheckpointError(flaw)
    tensors = {
        key: torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="cpu")
        for key, entry in manifest.tensors.items()
    }
    saved = manifest.values["optimizer"]
    blocks = {} if saved is None else _whole_blocks(folder, manifest, saved)
    read_into(folder, manifest, {key: tensor for key, tensor in tensors.items() if key not in blocks})
    tensors |= blocks
    content = {
        "model": decode_value(manifest.values["model"], tensors),
        "optimizer": None if saved is None else optimizer_state_dict(saved, None, tensors),
        "step": manifest.step,
        "extra": decode_value(manifest.values["extra"], tensors),
    }
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        torch.save(content, temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.rename(target)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(target.parent)
    return target


def _whole_blocks(folder: Path, manifest: Manifest, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors in blocks as one process has them, of parameters that several ranks wrote, by their keys."""
    made: dict[str, Tensor] = {}
    sizes = block_sizes(saved)
    for name, blocks in block_keys(saved).items():
        if not is_split(manifest, name, blocks):
            continue
        state = whole_state(Chunks(saved_boxes(folder, manifest, name, blocks, sizes[name]), {}), sizes[name])
        if state is None:
            raise ValueError(
                f"path: the shards of {name!r} do not begin with its blocks of {sizes[name]}, so its moments have "
                "no codes as a whole; load it in one process (load_checkpoint), which encodes them again"
            )
        made |= {tensor: state[key] for key, tensor in blocks.items()}
    return made
