"""States of shared parameters on their way out and back in: words here, DTensors in a `state_dict`.

Whoever reads a state must be able to tell which part of what a rank holds. A word with an item for each element
(a float moment, a low word, an 8-bit code) is a DTensor of its parameter's shape, cut as that is. What counts in
blocks or pairs (scales, 4-bit codes) has no such shape: blocks begin with the shard, and its last one may be short.
Those are DTensors along one dimension, as many items for every rank as the largest shard has, the rest zero:
torch's checkpoints and `get_optimizer_state_dict` take them as they are, on as many ranks.

On another number of ranks the blocks may be others, and items would mean other elements. So beside them goes
``shards``, the number of shards and the elements of the largest; it is left out where every shard's blocks are
blocks of the whole parameter. What was written for other shards is put together from its boxes (`Pieces`): copied,
block by block, where the blocks here are the same blocks; else decoded, to be encoded once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from narrowgauge.optim._clip_gradients import HISTORY
from narrowgauge.optim._plan import ParameterPlan
from narrowgauge.optim._shards import Shard, as_shared, is_shared, is_split, local

# The key, in a state_dict, of what tells shards whose blocks are their own.
SHARDS = "shards"
_CODES = "codes"

Words = Mapping[str, Tensor]
# Gives the moments of a box that are kept in blocks: by slot, float32, in the box's sizes.
Reader = Callable[[Shard, Words], Mapping[str, Tensor]]


class Pieces(dict[str, Any]):
    """A parameter's saved state in pieces, for `load_state_dict`: as a dict, what is the same for all of them.

    Args:
        sources: the boxes of the whole parameter that were kept apart, and the words of each.
        common: what is no word of elements.
    """

    def __init__(self, sources: Sequence[tuple[Shard, Words]], common: Mapping[str, Any]) -> None:
        super().__init__(common)
        self.sources = sources


def largest(p: Any) -> int:
    """Elements of the largest shard of a DTensor, the same number on all ranks."""
    sizes = list(p.shape)
    for size, placement in zip(p.device_mesh.shape, p.placements, strict=True):
        if is_split(placement):
            sizes[placement.dim] = -(-sizes[placement.dim] // size)
    return math.prod(sizes)


def _items(plan: ParameterPlan, numel: int) -> dict[str, int]:
    """How many items words have that have not one for each element, by key, for so many elements."""
    found = {}
    for slot in (*plan.slots, *plan.dormant):
        zeros = slot.storage.init(torch.zeros(min(numel, 1), device="cpu"), slot.slot.signed, slot.block_size)
        if _CODES not in zeros:
            continue
        for word in zeros:
            key = f"{slot.slot.name}.{word}"
            if word != _CODES:
                found[key] = -(-numel // slot.block_size)
            elif getattr(slot.storage, "bits", 8) == 4:
                found[key] = -(-numel // 2)
    return found


def wrapped(p: Any, plan: ParameterPlan, state: Words) -> dict[str, Any]:
    """A parameter's state as `state_dict` gives it."""
    if not is_shared(p):
        return dict(state)
    here, most = local(p), largest(p)
    items = _items(plan, most) if plan.shard is not None else {}
    given: dict[str, Any] = {}
    for key, word in state.items():
        if key in items:
            padding = items[key] - len(word)
            pad = (0, 0) * (word.dim() - 1) + (0, padding)
            given[key] = _along(p, torch.nn.functional.pad(word, pad) if padding else word)
        elif _is_word(key, word) and word.shape == here.shape:
            given[key] = as_shared(p, word)
        else:
            given[key] = word
    if items and not _aligned_everywhere(p, plan):
        given[SHARDS] = _layout(plan, most)
    return given


def _layout(plan: ParameterPlan, most: int) -> Tensor:
    assert plan.shard is not None
    return torch.tensor([plan.shard.count, most], dtype=torch.int64)


def _aligned_everywhere(p: Any, plan: ParameterPlan) -> bool:
    """Whether the blocks of all shards are blocks of the whole; all ranks find the same."""
    block = next(slot.block_size for slot in plan.slots if slot.storage.quantized)
    # Rows of a parameter that is cut along its first dimension only, in equal runs but for the last.
    if any(is_split(one) and (one.dim != 0 or type(one).__name__ != "Shard") for one in p.placements):
        return False
    runs = [size for size, one in zip(p.device_mesh.shape, p.placements, strict=True) if is_split(one)]
    rows = -(-p.shape[0] // runs[0])
    return len(runs) == 1 and rows * math.prod(p.shape[1:]) % block == 0


def _along(p: Any, word: Tensor) -> Any:
    """What every rank has, all of one length, as a DTensor along its first dimension."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as Along

    placements = [Along(0) if is_split(one) else Replicate() for one in p.placements]
    return type(p.data).from_local(word, p.device_mesh, placements, run_check=False)


def unwrapped(
    p: Any, plan: ParameterPlan, entry: Mapping[str, Any], block_size: int, read: Reader
) -> tuple[dict[str, Any], bool]:
    """A saved state as it lies here: what `wrapped` gave, `Pieces`, or words of a whole parameter.

    Args:
        p: the parameter.
        plan: how it is kept.
        entry: its saved state.
        block_size: elements a block there.
        read: decodes the moments of a box.

    Returns:
        The words, and whether moments had to be decoded.

    Raises:
        ValueError: for blocks of other shards.
    """
    if isinstance(entry, Pieces):
        return _put_together(p, plan, entry, block_size, read)
    distributed, said = any(map(is_shared, entry.values())), entry.get(SHARDS)
    if said is not None and not distributed and int(said[0]) > 1:
        raise ValueError(
            f"state_dict: {plan.name} has full tensors of blocks of {int(said[0])} shards, which are not the whole "
            "parameter's; takes DTensors on as many ranks, or a checkpoint of narrowgauge.distributed "
            "(load_checkpoint), which puts blocks together"
        )
    if not is_shared(p):
        if distributed:
            raise ValueError(
                f"state_dict: the state of {plan.name} has DTensors, its parameter is none; takes full tensors, or "
                "a checkpoint of narrowgauge.distributed (load_checkpoint)"
            )
        return dict(entry), False
    sharded = plan.shard is not None
    if sharded and not distributed and any(_is_word(*item) for item in entry.items()):
        common = {key: value for key, value in entry.items() if not _is_word(key, value)}
        words = {key: value for key, value in entry.items() if key not in common}
        shape = tuple(p.shape)
        whole = Shard(shape, (0,) * len(shape), shape)
        return _put_together(p, plan, Pieces([(whole, words)], common), block_size, read)
    found = {key: local(value) for key, value in entry.items() if key != SHARDS}
    if not sharded:
        return found, False
    assert plan.shard is not None
    blocks = [key for key in found if key.endswith(f".{_CODES}")]
    mine = _layout(plan, largest(p))
    own = not any(s.storage.quantized for s in plan.slots) or not _aligned_everywhere(p, plan)
    if blocks and (said is not None or own) and not (said is not None and torch.equal(said.cpu(), mine)):
        was = f"{int(said[0])} shards" if said is not None else "shards whose blocks are the whole parameter's"
        raise ValueError(
            f"state_dict: {plan.name} was saved in blocks of {was}, it has {plan.shard.count} here; takes as many, "
            "or a checkpoint of narrowgauge.distributed (load_checkpoint), which puts blocks together"
        )
    return _without_padding(plan, found), False


def _is_word(key: str, value: Any) -> bool:
    """Whether an entry of a saved state is there for elements, and not a count."""
    return isinstance(value, Tensor) and value.dim() > 0 and key != HISTORY


def _without_padding(plan: ParameterPlan, words: dict[str, Any]) -> dict[str, Any]:
    assert plan.shard is not None
    here = plan.shard.here
    for key in [key for key in words if key.endswith(f".{_CODES}")]:
        slot, codes = key.removesuffix(f".{_CODES}"), words[key]
        if codes.shape != plan.shard.sizes:  # two a byte
            words[key] = codes[: -(-here // 2)]
        size = _block_size(plan, slot)
        for other in [k for k in words if k.startswith(f"{slot}.") and k != key]:
            words[other] = words[other][: -(-here // size)]
    return words


def _block_size(plan: ParameterPlan, name: str) -> int:
    return next(slot.block_size for slot in (*plan.slots, *plan.dormant) if slot.slot.name == name)


def _put_together(
    p: Tensor, plan: ParameterPlan, pieces: Pieces, block_size: int, read: Reader
) -> tuple[dict[str, Any], bool]:
    """The words of the box that lies here, from those of others."""
    shape = tuple(p.shape)
    mine = plan.shard if plan.shard is not None else Shard(shape, (0,) * len(shape), shape)
    common = {key: local(value) for key, value in pieces.items()}
    for box, words in pieces.sources:
        if (box.offsets, box.sizes) == (mine.offsets, mine.sizes):
            return common | dict(words), False
    keys = {key for _, words in pieces.sources for key in words}
    slots = sorted({key.removesuffix(f".{_CODES}") for key in keys if key.endswith(f".{_CODES}")})
    inside = {key for slot in slots for key in keys if key.startswith(f"{slot}.")}
    made: dict[str, Any] = common
    for key in sorted(keys - inside):
        parts = [(box, words[key]) for box, words in pieces.sources if key in words]
        if wrong := [tuple(word.shape) for box, word in parts if tuple(word.shape) != box.sizes]:
            raise ValueError(f"state_dict: {key!r} of {plan.name} has shape {wrong[0]}, takes {shape}")
        made[key] = _boxed(mine, parts)
    if not slots:
        return made, False
    joined = _joined(mine, pieces, sorted(inside), block_size)
    if joined is not None:
        return made | joined, False
    decoded = [(box, read(box, words)) for box, words in pieces.sources if _meet(box, mine) is not None]
    for slot in slots:
        parts = [(box, moments[slot]) for box, moments in decoded if slot in moments]
        made[slot] = _boxed(mine, parts) if parts else torch.empty(mine.sizes)  # no elements
    return made, mine.here > 0


def whole_words(pieces: Pieces, block_size: int) -> dict[str, Tensor] | None:
    """Words in blocks of a whole parameter; None if its boxes have blocks of their own."""
    shape = pieces.sources[0][0].shape
    keys = sorted({key for _, words in pieces.sources for key in words})
    return _joined(Shard(shape, (0,) * len(shape), shape), pieces, keys, block_size)


def _joined(mine: Shard, pieces: Pieces, keys: Sequence[str], block: int) -> dict[str, Tensor] | None:
    """Words in blocks of a box whose blocks are those of the boxes that were saved; None if they are others."""
    if block % 2 or not all(box.aligned(block) for box in (mine, *(box for box, _ in pieces.sources))):
        return None
    sources = sorted((one for one in pieces.sources if one[0].here), key=lambda one: one[0].first or 0)
    if not mine.here:
        return {key: _none_of(sources[0][1][key], key, sources[0][0], mine) for key in keys}
    first, end = mine.first or 0, (mine.first or 0) + mine.here
    joined = {}
    for key in keys:
        name = key.partition(".")[0]
        codes = key == f"{name}.{_CODES}"
        parts = []
        for box, words in sources:
            begin = box.first or 0
            low, high = max(first, begin) - begin, min(end, begin + box.here) - begin
            if low >= high:
                continue
            word = words[key]
            if codes and word.shape == box.sizes:
                parts.append(word.reshape(-1)[low:high])
            elif codes:
                parts.append(word[low // 2 : -(-high // 2)])
            else:
                parts.append(word[low // block : -(-high // block)])
        flat = torch.cat(parts)
        by_element = codes and sources[0][1][key].shape == sources[0][0].sizes
        joined[key] = flat.reshape(mine.sizes) if by_element else flat
    return joined


def _none_of(word: Tensor, key: str, box: Shard, mine: Shard) -> Tensor:
    """A word of no elements."""
    by_element = key.endswith(f".{_CODES}") and word.shape == box.sizes
    return word.new_empty(mine.sizes) if by_element else word[:0]


def _boxed(mine: Shard, parts: Sequence[tuple[Shard, Tensor]]) -> Tensor:
    """What lies in a box, from what lies in others."""
    made = torch.empty(mine.sizes, dtype=parts[0][1].dtype, device=parts[0][1].device)
    for box, values in parts:
        both = _meet(box, mine)
        if both is not None:
            _cut(made, mine, both).copy_(_cut(values, box, both))
    return made


def _meet(one: Shard, other: Shard) -> Shard | None:
    """The box that two boxes share; None if it is empty."""
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
