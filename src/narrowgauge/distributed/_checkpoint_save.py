"""Save what a run needs to go on, at once or beside training.

To be asynchronous, only the copy to the CPU keeps training waiting; writing and waiting for other ranks are a
thread's (`_checkpoint_write` says what is written and in which order).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from narrowgauge.distributed._checkpoint_ranks import Ranks, new_token, ranks, say_refused
from narrowgauge.distributed._checkpoint_state import gather, local_piece, writes
from narrowgauge.distributed._checkpoint_write import Job, Part, write_checkpoint


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
    moved to it, and the oldest checkpoints beyond `keep_last` go. On several ranks all call it, with one folder
    that all of them see. Sharded tensors are written by the ranks that have them, everything else by rank 0.

    Args:
        directory: of this run's checkpoints; made if it is not there.
        model: DDP, FSDP2 (`fully_shard`), compiled or plain.
        optimizer: of this library or torch's; None saves the model alone.
        step: how many steps were taken.
        keep_last: how many checkpoints to keep, this one counted; None for all.
        extra: whatever else is to come back: None, numbers, str, tensors, and lists, tuples and dicts of them (a
            scheduler's or a loss scaler's `state_dict()`). That of rank 0 is kept.
        random_states: also save the states of torch's, Python's and NumPy's generators, each rank's own.
        timeout: seconds to wait for other ranks.

    Returns:
        The checkpoint, for `load_checkpoint`.

    Raises:
        ValueError: for an argument that cannot be saved; nothing is written then.
        OSError: where the disk says no, for instance that it is full.
        TimeoutError: naming the ranks that did not write their part.
        RuntimeError: naming the rank that failed, on the others. In all cases earlier checkpoints are as they were.
    """
    return write_checkpoint(
        _job(_checked, directory, model, optimizer, step, keep_last, extra, random_states, timeout)
    )


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

    One checkpoint is written at a time: a call waits for the one before it, and raises its error if nobody has seen
    it yet. At the end of the program Python waits for the last one. The host needs memory for a copy of this rank's
    part.

    Args:
        directory, model, optimizer, step, keep_last, extra, random_states, timeout: as of `save_checkpoint`.

    Returns:
        What to wait for.

    Raises:
        ValueError: as `save_checkpoint`; everything else is raised by `PendingCheckpoint.wait`.
    """
    job = _job(_checked, directory, model, optimizer, step, keep_last, extra, random_states, timeout)
    return _writer.submit(job)


class _Writer:
    """The thread that writes checkpoints, one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._last: PendingCheckpoint | None = None

    def submit(self, job: Job) -> PendingCheckpoint:
        with self._lock:
            last, self._last = self._last, None
            if last is not None and not last._seen:
                last.wait()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="narrowgauge-checkpoint")
            copied = _copied(job)
            self._last = PendingCheckpoint(self._pool.submit(write_checkpoint, copied))
            return self._last


_writer = _Writer()


def _copied(job: Job) -> Job:
    parts = [replace(part, tensor=part.tensor.detach().to("cpu", copy=True)) for part in job.parts]
    # Where this process is now: it may go elsewhere while a thread writes.
    return replace(job, folder=job.folder.absolute(), parts=parts)


def _job(
    check: Callable[..., Job],
    directory: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    keep_last: int | None,
    extra: Any,
    random_states: bool,
    timeout: float,
) -> Job:
    us = ranks()
    token = new_token(us)  # first: ranks count their saves, one that is refused too
    try:
        return check(us, token, directory, model, optimizer, step, keep_last, extra, random_states, timeout)
    except Exception as error:
        say_refused(us, token, error)
        raise


def _checked(
    us: Ranks,
    token: str,
    directory: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    keep_last: int | None,
    extra: Any,
    random_states: bool,
    timeout: float,
) -> Job:
    folder = Path(directory)
    # `exists` first: another rank may make the folder between the two questions.
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"directory: got {folder}, which is a file, takes a folder, or a name for one")
    if folder.is_symlink() and not folder.exists():
        raise ValueError(f"directory: got {folder}, a link to what is not there, takes a folder, or a name for one")
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step: got {step!r}, takes a number of steps, 0 or more")
    if keep_last is not None and (isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1):
        raise ValueError(f"keep_last: got {keep_last!r}, takes 1 or more, or None for all")
    if not timeout > 0:
        raise ValueError(f"timeout: got {timeout!r}, takes seconds above 0")
    gathered = gather(model, optimizer, extra, random_states, us.rank)
    parts: dict[Any, Part] = {}
    for key, tensor in gathered.tensors.items():
        piece = local_piece(key, tensor)
        if piece is not None and writes(tensor, us.rank, key in gathered.own):
            part, offsets, sizes = piece
            if part.numel() or tuple(sizes) == tuple(tensor.shape):
                new = Part(key, part.detach(), tuple(tensor.shape), offsets)
                # Tied weights are written once. An empty tensor has no memory that would tell it from others; a
                # view that negates (`z.conj().imag`) has the same memory and other numbers.
                like = part.device, part.dtype, part.shape, part.stride(), part.is_neg()
                memory = part.data_ptr(), *like, new.shape, offsets
                place = memory if part.numel() else key
                known = parts.get(place)
                parts[place] = new if known is None else replace(known, also=(*known.also, key))
    held = list(gathered.tensors)
    return Job(folder, step, keep_last, timeout, token, us, [*parts.values()], held, gathered.values)
