"""Trainings by several processes, forked from the tests' server."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fitted import Silent, gradients_kept

from forked import START
from narrowgauge.trainers import TrainSettings, fit
from narrowgauge.trainers._parallel import processes


class Trainings:
    """Runs trainings.

    Attributes:
        cache: of tokens.
    """

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    def __call__(
        self,
        settings: dict[str, Any],
        answers: Path,
        world: int = 2,
        stops: dict[int, int] | None = None,
        other: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Run one, all but the first process with `other` settings; each one's answer, or the text of its error."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        answers.mkdir(parents=True)
        ranks = []
        for rank in range(world):
            environment = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "XDG_CACHE_HOME": str(self.cache),
            }  # fmt: skip
            given = settings | (other or {} if rank else {})
            args = (answers / str(rank), environment, given, (stops or {}).get(rank))
            ranks.append(multiprocessing.get_context(START).Process(target=_rank, args=args))
            ranks[-1].start()
        found: list[Any] = []
        for rank, process in enumerate(ranks):
            process.join(120)
            assert process.exitcode is not None, f"process {rank} is still running"
            error = answers / f"{rank}.error"
            found.append(
                error.read_text() if error.exists() else json.loads((answers / f"{rank}.json").read_text())
            )
        return found


def _rank(answer: Path, environment: dict[str, str], given: dict[str, Any], stops: int | None) -> None:
    """One process of a training, as torchrun starts it."""
    torch.set_num_threads(1)
    os.environ |= environment
    progress, calls = Silent(), []

    def stop() -> bool:
        calls.append(1)
        return stops is not None and len(calls) >= stops

    try:
        settings = TrainSettings(**{**given, "data": Path(given["data"]), "out": Path(given["out"])})
        with processes(torch.device("cpu")) as device, gradients_kept() as gradients:
            if dist.is_initialized():
                dist.barrier()  # or one that fails at once is gone while the others still connect to it
            outcome = fit(settings, device, progress, stop)
        torch.save(gradients, answer.with_suffix(".pt"))
        said = {"outcome": outcome.__dict__, "told": progress.told, "initialized": dist.is_initialized()}
        answer.with_suffix(".json").write_text(json.dumps(said))
    except BaseException:
        answer.with_suffix(".error").write_text(traceback.format_exc())
    os._exit(0)  # gloo's threads may not end
