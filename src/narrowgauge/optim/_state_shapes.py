"""States of sharded parameters in a `state_dict`: shapes that are the same on any number of ranks.

torch's tools (`torch.distributed.checkpoint`, and `get_optimizer_state_dict` with any of its options) gather, cut and
copy tensors by their shapes. They know nothing of blocks, and some keep only the keys that the live optimizer has. So
every tensor of a sharded parameter is shown under its own key, as a DTensor that is cut as the parameter is, in a
shape that follows from the parameter's shape and `block_size`:

| tensor | shape |
| --- | --- |
| an item per element: float moments, low words (those of 4 bits as of 8), 8-bit codes | the parameter's |
| a number per block (scales, ranges), two 4-bit codes a byte | the parameter's leading dimensions, then those of the blocks (the bytes) of the trailing ones: (4096, 1024) in blocks of 256 has (4096, 4) scales |
| the same where blocks do not fit into trailing dimensions, or a rank cuts one | (\\*parameter, 1): the number of each element's block; each code in an int8 |
| int16 and float8, which collectives do not move | (\\*parameter, 2) and (\\*parameter, 1): their bytes |

The reader takes each of these, and the flat tensors of one process. If the blocks here are those that were written,
it copies them, bit for bit: numbers that were repeated are equal in each block. Otherwise it decodes element by
element, for which repeated numbers are all it needs, and the moments are encoded again.
"""  # noqa: E501  # a table

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge._torch_private import local
from narrowgauge.optim._plan import ParamPlan
from narrowgauge.optim._sharded_state import (
    LOW_CODES,
    Chunks,
    Reader,
    assembled,
    has_items,
    in_blocks,
    is_factor,
    with_single_words,
)
from narrowgauge.optim._sharding import Shard, as_shared, is_shared, is_split
from narrowgauge.storage._blockwise import pack_pairs, unpack_pairs

_CODES = ".codes"
# Dtypes that neither gloo nor NCCL moves in every version; shown as bytes. By their size, which tells them apart.
_BYTES = {1: torch.float8_e4m3fn, 2: torch.int16}
Shape = tuple[int, ...]


def _trailing(shape: Shape, block_size: int) -> int | None:
    """The last dimension from which on the trailing ones hold whole blocks; None if there is none.

    The first dimension does not count: on some numbers of ranks its parts are whole blocks, and on others not.
    """
    return next((d for d in reversed(range(1, len(shape))) if math.prod(shape[d:]) % block_size == 0), None)


def _fits(p: Any, dim: int, block_size: int) -> bool:
    """Whether no rank cuts a block of the dimensions from `dim` on; the same answer on all ranks."""
    if not is_shared(p):
        return True
    ways: dict[int, int] = {}
    for size, placement in zip(p.device_mesh.shape, p.placements, strict=True):
        if is_split(placement):
            ways[placement.dim] = ways.get(placement.dim, 1) * size
    if any(d > dim for d in ways):
        return False
    count = ways.get(dim, 1)
    return count == 1 or math.prod(p.shape[dim:]) % (count * block_size) == p.shape[dim] % count == 0


def to_shapes(p: Any, plan: ParamPlan, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """A parameter's state as `state_dict` shows it."""
    if not is_shared(p):
        return dict(state)
    shape, sizes = tuple(p.shape), tuple(local(p).shape)
    state = with_single_words(state, sizes)
    slots = {slot.slot.name: slot for slot in plan.all_slots}
    blocks = {key for key in in_blocks(state) if not is_factor(key)} - {LOW_CODES}
    given: dict[str, Any] = {}
    for key, x in state.items():
        slot = slots[key.rpartition(".")[0]] if key in blocks else None
        packed = slot is not None and key.endswith(_CODES) and getattr(slot.storage, "bits", 8) == 4
        if slot is None or (key.endswith(_CODES) and not packed):
            by_element = has_items(x) and tuple(x.shape) == sizes
            given[key] = _shown(p, x) if by_element else x
            continue
        per_item = 2 if packed else slot.block_size
        dim = _trailing(shape, slot.block_size)
        if dim is not None and slot.block_size % per_item == 0 and _fits(p, dim, slot.block_size):
            whole, here = (math.prod(s[dim:]) // per_item for s in (shape, sizes))
            given[key] = _cut_alike(p, x.reshape(*sizes[:dim], here, *x.shape[1:]), (*shape[:dim], whole))
        elif packed:
            codes = unpack_pairs(x, torch.Size(sizes)).view(torch.int8)
            given[key] = _cut_alike(p, codes.unsqueeze(-1), (*shape, 1))
        else:
            numbers = _repeated(x, per_item, math.prod(sizes)).reshape(*sizes, 1, *x.shape[1:])
            given[key] = _cut_alike(p, numbers, (*shape, 1))
    return given


def _shown(p: Any, x: Tensor) -> Any:
    """A DTensor of a tensor with an item per element."""
    if x.dtype not in _BYTES.values():
        return as_shared(p, x)
    raw = x.contiguous().unsqueeze(-1).view(torch.uint8)
    return _cut_alike(p, raw, (*p.shape, x.dtype.itemsize))


def _cut_alike(p: Any, here: Tensor, leading: Shape) -> Any:
    """A DTensor cut as a parameter is, from its local part, whose last dimensions are all here."""
    shape = (*leading, *here.shape[len(leading) :])
    stride = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    placed = p.device_mesh, p.placements
    return type(p.data).from_local(here, *placed, run_check=False, shape=torch.Size(shape), stride=stride)


def from_shapes(
    p: Any, plan: ParamPlan, entry: Mapping[str, Any], block_size: int, read: Reader
) -> tuple[dict[str, Any], bool]:
    """The local part of a saved state: a result of `to_shapes`, what torch's tools make of one, or `Chunks`.

    `block_size` is that of the saved state; `read` decodes the moments of a box.

    Returns:
        The local tensors, and whether moments had to be decoded.
    """
    if isinstance(entry, Chunks):
        return assembled(p, plan, entry, block_size, read)
    if not is_shared(p) and any(map(is_shared, entry.values())):
        raise ValueError(
            f"state_dict: the state of {plan.name} must be full tensors, as its parameter is, got DTensors; "
            "gather them (full_tensor, or StateDictOptions(full_state_dict=True)), or use "
            "narrowgauge.distributed.load_checkpoint"
        )
    if plan.shard is not None:
        entry = with_single_words(entry, p.shape)
    mine = plan.shard if plan.shard is not None else Shard.whole(p.shape)
    blocks = {key for key in in_blocks(entry) if has_items(entry[key])} - {LOW_CODES}
    if plan.shard is not None:
        _check(plan, {key: value for key, value in entry.items() if key not in blocks})
    if plan.shard is not None and not all(_is_cut_alike(p, key, entry[key], block_size) for key in blocks):
        # Blocks of the whole parameter, one after the other; gathered in one order on all ranks.
        whole = {key: entry[key].full_tensor() if is_shared(entry[key]) else entry[key] for key in sorted(blocks)}
        words, _ = _words(mine.shape, mine.shape, whole, whole, block_size)
        common = {key: _part(mine, value) for key, value in entry.items() if key not in blocks}
        common, _ = _words(mine.shape, mine.sizes, entry, common, block_size)
        return assembled(p, plan, Chunks([(Shard.whole(p.shape), words)], common), block_size, read)
    parts = {key: _part(mine, value) for key, value in entry.items()}
    found, repeated = _words(mine.shape, mine.sizes, entry, parts, block_size)
    firsts = {key: found[key][::block_size] for key in repeated}
    if all(torch.equal(_repeated(one, block_size, mine.here), found[key]) for key, one in firsts.items()):
        return found | firsts, False
    moments = read(mine, {key: x for key, x in found.items() if has_items(x)}, 1)
    return {key: x for key, x in found.items() if key not in blocks} | dict(moments), True


def _repeated(numbers: Tensor, block_size: int, count: int) -> Tensor:
    """The number of each element's block."""
    return numbers.repeat_interleave(block_size, dim=0)[:count]


def _check(plan: ParamPlan, elements: Mapping[str, Any]) -> None:
    assert plan.shard is not None
    shape = plan.shard.shape
    for key, value in elements.items():
        if has_items(value) and tuple(value.shape[: len(shape)]) != shape:
            raise ValueError(
                f"state_dict: {key!r} of {plan.name} must have shape {shape}, got {tuple(value.shape)}"
            )


def _leads(shape: Shape, block_size: int, key: str, saved: Tensor) -> int | None:
    """The dimension of a saved tensor that blocks or bytes are along, after leading ones of the parameter.

    None for a tensor with items for each element, and for one that is flat.
    """
    dim, whole = _trailing(shape, block_size), tuple(saved.shape)
    per_item = 2 if key.endswith(_CODES) else block_size
    if dim is None or whole == shape or whole[:dim] != shape[:dim] or len(whole) <= dim:
        return None
    return dim if whole[dim] * per_item == math.prod(shape[dim:]) else None


def _is_cut_alike(p: Any, key: str, saved: Tensor, block_size: int) -> bool:
    """Whether a rank's part of a saved tensor belongs to its part of the parameter."""
    shape = tuple(p.shape)
    if tuple(saved.shape[: len(shape)]) == shape:
        return True
    dim = _leads(shape, block_size, key, saved)
    return dim is not None and _fits(p, dim, block_size)


def _part(mine: Shard, value: Any) -> Any:
    """A rank's part of a saved tensor."""
    if is_shared(value) or not has_items(value):
        return local(value)
    for dim, (offset, size, of) in enumerate(zip(mine.offsets, mine.sizes, mine.shape, strict=True)):
        if size < of:
            items = value.shape[dim]  # as many as the parameter has, or blocks, or bytes
            value = value.narrow(dim, offset * items // of, size * items // of)
    return value


def _words(
    shape: Shape, sizes: Shape, saved: Mapping[str, Any], parts: Mapping[str, Any], block_size: int
) -> tuple[dict[str, Any], set[str]]:
    """A part of a state in the shapes that an optimizer keeps; the keys of numbers that are there for each element.

    Args:
        shape: of the parameter.
        sizes: of its part.
        saved: the whole tensors, whose shapes count.
        parts: the tensors of the part.
        block_size: of the saved state.
    """
    blocks, found, repeated = in_blocks(saved), dict(parts), set()
    for key, x in parts.items():
        if not has_items(x):
            continue
        whole = tuple(saved[key].shape)
        more = whole[len(shape) :] if shape and whole[: len(shape)] == shape else ()
        number = key in blocks and not key.endswith(_CODES)
        if number and more[:1] == (1,):
            found[key] = x.reshape(math.prod(sizes), *x.shape[len(shape) + 1 :])
            repeated.add(key)
        elif not number and x.dtype == torch.uint8 and len(more) == 1 and more[0] in _BYTES:
            found[key] = x.contiguous().view(_BYTES[more[0]]).squeeze(-1)
        elif key in blocks and x.dtype == torch.int8 and more == (1,):
            found[key] = pack_pairs(x.contiguous().view(torch.uint8))
        elif key in blocks and (dim := _leads(shape, block_size, key, saved[key])) is not None:
            items = math.prod(sizes[dim:]) // (block_size if number else 2)
            found[key] = x.reshape(math.prod(sizes[:dim]) * items, *x.shape[dim + 1 :])
    return found, repeated
