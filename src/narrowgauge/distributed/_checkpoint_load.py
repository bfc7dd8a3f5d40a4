"""Go on from a checkpoint: on as many processes as there are now, and only if every byte is what was written.

Everything is checked before anything is changed. Each rank verifies the checksums of some files. Names, shapes and
dtypes are compared with the model's and the optimizer's. Ranks exchange what they found. The optimizer's
`load_state_dict` checks the rest; if it refuses, the model is restored.

Each rank then reads the pieces that overlap its own shards, whoever wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from narrowgauge.distributed._checkpoint_blocks import (
    Blocks,
    block_sizes,
    block_words,
    in_pieces,
    sources,
    without,
)
from narrowgauge.distributed._checkpoint_folder import flaws, newest_whole
from narrowgauge.distributed._checkpoint_format import (
    DTYPES,
    DamagedCheckpointError,
    Manifest,
    decode_value,
    tensor_keys,
)
from narrowgauge.distributed._checkpoint_random import set_random_states
from narrowgauge.distributed._checkpoint_ranks import on_first, ranks, together
from narrowgauge.distributed._checkpoint_read import open_checkpoint, read_into
from narrowgauge.distributed._checkpoint_state import (
    check_groups,
    is_ours,
    is_sharded,
    load_model_state,
    model_state,
    optimizer_state_dict,
    parameter_names,
    parameters_of,
    state_owners,
)


class LoadedCheckpoint(NamedTuple):
    """What a checkpoint said beside the states.

    Attributes:
        step: how many steps were taken before it was saved.
        extra: as it was given to `save_checkpoint`; tensors on the CPU.
    """

    step: int
    extra: Any


def latest_checkpoint(directory: str | Path) -> Path | None:
    """The newest checkpoint in a folder that is whole.

    Reads it, to compare its checksums. A damaged or half-written one that is newer is named in a UserWarning and
    left as it is. On several ranks all call it; rank 0 looks, and all get its answer.

    Args:
        directory: of this run's checkpoints.

    Returns:
        A checkpoint for `load_checkpoint`; None if the folder has none, or is not there.

    Raises:
        ValueError: if `directory` is a file, or a link to what is not there.
        DamagedCheckpointError: if there are checkpoints, but not one that is whole.
    """
    return on_first(lambda: newest_whole(Path(directory)))


def load_checkpoint(
    path: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    random_states: bool | Literal["own"] = False,
) -> LoadedCheckpoint:
    """Take over what `save_checkpoint` saved, on as many ranks as there are now.

    Parameters are found by their names. The optimizer's `load_state_dict` has the last word on its states: storages
    stay as it was made, what was saved in the same ones is taken bit for bit, everything else is converted.

    Args:
        path: a checkpoint, as `save_checkpoint` and `latest_checkpoint` return it.
        model: of the same parameters, in the same dtypes; sharded as it may be.
        optimizer: of this model's parameters, in the same groups; None leaves the states.
        random_states: also put back the states of random generators; True takes a checkpoint that was saved with
            them, by as many ranks as there are now. ``"own"``: only if this rank's were saved; else generators
            stay as they are.

    Returns:
        The step, and `extra`.

    Raises:
        ValueError: for a checkpoint of another version, model or optimizer.
        DamagedCheckpointError: (a ValueError) if it is not what was written, naming the file.
        RuntimeError: naming the rank that cannot load it, on the others. Nothing is changed then, on any rank.
    """
    us = ranks()

    def check() -> tuple[Path, Manifest, dict[str, Tensor], dict[str, Blocks]]:
        if random_states not in (True, False, "own"):
            raise ValueError(f"random_states: got {random_states!r}, takes True, False or 'own'")
        folder = Path(path)
        manifest = open_checkpoint(folder)
        for flaw in flaws(folder, manifest, slice(us.rank, None, us.world)):
            raise DamagedCheckpointError(flaw)
        _check_model(model, manifest)
        apart = _apart(model, optimizer, manifest)
        targets = _targets(model, optimizer, manifest, apart)
        if random_states is True and str(us.rank) not in (manifest.values["random"] or {}):
            raise ValueError(
                f"random_states: got True, {folder} has none of rank {us.rank}; takes a checkpoint that was saved "
                "with random_states=True by as many ranks"
            )
        return folder, manifest, targets, apart

    folder, manifest, targets, apart = together(check)
    state = model_state(model)
    before = {name: value.detach().clone() for name, value in state.items() if isinstance(value, Tensor)}

    states_before: list[dict[str, Any]] = []

    def load() -> Any:
        read_into(folder, manifest, targets)
        read_into(folder, manifest, {f"model/{name}": state[name] for name in before})
        load_model_state(model, _loaded_model(manifest, state, targets))
        if optimizer is not None:
            kept = optimizer.state_dict()
            order = parameter_names(model, optimizer)
            said = manifest.values["optimizer"]
            sizes = block_sizes(said)
            boxes = {n: sources(folder, manifest, n, words, sizes[n]) for n, words in apart.items()}
            optimizer.load_state_dict(optimizer_state_dict(without(said, apart), order, targets, boxes))
            states_before.append(kept)
        return decode_value(manifest.values["extra"], targets)

    try:
        extra = together(load)
    except BaseException:
        with torch.no_grad():
            for name, value in before.items():
                state[name].copy_(value)
        load_model_state(model, state)
        if optimizer is not None and states_before:  # it was another rank that failed
            optimizer.load_state_dict(states_before[0])
        raise
    own = (manifest.values["random"] or {}).get(str(us.rank))
    if random_states and own is not None:
        set_random_states(decode_value(own, targets))
    return LoadedCheckpoint(manifest.step, extra)


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
        stored = manifest.tensors.get(f"model/{name}")
        if isinstance(value, Tensor) != (stored is not None):
            raise ValueError(f"model: {name!r} is a tensor on one side only")
        if stored is None or not isinstance(value, Tensor):
            continue
        if value.is_meta:
            raise ValueError(f"model: {name!r} is on the meta device, takes tensors with data (model.to_empty)")
        wanted = DTYPES[stored.dtype], stored.shape
        if (value.dtype, tuple(value.shape)) != wanted:
            raise ValueError(
                f"model: {name!r} is {value.dtype} of shape {tuple(value.shape)}, the checkpoint has {wanted[0]} "
                f"of shape {wanted[1]}"
            )


def _loaded_model(manifest: Manifest, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """A model's state, its tensors as they are now, everything else from the checkpoint."""
    saved = dict(manifest.values["model"]["dict"])
    return {
        name: value if isinstance(value, Tensor) else decode_value(saved[name], tensors)
        for name, value in state.items()
    }


def _apart(model: nn.Module, optimizer: torch.optim.Optimizer | None, manifest: Manifest) -> dict[str, Blocks]:
    """Words in blocks that are joined from boxes: of parameters sharded here, or when they were saved."""
    if optimizer is None or not is_ours(optimizer) or manifest.values["optimizer"] is None:
        return {}
    sharded = {name for name, p in parameters_of(model).items() if is_sharded(p)}
    found = block_words(manifest.values["optimizer"])
    return {name: words for name, words in found.items() if name in sharded or in_pieces(manifest, name, words)}


def _targets(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, manifest: Manifest, apart: Mapping[str, Blocks]
) -> dict[str, Tensor]:
    """Empty tensors for all that is not the model's: sharded as their parameter, else whole on the CPU.

    Words that are joined from boxes (`apart`) have none.
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
        said = values["optimizer"]
        if said is None:
            raise ValueError("optimizer: the checkpoint was saved with optimizer=None, takes None")
        check_groups(said, parameter_names(model, optimizer))
        parameters = parameters_of(model)
        owners = {key: parameters[name] for key, name in state_owners(without(said, apart))}
        wanted += list(owners)
        wanted += [key for group in said["groups"] for key in tensor_keys(group["options"])]
    targets = {}
    for key in wanted:
        stored, p = manifest.tensors[key], owners.get(key)
        plain = not is_ours(optimizer)
        if isinstance(p, DTensor) and stored.shape and tuple(p.shape) != stored.shape and plain:
            raise ValueError(
                f"optimizer: {key.removeprefix('optimizer/')!r} was saved in blocks of a whole parameter, which is "
                "a DTensor here; takes states of 'fp32', 'bf16' or 'expansion': load it unsharded into those, "
                "and save that"
            )
        if isinstance(p, DTensor) and tuple(p.shape) == stored.shape:
            targets[key] = torch.empty_like(p.detach(), dtype=DTYPES[stored.dtype])
        else:
            targets[key] = torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="cpu")
    return targets
