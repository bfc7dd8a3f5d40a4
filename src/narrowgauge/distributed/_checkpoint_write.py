"""Write a checkpoint: every rank its share, and rank 0 the manifest and the name.

Every rank writes the pieces that only it has (of equal ones the first rank's) into a folder with a name of its own,
`.step-….token`, and a note of what it wrote. Rank 0 waits for all notes, joins them to the manifest, and gives the
folder its name: from then on it is a checkpoint. Before every one of these steps what came before is on disk. So
whatever is killed and whenever, the folder has the checkpoints from before, and perhaps the new one: never half of
one that looks whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from narrowgauge.distributed._checkpoint_files import Lock, locked, write_file, write_tensors
from narrowgauge.distributed._checkpoint_folder import (
    TOKEN,
    checkpoints,
    clear_abandoned,
    commit,
    name_of,
    unfinished_name,
)
from narrowgauge.distributed._checkpoint_format import DTYPE_NAMES, Manifest, Piece, Stored
from narrowgauge.distributed._checkpoint_ranks import (
    FAILED,
    Ranks,
    raise_refused,
    say_failed,
    say_refused,
    wait_for,
)


@dataclass(frozen=True)
class Part:
    """What a rank holds of a tensor and writes; `also` are other names of the same memory, as of tied weights."""

    key: str
    tensor: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """One rank's share of a save, all that is needed once the model may change again."""

    folder: Path
    step: int
    keep_last: int | None
    timeout: float
    token: str
    us: Ranks
    parts: list[Part]
    held: list[str]
    values: Mapping[str, Any]

    @property
    def written(self) -> Path:
        return self.folder / unfinished_name(self.step, self.token)

    @property
    def name(self) -> str:
        return f"rank-{self.us.rank:05d}"


def write_checkpoint(job: Job) -> Path:
    """Do this rank's share, and wait until all have done theirs.

    Returns:
        The checkpoint.

    Raises:
        OSError, TimeoutError, RuntimeError: see `save_checkpoint`.
    """
    try:
        return _run_first(job) if job.us.rank == 0 else _run_other(job)
    except BaseException as error:
        say_refused(job.us, job.token, error)  # a folder that cannot be made or written to says nothing
        raise


def _run_first(job: Job) -> Path:
    job.folder.mkdir(parents=True, exist_ok=True)
    with locked(job.folder) as alone:
        if alone:
            clear_abandoned(job.folder)
        job.written.mkdir()
        lock = Lock(job.written / TOKEN, wait=True)  # says, as long as this process lives, that somebody is at it
    try:
        (job.written / TOKEN).write_text(job.token)
        _write_part(job)
        notes = _wait_for_notes(job)
        return commit(job.written, lambda serial: _manifest(job, serial, notes), job.keep_last, job.token)
    except BaseException as error:
        # Space first: on a full disk the note that says so needs some.
        for path in job.written.glob("*.safetensors"):
            path.unlink(missing_ok=True)
        if job.us.world == 1:
            shutil.rmtree(job.written, ignore_errors=True)
        else:
            say_failed(job.written, "save", error)
        raise
    finally:
        lock.release()


def _run_other(job: Job) -> Path:
    wait_for(lambda: _begun(job), lambda: f"rank 0 has not made {job.written}", job.timeout)
    try:
        _write_part(job)
    except BaseException as error:
        (job.written / f"{job.name}.safetensors").unlink(missing_ok=True)
        say_failed(job.written, job.name, error)
        raise
    return wait_for(lambda: _committed(job), lambda: f"rank 0 has not completed {job.written}", job.timeout)


def _begun(job: Job) -> bool | None:
    """Whether rank 0 has made the folder; None for not yet."""
    raise_refused(job.us, job.token)
    return job.written.is_dir() or None


def _write_part(job: Job) -> None:
    """This rank's tensors, and a note of what is where."""
    file = f"{job.name}.safetensors"
    said: dict[str, Any] = {"held": job.held, "random": job.values["random"], "files": {}, "tensors": {}}
    if job.parts:
        path = job.written / file
        starts, size, digest = write_tensors(path, [(part.key, part.tensor) for part in job.parts])
        said["files"][file] = size, digest
        for part, start in zip(job.parts, starts, strict=True):
            piece = Piece(file, start, part.offsets, tuple(part.tensor.shape))
            stored = Stored(DTYPE_NAMES[part.tensor.dtype], part.shape, (piece,))
            said["tensors"] |= dict.fromkeys((part.key, *part.also), asdict(stored))
    write_file(job.written / f"{job.name}.json", json.dumps(said).encode())


def _wait_for_notes(job: Job) -> list[dict[str, Any]]:
    paths = [job.written / f"rank-{rank:05d}.json" for rank in range(job.us.world)]

    def look() -> list[dict[str, Any]] | None:
        raise_refused(job.us, job.token)
        for failure in job.written.glob(f"rank-*.{FAILED}"):
            rank = int(failure.stem.removeprefix("rank-"))
            raise RuntimeError(f"save_checkpoint: rank {rank} failed: {failure.read_text()}")
        return [json.loads(path.read_bytes()) for path in paths] if all(p.exists() for p in paths) else None

    def missing() -> str:
        late = [str(rank) for rank, path in enumerate(paths) if not path.exists()]
        who = f"rank {late[0]} has not written its part" if len(late) == 1 else f"ranks {', '.join(late)} have not"
        return f"{who} of {job.written}" if len(late) == 1 else f"{who} written their parts of {job.written}"

    return wait_for(look, missing, job.timeout)


def _manifest(job: Job, serial: int, notes: list[dict[str, Any]]) -> Manifest:
    """All ranks' notes in one, which replaces them."""
    files: dict[str, tuple[int, str]] = {}
    tensors: dict[str, Stored] = {}
    random: dict[str, Any] | None = None
    for note in notes:
        files |= note["files"]
        for key, said in note["tensors"].items():
            pieces = tuple(Piece(**piece) for piece in said["pieces"])
            before = tensors[key].pieces if key in tensors else ()
            # Norms beside tensor parallelism lie on a data-parallel mesh for each of its ranks, none of which knows
            # of another: of equal boxes the first rank's counts.
            known = {tuple(piece.offsets) for piece in before}
            new = tuple(piece for piece in pieces if tuple(piece.offsets) not in known)
            tensors[key] = Stored(said["dtype"], said["shape"], before + new)
        if note["random"] is not None:
            random = {**(random or {}), **note["random"]}
    for rank, note in enumerate(notes):
        for key in note["held"]:
            if key not in tensors:
                raise RuntimeError(
                    f"save_checkpoint: rank {rank} has {key!r}, which rank 0 has not; takes one model"
                )
        (job.written / f"rank-{rank:05d}.json").unlink()
    return Manifest(serial, job.step, job.us.world, files, tensors, {**job.values, "random": random})


def _committed(job: Job) -> Path | None:
    """The checkpoint, once rank 0 has given it its name."""
    if job.written.exists():
        for failure in job.written.glob(f"save.{FAILED}"):
            raise RuntimeError(f"save_checkpoint: rank 0 failed: {failure.read_text()}")
        return None
    for path in checkpoints(job.folder):
        if path.name.startswith(name_of(job.step)):
            token = path / TOKEN
            if token.exists() and token.read_text() == job.token:
                return path
    raise RuntimeError(f"save_checkpoint: {job.written} is gone: rank 0 failed, and another save cleared it away")
