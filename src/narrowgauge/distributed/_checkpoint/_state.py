"""A model and an optimizer as named tensors and plain values, the same on any number of processes.

A parameter has one name in every process: its name in the model without wrappers (DDP, compile, activation
checkpointing). States are named by their parameters, so neither the order of parameters nor the number of processes
matters. A sharded tensor (DTensor) has one name, and each rank has its chunk.

Blocks of quantized moments begin with the shard they were made for, so a rank's codes and scales mean something
only beside its chunk of the parameter: both are in its file, and the parameter's chunk is the box. Loading takes
the boxes that overlap its own. The optimizer joins them: copied where the blocks are the same, else decoded and
encoded again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor, Replicate

from narrowgauge._module_names import clean_name, unwrap_model
from narrowgauge.distributed._checkpoint._format import (
    Manifest,
    decode_value,
    encode_value,
    tensor_keys,
)
from narrowgauge.distributed._offload import CPUOffload
from narrowgauge.optim import NarrowOptimizer, QuantizedGradients
from narrowgauge.optim._changes import KEPT, STORAGES
from narrowgauge.optim._plan import unique_names
from narrowgauge.optim._sharded_state import Chunks, in_blocks
from narrowgauge.storage import Float8Weight

_SCALE, _LOW = ".scale", ".low"  # after the name of a Float8Weight
# Tensors in blocks of one parameter's state: their keys among the manifest's tensors.
BlockKeys = dict[str, str]


@dataclass
class Snapshot:
    """Everything that goes into a checkpoint, on one rank.

    Attributes:
        tensors: by key.
        values: everything else, as JSON has it.
        own: keys of tensors that belong to this rank alone.
    """

    tensors: dict[str, Tensor]
    values: dict[str, Any]
    own: set[str]


def model_state(model: nn.Module) -> dict[str, Any]:
    """A model's state_dict, by names without wrappers.

    A `Float8Weight` is its codes, by its name, ``NAME.scale`` and ``NAME.low``.
    """
    found: dict[str, Any] = {}
    for wrapped, value in unwrap_model(model).state_dict().items():
        name = clean_name(wrapped)
        if isinstance(value, Float8Weight):
            found |= {name: value.codes, name + _SCALE: value.scale, name + _LOW: value.low}
        else:
            found[name] = value
    return found


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `model_state` names."""
    bare = unwrap_model(model)
    joined = joined_state(state)
    bare.load_state_dict({name: joined[clean_name(name)] for name in bare.state_dict()})


def joined_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """What `model_state` gives as a state_dict: the parts of a `Float8Weight` are one again."""
    joined = dict(state)
    for name, codes in state.items():
        if name + _SCALE in state:
            joined[name] = Float8Weight(codes, joined.pop(name + _SCALE), joined.pop(name + _LOW))
    return joined


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters, by names without wrappers."""
    return {clean_name(name): p for name, p in unwrap_model(model).named_parameters()}


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of an optimizer's parameters, by group; a ValueError for one that the model does not have."""
    names = {p: name for name, p in parameters_of(model).items()}
    for number, group in enumerate(optimizer.param_groups):
        for place, p in enumerate(group["params"]):
            if p not in names:
                which = f"parameter {place} of group {number}, of shape {tuple(p.shape)},"
                raise ValueError(
                    f"optimizer: {which} is not the model's; fully_shard makes new ones: make it after that"
                )
    return [[names[p] for p in group["params"]] for group in optimizer.param_groups]


def snapshot(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any, random_states: bool, rank: int
) -> Snapshot:
    """Everything that goes into a checkpoint; nothing is copied. A ValueError names what cannot be saved."""
    tensors: dict[str, Tensor] = {}
    state = model_state(model).items()
    values: dict[str, Any] = {
        "model": {"dict": [[k, encode_value(v, f"model[{k!r}]", f"model/{k}", tensors)] for k, v in state]},
        "optimizer": None if optimizer is None else _optimizer_values(model, optimizer, tensors),
        "extra": encode_value(extra, "extra", "extra", tensors),
        "random": None,
    }
    own: set[str] = set()
    if random_states:
        before = set(tensors)
        value = encode_value(_random_states(), "random_states", f"random/{rank}", tensors)
        values["random"] = {str(rank): value}
        own = set(tensors) - before
    return Snapshot(tensors, values, own)


def _optimizer_values(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    names = parameter_names(model, optimizer)
    ours = optimizer if isinstance(optimizer, NarrowOptimizer) else None
    state_dict = ours.state_in_pieces() if ours is not None else optimizer.state_dict()
    sharded: set[str] = set()
    identities: dict[Any, str] = {}
    for group, packed, named in zip(optimizer.param_groups, state_dict["param_groups"], names, strict=True):
        identities |= dict(zip(packed["params"], named, strict=True))
        sharded |= {name for name, p in zip(named, group["params"], strict=True) if is_sharded(p)}
    states = []
    for identity, entry in state_dict["state"].items():
        if identity not in identities:
            raise ValueError(f"optimizer: its state has {identity!r}, which is not one of its parameters")
        name = identities[identity]
        for key, value in entry.items():
            plain = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.dim()
            if name in sharded and plain and not is_ours(optimizer):
                raise ValueError(
                    f"optimizer: {key!r} of {name} must be sharded as its parameter is, or have no dimension"
                )
        pairs = [
            [key, encode_value(value, f"optimizer: {key!r} of {name}", f"optimizer/{name}/{key}", tensors)]
            for key, value in entry.items()
        ]
        states.append([name, {"dict": pairs}])
    groups = []
    own_names = unique_names(state_dict["param_groups"])
    for number, (packed, named) in enumerate(zip(state_dict["param_groups"], names, strict=True)):
        options = {key: value for key, value in packed.items() if key not in ("params", "param_names")}
        _rename(options, dict(zip(own_names[number], named, strict=True)))
        groups.append(
            {
                "params": named,
                "named": "param_names" in packed,
                "options": encode_value(
                    options, f"optimizer: group {number}", f"optimizer/group/{number}", tensors
                ),
            }
        )
    return {
        "groups": groups,
        "state": {"dict": states},
        "class": type(getattr(_stepping(optimizer), "inner", _stepping(optimizer))).__name__,
    }


def is_ours(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether an optimizer is of this library, and refuses by itself what it cannot load."""
    return isinstance(_stepping(optimizer), NarrowOptimizer | CPUOffload)


def _stepping(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """The optimizer that updates weights, inside one that passes gradients to it."""
    return optimizer.optimizer if isinstance(optimizer, QuantizedGradients) else optimizer


def is_sharded(tensor: Tensor) -> bool:
    """Whether ranks hold different parts of a tensor."""
    return isinstance(tensor, DTensor) and not all(isinstance(p, Replicate) for p in tensor.placements)


def local_chunk(key: str, tensor: Tensor) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]] | None:
    """What this process holds of a tensor: the part, where it begins in the whole, its sizes. None if nothing."""
    items = create_default_local_save_plan({key: tensor}, True).items
    if not items:
        return None
    data = items[0].tensor_data
    assert data is not None
    assert data.chunk is not None
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part, tuple(data.chunk.offsets), tuple(data.chunk.sizes)


def writes(tensor: Tensor, rank: int, own: bool) -> bool:
    """Whether a rank writes its part of a tensor: the first rank that has it does."""
    if own:
        return True
    if not isinstance(tensor, DTensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and all(
        at == 0 for at, p in zip(coordinate, tensor.placements, strict=True) if isinstance(p, Replicate)
    )


def _rename(options: dict[str, Any], to: Mapping[str, str]) -> None:
    """Give the storages of single parameters, in a group's options, by other names."""
    for key in (KEPT, STORAGES):
        if isinstance(options.get(key), Mapping):
            options[key] = {to.get(name, name): own for name, own in options[key].items()}


def check_groups(saved: Mapping[str, Any], order: list[list[str]]) -> None:
    """Refuse a saved optimizer whose groups hold other parameters than the live one's (`order`: names by group).

    Raises:
        ValueError: naming the group, and what one side has alone.
    """
    if len(order) != len(saved["groups"]):
        raise ValueError(
            f"optimizer must have as many groups as the checkpoint, {len(saved['groups'])}, got {len(order)}: "
            "make it with the recipe and the options of then"
        )
    for number, (live, group) in enumerate(zip(order, saved["groups"], strict=True)):
        if set(live) != set(group["params"]):
            raise ValueError(
                f"optimizer: group {number} has other parameters than the checkpoint: "
                f"{_difference(live, group['params'])}"
            )


def optimizer_state_dict(
    saved: Mapping[str, Any],
    order: list[list[str]] | None,
    tensors: Mapping[str, Tensor],
    boxes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A state_dict for `load_state_dict`.

    Args:
        saved: the optimizer's part of a manifest's values.
        order: the live optimizer's names, by group, which `check_groups` has passed; None for the saved order.
        tensors: by key.
        boxes: by parameter, its tensors in blocks, which `saved` is `without`.
    """
    groups: list[dict[str, Any]] = []
    identities: dict[str, int] = {}
    for number, group in enumerate(saved["groups"]):
        named = group["params"] if order is None else order[number]
        first = len(identities)
        identities |= {name: first + place for place, name in enumerate(named)}
        # A live optimizer keeps its own names.
        names = {"param_names": list(named)} if group["named"] and order is None else {}
        params = [identities[name] for name in named]
        options = decode_value(group["options"], tensors)
        if not names:  # places are understood beside any names
            _rename(options, {name: f"{number}.{place}" for place, name in enumerate(named)})
        groups.append({**options, **names, "params": params})
    states = decode_value(saved["state"], tensors)
    for name, sources in (boxes or {}).items():
        states[name] = Chunks(sources, states[name])
    return {"state": {identities[name]: state for name, state in states.items()}, "param_groups": groups}


def _difference(live: list[str], saved: list[str]) -> str:
    sides = {"only here": set(live) - set(saved), "only in the checkpoint": set(saved) - set(live)}
    parts = [f"{side} {', '.join(sorted(names)[:3])}" for side, names in sides.items() if names]
    return "; ".join(parts)


def state_owners(saved: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key of a tensor, name of the parameter whose state it is) of a saved optimizer."""
    for name, state in saved["state"]["dict"]:
        for key in tensor_keys(state):
            yield key, name


def block_keys(saved: Mapping[str, Any]) -> dict[str, BlockKeys]:
    """The tensors in blocks of a saved optimizer, by the parameter's name."""
    found = {}
    for name, state in saved["state"]["dict"]:
        keys = {
            key: value["tensor"] for key, value in state["dict"] if isinstance(value, dict) and "tensor" in value
        }
        kept = in_blocks(keys)
        if blocks := {key: tensor for key, tensor in keys.items() if key in kept}:
            found[name] = blocks
    return found


def block_sizes(saved: Mapping[str, Any]) -> dict[str, int]:
    """Elements a block of each parameter's state in a saved optimizer, by the parameter's name."""
    sizes: dict[str, int] = {}
    for group in saved["groups"]:
        size = decode_value(dict(group["options"]["dict"]).get("block_size", 1), {})
        sizes |= dict.fromkeys(group["params"], size)
    return sizes


def is_split(manifest: Manifest, name: str, blocks: BlockKeys) -> bool:
    """Whether tensors in blocks were written by more than one rank."""
    keys = [*blocks.values(), f"model/{name}"]
    return any(len(manifest.tensors[key].pieces) != 1 for key in keys)


def without(saved: Mapping[str, Any], blocks: Mapping[str, BlockKeys]) -> dict[str, Any]:
    """A saved optimizer without some tensors in blocks."""
    states = [
        [name, {"dict": [[key, value] for key, value in state["dict"] if key not in blocks.get(name, {})]}]
        for name, state in saved["state"]["dict"]
    ]
    return {**saved, "state": {"dict": states}}


def _random_states() -> dict[str, Any]:
    """The states of the generators that training draws from without naming one: torch's, Python's and NumPy's; of
    a CUDA device the current one's."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  # what people still use
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(np.array(keys, dtype=np.int64)), *(float(x) for x in rest)),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Put back what a snapshot saved."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    kind, keys, at, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), int(at), int(has_gauss), gauss))  # noqa: NPY002
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
