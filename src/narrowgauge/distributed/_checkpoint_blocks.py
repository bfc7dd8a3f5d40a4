"""States in blocks in a checkpoint: which elements a rank's codes and scales stand for.

Blocks begin with the shard that they were made for, so what a rank wrote of them means something beside what it
wrote of the parameter only: both are in its file, and the parameter's piece says the box. Whoever loads takes the
boxes that meet its own. The optimizer puts them together: copied where the blocks are the same ones, else decoded
and encoded anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from narrowgauge.distributed._checkpoint_format import DamagedCheckpointError, Manifest, decode_value
from narrowgauge.distributed._checkpoint_read import mapped
from narrowgauge.optim._sharded_state import Chunks, in_blocks, whole_state, without_padding
from narrowgauge.optim._sharding import Shard

# Words of one parameter's state that are kept in blocks: their keys among the manifest's tensors.
Blocks = dict[str, str]


def block_words(said: Mapping[str, Any]) -> dict[str, Blocks]:
    """The words in blocks of a saved optimizer, by the parameter's name."""
    found = {}
    for name, words in said["state"]["dict"]:
        keys = {word: value["tensor"] for word, value in words["dict"] if _is_tensor(value)}
        kept = in_blocks(keys)
        if blocks := {word: key for word, key in keys.items() if word in kept}:
            found[name] = blocks
    return found


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and "tensor" in value


def in_pieces(manifest: Manifest, name: str, blocks: Blocks) -> bool:
    """Whether words in blocks were written by more than one rank."""
    keys = [*blocks.values(), f"model/{name}"]
    return any(len(manifest.tensors[key].pieces) != 1 for key in keys)


def without(said: Mapping[str, Any], taken: Mapping[str, Blocks]) -> dict[str, Any]:
    """A saved optimizer without some words."""
    states = [
        [name, {"dict": [[word, value] for word, value in words["dict"] if word not in taken.get(name, {})]}]
        for name, words in said["state"]["dict"]
    ]
    return {**said, "state": {"dict": states}}


def sources(folder: Path, manifest: Manifest, name: str, blocks: Blocks, block_size: int) -> list[Any]:
    """The boxes of a parameter that were written, and the words in blocks of each; mapped, not read."""
    stored = manifest.tensors[f"model/{name}"]
    found = []
    for piece in stored.pieces:
        box = Shard(tuple(stored.shape), tuple(piece.offsets), tuple(piece.sizes))
        words: dict[str, Tensor] = {}
        packed = set()
        for word, key in blocks.items():
            kept = manifest.tensors[key]
            mine = next((one for one in kept.pieces if one.file == piece.file), None)
            if mine is None:
                raise DamagedCheckpointError(f"{folder}: {piece.file} has a part of {name!r} and none of {key!r}")
            words[word] = mapped(folder, kept, mine)
            if word.endswith(".codes") and tuple(kept.shape) != tuple(stored.shape):
                packed.add(word)
        found.append((box, without_padding(box, words, packed, block_size)))
    return found


def block_sizes(said: Mapping[str, Any]) -> dict[str, int]:
    """Elements a block of each parameter's state in a saved optimizer, by the parameter's name."""
    sizes: dict[str, int] = {}
    for group in said["groups"]:
        size = decode_value(dict(group["options"]["dict"]).get("block_size", 1), {})
        sizes |= dict.fromkeys(group["params"], size)
    return sizes


def whole_blocks(folder: Path, manifest: Manifest, said: Mapping[str, Any]) -> dict[str, Tensor]:
    """Words in blocks as one process has them, of parameters that several ranks wrote; by their keys.

    Raises:
        ValueError: where shards do not begin with a block of the whole parameter.
    """
    made: dict[str, Tensor] = {}
    sizes = block_sizes(said)
    for name, blocks in block_words(said).items():
        if not in_pieces(manifest, name, blocks):
            continue
        words = whole_state(Chunks(sources(folder, manifest, name, blocks, sizes[name]), {}), sizes[name])
        if words is None:
            raise ValueError(
                f"path: the shards of {name!r} do not begin with its blocks of {sizes[name]}, so that its moments "
                "have no codes as a whole; load it in one process (load_checkpoint), which encodes them anew"
            )
        made |= {key: words[word] for word, key in blocks.items()}
    return made
