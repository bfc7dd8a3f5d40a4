"""States of sharded parameters as pieces, one a rank, and a state put together from the pieces of other ranks.

A checkpoint of this library (`narrowgauge.distributed`) writes what each rank has, as it is. A tensor with an item
per element (a float moment, a low word, 8-bit codes) becomes a DTensor of its parameter's shape, cut as that is.
Tensors with an item per block or per pair of elements (scales, 4-bit codes) begin with the shard, whose last block
may be short. They become DTensors cut along dimension 0; each rank pads its part with zeros to the longest part. A
reader knows each piece's box from the parameter's pieces.

On another number of ranks blocks may begin elsewhere, and items would belong to other elements. A state that was
written for other shards is assembled from its boxes (`Chunks`): copied block by block if the blocks here are the
same, else decoded and encoded again.

Low words of 4 bits (`split4`) leave a rank as those of `split8`, a byte each, because a shard may cut a pair.

A `state_dict` has other shapes, which torch's tools can move by themselves: see `_state_shapes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from narrowgauge._torch_private import local
from narrowgauge.optim._plan import ParamPlan
from narrowgauge.optim._sharding import Shard, as_shared, is_shared, is_split
from narrowgauge.storage._weights import to_bytes

_CODES = "codes"
# The keys of row means and column means: of a moment that is stored as a whole, in one box.
_FACTORS = ("rows", "columns")
LOW_CODES = "weight.codes"  # low words of 4 bits

Tensors = Mapping[str, Tensor]
# Decodes a box's moments that are stored in blocks of a size: float32, by slot, in the box's sizes.
Reader = Callable[[Shard, Tensors, int], Mapping[str, Tensor]]


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


def is_factor(key: str) -> bool:
    """Whether a key is that of row means or column means."""
    return key.rpartition(".")[2] in _FACTORS


def with_single_words(state: Mapping[str, Any], shape: Sequence[int]) -> Mapping[str, Any]:
    """A state whose 4-bit low words became those of `split8`: int8 in the shape of the parameter, `shape`."""
    pairs, whole = state.get(LOW_CODES), torch.Size(shape)
    if pairs is None or (pairs.dtype == torch.int8 and pairs.shape == whole):
        return state
    pairs = pairs.full_tensor() if is_shared(pairs) else pairs  # torch cuts what it finds flat
    if pairs.dtype != torch.uint8 or pairs.shape != (-(-whole.numel() // 2),):
        raise ValueError(
            f"state_dict: {LOW_CODES!r} must be two words a byte for shape {tuple(whole)}, got {pairs.dtype} of "
            f"shape {tuple(pairs.shape)}"
        )
    return {**state, LOW_CODES: to_bytes(pairs, whole)}


def without_padding(box: Shard, words: Tensors, packed: Collection[str], block_size: int) -> dict[str, Tensor]:
    """Tensors in blocks of a box, without the zeros that `to_dtensors` adds; `packed` codes are kept two a byte."""
    found = {}
    for key, x in words.items():
        per_item = 2 if key in packed else 1 if key.endswith(f".{_CODES}") or is_factor(key) else block_size
        found[key] = x if per_item == 1 else x[: -(-box.here // per_item)]
    return found


def _items(plan: ParamPlan, numel: int) -> dict[str, int]:
    """By key, the length of tensors that do not have an item per element, for `numel` elements."""
    found = {}
    for slot in plan.all_slots:
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


def to_pieces(p: Any, plan: ParamPlan, state: Tensors) -> dict[str, Any]:
    """A parameter's state as a checkpoint of this library writes it."""
    if not is_shared(p):
        return dict(state)
    here = local(p)
    state = with_single_words(state, here.shape)
    items = _items(plan, largest(p)) if plan.shard is not None else {}
    given: dict[str, Any] = {}
    for key, x in state.items():
        if key in items:
            padding = items[key] - len(x)
            pad = (0, 0) * (x.dim() - 1) + (0, padding)
            given[key] = _along(p, torch.nn.functional.pad(x, pad) if padding else x)
        elif has_items(x) and x.shape == here.shape:
            given[key] = as_shared(p, x)
        else:
            given[key] = x
    return given


def _along(p: Any, x: Tensor) -> Any:
    """A DTensor along the first dimension, from local tensors of one length."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as Along

    placements = [Along(0) if is_split(one) else Replicate() for one in p.placements]
    return type(p.data).from_local(x, p.device_mesh, placements, run_check=False)


def has_items(value: Any) -> bool:
    """Whether an entry is a tensor of elements or blocks, not a count."""
    return isinstance(value, Tensor) and value.dim() > 0


def assembled(
    p: Tensor, plan: ParamPlan, chunks: Chunks, block_size: int, read: Reader
) -> tuple[dict[str, Any], bool]:
    """The state of the local box, from the states of other boxes."""
    mine = plan.shard if plan.shard is not None else Shard.whole(p.shape)
    common = {key: local(value) for key, value in chunks.items()}
    for box, saved in chunks.sources:
        if (box.offsets, box.sizes) == (mine.offsets, mine.sizes):
            return common | dict(saved), False
    chunks = Chunks([(box, with_single_words(saved, box.sizes)) for box, saved in chunks.sources], common)
    keys = {key for _, saved in chunks.sources for key in saved}
    blocks = in_blocks(keys) - {LOW_CODES}
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
    beside = {k: x for k, x in made.items() if has_items(x) and x.shape == mine.sizes and "weight." not in k}
    decoded = []
    for box, saved in chunks.sources:
        if _intersection(box, mine) is not None:
            more = {key: _boxed(box, [(mine, x)]) for key, x in beside.items() if key not in saved}
            decoded.append((box, read(box, {**more, **saved}, block_size)))
    for slot in sorted({key.rpartition(".")[0] for key in blocks}):
        parts = [(box, moments[slot]) for box, moments in decoded if slot in moments]
        made[slot] = _boxed(mine, parts) if parts else torch.empty(mine.sizes)  # no elements
    return made, mine.here > 0


def whole_state(chunks: Chunks, block_size: int) -> dict[str, Tensor] | None:
    """A whole parameter's tensors in blocks and its 4-bit low words; None if some box cuts a block."""
    keys = {key for _, saved in chunks.sources for key in saved}
    whole = Shard.whole(chunks.sources[0][0].shape)
    blocks = sorted(keys - {LOW_CODES})
    joined = _joined(whole, chunks, blocks, block_size) if blocks else {}
    if joined is None or LOW_CODES not in keys:
        return joined
    words = [(box, with_single_words(saved, box.sizes)[LOW_CODES]) for box, saved in chunks.sources]
    return {**joined, LOW_CODES: _boxed(whole, words)}


def _joined(mine: Shard, chunks: Chunks, keys: Sequence[str], block: int) -> dict[str, Tensor] | None:
    """A box's tensors in blocks, joined from saved boxes with the same blocks; None if it must be decoded."""
    if (
        any(map(is_factor, keys))
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
