"""Processes that train, save at every step, and can be killed.

Run as a program it imports what takes long once and then forks: each line of its input is a run to be started, as
JSON; it answers with the ids of the run's processes, and when all have ended with how they did.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpointed import KIND, made, train
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.distributed import latest_checkpoint, load_checkpoint, save_checkpoint

# What touches the disk, in the order it is asked for.
OPERATIONS = [(os, "fsync"), (os, "mkdir"), (os, "rename"), (os, "replace"), (os, "unlink"), (os, "rmdir")]


@contextmanager
def failing(at: int, fail: Callable[[], None]) -> Iterator[list[str]]:
    """Do something else than the operation on the disk with this number; gives the names of those done."""
    done: list[str] = []
    real = {(module, name): getattr(module, name) for module, name in OPERATIONS}

    def replaced(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **options: Any) -> Any:
            done.append(name)
            if len(done) == at:
                fail()
            return function(*args, **options)

        return operation

    for (module, name), function in real.items():
        setattr(module, name, replaced(name, function))
    try:
        yield done
    finally:
        for (module, name), function in real.items():
            setattr(module, name, function)


def run(folder: Path, rank: int, world: int, steps: int, die_at: int = 0, store: str = "") -> None:
    """Resume, then train and save at every step; say in a file what was done."""
    torch.set_num_threads(1)
    log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(*words: object) -> None:
        os.write(log, (" ".join(map(str, words)) + "\n").encode())

    try:
        if world > 1:
            # gloo does not always see that the other process was killed.
            patience = timedelta(seconds=20)
            dist.init_process_group("gloo", f"file://{store}", patience, world, rank)
        net, optimizer = made(KIND)
        model = DistributedDataParallel(net) if world > 1 else net
        path, step = latest_checkpoint(folder / "run"), 0
        if path is not None:
            step, _ = load_checkpoint(path, model=model, optimizer=optimizer)
        say("resumed", step)
        while step < steps:
            (loss,) = train(model, optimizer, range(step, step + 1))
            step += 1
            say("loss", step, loss.hex())
            with failing(die_at, lambda: os.kill(os.getpid(), signal.SIGKILL)) as done:
                save_checkpoint(folder / "run", model=model, optimizer=optimizer, step=step, timeout=1)
            say("saved", step, len(done))
    except BaseException as error:
        say("error", type(error).__name__, repr(str(error)))
        traceback.print_exc(file=sys.stderr)
        os._exit(1)
    os._exit(0)


def answer() -> None:
    # What a process does once (compiled steps are loaded, random ones made) is done before the fork.
    torch.set_num_threads(1)
    train(*made(KIND), range(2))
    for line in sys.stdin:
        asked = json.loads(line)
        folder, world = Path(asked["folder"]), asked.get("world", 1)
        store = str(folder / f"store-{time.monotonic_ns()}")
        pids = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                run(folder, rank, world, asked["steps"], asked.get("die_at", 0), store)
            pids.append(pid)
        print(json.dumps(pids), flush=True)
        print(json.dumps([os.waitpid(pid, 0)[1] for pid in pids]), flush=True)


class Processes:
    """The program, from the test's side."""

    def __init__(self) -> None:
        here = Path(__file__)
        path = os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])
        self._program = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(here)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            # Where torch sees GPUs, a fork runs no backward pass.
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip

    def start(self, folder: Path, **asked: Any) -> list[int]:
        assert self._program.stdin is not None
        print(json.dumps({"folder": str(folder), **asked}), file=self._program.stdin, flush=True)
        return self._line()

    def ended(self) -> list[int]:
        """How the processes of the last run ended: 0, an exit status times 256, or a signal."""
        return self._line()

    def _line(self) -> list[int]:
        assert self._program.stdout is not None
        return json.loads(self._program.stdout.readline())

    def close(self) -> None:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.close()
        self._program.wait(20)
        self._program.stdout.close()


def log(folder: Path, rank: int = 0) -> list[list[str]]:
    """What a rank's processes have said; the last line may be cut."""
    path = folder / f"log-{rank}"
    return [line.split(" ", 2) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    answer()
