"""What a checkpoint is on disk: tensors as bytes, everything else as JSON, and nothing that can be executed.

A checkpoint is a folder with one `rank-00000.safetensors` for each rank that had something to write, and one
`checkpoint.json`, its manifest. The first are plain safetensors files: a header in JSON, then the tensors' bytes.
The manifest says which chunk of which tensor lies where, and holds every value that is not a tensor, the size and
SHA-256 of every other file, and its own SHA-256. It is written last: a folder without a manifest is not a
checkpoint.

No pickle is written or read, so a checkpoint from an untrusted source can be wrong but cannot run code. What it
says is checked before use: file names that lead elsewhere, chunks outside their file or tensor, and tensors with a
missing chunk are damage.
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
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

FORMAT, VERSION = "narrowgauge checkpoint", 1
MANIFEST = "checkpoint.json"

DTYPES = {  # by their safetensors names
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class DamagedCheckpointError(ValueError):
    """A checkpoint that is not what was written: says which, and what is wrong with it."""


@dataclass(frozen=True)
class Chunk:
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
class TensorEntry:
    """A whole tensor.

    Attributes:
        dtype: its safetensors name.
        shape: its global shape.
        pieces: chunks that together are all of it.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    """The content of `checkpoint.json`; the names of its fields, and of those above, are the file's.

    Attributes:
        serial: how many checkpoints came before it in its folder; tells the newest without a clock.
        step: the step after which it was saved.
        world: how many ranks wrote it.
        files: size in bytes and SHA-256 of every file, by name.
        tensors: every tensor, by key.
        values: everything that is not a tensor, as `encode_value` gives it.
    """

    serial: int
    step: int
    world: int
    files: Mapping[str, tuple[int, str]]
    tensors: Mapping[str, TensorEntry]
    values: Any

    def to_bytes(self) -> bytes:
        """The file."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return canonical({**content, "sha256": hashlib.sha256(canonical(content)).hexdigest()})


def canonical(content: Any, allow_nan: bool = False) -> bytes:
    """The JSON whose SHA-256 is a manifest's checksum. Manifests of earlier releases may hold bare NaN or Infinity,
    which is not JSON; Python reads it."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=allow_nan).encode()


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
    digest = content.pop("sha256", None)
    if digest != hashlib.sha256(canonical(content, allow_nan=True)).hexdigest():
        raise DamagedCheckpointError(f"{path} was changed: its checksum is another")
    try:
        manifest = _parse(content)
        for flaw in _contradictions(manifest):
            raise DamagedCheckpointError(f"{path}: {flaw}")
    except DamagedCheckpointError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} lacks what a manifest has: {error!r}") from error
    return manifest


def open_file(path: Path) -> BufferedReader:
    """A file to read, if it is a regular one: opening a pipe in its place would wait for a writer forever."""
    if path.exists() and not path.is_file():
        raise OSError("it is no file")
    return path.open("rb")


def _parse(content: Mapping[str, Any]) -> Manifest:
    files = {str(name): (int(size), str(digest)) for name, (size, digest) in content["files"].items()}
    tensors = {key: parse_entry(entry) for key, entry in content["tensors"].items()}
    serial, step, world = (int(content[name]) for name in ("serial", "step", "world"))
    return Manifest(serial, step, world, files, tensors, content["values"])


def parse_entry(entry: Mapping[str, Any]) -> TensorEntry:
    """A tensor's entry, as JSON has it."""
    pieces = (
        Chunk(str(p["file"]), int(p["start"]), _sizes(p["offsets"]), _sizes(p["sizes"])) for p in entry["pieces"]
    )
    return TensorEntry(str(entry["dtype"]), _sizes(entry["shape"]), tuple(pieces))


def _sizes(sizes: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """What a manifest says that cannot be true."""
    for name in manifest.files:
        if Path(name).name != name or name in (".", ".."):
            yield f"the file name {name!r} leads out of the folder"
    for key, entry in manifest.tensors.items():
        if entry.dtype not in DTYPES or min(entry.shape, default=0) < 0:
            yield f"{key!r} has dtype {entry.dtype!r} and shape {entry.shape}"
            return
        for chunk in entry.pieces:
            size, _ = manifest.files[chunk.file]
            end = chunk.start + chunk.numel * DTYPES[entry.dtype].itemsize
            ends = [offset + length for offset, length in zip(chunk.offsets, chunk.sizes, strict=False)]
            fits = len(chunk.offsets) == len(chunk.sizes) == len(entry.shape)
            inside = min((*chunk.offsets, *chunk.sizes, chunk.start)) >= 0 and end <= size
            if not (fits and inside and all(e <= s for e, s in zip(ends, entry.shape, strict=True))):
                yield f"a piece of {key!r} lies outside of its file or tensor: {chunk}"
        offsets = {chunk.offsets for chunk in entry.pieces}
        whole = sum(chunk.numel for chunk in entry.pieces) == math.prod(entry.shape)
        if not whole or len(offsets) != len(entry.pieces):
            yield f"the pieces of {key!r} are not all of it"
    for key in _keys_of(manifest.values):
        if key not in manifest.tensors:
            yield f"the tensor {key!r} is not there"


def _keys_of(values: Mapping[str, Any]) -> Iterator[str]:
    """The keys of all tensors in a manifest's values; raises any error if they do not have the expected form."""
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
        for name, state in optimizer["state"]["dict"]:
            yield from tensor_keys(state)
            if name not in names or not all(isinstance(key, str) for key, _ in state["dict"]):
                raise KeyError(name)


def verify_file(path: Path, size: int, digest: str | None) -> None:
    """Compare a file of a checkpoint with its size in bytes, and with its SHA-256 (not if `digest` is None).

    Raises:
        DamagedCheckpointError: if it is missing or different.
    """
    try:
        with open_file(path) as file:
            found = file.seek(0, 2)
            file.seek(0)
            if found != size:
                raise DamagedCheckpointError(f"{path} has {found} bytes, {size} were written")
            if digest is not None and hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise DamagedCheckpointError(f"{path} was changed: its checksum is another")
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error


def encode_value(value: Any, name: str, key: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON; tensors are collected in `tensors`.

    What JSON does not have is a dictionary of one item: {"tensor": key}, {"tuple": items}, {"dict": pairs}, and
    {"float": text} for numbers that are not finite.

    Args:
        value: None, bool, int, float, str, a tensor, or lists, tuples and dicts of them.
        name: what to call it in an error.
        key: the key of the tensor, if it is one; those inside it have longer ones.
        tensors: by key; written to.

    Raises:
        ValueError: for anything else, by `name`.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, Tensor):
        _check(name, value)
        tensors[key] = value
        return {"tensor": key}
    if isinstance(value, list | tuple):
        items = [encode_value(v, f"{name}[{n}]", f"{key}/{n}", tensors) for n, v in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        pairs = []
        for n, (inner, v) in enumerate(value.items()):
            if not isinstance(inner, str | int | float | bool | None):
                raise ValueError(f"{name}: keys must be str or int, got {inner!r} of type {type(inner).__name__}")
            encoded = encode_value(v, f"{name}[{inner!r}]", f"{key}/{n}", tensors)
            pairs.append([encode_value(inner, name, "", {}), encoded])
        return {"dict": pairs}
    raise ValueError(
        f"{name} must be None, bool, int, float, str, a tensor, or lists, tuples and dicts of them, got "
        f"{type(value).__name__}"
    )


def _check(name: str, tensor: Tensor) -> None:
    kind = type(tensor)
    if not (isinstance(tensor, DTensor) or kind in (Tensor, nn.Parameter, nn.Buffer)):
        raise ValueError(f"{name} must be a plain tensor or a DTensor, got a {kind.__name__}")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype not in DTYPE_NAMES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
        raise ValueError(
            f"{name} must be a dense tensor with data in {allowed}; got {tensor.dtype} ({tensor.layout}, on "
            f"{tensor.device})"
        )
    if isinstance(tensor, DTensor) and any(isinstance(p, Partial) for p in tensor.placements):
        raise ValueError(f"{name} must be sharded or replicated, got a DTensor with {tensor.placements}")


def decode_value(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `encode_value` was given."""
    if isinstance(value, list):
        return [decode_value(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float(content)
    if kind == "tuple":
        return tuple(decode_value(v, tensors) for v in content)
    return {decode_value(key, {}) if isinstance(key, dict) else key: decode_value(v, tensors) for key, v in content}


def tensor_keys(value: Any) -> list[str]:
    """The keys of all tensors in an encoded value."""
    found: dict[str, None] = {}

    class Seen(dict[str, Any]):
        def __missing__(self, key: str) -> None:
            found[key] = None

    decode_value(value, Seen())
    return list(found)
