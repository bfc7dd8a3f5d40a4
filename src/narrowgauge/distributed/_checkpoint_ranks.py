"""How ranks that save together find each other: in the folder they write to, not in a process group.

A rank that died, or hangs, is missing from a collective, and the others learn at best that something was. In a
folder everybody can see who has written what: whoever waits says for whom, and gives up after a time of its own
choice. A background thread can wait so without disturbing the collectives of training, on any backend. The folder
must be one that all ranks see, as for every sharded checkpoint.

One collective is used, once: the ranks agree on a word that no other run uses, and count saves from there. A rank
that takes no part in a save, because of what it was asked to keep, writes nothing: it leaves word under this save's
token in the store by which the ranks have met.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from narrowgauge.distributed._checkpoint_files import write_file

Result = TypeVar("Result")

FAILED = "failed"
_POLL = 0.02  # seconds between two looks, at first; later longer
_agreed: tuple[object, str] | None = None  # a process group, and its word
_saves = 0  # of that group
_ANSWER = 5.0  # seconds that the store has for an answer
_silent = ""  # the save in which it had none


@dataclass(frozen=True)
class Ranks:
    """This process among those that save together.

    Attributes:
        rank, world: which of how many.
        store: by which they have met; kept, for a save may go on after its process group was destroyed.
    """

    rank: int
    world: int
    store: Any = None


def ranks() -> Ranks:
    """This process among all."""
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store())
    return Ranks(0, 1)


def new_token(us: Ranks) -> str:
    """A word for one save, the same on all its ranks, and nobody else's."""
    global _agreed, _saves
    if us.world == 1:
        return secrets.token_hex(8)
    group = dist.group.WORLD
    if _agreed is None or _agreed[0] is not group:
        said = [secrets.token_hex(8)]
        dist.broadcast_object_list(said, src=0)
        _agreed, _saves = (group, said[0]), 0
    _saves += 1
    return f"{_agreed[1]}-{_saves}"


def say_refused(us: Ranks, token: str, error: BaseException) -> None:
    """Let the other ranks of a save know that this one takes no part in it; what is said first counts."""

    def say() -> None:
        if not us.store.check([_key(token)]):
            us.store.set(_key(token), f"rank {us.rank} failed: {type(error).__name__}: {error}")

    if us.world > 1:
        _ask(say, token)


def raise_refused(us: Ranks, token: str) -> None:
    """Fail where another rank of this save takes no part in it.

    Raises:
        RuntimeError: naming the rank, and its error.
    """

    def look() -> str:
        return us.store.get(_key(token)).decode(errors="replace") if us.store.check([_key(token)]) else ""

    said = _ask(look, token) if us.world > 1 else None
    if said:
        raise RuntimeError(f"save_checkpoint: {said}")


def _ask(question: Callable[[], Result], token: str) -> Result | None:
    """What the store answers; None where it is gone, or does not answer, as one of a process that hangs.

    It has no time-out of its own for this, so that a thread asks, and is left alone where nobody answers; the store
    is not asked again then, of the same save.
    """
    global _silent
    if _silent == token:
        return None
    answer = list[Result]()

    def ask() -> None:
        with suppress(RuntimeError):  # gone: whoever waits says which rank is missing
            answer.append(question())

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_ANSWER)
    if asking.is_alive():
        _silent = token
        return None
    return answer[0] if answer else None


def _key(token: str) -> str:
    return f"narrowgauge/save/{token}"


def say_failed(folder: Path, name: str, error: BaseException) -> None:
    """Leave word in a folder that this rank has failed, as far as the disk lets it."""
    try:
        write_file(folder / f"{name}.{FAILED}", f"{type(error).__name__}: {error}".encode())
    except OSError:
        try:
            (folder / f"{name}.{FAILED}").touch()
        except OSError:
            return  # the folder is gone, or full: the others will say that this rank is missing


def wait_for(look: Callable[[], Result | None], missing: Callable[[], str], timeout: float) -> Result:
    """Look until there is something to see.

    Args:
        look: gives a result, or None for not yet.
        missing: says what is not there.
        timeout: seconds.

    Raises:
        TimeoutError: when they are over.
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


def together(work: Callable[[], Result]) -> Result:
    """Do something on every rank; where one fails, all fail.

    Raises:
        whatever this rank's work raises; else RuntimeError, naming the ranks that failed.
    """
    us = ranks()
    if us.world == 1:
        return work()
    result: Result | None = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    said: list[str | None] = [None] * us.world
    dist.all_gather_object(said, None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    failed = [f"rank {rank}: {what}" for rank, what in enumerate(said) if what is not None]
    if failed:
        raise RuntimeError("; ".join(failed))
    return result  # type: ignore[return-value]  # set where nothing failed


def on_first(work: Callable[[], Result]) -> Result:
    """What rank 0 finds, on every rank."""
    us = ranks()
    if us.world == 1:
        return work()
    said: list[Result | None] = [None]

    def first() -> None:
        if us.rank == 0:
            said[0] = work()

    together(first)
    dist.broadcast_object_list(said, src=0)
    return said[0]  # type: ignore[return-value]  # rank 0's, whatever it is
