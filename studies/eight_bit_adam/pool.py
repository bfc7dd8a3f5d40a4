"""Many trainings, several at a time, each in a process that makes one after the other.

What a run found is told as soon as it ends. A run that raises is a result too, and says what it raised.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from studies.eight_bit_adam.training import Trial, train
from studies.shared.gather import Training

Result = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Shared:
    """What every run needs: the settings, the text as tokens, whether to use CUDA graphs, and when to stop."""

    training: Training
    tokens: np.ndarray  # int32 array, to train on
    validation: np.ndarray  # int64 array (windows, sequence + 1)
    graph: bool = False
    deadline: float = math.inf  # in seconds of `time.time`, after which no run is begun


_shared: Shared | None = None
_tensors: tuple[torch.Tensor, torch.Tensor] | None = None


def run_all(trials: Sequence[Trial], shared: Shared, jobs: int, on_result: Callable[[Trial, Result], None]) -> None:
    """Make the runs, and tell each one's result in the order in which they end.

    Args:
        trials: the runs.
        shared: what they share.
        jobs: processes; 1 for this one.
        on_result: told a trial and what it found.
    """
    if jobs == 1:
        _begin(shared, None)
        for trial in trials:
            on_result(trial, one(trial))
        return
    context = multiprocessing.get_context("spawn")  # CUDA does not live through a fork
    with ProcessPoolExecutor(jobs, context, _begin, (shared, 1)) as pool:
        running: dict[Future[Result], Trial] = {pool.submit(one, trial): trial for trial in trials}
        waiting = set(running)
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                error = future.exception()  # of a process that was killed: `one` raises nothing
                found = failed(error) if error is not None else future.result()
                on_result(running[future], found)


def one(trial: Trial) -> Result:
    """One run, or why there is none."""
    assert _shared is not None
    assert _tensors is not None
    if time.time() > _shared.deadline:
        return {"error": "not begun: the time was up"}
    try:
        return train(trial, _shared.training, *_tensors, graph=_shared.graph)
    except Exception as error:  # whatever it is, the other runs go on
        return failed(error)


def failed(error: BaseException) -> Result:
    """The result of a run that raised."""
    return {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}


def _begin(shared: Shared, threads: int | None) -> None:
    """Set up a process: the text on its device, and no more threads than it has cores to itself."""
    global _shared, _tensors
    if threads is not None:
        torch.set_num_threads(threads)
    device = shared.training.device
    _shared = shared
    _tensors = torch.from_numpy(shared.tokens).to(device), torch.from_numpy(shared.validation).to(device)
