"""How the ranks of a save or a load act together.

What is checked before anything is written is exchanged by collectives, in the thread that trains: where one rank
fails, all fail, and nothing is written.

While files are written ranks meet in the folder that they write to. A rank that died or hangs is missing from a
collective, and the others learn at best that something failed, after the process group's own timeout. In a folder
everybody sees who has written what: a waiting rank can name the missing one, after a timeout of its own. A
background thread can wait like this without disturbing the collectives of training, on any backend, even after the
process group was destroyed. The folder must be visible to all ranks, as for every sharded checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from narrowgauge.distributed._checkpoint._files import write_file

Result = TypeVar("Result")

FAILED = "failed"
_POLL = 0.02  # seconds between two looks, at first; later longer


class Ranks(NamedTuple):
    """This process among those that save together."""

    rank: int
    world: int


def ranks() -> Ranks:
    """This process among all."""
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size())
    return Ranks(0, 1)


def all_ranks(work: Callable[[], Result]) -> Result:
    """Do something on every rank; where one fails, all fail: with its error, or a RuntimeError that names it."""
    result: list[Result] = []
    gathered(lambda: result.append(work()))
    return result[0]


def broadcast_from_rank0(work: Callable[[], Result]) -> Result:
    """What rank 0's work returns, on every rank; errors as with `all_ranks`."""
    found = gathered(lambda: work() if ranks().rank == 0 else None)[0]
    return found  # type: ignore[return-value]  # rank 0's, whatever it is


def gathered(work: Callable[[], Result]) -> list[Result]:
    """Every rank's result, sent to all; errors as with `all_ranks`."""
    world = ranks().world
    if world == 1:
        return [work()]
    result: Result | None = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    outcomes: list[tuple[str, Any]] = [("", None)] * world
    mine = "" if failure is None else f"{type(failure).__name__}: {failure}"
    dist.all_gather_object(outcomes, (mine, result))
    if failure is not None:
        raise failure
    failed = [f"rank {other} failed: {error}" for other, (error, _) in enumerate(outcomes) if error]
    if failed:
        raise RuntimeError("; ".join(failed))
    return [found for _, found in outcomes]


def report_failure(folder: Path, name: str, error: BaseException) -> None:
    """Tell other ranks through the folder that this rank has failed, as far as the disk allows."""
    try:
        write_file(folder / f"{name}.{FAILED}", f"{type(error).__name__}: {error}".encode())
    except OSError:
        with suppress(OSError):  # the folder is gone, or full: the others will name this rank as missing
            (folder / f"{name}.{FAILED}").touch()


def wait_for(look: Callable[[], Result | None], missing: Callable[[], str], timeout: float) -> Result:
    """Wait until `look` gives something other than None.

    Raises:
        TimeoutError: after `timeout` seconds; `missing` says what is missing.
    """
    end, pause = time.monotonic() + timeout, _POLL
    while True:
        found = look()
        if found is not None:
            return found
        if time.monotonic() > end:
            raise TimeoutError(
                f"save_checkpoint: {missing()} within {timeout:g} s (timeout): it died, hangs, or sees another "
                "folder; checkpoints from before are as they were"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
