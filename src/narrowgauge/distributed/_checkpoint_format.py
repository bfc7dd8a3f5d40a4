"""What a checkpoint is on disk: tensors as bytes, everything else as JSON, and nothing that could be executed.

A checkpoint is a folder with one `rank-00000.safetensors` for each rank that had something to write, and one
`checkpoint.json`, its manifest. The first are plain safetensors files: a header in JSON, then the tensors' bytes.
The manifest says which piece of which tensor lies where, holds every value that is no tensor, the size and the
SHA-256 of every other file, and its own. A folder without a manifest is no checkpoint: the manifest comes last.

No pickle is written or read, so a checkpoint from somebody else can be wrong but cannot run code. What it says is
checked before it is used: names of files that lead elsewhere, pieces outside their file or tensor, and tensors
with a piece missing are damage.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FORMAT, VERSION = "narrowgauge checkpoint", 1
MANIFEST = "checkpoint.json"

# The names that safetensors has for what a storage, a model or an extra may be kept in.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class DamagedCheckpointError(ValueError):
    """A checkpoint that is not what was written: says which, and what is wrong with it."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, contiguous in a file.

    Attributes:
        file: the file's name.
        start: where its bytes begin there.
        offsets, sizes: of the box in the tensor, one number a dimension.
    """

    file: str
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Stored:
    """A whole tensor.

    Attributes:
        dtype: its safetensors name.
        shape: its global shape.
        pieces: boxes that together are all of it.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    """What `checkpoint.json` says.

    Attributes:
        serial: how many checkpoints came before it in its folder; tells the newest without a clock.
        step: the step it was saved after.
        world: how many ranks wrote it.
        files: size in bytes and SHA-256 of every file, by name.
        tensors: every tensor, by key.
        values: everything that is no tensor, as `encode_value` gives it.
    """

    serial: int
    step: int
    world: int
    files: Mapping[str, tuple[int, str]]
    tensors: Mapping[str, Stored]
    values: Any

    def to_bytes(self) -> bytes:
        """The file."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return _canonical({**content, "sha256": hashlib.sha256(_canonical(content)).hexdigest()})


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def read_manifest(folder: Path) -> Manifest:
    """A checkpoint's manifest, checked against its own checksum and against itself.

    Raises:
        DamagedCheckpointError: if there is none, or it is not what was written.
        ValueError: if another version wrote it.
    """
    path = folder / MANIFEST
    try:
        with open_file(path) as file:
            content = json.loads(file.read())
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{folder} has no {MANIFEST}: it is no checkpoint, or half of one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DamagedCheckpointError(f"{path} is no manifest of a checkpoint: its format is not {FORMAT!r}")
    if content.get("version") != VERSION:
        raise ValueError(f"{path} has version {content.get('version')!r}, this release reads version {VERSION}")
    said = content.pop("sha256", None)
    if said != hashlib.sha256(_canonical(content)).hexdigest():
        raise DamagedCheckpointError(f"{path} was changed: its checksum is another")
    try:
        manifest = _parse(content)
        for flaw in _flaws(manifest):
            raise DamagedCheckpointError(f"{path}: {flaw}")
    except DamagedCheckpointError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} lacks what a manifest has: {error!r}") from error
    return manifest


def open_file(path: Path) -> BufferedReader:
    """A file to read from; opening a pipe in its place would wait for a writer for ever.

    Raises:
        OSError: if it is not there, or no file.
    """
    if path.exists() and not path.is_file():
        raise OSError("it is no file")
    return path.open("rb")


def _parse(content: Mapping[str, Any]) -> Manifest:
    files = {str(name): (int(size), str(digest)) for name, (size, digest) in content["files"].items()}
    tensors = {}
    for key, said in content["tensors"].items():
        pieces = tuple(
            Piece(str(p["file"]), int(p["start"]), _sizes(p["offsets"]), _sizes(p["sizes"])) for p in said["pieces"]
        )
        tensors[key] = Stored(str(said["dtype"]), _sizes(said["shape"]), pieces)
    serial, step, world = (int(content[name]) for name in ("serial", "step", "world"))
    return Manifest(serial, step, world, files, tensors, content["values"])


def _sizes(said: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in said)


def _flaws(manifest: Manifest) -> Iterator[str]:
    """What a manifest says that cannot be: harmless where it was written by us, not where it was made up."""
    for name in manifest.files:
        if Path(name).name != name or name in (".", ".."):
            yield f"the file name {name!r} leads out of the folder"
    for key, stored in manifest.tensors.items():
        if stored.dtype not in DTYPES or min(stored.shape, default=0) < 0:
            yield f"{key!r} has dtype {stored.dtype!r} and shape {stored.shape}"
            return
        for piece in stored.pieces:
            size, _ = manifest.files[piece.file]
            end = piece.start + piece.numel * DTYPES[stored.dtype].itemsize
            ends = [offset + length for offset, length in zip(piece.offsets, piece.sizes, strict=False)]
            fits = len(piece.offsets) == len(piece.sizes) == len(stored.shape)
            inside = min((*piece.offsets, *piece.sizes, piece.start)) >= 0 and end <= size
            if not (fits and inside and all(e <= s for e, s in zip(ends, stored.shape, strict=True))):
                yield f"a piece of {key!r} lies outside of its file or tensor: {piece}"
        places = {piece.offsets for piece in stored.pieces}
        whole = sum(piece.numel for piece in stored.pieces) == math.prod(stored.shape)
        if not whole or len(places) != len(stored.pieces):
            yield f"the pieces of {key!r} are not all of it"
    for key in _keys_of(manifest.values):
        if key not in manifest.tensors:
            yield f"the tensor {key!r} is not there"


def _keys_of(values: Mapping[str, Any]) -> Iterator[str]:
    """The keys of all tensors in a manifest's values; raises anything where they are not what they should be."""
    random, optimizer = values["random"], values["optimizer"]
    for value in (values["model"], values["extra"], *(random or {}).values()):
        yield from tensor_keys(value)
    if any(isinstance(name, list | dict) for name, _ in values["model"]["dict"]):
        raise TypeError("names are lists")
    if optimizer is not None:
        names = {str(name) for group in optimizer["groups"] for name in group["params"]}
        for group in optimizer["groups"]:
            yield from tensor_keys(group["options"])
            if not isinstance(group["options"]["dict"], list) or "named" not in group:
                raise TypeError("a group has no options")
        for name, words in optimizer["state"]["dict"]:
            yield from tensor_keys(words)
            if name not in names or not all(isinstance(word, str) for word, _ in words["dict"]):
                raise KeyError(name)


def verify_file(folder: Path, name: str, said: tuple[int, str], content: bool = True) -> None:
    """Check a file of a checkpoint.

    Args:
        folder, name: which.
        said: its size and SHA-256.
        content: whether to read it; else its size is looked at only.

    Raises:
        DamagedCheckpointError: if it is missing or another.
    """
    size, digest = said
    path = folder / name
    try:
        with open_file(path) as file:
            found = file.seek(0, 2)
            file.seek(0)
            if found != size:
                raise DamagedCheckpointError(f"{path} has {found} bytes, {size} were written")
            if content and hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise DamagedCheckpointError(f"{path} was changed: its checksum is another")
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error


def encode_value(value: Any, name: str, key: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON keeps it; tensors are put aside.

    Args:
        value: None, bool, int, float, str, a tensor, or lists, tuples and dicts of them.
        name: what to call it in an error.
        key: the key of the tensor, if it is one; those inside it have longer ones.
        tensors: where tensors go.

    Raises:
        ValueError: for anything else.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Tensor):
        tensors[key] = value
        return {"tensor": key}
    if isinstance(value, list | tuple):
        items = [encode_value(v, f"{name}[{n}]", f"{key}/{n}", tensors) for n, v in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        pairs = []
        for n, (inner, v) in enumerate(value.items()):
            if not isinstance(inner, str | int | float | bool | None):
                raise ValueError(f"{name}: got a key {inner!r} of type {type(inner).__name__}, takes str or int")
            pairs.append([inner, encode_value(v, f"{name}[{inner!r}]", f"{key}/{n}", tensors)])
        return {"dict": pairs}
    raise ValueError(
        f"{name}: got {type(value).__name__}, takes None, bool, int, float, str, tensors, and lists, tuples "
        "and dicts of them"
    )


def decode_value(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `encode_value` was given."""
    if isinstance(value, list):
        return [decode_value(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(decode_value(v, tensors) for v in content)
    return {key: decode_value(v, tensors) for key, v in content}


def tensor_keys(value: Any) -> list[str]:
    """The keys of all tensors in an encoded value."""
    found: dict[str, None] = {}

    class Seen(dict[str, Any]):
        def __missing__(self, key: str) -> None:
            found[key] = None

    decode_value(value, Seen())
    return list(found)
