"""Resume from a checkpoint: on as many processes as there are now, and only if every byte is what was written.

Everything is checked before anything is changed. Each rank verifies the checksums of some files, unless they were
verified in this process or by `latest_checkpoint` and have not changed since. Names, shapes and dtypes are compared
with the model's and the optimizer's, and ranks exchange what they found. Only then is the model written. The
optimizer's `load_state_dict` checks its states against the new weights, so it comes last; if it refuses, or another
rank fails, the weights are restored from a copy on the host. Nothing is copied on the device.

Each rank reads the chunks that overlap its own shards, whichever rank wrote them; torch.distributed.checkpoint
works out which. Files are mapped, so only the overlap is read from the disk.

`export_checkpoint` reads a checkpoint as one file, however it was sharded: for another tool or torch's optimizers.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from narrowgauge.distributed._checkpoint._coordination import all_ranks, broadcast_from_rank0, gathered, ranks
from narrowgauge.distributed._checkpoint._directory import flaws, newest_whole, open_checkpoint, verified_files
from narrowgauge.distributed._checkpoint._files import sync_folder
from narrowgauge.distributed._checkpoint._format import (
    DTYPES,
    MANIFEST,
    Chunk,
    DamagedCheckpointError,
    Manifest,
    TensorEntry,
    decode_value,
    tensor_keys,
)
from narrowgauge.distributed._checkpoint._state import (
    BlockKeys,
    block_keys,
    block_sizes,
    check_groups,
    is_ours,
    is_sharded,
    is_split,
    joined_state,
    load_model_state,
    local_chunk,
    model_state,
    optimizer_state_dict,
    parameter_names,
    parameters_of,
    set_random_states,
    state_owners,
    without,
)
from narrowgauge.optim._sharded_state import Chunks, whole_state, without_padding
from narrowgauge.optim._sharding import Shard


class LoadedCheckpoint(NamedTuple):
    """What a checkpoint holds beside the states.

    Attributes:
        step: how many steps were taken before it was saved.
        extra: as it was given to `save_checkpoint`; tensors on the CPU.
    """

    step: int
    extra: Any


def latest_checkpoint(directory: str | Path) -> Path | None:
    """The newest checkpoint in a folder that is whole.

    Reads it, to compare its checksums; `load_checkpoint` does not read it for that again. A damaged or unfinished
    one that is newer is named in a UserWarning and left as it is. On several ranks all call it; rank 0 looks, and
    all get its answer.

    Args:
        directory: of this run's checkpoints.

    Returns:
        A checkpoint for `load_checkpoint`; None if the folder has none, or does not exist.

    Raises:
        ValueError: if `directory` is a file, or a broken link.
        DamagedCheckpointError: if there are checkpoints, but none is whole.
    """

    path, verified = broadcast_from_rank0(lambda: (newest_whole(Path(directory)), verified_files))
    verified_files.update(verified)  # no rank hashes files again that rank 0 has hashed
    return path


def load_checkpoint(
    path: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    random_states: bool | Literal["own"] = False,
) -> LoadedCheckpoint:
    """Load what `save_checkpoint` saved, on as many ranks as there are now.

    Parameters are found by their names. The optimizer's `load_state_dict` has the last word on its states: its
    storages stay, what was saved in the same ones is loaded bit for bit, everything else is converted. The host
    needs memory for a copy of this rank's weights, to restore them if the optimizer refuses.

    Args:
        path: a checkpoint, as `save_checkpoint` and `latest_checkpoint` return it.
        model: of the same parameters, in the same dtypes; sharded in any way.
        optimizer: of this model's parameters, in the same groups; None loads the model alone, whatever optimizer
            it was saved with.
        random_states: also restore the states of random generators; True needs a checkpoint that was saved with
            them, by as many ranks as there are now. ``"own"``: only if this rank's were saved; else generators
            stay as they are.

    Returns:
        The step, and `extra`.

    Raises:
        ValueError: for a checkpoint of another version, model or optimizer, and for several on several ranks.
        DamagedCheckpointError: (a ValueError) if it is not what was written, naming the file.
        RuntimeError: naming the rank that cannot load it, on the others. Nothing is changed then, on any rank.
    """
    us = ranks()

    def check() -> tuple[Path, Manifest, dict[str, Tensor], dict[str, BlockKeys]]:
        if random_states not in (True, False, "own"):
            raise ValueError(f"random_states must be True, False or 'own', got {random_states!r}")
        if path is None:
            raise ValueError("path must be a checkpoint, got None: latest_checkpoint found none")
        folder = Path(path)
        manifest = open_checkpoint(folder)
        for flaw in flaws(folder, manifest, slice(us.rank, None, us.world)):
            raise DamagedCheckpointError(flaw)
        _check_model(model, manifest)
        blocks = _joined_blocks(model, optimizer, manifest)
        targets = _targets(model, optimizer, manifest, blocks)
        if random_states is True and str(us.rank) not in (manifest.values["random"] or {}):
            raise ValueError(
                f"random_states=True needs a checkpoint that was saved with random_states=True by as many ranks; "
                f"{folder} has none of rank {us.rank}"
            )
        return folder, manifest, targets, blocks

    folder, manifest, targets, blocks = all_ranks(check)
    digests = gathered(lambda: hashlib.sha256((folder / MANIFEST).read_bytes()).digest())
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise ValueError(f"path must be one checkpoint on all ranks, got another on rank {rank} than on rank 0")
    state = model_state(model)
    here = {name: _local(value) for name, value in state.items() if isinstance(value, Tensor)}
    before: dict[str, Tensor] = {}
    states_before: list[dict[str, Any]] = []

    def load() -> Any:
        read_into(folder, manifest, targets)
        before.update({name: value.to("cpu", copy=True) for name, value in here.items()})
        read_into(folder, manifest, {f"model/{name}": state[name] for name in here})
        load_model_state(model, _loaded_model(manifest, state, targets))
        if optimizer is not None:
            kept = optimizer.state_dict()
            order = parameter_names(model, optimizer)
            saved = manifest.values["optimizer"]
            sizes = block_sizes(saved)
            boxes = {name: saved_boxes(folder, manifest, name, keys, sizes[name]) for name, keys in blocks.items()}
            optimizer.load_state_dict(optimizer_state_dict(without(saved, blocks), order, targets, boxes))
            states_before.append(kept)
        return decode_value(manifest.values["extra"], targets)

    try:
        extra = all_ranks(load)
    except BaseException:
        with torch.no_grad():
            for name, value in before.items():
                here[name].copy_(value)
        load_model_state(model, state)
        if optimizer is not None and states_before:  # another rank failed
            optimizer.load_state_dict(states_before[0])
        raise
    own = (manifest.values["random"] or {}).get(str(us.rank))
    if random_states and own is not None:
        set_random_states(decode_value(own, targets))
    return LoadedCheckpoint(manifest.step, extra)


def _local(tensor: Tensor) -> Tensor:
    """What this process has of a tensor, in the same memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _check_model(model: nn.Module, manifest: Manifest) -> None:
    live = model_state(model)
    saved = dict(manifest.values["model"]["dict"])
    for what, names in (
        ("has no", [name for name in live if name not in saved]),
        ("has more:", [name for name in saved if name not in live]),
    ):
        if names:
            raise ValueError(f"model: the checkpoint {what} {', '.join(map(repr, names[:3]))} ({len(names)} names)")
    for name, value in live.items():
        entry = manifest.tensors.get(f"model/{name}")
        if isinstance(value, Tensor) != (entry is not None):
            raise ValueError(f"model: {name!r} is a tensor on one side only")
        if entry is None or not isinstance(value, Tensor):
            continue
        if value.is_meta:
            raise ValueError(f"model: {name!r} must have data (model.to_empty), got the meta device")
        wanted = DTYPES[entry.dtype], entry.shape
        if (value.dtype, tuple(value.shape)) != wanted:
            is_cast = tuple(value.shape) == wanted[1]
            hint = "; cast the model first, or take load_state_dict, which casts" if is_cast else ""
            raise ValueError(
                f"model: {name!r} is {value.dtype} of shape {tuple(value.shape)}, the checkpoint has {wanted[0]} "
                f"of shape {wanted[1]}{hint}"
            )


def _loaded_model(manifest: Manifest, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """A model's state: its tensors, which were read in place, and everything else from the checkpoint."""
    saved = dict(manifest.values["model"]["dict"])
    return {
        name: value if isinstance(value, Tensor) else decode_value(saved[name], tensors)
        for name, value in state.items()
    }


def _joined_blocks(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, manifest: Manifest
) -> dict[str, BlockKeys]:
    """Tensors in blocks that are joined from boxes: of parameters that are sharded here, or were when saved."""
    if optimizer is None or not is_ours(optimizer) or manifest.values["optimizer"] is None:
        return {}
    sharded = {name for name, p in parameters_of(model).items() if is_sharded(p)}
    found = block_keys(manifest.values["optimizer"])
    return {name: keys for name, keys in found.items() if name in sharded or is_split(manifest, name, keys)}


def _targets(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, manifest: Manifest, blocks: Mapping[str, BlockKeys]
) -> dict[str, Tensor]:
    """Empty tensors for everything but the model's own: sharded as their parameter, else whole on the CPU.

    Tensors that are joined from boxes (`blocks`) have none.
    """
    values = manifest.values
    wanted = tensor_keys(values["extra"])
    # Tensors in a module's `get_extra_state`; its own tensors are read in place.
    live = {f"model/{name}" for name, value in model_state(model).items() if isinstance(value, Tensor)}
    wanted += [key for key in tensor_keys(values["model"]) if key not in live]
    random = (values["random"] or {}).get(str(ranks().rank))
    wanted += tensor_keys(random) if random is not None else []
    owners: dict[str, Tensor] = {}
    if optimizer is not None:
        saved = values["optimizer"]
        if saved is None:
            raise ValueError("optimizer must be None for a checkpoint that was saved with optimizer=None")
        check_groups(saved, parameter_names(model, optimizer))
        parameters = parameters_of(model)
        owners = {key: parameters[name] for key, name in state_owners(without(saved, blocks))}
        wanted += list(owners)
        wanted += [key for group in saved["groups"] for key in tensor_keys(group["options"])]
    targets = {}
    for key in wanted:
        entry, p = manifest.tensors[key], owners.get(key)
        if isinstance(p, DTensor) and tuple(p.shape) == entry.shape:
            targets[key] = torch.empty_like(p.detach(), dtype=DTYPES[entry.dtype])
            continue
        if isinstance(p, DTensor) and entry.shape and not is_ours(optimizer):
            raise ValueError(
                f"optimizer: {key.removeprefix('optimizer/')!r} was saved in blocks of a whole parameter, which is "
                "a DTensor here; load it unsharded into states of 'fp32', 'bf16' or 'expansion', and save that"
            )
        targets[key] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="cpu")
    return targets


@torch.no_grad()
def read_into(folder: Path, manifest: Manifest, targets: Mapping[str, Tensor]) -> None:
    """Read what this process has of some tensors, by key, from the chunks in which they were written."""
    for key, target in targets.items():
        chunk = local_chunk(key, target)
        if chunk is None:
            continue
        part, offsets, sizes = chunk
        entry = manifest.tensors[key]
        here = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for item in create_read_items_for_chunk_list(key, _metadata(entry), [here]):
            assert item.storage_index.index is not None
            source = _box(
                _mapped(folder, entry, entry.pieces[item.storage_index.index]), item.storage_offsets, item.lengths
            )
            _box(part, item.dest_offsets, item.lengths).copy_(source)


def _metadata(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in entry.pieces]
    return TensorStorageMetadata(TensorProperties(DTYPES[entry.dtype]), torch.Size(entry.shape), chunks)


def _mapped(folder: Path, entry: TensorEntry, chunk: Chunk) -> Tensor:
    """A chunk in its file; nothing is read yet."""
    dtype = DTYPES[entry.dtype]
    nbytes = chunk.numel * dtype.itemsize
    if not nbytes:
        return torch.empty(chunk.sizes, dtype=dtype)
    # Copy on write: torch needs memory that can be written to.
    raw = np.memmap(folder / chunk.file, dtype=np.uint8, mode="c", offset=chunk.start, shape=(nbytes,))
    return torch.from_numpy(raw).view(dtype).reshape(chunk.sizes)


def _box(tensor: Tensor, offsets: Iterable[int], sizes: Iterable[int]) -> Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def saved_boxes(folder: Path, manifest: Manifest, name: str, blocks: BlockKeys, block_size: int) -> list[Any]:
    """The boxes of a parameter that were written, and the tensors in blocks of each; mapped, not read."""
    stored = manifest.tensors[f"model/{name}"]
    found = []
    for chunk in stored.pieces:
        box = Shard(tuple(stored.shape), tuple(chunk.offsets), tuple(chunk.sizes))
        tensors: dict[str, Tensor] = {}
        packed = set()
        for key, saved in blocks.items():
            entry = manifest.tensors[saved]
            mine = next((one for one in entry.pieces if one.file == chunk.file), None)
            if mine is None:
                raise DamagedCheckpointError(f"{folder}: {chunk.file} has a part of {name!r} and none of {saved!r}")
            tensors[key] = _mapped(folder, entry, mine)
            if key.endswith(".codes") and tuple(entry.shape) != tuple(stored.shape):
                packed.add(key)
        found.append((box, without_padding(box, tensors, packed, block_size)))
    return found


# --- one file


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
        "model": joined_state(decode_value(manifest.values["model"], tensors)),
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
