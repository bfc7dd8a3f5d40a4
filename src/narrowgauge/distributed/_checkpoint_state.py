"""A model and an optimizer as named tensors and plain values, the same on any number of processes.

A parameter has one name in every process: the one it has in the model without DDP's, compile's and activation
checkpointing's wrappers. States are named by their parameters, so that neither the order of parameters nor the
number of processes matters. A sharded tensor (DTensor) is named once, and each rank has its piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor, Partial, Replicate

from narrowgauge._module_names import clean_name as clean
from narrowgauge._module_names import unwrap_model as bare
from narrowgauge.distributed._checkpoint_format import DTYPE_NAMES, decode_value, encode_value, tensor_keys
from narrowgauge.distributed._checkpoint_random import read_random_states
from narrowgauge.distributed._offload import CPUOffload
from narrowgauge.optim import NarrowOptimizer, QuantizedGradients
from narrowgauge.optim._sharded_state import SHARDS, Chunks


@dataclass
class Gathered:
    """All that goes into a checkpoint, on one rank.

    Attributes:
        tensors: by key.
        values: everything else, as JSON keeps it.
        own: keys of tensors that are this rank's alone.
    """

    tensors: dict[str, Tensor]
    values: dict[str, Any]
    own: set[str]


def model_state(model: nn.Module) -> dict[str, Any]:
    """A model's state_dict, by clean names."""
    return {clean(name): value for name, value in bare(model).state_dict().items()}


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give a model what `model_state` names."""
    names = {clean(name): name for name in bare(model).state_dict()}
    bare(model).load_state_dict({names[name]: value for name, value in state.items()})


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters, by clean names."""
    return {clean(name): p for name, p in bare(model).named_parameters()}


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of an optimizer's parameters, by group.

    Raises:
        ValueError: for a parameter that the model does not have.
    """
    names = {p: name for name, p in parameters_of(model).items()}
    for number, group in enumerate(optimizer.param_groups):
        for place, p in enumerate(group["params"]):
            if p not in names:
                raise ValueError(
                    f"optimizer: parameter {place} of group {number}, of shape {tuple(p.shape)}, is none of the "
                    "model's; takes an optimizer of this model's parameters"
                )
    return [[names[p] for p in group["params"]] for group in optimizer.param_groups]


def gather(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Any,
    random_states: bool,
    rank: int,
) -> Gathered:
    """All that goes into a checkpoint. Nothing is copied.

    Raises:
        ValueError: for what cannot be kept, by name.
    """
    held: dict[str, Tensor] = {}
    state = model_state(model).items()
    values: dict[str, Any] = {
        "model": {"dict": [[k, encode_value(v, f"model[{k!r}]", f"model/{k}", held)] for k, v in state]},
        "optimizer": None if optimizer is None else _optimizer_values(model, optimizer, held),
        "extra": encode_value(extra, "extra", "extra", held),
        "random": None,
    }
    own: set[str] = set()
    if random_states:
        before = set(held)
        value = encode_value(read_random_states(), "random_states", f"random/{rank}", held)
        values["random"] = {str(rank): value}
        own = set(held) - before
    for key, tensor in held.items():
        _check(key, tensor)
    return Gathered(held, values, own)


def _optimizer_values(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    names = parameter_names(model, optimizer)
    state_dict = optimizer.state_dict()
    shards: dict[str, Tensor] = {}
    identities: dict[Any, str] = {}
    for group, packed, named in zip(optimizer.param_groups, state_dict["param_groups"], names, strict=True):
        identities |= dict(zip(packed["params"], named, strict=True))
        shards |= {name: p for name, p in zip(named, group["params"], strict=True) if is_sharded(p)}
    states = []
    for identity, entry in state_dict["state"].items():
        if identity not in identities:
            raise ValueError(f"optimizer: its state has {identity!r}, which is none of its parameters")
        name = identities[identity]
        for word, value in entry.items():
            plain = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.dim()
            if name in shards and plain and not is_ours(optimizer):
                raise ValueError(
                    f"optimizer: {word!r} of {name} is not sharded as its parameter is; takes states that are kept "
                    "element by element beside sharded parameters"
                )
        words = [
            [word, encode_value(value, f"optimizer: {word!r} of {name}", f"optimizer/{name}/{word}", tensors)]
            for word, value in entry.items()
            if word != SHARDS  # pieces say that here
        ]
        states.append([name, {"dict": words}])
    groups = []
    for number, (packed, named) in enumerate(zip(state_dict["param_groups"], names, strict=True)):
        options = {key: value for key, value in packed.items() if key not in ("params", "param_names")}
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
    """Whether an optimizer is of this library, and says itself what it cannot take."""
    return isinstance(_stepping(optimizer), NarrowOptimizer | CPUOffload)


def _stepping(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """The optimizer that moves weights, where another one hands it gradients."""
    return optimizer.optimizer if isinstance(optimizer, QuantizedGradients) else optimizer


def is_sharded(tensor: Tensor) -> bool:
    """Whether ranks hold different parts of a tensor."""
    return isinstance(tensor, DTensor) and not all(isinstance(p, Replicate) for p in tensor.placements)


def _check(key: str, tensor: Tensor) -> None:
    kind = type(tensor)
    if not (isinstance(tensor, DTensor) or kind in (Tensor, nn.Parameter, nn.Buffer)):
        raise ValueError(f"{key}: got a {kind.__name__}, takes plain tensors and DTensors")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype not in DTYPE_NAMES:
        taken = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
        raise ValueError(
            f"{key}: got a tensor of {tensor.dtype} ({tensor.layout}, on {tensor.device}); takes dense ones with "
            f"data in {taken}"
        )
    if isinstance(tensor, DTensor) and any(isinstance(p, Partial) for p in tensor.placements):
        raise ValueError(f"{key}: got a DTensor with {tensor.placements}, takes sharded and replicated ones")


def local_piece(key: str, tensor: Tensor) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]] | None:
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
    """Whether a rank writes its part of a tensor: the first rank that holds it does."""
    if own:
        return True
    if not isinstance(tensor, DTensor):
        return rank == 0
    place = tensor.device_mesh.get_coordinate()
    return place is not None and all(
        at == 0 for at, p in zip(place, tensor.placements, strict=True) if isinstance(p, Replicate)
    )


def check_groups(said: Mapping[str, Any], order: list[list[str]]) -> None:
    """Refuse a saved optimizer whose groups hold other parameters.

    Args:
        said: what `gather` made of the saved optimizer.
        order: the live optimizer's names, by group.

    Raises:
        ValueError: naming the group, and what one side has alone.
    """
    if len(order) != len(said["groups"]):
        raise ValueError(f"optimizer: got {len(order)} groups, the checkpoint has {len(said['groups'])}")
    for number, (live, group) in enumerate(zip(order, said["groups"], strict=True)):
        if set(live) != set(group["params"]):
            raise ValueError(
                f"optimizer: group {number} has other parameters than the checkpoint: "
                f"{_difference(live, group['params'])}"
            )


def optimizer_state_dict(
    said: Mapping[str, Any],
    order: list[list[str]] | None,
    tensors: Mapping[str, Tensor],
    pieces: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A state_dict for `load_state_dict`.

    Args:
        said: what `gather` made of the saved optimizer.
        order: the live optimizer's names, by group, which `check_groups` has passed; None for the saved order.
        tensors: by key.
        pieces: by parameter, the boxes of words in blocks that `said` is without.
    """
    groups: list[dict[str, Any]] = []
    identities: dict[str, int] = {}
    for number, group in enumerate(said["groups"]):
        named = group["params"] if order is None else order[number]
        first = len(identities)
        identities |= {name: first + place for place, name in enumerate(named)}
        names = {"param_names": list(named)} if group["named"] and order is None else {}  # else the live ones stay
        params = [identities[name] for name in named]
        groups.append({**decode_value(group["options"], tensors), **names, "params": params})
    states = decode_value(said["state"], tensors)
    for name, sources in (pieces or {}).items():
        states[name] = Chunks(sources, states[name])
    return {"state": {identities[name]: state for name, state in states.items()}, "param_groups": groups}


def _difference(live: list[str], saved: list[str]) -> str:
    more, less = sorted(set(live) - set(saved)), sorted(set(saved) - set(live))
    parts = [f"{what} {', '.join(names[:3])}" for what, names in (("more", more), ("without", less)) if names]
    return "; ".join(parts)


def state_owners(said: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key of a tensor, name of the parameter whose state it is) of a saved optimizer."""
    for name, words in said["state"]["dict"]:
        for key in tensor_keys(words):
            yield key, name
