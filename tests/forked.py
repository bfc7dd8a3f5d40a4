"""Processes of tests' own, forked from one that has imported what takes long: importing is most of what they take.

They are started as `spawn` starts them: what they run and what they are given is pickled, and nothing that the test
has done is in them. Only the imports are there already, of a server that has run nothing else. Some libraries
count GPUs when they are imported, as torchao does, and after that no fork may use one. Where there are GPUs,
processes are spawned, and import everything themselves.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

START = "spawn" if torch.cuda.is_available() else "forkserver"
# What is not installed is passed over.
multiprocessing.set_forkserver_preload(
    [
        "pytest", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "narrowgauge.cli._app",
        "narrowgauge.distributed", "narrowgauge.gauges", "narrowgauge.trainers", "tokenizers", "matplotlib.pyplot",
        "jinja2", "transformers.models.gpt2.modeling_gpt2", "transformers.models.clip.modeling_clip",
    ]
)  # fmt: skip


def run_ranks(work: Callable[..., None], world: int, *arguments: Any, start: str = START) -> None:
    """Call `work(rank, *arguments)` in so many processes; raises what one of them raises.

    The server's processes have sets of strings in one order. With ``start="spawn"`` each has its own, as under
    torchrun.
    """
    torch.multiprocessing.start_processes(_rank, (work, *arguments), world, start_method=start)


def _rank(rank: int, work: Callable[..., None], *arguments: Any) -> None:
    """The other side. A process group that is destroyed lives until DistributedDataParallel is gone, too.

    Gloo's threads let go of a backward pass's collectives, and take the interpreter's lock for it; the group's end
    waits for these threads with the lock held. So they are given a moment before it.
    """
    _leave_imports_alone()
    end = dist.destroy_process_group

    def destroy(*given: Any) -> None:
        time.sleep(0.05)
        end(*given)

    dist.destroy_process_group = destroy
    work(rank, *arguments)


def _leave_imports_alone() -> None:
    """Look for garbage only among what is made from here on: to look at an object is to copy its page of memory."""
    gc.freeze()


class Command:
    """The command line in a process of its own, which can be sent signals.

    Attributes:
        returncode: the exit status, or minus the number of the signal that ended it; None until it is waited for.
    """

    def __init__(self, arguments: list[str], folder: Path, terminal: str | None = None, **environment: str) -> None:
        """Start it.

        Args:
            arguments: what follows `narrowgauge`.
            folder: where what it prints is kept.
            terminal: the path of a terminal that it prints to; what it prints is not kept then.
            environment: what it has beside the test's.
        """
        self._printed = [folder / f"{id(self)}.{name}" for name in ("out", "err")]
        self._printed[0].touch()
        paths = [terminal or str(self._printed[0]), str(self._printed[1])]
        self._process = multiprocessing.get_context(START).Process(
            target=_command, args=(arguments, paths, os.environ | environment)
        )
        self._process.start()
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float = 300.0) -> tuple[str, str]:
        """Wait for its end; what it has printed, and what it has complained of."""
        self._process.join(timeout)
        self.returncode = self._process.exitcode
        assert self.returncode is not None, f"still running after {timeout:g} s"
        out, err = (path.read_text() for path in self._printed)
        return out, err


def _command(arguments: list[str], printed: list[str], environment: dict[str, str]) -> None:
    """The other side; the server's environment is that of its first start."""
    _leave_imports_alone()
    for number, path in enumerate(printed, 1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(file, number)
        os.close(file)
    # Those of the server are of files, in which they look for their place.
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    # Tests run in the background may have been told to ignore Ctrl-C, and their children with them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    sys.argv = ["narrowgauge", *arguments]
    from narrowgauge.cli import main

    sys.exit(main(arguments))
