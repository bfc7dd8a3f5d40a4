"""Reading a checkpoint's tensors: each process takes what overlaps its own shards, whoever wrote it.

Which pieces those are is worked out by torch.distributed.checkpoint. They are mapped, not read, so that of a piece
that was written elsewhere only the overlap comes from the disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from narrowgauge.distributed._checkpoint_folder import LATEST, checkpoints
from narrowgauge.distributed._checkpoint_format import DTYPES, Manifest, Piece, Stored, read_manifest
from narrowgauge.distributed._checkpoint_state import local_piece


def open_checkpoint(folder: Path) -> Manifest:
    """The manifest of what is to be a checkpoint.

    Raises:
        ValueError: if it is none, or of another version.
        DamagedCheckpointError: if it is not what was written.
    """
    if not folder.is_dir():
        raise ValueError(
            f"path: got {folder}, which is no folder; takes a checkpoint, as latest_checkpoint returns it"
        )
    if (folder / LATEST).exists() or checkpoints(folder):
        raise ValueError(f"path: got {folder}, a folder of checkpoints; takes one of them (see latest_checkpoint)")
    return read_manifest(folder)


@torch.no_grad()
def read_into(folder: Path, manifest: Manifest, targets: Mapping[str, Tensor]) -> None:
    """Read what this process holds of some tensors, from whichever pieces it was written in.

    Args:
        folder, manifest: the checkpoint, verified.
        targets: by key; written over.
    """
    for key, target in targets.items():
        piece = local_piece(key, target)
        if piece is None:
            continue
        part, offsets, sizes = piece
        stored = manifest.tensors[key]
        here = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for item in create_read_items_for_chunk_list(key, _described(stored), [here]):
            assert item.storage_index.index is not None
            said = stored.pieces[item.storage_index.index]
            source = _box(mapped(folder, stored, said), item.storage_offsets, item.lengths)
            _box(part, item.dest_offsets, item.lengths).copy_(source)


def _described(stored: Stored) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in stored.pieces]
    return TensorStorageMetadata(TensorProperties(DTYPES[stored.dtype]), torch.Size(stored.shape), chunks)


def mapped(folder: Path, stored: Stored, piece: Piece) -> Tensor:
    """A piece in its file, of which nothing is read yet."""
    dtype = DTYPES[stored.dtype]
    nbytes = piece.numel * dtype.itemsize
    if not nbytes:
        return torch.empty(piece.sizes, dtype=dtype)
    # Copy on write: torch takes no memory that cannot be written to.
    raw = np.memmap(folder / piece.file, dtype=np.uint8, mode="c", offset=piece.start, shape=(nbytes,))
    return torch.from_numpy(raw).view(dtype).reshape(piece.sizes)


def _box(tensor: Tensor, offsets: Iterable[int], sizes: Iterable[int]) -> Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor
