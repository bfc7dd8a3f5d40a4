"""Save what a run needs to go on, at once or beside training.

Every rank writes the chunks that only it has (of equal ones the first rank's) into a folder with a temporary name,
`.step-….token`, and a note of what it wrote. Rank 0 waits for all notes, joins them to the manifest, and gives the
folder its name: from then on it is a checkpoint. Before each of these steps the previous one is on disk. So
whatever is killed and whenever, the folder has the earlier checkpoints and perhaps the new one, never half of one
that looks whole.

An asynchronous save keeps training waiting for its checks and the copy to the CPU only. A thread writes, and waits
for other ranks.
"""

from __future__ import annotations

import json
import secrets
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge._arguments import Count, Size, check
from narrowgauge.distributed._checkpoint._coordination import (
    FAILED,
    Ranks,
    broadcast_from_rank0,
    gathered,
    ranks,
    report_failure,
    wait_for,
)
from narrowgauge.distributed._checkpoint._directory import (
    TOKEN,
    checkpoints,
    clear_abandoned,
    commit,
    name_of,
    unfinished_name,
)
from narrowgauge.distributed._checkpoint._files import Lock, locked, write_file, write_tensors
from narrowgauge.distributed._checkpoint._format import DTYPE_NAMES, Chunk, Manifest, TensorEntry, parse_entry
from narrowgauge.distributed._checkpoint._state import local_chunk, snapshot, writes


class PendingCheckpoint:
    """A checkpoint that is being written."""

    def __init__(self, future: Future[Path]) -> None:
        self._future = future
        self._seen = False

    def done(self) -> bool:
        """Whether it was written, or failed."""
        return self._future.done()

    def wait(self) -> Path:
        """Wait for it.

        Returns:
            The checkpoint.

        Raises:
            OSError, TimeoutError, RuntimeError: as `save_checkpoint` does.
        """
        self._seen = True
        return self._future.result()


def save_checkpoint(
    directory: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    keep_last: int | None = 2,
    extra: Any = None,
    random_states: bool = False,
    timeout: float = 600.0,
) -> Path:
    """Save a model, an optimizer and what else a run needs into a new folder of `directory`.

    The folder is called after the step, and complete on disk when it gets this name; then the file `latest` is
    moved to it, and the oldest checkpoints beyond `keep_last` are removed. On several ranks all call it, with one
    folder that all of them see. Sharded tensors are written by the ranks that have them, everything else by rank 0.

    Args:
        directory: of this run's checkpoints; created if it is missing.
        model: DDP, FSDP2 (`fully_shard`), compiled or plain.
        optimizer: of this library or torch's; None saves the model alone.
        step: how many steps were taken.
        keep_last: how many checkpoints to keep, this one included; None for all.
        extra: whatever else is to come back: None, numbers, str, tensors, and lists, tuples and dicts of them (a
            scheduler's or a loss scaler's `state_dict()`). Rank 0's is saved.
        random_states: also save the states of torch's, Python's and NumPy's generators, each rank's own.
        timeout: seconds to wait for other ranks to write.

    Returns:
        The checkpoint, for `load_checkpoint`.

    Raises:
        ValueError: for an argument that cannot be saved, or a step, `keep_last` or name of the folder that differs
            between ranks; nothing is written then.
        OSError: if the disk fails, for instance because it is full.
        TimeoutError: naming the ranks that did not write their part.
        RuntimeError: naming the rank that failed, on the others. In all cases earlier checkpoints are as they were.
    """
    return write_checkpoint(_begin(directory, model, optimizer, step, keep_last, extra, random_states, timeout))


def save_checkpoint_async(
    directory: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    keep_last: int | None = 2,
    extra: Any = None,
    random_states: bool = False,
    timeout: float = 600.0,
) -> PendingCheckpoint:
    """`save_checkpoint` that returns as soon as everything was copied to the CPU; a thread does the rest.

    One checkpoint is written at a time: a call waits for the one before it, and raises its error if it was not
    raised yet. At the end of the program Python waits for the last one. The host needs memory for a copy of this
    rank's part.

    Args:
        directory, model, optimizer, step, keep_last, extra, random_states, timeout: see `save_checkpoint`.

    Returns:
        What to wait for.

    Raises:
        ValueError: as `save_checkpoint`, as does an OSError if the folder cannot be created; what fails later is
            raised by `PendingCheckpoint.wait`.
    """
    return _writer.submit(directory, model, optimizer, step, keep_last, extra, random_states, timeout)


@dataclass(frozen=True)
class LocalChunk:
    """What a rank has of a tensor and writes; `also` are other names of the same memory, as of tied weights."""

    key: str
    tensor: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class SaveTask:
    """One rank's part of a save: everything that is needed once the model may change again.

    Attributes:
        lock: of rank 0; says, as long as this process lives, that the save is in progress.
    """

    folder: Path
    step: int
    keep_last: int | None
    timeout: float
    us: Ranks
    chunks: list[LocalChunk]
    keys: list[str]
    values: Mapping[str, Any]
    token: str = ""
    lock: Lock | None = field(default=None, compare=False)

    @property
    def written(self) -> Path:
        return self.folder / unfinished_name(self.step, self.token)

    @property
    def name(self) -> str:
        return f"rank-{self.us.rank:05d}"


class _Writer:
    """The thread that writes checkpoints, one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._last: PendingCheckpoint | None = None

    def submit(self, *given: Any) -> PendingCheckpoint:
        with self._lock:
            last, self._last = self._last, None
            task = _begin(*given, after=None if last is None or last._seen else last, copied=True)
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="narrowgauge-checkpoint")
            self._last = PendingCheckpoint(self._pool.submit(write_checkpoint, task))
            return self._last


_writer = _Writer()


def _begin(
    directory: str | Path, *given: Any, after: PendingCheckpoint | None = None, copied: bool = False
) -> SaveTask:
    """Wait for another save, check on all ranks what is to be saved, copy it to the CPU if asked to, and create the
    folder to write to."""

    tasks: list[SaveTask] = []

    def check() -> dict[str, Any]:
        if after is not None:
            after.wait()
        task = _checked(Path(directory), *given)
        if copied:
            chunks = [replace(chunk, tensor=chunk.tensor.to("cpu", copy=True)) for chunk in task.chunks]
            # The process may change its directory while a thread writes.
            task = replace(task, chunks=chunks, folder=task.folder.absolute())
        tasks.append(task)
        # Ranks may have the folder under different paths, but its name is one.
        return {"step": task.step, "keep_last": task.keep_last, "directory": task.folder.resolve().name}

    first, *others = gathered(check)
    for rank, other in enumerate(others, start=1):
        for name, value in other.items():
            if value != first[name]:
                got = f"{first[name]!r} on rank 0 and {value!r} on rank {rank}"
                raise ValueError(f"{name} must be the same on all ranks, got {got}")
    (task,) = tasks
    lock: list[Lock] = []

    def create() -> str:
        token = secrets.token_hex(8)
        task.folder.mkdir(parents=True, exist_ok=True)
        with locked(task.folder):
            written = task.folder / unfinished_name(task.step, token)
            written.mkdir()
            lock.append(Lock(written / TOKEN, wait=True))
        return token

    token = broadcast_from_rank0(create)
    return replace(task, token=token, lock=lock[0] if lock else None)


def _checked(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    keep_last: int | None,
    extra: Any,
    random_states: bool,
    timeout: float,
) -> SaveTask:
    us = ranks()
    # `exists` first: another rank may create the folder between the two questions.
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"directory must be a folder, got {folder}, which is a file")
    if folder.is_symlink() and not folder.exists():
        raise ValueError(f"directory must be a folder, got {folder}, a link to what is not there")
    check("step", step, Count)
    if keep_last is not None:
        check("keep_last", keep_last, Size)
    if not timeout > 0:
        raise ValueError(f"timeout must be above 0 seconds, got {timeout!r}")
    found = snapshot(model, optimizer, extra, random_states, us.rank)
    chunks: dict[Any, LocalChunk] = {}
    for key, tensor in found.tensors.items():
        chunk = local_chunk(key, tensor)
        if chunk is None or not writes(tensor, us.rank, key in found.own):
            continue
        part, offsets, sizes = chunk
        if part.numel() or tuple(sizes) == tuple(tensor.shape):
            new = LocalChunk(key, part.detach(), tuple(tensor.shape), offsets)
            # Tied weights are written once. Empty tensors have no memory that would tell them apart; a negating
            # view (`z.conj().imag`) has the same memory and other numbers.
            like = part.device, part.dtype, part.shape, part.stride(), part.is_neg()
            memory = (part.data_ptr(), *like, new.shape, offsets) if part.numel() else key
            known = chunks.get(memory)
            chunks[memory] = new if known is None else replace(known, also=(*known.also, key))
    return SaveTask(folder, step, keep_last, timeout, us, [*chunks.values()], list(found.tensors), found.values)


def write_checkpoint(task: SaveTask) -> Path:
    """Do this rank's part, and wait until all have done theirs; result and errors as `save_checkpoint`."""
    return _run_first(task) if task.lock is not None else _run_other(task)


def _run_first(task: SaveTask) -> Path:
    assert task.lock is not None
    try:
        with locked(task.folder) as alone:
            if alone:
                clear_abandoned(task.folder)
        (task.written / TOKEN).write_text(task.token)
        _write_chunks(task)
        notes = _wait_for_notes(task)
        return commit(task.written, lambda serial: _manifest(task, serial, notes), task.keep_last, task.token)
    except BaseException as error:
        # Space first: on a full disk the report needs some.
        for path in task.written.glob("*.safetensors"):
            path.unlink(missing_ok=True)
        if task.us.world == 1:
            shutil.rmtree(task.written, ignore_errors=True)
        else:
            report_failure(task.written, "save", error)
        raise
    finally:
        task.lock.release()


def _run_other(task: SaveTask) -> Path:
    # Network file systems may show a folder late.
    wait_for(lambda: task.written.is_dir() or None, lambda: f"rank 0 has not made {task.written}", task.timeout)
    try:
        _write_chunks(task)
    except BaseException as error:
        (task.written / f"{task.name}.safetensors").unlink(missing_ok=True)
        report_failure(task.written, task.name, error)
        raise
    return wait_for(lambda: _committed(task), lambda: f"rank 0 has not completed {task.written}", task.timeout)


def _write_chunks(task: SaveTask) -> None:
    """Write this rank's tensors, and a note of what is where."""
    file = f"{task.name}.safetensors"
    note: dict[str, Any] = {"keys": task.keys, "random": task.values["random"], "files": {}, "tensors": {}}
    if task.chunks:
        named = [(chunk.key, chunk.tensor) for chunk in task.chunks]
        starts, size, digest = write_tensors(task.written / file, named)
        note["files"][file] = size, digest
        for chunk, start in zip(task.chunks, starts, strict=True):
            piece = Chunk(file, start, chunk.offsets, tuple(chunk.tensor.shape))
            entry = TensorEntry(DTYPE_NAMES[chunk.tensor.dtype], chunk.shape, (piece,))
            note["tensors"] |= dict.fromkeys((chunk.key, *chunk.also), asdict(entry))
    write_file(task.written / f"{task.name}.json", json.dumps(note, allow_nan=False).encode())


def _wait_for_notes(task: SaveTask) -> list[dict[str, Any]]:
    paths = [task.written / f"rank-{rank:05d}.json" for rank in range(task.us.world)]

    def look() -> list[dict[str, Any]] | None:
        for failure in task.written.glob(f"rank-*.{FAILED}"):
            rank = int(failure.stem.removeprefix("rank-"))
            raise RuntimeError(f"save_checkpoint: rank {rank} failed: {failure.read_text()}")
        return [json.loads(path.read_bytes()) for path in paths] if all(p.exists() for p in paths) else None

    def missing() -> str:
        late = [str(rank) for rank, path in enumerate(paths) if not path.exists()]
        if len(late) == 1:
            return f"rank {late[0]} has not written its part of {task.written}"
        return f"ranks {', '.join(late)} have not written their parts of {task.written}"

    return wait_for(look, missing, task.timeout)


def _manifest(task: SaveTask, serial: int, notes: list[dict[str, Any]]) -> Manifest:
    """The manifest of all ranks' notes, which are removed."""
    files: dict[str, tuple[int, str]] = {}
    tensors: dict[str, TensorEntry] = {}
    random: dict[str, Any] | None = None
    for note in notes:
        files |= note["files"]
        for key, entry in ((key, parse_entry(entry)) for key, entry in note["tensors"].items()):
            before = tensors[key].pieces if key in tensors else ()
            # Norms beside tensor parallelism lie on a data-parallel mesh for each of its ranks, which do not know
            # of each other: of equal boxes the first rank's counts.
            known = {piece.offsets for piece in before}
            new = tuple(piece for piece in entry.pieces if piece.offsets not in known)
            tensors[key] = replace(entry, pieces=before + new)
        if note["random"] is not None:
            random = {**(random or {}), **note["random"]}
    for rank, note in enumerate(notes):
        for key in note["keys"]:
            if key not in tensors:
                raise RuntimeError(f"save_checkpoint: rank {rank} has {key!r}, which no rank has written")
        (task.written / f"rank-{rank:05d}.json").unlink()
    return Manifest(serial, task.step, task.us.world, files, tensors, {**task.values, "random": random})


def _committed(task: SaveTask) -> Path | None:
    """The checkpoint, once rank 0 has given it its name."""
    if task.written.exists():
        for failure in task.written.glob(f"save.{FAILED}"):
            raise RuntimeError(f"save_checkpoint: rank 0 failed: {failure.read_text()}")
        return None
    for path in checkpoints(task.folder):
        if path.name.startswith(name_of(task.step)):
            token = path / TOKEN
            if token.exists() and token.read_text() == task.token:
                return path
    raise RuntimeError(f"save_checkpoint: {task.written} is gone: rank 0 failed, and another save removed it")
