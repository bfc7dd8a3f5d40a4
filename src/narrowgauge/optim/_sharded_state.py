"""States of sharded parameters in a `state_dict`: local tensors to DTensors, and back.

A reader of a state must know which part of the whole a rank holds. A tensor with an item per element (a float
moment, a low word, 8-bit codes) becomes a DTensor of its parameter's shape, cut as that is. Tensors with an item
per block or per pair of elements (scales, 4-bit codes) have no such shape: blocks begin with the shard, and its
last block may be short. They become DTensors cut along dimension 0. Each rank pads its part with zeros to the
length of the largest. torch's checkpoints and `get_optimizer_state_dict` take these on the same number of ranks.

On another number of ranks blocks may begin elsewhere, and items would belong to other elements. So the state also
gets ``shards``: the number of shards and the elements of the largest. It is left out if every shard's blocks are
blocks of the whole parameter. A state that was written for other shards is assembled from its boxes (`Chunks`):
copied block by block if the blocks here are the same, else decoded and encoded again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from narrowgauge._arguments import shown
from narrowgauge.optim._plan import ParamPlan
from narrowgauge.optim._sharding import Shard, as_shared, is_shared, is_split, local

# The key, in a state_dict, of the number of shards and the elements of the largest.
SHARDS = "shards"
_CODES = "codes"
# The keys of row means and column means: of a moment that is stored as a whole, in one box.
_FACTORS = ("rows", "columns")
_REARRANGES = "narrowgauge.distributed.load_checkpoint rearranges blocks"

Tensors = Mapping[str, Tensor]
# Decodes a box's moments that are stored in blocks: float32, by slot, in the box's sizes.
Reader = Callable[[Shard, Tensors], Mapping[str, Tensor]]


class Chunks(dict[str, Any]):
    """A parameter's saved state in boxes, for `load_state_dict`; `distributed.load_checkpoint` makes one.

    `sources` has the boxes of the whole parameter that were saved, and the tensors of each. The dict itself has the
    entries that belong to no box; it is a dict, so that it passes through hooks like any entry.
    """

    def __init__(self, sources: Sequence[tuple[Shard, Tensors]], common: Mapping[str, Any]) -> None:
        super().__init__(common)
        self.sources = sources


def largest(p: Any) -> int:
    """Elements of the largest shard of a DTensor, the same number on all ranks."""
    sizes = list(p.shape)
    for size, placement in zip(p.device_mesh.shape, p.placements, strict=True):
        if is_split(placement):
            sizes[placement.dim] = -(-sizes[placement.dim] // size)
    return math.prod(sizes)


def in_blocks(keys: Collection[str]) -> set[str]:
    """Of the keys of a state, those of moments that are stored in blocks, or as factors."""
    slots = {slot for slot, dot, word in (key.rpartition(".") for key in keys) if word in (_CODES, *_FACTORS)}
    return {key for key in keys if key.rpartition(".")[0] in slots}


def _is_factor(key: str) -> bool:
    return key.rpartition(".")[2] in _FACTORS


def without_padding(box: Shard, words: Tensors, packed: Collection[str], block_size: int) -> dict[str, Tensor]:
    """Tensors in blocks of a box, without the zeros that `to_dtensors` adds; `packed` codes are kept two a byte."""
    found = {}
    for key, x in words.items():
        per_item = 2 if key in packed else 1 if key.endswith(f".{_CODES}") or _is_factor(key) else block_size
        found[key] = x if per_item == 1 else x[: -(-box.here // per_item)]
    return found


def _items(plan: ParamPlan, numel: int) -> dict[str, int]:
    """By key, the length of tensors that do not have an item per element, for `numel` elements."""
    found = {}
    for slot in (*plan.slots, *plan.inactive):
        zeros = slot.storage.init(torch.zeros(min(numel, 1), device="cpu"), slot.slot.signed, slot.block_size)
        if _CODES not in zeros:
            continue
        for name in zeros:
            key = f"{slot.slot.name}.{name}"
            if name != _CODES:
                found[key] = -(-numel // slot.block_size)
            elif getattr(slot.storage, "bits", 8) == 4:
                found[key] = -(-numel // 2)
    return found


def to_dtensors(p: Any, plan: ParamPlan, state: Tensors) -> dict[str, Any]:
    """A parameter's state as `state_dict` gives it."""
    if not is_shared(p):
        return dict(state)
    here, most = local(p), largest(p)
    items = _items(plan, most) if plan.shard is not None else {}
    given: dict[str, Any] = {}
    for key, x in state.items():
        if key in items:
            padding = items[key] - len(x)
            pad = (0, 0) * (x.dim() - 1) + (0, padding)
            given[key] = _along(p, torch.nn.functional.pad(x, pad) if padding else x)
        elif _has_items(x) and x.shape == here.shape:
            given[key] = as_shared(p, x)
        else:
            given[key] = x
    if items and plan.shard is not None:
        block_size = next(slot.block_size for slot in (*plan.slots, *plan.inactive))
        if (layout := _layout(p, plan.shard, block_size)) is not None:
            given[SHARDS] = torch.tensor(layout, dtype=torch.int64)
    return given


def _layout(p: Any, shard: Shard, block_size: int) -> list[int] | None:
    """The number of shards and the elements of the largest; None if all their blocks are the whole parameter's."""
    return None if shard.count == 1 or _aligned_everywhere(p, block_size) else [shard.count, largest(p)]


def _saved_layout(name: str, entry: Mapping[str, Any]) -> list[int] | None:
    """The same as a saved state says it."""
    if SHARDS not in entry:
        return None
    said = local(entry[SHARDS])
    if not isinstance(said, Tensor) or said.shape != (2,) or said.is_floating_point():
        raise ValueError(f"state_dict: {SHARDS!r} of {name} must be two integers, got {shown(said)}")
    layout: list[int] = said.tolist()
    return layout if layout[0] > 1 else None


def _aligned_everywhere(p: Any, block_size: int) -> bool:
    """Whether the blocks of all shards are blocks of the whole parameter; the same answer on all ranks."""
    # True only for a parameter cut along dimension 0, by one mesh dimension, into runs of whole blocks.
    if any(is_split(one) and (one.dim != 0 or type(one).__name__ != "Shard") for one in p.placements):
        return False
    runs = [size for size, one in zip(p.device_mesh.shape, p.placements, strict=True) if is_split(one)]
    rows = -(-p.shape[0] // runs[0])
    return len(runs) == 1 and rows * math.prod(p.shape[1:]) % block_size == 0


def _along(p: Any, x: Tensor) -> Any:
    """A DTensor along the first dimension, from local tensors of one length."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as Along

    placements = [Along(0) if is_split(one) else Replicate() for one in p.placements]
    return type(p.data).from_local(x, p.device_mesh, placements, run_check=False)


def from_dtensors(
    p: Any, plan: ParamPlan, entry: Mapping[str, Any], block_size: int, read: Reader
) -> tuple[dict[str, Any], bool]:
    """The local part of a saved state: a result of `to_dtensors`, `Chunks`, or a whole state.

    `block_size` is that of the saved state; `read` decodes the moments of a box.

    Returns:
        The local tensors, and whether moments had to be decoded.
    """
    if isinstance(entry, Chunks):
        return _assembled(p, plan, entry, block_size, read)
    distributed, layout = any(map(is_shared, entry.values())), _saved_layout(plan.name, entry)
    if layout is not None and not distributed:
        raise ValueError(
            f"state_dict: {plan.name}, in blocks of {layout[0]} shards, must be DTensors on {layout[0]} ranks, got "
            f"full tensors; {_REARRANGES}"
        )
    entry = {key: value for key, value in entry.items() if key != SHARDS}
    if not is_shared(p):
        if distributed:
            raise ValueError(
                f"state_dict: the state of {plan.name} must be full tensors, as its parameter is, got DTensors; "
                f"{_REARRANGES}"
            )
        return entry, False
    if plan.shard is not None and not distributed and any(map(_has_items, entry.values())):
        common = {key: value for key, value in entry.items() if not _has_items(value)}
        saved = {key: value for key, value in entry.items() if key not in common}
        return _assembled(p, plan, Chunks([(Shard.whole(p.shape), saved)], common), block_size, read)
    found = {key: local(value) for key, value in entry.items()}
    if plan.shard is None:
        return found, False
    blocks = {key for key in in_blocks(found) if _has_items(found[key])}
    if blocks and layout != _layout(p, plan.shard, block_size):
        was = f"{layout[0]} shards" if layout is not None else "shards whose blocks are the whole parameter's"
        raise ValueError(
            f"state_dict: {plan.name} must be in blocks of {plan.shard.count} shards, got those of {was}; "
            f"{_REARRANGES}"
        )
    # In whole shapes: a shard's codes of two a byte may have its own shape by chance.
    packed = {key for key in blocks if key.endswith(f".{_CODES}") and entry[key].shape != p.shape}
    return found | without_padding(plan.shard, {key: found[key] for key in blocks}, packed, block_size), False


def _has_items(value: Any) -> bool:
    """Whether an entry is a tensor of elements or blocks, not a count."""
    return isinstance(value, Tensor) and value.dim() > 0


def _assembled(
    p: Tensor, plan: ParamPlan, chunks: Chunks, block_size: int, read: Reader
) -> tuple[dict[str, Any], bool]:
    """The state of the local box, from the states of other boxes."""
    mine = plan.shard if plan.shard is not None else Shard.whole(p.shape)
    common = {key: local(value) for key, value in chunks.items()}
    for box, saved in chunks.sources:
        if (box.offsets, box.sizes) == (mine.offsets, mine.sizes):
            return common | dict(saved), False
    keys = {key for _, saved in chunks.sources for key in saved}
    blocks = in_blocks(keys)
    made: dict[str, Any] = common
    for key in sorted(keys - blocks):
        parts = [(box, saved[key]) for box, saved in chunks.sources if key in saved]
        if wrong := [tuple(x.shape) for box, x in parts if tuple(x.shape) != box.sizes]:
            raise ValueError(f"state_dict: {key!r} of {plan.name} must have shape {mine.shape}, got {wrong[0]}")
        made[key] = _boxed(mine, parts)
    if not blocks:
        return made, False
    joined = _joined(mine, chunks, sorted(blocks), block_size)
    if joined is not None:
        return made | joined, False
    # The unit of a moment may be the root of another that has an item per element. Outside of `mine` it is zero,
    # where nothing is taken from what is decoded by it.
    beside = {k: x for k, x in made.items() if _has_items(x) and x.shape == mine.sizes and "weight." not in k}
    decoded = []
    for box, saved in chunks.sources:
        if _intersection(box, mine) is not None:
            more = {key: _boxed(box, [(mine, x)]) for key, x in beside.items() if key not in saved}
            decoded.append((box, read(box, {**more, **saved})))
    for slot in sorted({key.rpartition(".")[0] for key in blocks}):
        parts = [(box, moments[slot]) for box, moments in decoded if slot in moments]
        made[slot] = _boxed(mine, parts) if parts else torch.empty(mine.sizes)  # no elements
    return made, mine.here > 0


def whole_state(chunks: Chunks, block_size: int) -> dict[str, Tensor] | None:
    """A whole parameter's tensors in blocks; None if some box cuts a block."""
    keys = sorted({key for _, saved in chunks.sources for key in saved})
    return _joined(Shard.whole(chunks.sources[0][0].shape), chunks, keys, block_size)


def _joined(mine: Shard, chunks: Chunks, keys: Sequence[str], block: int) -> dict[str, Tensor] | None:
    """A box's tensors in blocks, joined from saved boxes with the same blocks; None if it must be decoded."""
    if (
        any(map(_is_factor, keys))
        or block % 2
        or not all(box.aligned(block) for box in (mine, *(box for box, _ in chunks.sources)))
    ):
        return None
    sources = sorted((one for one in chunks.sources if one[0].here), key=lambda one: one[0].first or 0)
    first, end = mine.first or 0, (mine.first or 0) + mine.here
    joined = {}
    for key in keys:
        codes, sample = key.endswith(f".{_CODES}"), sources[0][1][key]
        by_element = codes and sample.shape == sources[0][0].sizes
        per_item = 1 if by_element else 2 if codes else block
        parts = []
        for box, saved in sources:
            begin = box.first or 0
            low, high = max(first, begin) - begin, min(end, begin + box.here) - begin
            if low < high:
                x = saved[key].reshape(-1) if by_element else saved[key]
                parts.append(x[low // per_item : -(-high // per_item)])
        flat = torch.cat(parts) if parts else sample[:0]
        joined[key] = flat.reshape(mine.sizes) if by_element else flat
    return joined


def _boxed(mine: Shard, parts: Sequence[tuple[Shard, Tensor]]) -> Tensor:
    """The tensor of a box, from those of other boxes; zeros where they have no elements."""
    made = torch.zeros(mine.sizes, dtype=parts[0][1].dtype, device=parts[0][1].device)
    for box, values in parts:
        both = _intersection(box, mine)
        if both is not None:
            _cut(made, mine, both).copy_(_cut(values, box, both))
    return made


def _intersection(one: Shard, other: Shard) -> Shard | None:
    """The intersection of two boxes; None if it is empty."""
    low = tuple(map(max, one.offsets, other.offsets))
    ends = [
        min(a + m, b + n) for a, m, b, n in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    ]
    sizes = tuple(end - begin for begin, end in zip(low, ends, strict=True))
    return replace(one, offsets=low, sizes=sizes) if all(size > 0 for size in sizes) else None


def _cut(x: Tensor, box: Shard, part: Shard) -> Tensor:
    for dim, (base, offset, size) in enumerate(zip(box.offsets, part.offsets, part.sizes, strict=True)):
        x = x.narrow(dim, offset - base, size)
    return x
