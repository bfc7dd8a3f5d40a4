"""Runs that several processes share, as `torchrun` starts them: each takes the next one, and the first keeps all.

A comparison is many trainings that know nothing of each other, so a process takes a whole one, and does with it
what it would do alone: the numbers are those of one process. They meet in the key-value store that torch's
processes find each other by; there is no process group, and nothing waits for anybody until the end. A single
process has a store of its own, and the same code.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from narrowgauge.optim import UpdateStats
from narrowgauge.trainers import Run

SILENCE = 1800.0  # seconds without a step, after which a process is given up; torch's own patience
_BEAT = 1.0  # seconds between two signs of life
_LOOK = 0.2  # seconds between two looks at what the others have


class Crew:
    """The processes of a comparison.

    Attributes:
        rank, world: this one's number, and how many.
    """

    def __init__(self, store: Any, rank: int, world: int, silence: float = SILENCE) -> None:
        """Processes that share a store.

        Args:
            store: of torch.distributed.
            rank, world: this one's number, and how many.
            silence: seconds without a step of the others after which the first waits no longer.
        """
        self.rank, self.world = rank, world
        self._store, self._silence = store, silence
        self._last_beat = 0.0
        self._kept: set[int] = set()

    @classmethod
    def find(cls) -> Crew:
        """Those that `torchrun` has started, or this one."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls(dist.HashStore(), 0, 1)  # type: ignore[attr-defined]
        store, rank, world = next(rendezvous("env://"))
        return cls(dist.PrefixStore("compare", store), rank, world)  # type: ignore[attr-defined]

    @property
    def first(self) -> bool:
        """Whether this process keeps the runs, and tells of them."""
        return self.rank == 0

    def agree(self, options: Mapping[str, Any]) -> None:
        """Refuse a process whose runs would be others than those of the first that has come here.

        Args:
            options: what all runs are made by, as JSON has it.

        Raises:
            ValueError: naming the first option that differs. The others begin no more runs then.
        """
        mine = json.dumps(dict(options), sort_keys=True)
        theirs = json.loads(self._store.compare_set("options", "", mine))
        for name, value in json.loads(mine).items():
            if theirs[name] != value:
                flag = f"--{name.replace('_', '-')}"
                said = f"{flag}: got {value!r} here and {theirs[name]!r} in another process; takes one value in all"
                self._store.set("failed", said)
                raise ValueError(said)

    def numbers(self, count: int) -> Iterator[int]:
        """The next run that nobody has taken, until there is none of so many, or one has failed."""
        while (number := self._store.add("taken", 1) - 1) < count:
            if self.failure:
                self._store.set(f"run {number}", "")
                return
            self._store.set(f"maker of {number}", str(self.rank))
            self.beat()
            yield number

    def beat(self) -> None:
        """A sign of life, at most one a second: to be called at every step."""
        now = time.monotonic()
        if self.world > 1 and now - self._last_beat >= _BEAT:
            self._last_beat = now
            self._store.add(f"beats of {self.rank}", 1)

    def hand_in(self, number: int, run: Run) -> None:
        """Give a finished run to the first process."""
        self._store.set(f"run {number}", _written(run))

    def fail(self, number: int, reason: str) -> None:
        """Give a run up, and tell the others to take no more."""
        self._store.set("failed", reason)
        self._store.set(f"run {number}", "")

    @property
    def failure(self) -> str | None:
        """Why a process has given up, if one has."""
        return self._store.get("failed").decode() if self._store.check(["failed"]) else None

    def handed_in(self, count: int) -> dict[int, Run]:
        """The runs, of so many, that have been finished since the last call."""
        found = {}
        for number in range(min(count, self._store.add("taken", 0))):
            if number not in self._kept and self._store.check([f"run {number}"]):
                self._kept.add(number)
                written = self._store.get(f"run {number}").decode()
                if written:
                    found[number] = _read(written)
        return found

    def rest(self, count: int) -> Iterator[dict[int, Run]]:
        """Wait for the runs, of so many, that others still make.

        Raises:
            RuntimeError: if none of those who make them has made a step for longer than the crew's patience.
        """
        beats: dict[int, tuple[int, float]] = {}
        while True:
            yield self.handed_in(count)
            makers = self._makers(count)
            if makers is None:
                return
            now = time.monotonic()
            for rank in makers:
                said = self._store.add(f"beats of {rank}", 0)
                if rank not in beats or beats[rank][0] != said:
                    beats[rank] = said, now
            if makers and all(now - beats[rank][1] > self._silence for rank in makers):
                ranks = ", ".join(map(str, sorted(makers)))
                raise RuntimeError(
                    f"compare: no step for {self._silence:.0f} s in processes that still have runs to make: {ranks}"
                )
            time.sleep(_LOOK)

    def _makers(self, count: int) -> set[int] | None:
        """The processes whose runs are missing, or None if no run is."""
        missing = set(range(min(count, self._store.add("taken", 0)))) - self._kept
        if not missing:
            return None
        named = [f"maker of {number}" for number in missing]
        return {int(self._store.get(name)) for name in named if self._store.check([name])}


def _written(run: Run) -> str:
    """A run as text; numbers come back with the same bits."""
    values = {each.name: getattr(run, each.name) for each in fields(run)}
    return json.dumps(values | {"stats": {step: stats.sums.tolist() for step, stats in run.stats.items()}})


def _read(text: str) -> Run:
    values = json.loads(text)
    stats = {
        int(step): UpdateStats(torch.tensor(sums, dtype=torch.float64)) for step, sums in values["stats"].items()
    }
    return Run(**values | {"stats": stats})
