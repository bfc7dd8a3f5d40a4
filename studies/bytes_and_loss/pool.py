"""Trainings in processes of their own, several at once, each result handed over as it comes.

A process does one training after another and keeps what is dear to make: imports, tokens, compiled kernels. It
ends after an exception, since an error of the device stays with its process, and a fresh one takes its place; and
before and after a peer's optimizer, so that libraries do not meet what others left. A process that dies takes one
training with it, which is reported as failed. When the time is up, what still runs is ended.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from studies.bytes_and_loss import rows as bytes_rows
from studies.bytes_and_loss import training as bytes_training
from studies.bytes_and_loss.training import Setting


@dataclass(frozen=True)
class Task:
    """One training: a row's name, the number of its setting and the setting, a seed."""

    row: str
    number: int
    setting: Setting
    seed: int


class Pool:
    """Processes that train, as many at once as there are jobs; on machines of several GPUs they take turns."""

    def __init__(self, jobs: int) -> None:
        self._workers = [_Worker(number, jobs) for number in range(jobs)]

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()

    def run(
        self, tasks: Sequence[Task], seconds: float, on_result: Callable[[Task, dict[str, Any]], None]
    ) -> list[Task]:
        """Do the tasks in their order.

        Args:
            tasks: the most important first.
            seconds: after which nothing is begun and everything that runs is ended.
            on_result: told each task's result, or `{"failed": reason}`; one call at a time.

        Returns:
            The tasks that time did not suffice for.
        """
        deadline = time.monotonic() + seconds
        waiting, left, lock = list(tasks), [], threading.Lock()

        def serve(worker: _Worker) -> None:
            while True:
                with lock:
                    if not waiting:
                        return
                    task = waiting.pop(0)
                    if time.monotonic() >= deadline:
                        left.append(task)
                        continue
                result = worker.do(task)
                with lock:
                    if "failed" in result and time.monotonic() >= deadline:
                        left.append(task)  # it was ended
                    else:
                        on_result(task, result)

        threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in self._workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
        for worker, thread in zip(self._workers, threads, strict=True):
            if thread.is_alive():
                worker.end()
            thread.join()
        return left


class _Worker:
    """A process that trains, made when first needed and again after a failure."""

    def __init__(self, number: int, jobs: int) -> None:
        self._number = number
        self._threads = max(1, len(os.sched_getaffinity(0)) // jobs)
        self._process: Any = None
        self._connection: Connection | None = None

    def do(self, task: Task) -> dict[str, Any]:
        peer = any(row.name == task.row and row.family != "ours" for row in bytes_rows.rows())
        if peer:
            self.end()
        connection = self._connection or self._begin()
        try:
            connection.send(task)
            result: dict[str, Any] = connection.recv()
        except (EOFError, OSError):
            self._process.join(5)
            result = {"failed": f"its process ended with code {self._process.exitcode}"}
        if peer or "failed" in result:
            self.end()
        return result

    def _begin(self) -> Connection:
        # Spawned, not forked: a fork cannot use the GPU.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._number, self._threads), name=f"training {self._number}"
        )
        self._process.start()
        theirs.close()
        return self._connection

    def end(self) -> None:
        if self._process is not None and self._process.is_alive():
            self._process.kill()
        self._connection = None


def _serve(connection: Connection, number: int, threads: int) -> None:
    """The other side: trains what it is told until nobody speaks to it any more."""
    torch.set_num_threads(threads)
    while True:
        try:
            task: Task = connection.recv()
        except EOFError:
            return
        try:
            result = bytes_training.train(task.row, _placed(task.setting, number), task.seed)
        except Exception as error:
            result = {"failed": bytes_training.reason(error)}
        connection.send(result)


def _placed(setting: Setting, number: int) -> Setting:
    """The setting on this process's own GPU."""
    if setting.device != "cuda":
        return setting
    index = number % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return replace(setting, device=f"cuda:{index}")
