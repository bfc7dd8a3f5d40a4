"""A study of many runs that is never lost and never made twice: on disk after every run, and going on later.

A task is a frozen dataclass whose fields say which run it is; a run in a results file has the same fields, and
what it found. A call has so many seconds and begins no run that would not end in time. The next call, with
`--resume`, takes the runs that are there and makes the others, if it is the same study: equal settings, text
and device. What may differ is how much of it is asked for.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import typer

from narrowgauge._files import write_whole
from studies.shared import options

Result = dict[str, Any]
RECENT = 5  # runs whose mean is what the next one is expected to take


class Study:
    """The results as they grow, on disk at every moment."""

    def __init__(
        self, out: Path, about: dict[str, Any], resume: bool, grows: Sequence[str] = (), ignores: Sequence[str] = ()
    ) -> None:
        """Begin, or with `resume` go on with the file, if there is one.

        `about` is what it says beside its runs: `command`, `environment`, `training`, `data`, `rows`. A later
        command with `--only`, which does not make what is there, is kept under `resumed`. `grows` are fields of
        `training` that may differ: of lists all is kept, of numbers the largest. `ignores` are fields that
        may differ because they change no run; "device" may be among them, as each run says its own.
        """
        self._out, self.about = out, about
        self.runs: list[Result] = []
        self._before: list[dict[str, Any]] = []  # tasks that an earlier call left
        if resume and out.exists():
            self._take(json.loads(out.read_text()), grows, {*grows, *ignores})
        out.parent.mkdir(parents=True, exist_ok=True)

    def _take(self, found: dict[str, Any], grows: Sequence[str], may_differ: set[str]) -> None:
        mine, theirs = (_identity(json.loads(json.dumps(options.rounded(x)))) for x in (self.about, found))
        for name in sorted((mine.keys() | theirs.keys()) - may_differ):
            if mine.get(name) != theirs.get(name):
                raise typer.BadParameter(
                    f"--resume: got {name} {mine.get(name)!r}, takes {theirs.get(name)!r} to go on with {self._out}"
                )
        for name in grows:
            old, new = found["training"][name], self.about["training"][name]
            both = list(dict.fromkeys((*old, *new))) if isinstance(old, list) else max(old, new)
            self.about["training"][name] = both
        rows = {row["name"]: row for row in (*found["rows"], *self.about["rows"])}
        self.about |= {key: found[key] for key in ("environment", "data")} | {"rows": [*rows.values()]}
        if "--only" in self.about["command"]:  # which does not make what is there
            commands = dict.fromkeys((found["command"], *found.get("resumed", ()), self.about["command"]))
            self.about["command"], *self.about["resumed"] = commands
        self.runs = [run for run in found["runs"] if "failed" not in run]
        self._before = found["unfinished"]

    def of(self, task: Any) -> Result | None:
        """What a run found, if it has been made."""
        return next((run for run in self.runs if asdict(task).items() <= run.items()), None)

    def missing(self, tasks: Sequence[Any]) -> list[Any]:
        """Those of some runs that have not been made."""
        return [task for task in tasks if self.of(task) is None]

    def add(self, task: Any, result: Result, left: Sequence[Any]) -> None:
        """Keep a run, and say how it went."""
        self.runs.append(asdict(task) | result)
        self.write(left)
        print(f"{_named(task)}: {result.get('failed') or _said(result)}", flush=True)

    def write(self, left: Sequence[Any]) -> None:
        """Write the results: who is ended in the middle leaves the last whole file."""
        asked = [asdict(task) for task in left]
        made = [run.items() for run in self.runs]
        before = [task for task in self._before if task not in asked and not any(task.items() <= of for of in made)]
        results = self.about | {"runs": self.runs, "unfinished": asked + before}
        write_whole(self._out, json.dumps(options.rounded(results), separators=(",", ":")) + "\n")

    def make(
        self,
        tasks: Sequence[Any],
        one: Callable[[Any], Result],
        end: float,
        *,
        expected: float = 0.0,
        jobs: int = 1,
        alone: Callable[[Any], bool] | None = None,
    ) -> list[Any]:
        """Make what is missing, in order, and write it down run by run; the tasks that are left are returned.

        Args:
            tasks: the most important first.
            one: makes a run; of several jobs, a function that another process can import.
            end: in seconds of `time.monotonic`: no run is begun that would not end by then.
            expected: seconds of the first run.
            jobs: processes; 1 for this one, unless some are made alone.
            alone: whether a run gets a process that no other uses: libraries do not meet what others left.
        """
        left, taken = self.missing(tasks), [expected]

        def in_time() -> bool:
            return time.monotonic() + statistics.fmean(taken[-RECENT:]) <= end

        if jobs == 1 and alone is None:
            with _only_runs_collected():
                while left and in_time():
                    task = left.pop(0)
                    result = attempt(one, task)
                    taken.append(result.get("seconds", taken[-1]))
                    self.add(task, result, left)
        else:
            self._make_in_processes(left, one, in_time, taken, jobs, alone)
        if left:
            self.write(left)
            print(f"{len(left)} runs are left for another call with --resume", flush=True)
        return left

    def _make_in_processes(
        self,
        left: list[Any],
        one: Callable[[Any], Result],
        in_time: Callable[[], bool],
        taken: list[float],
        jobs: int,
        alone: Callable[[Any], bool] | None,
    ) -> None:
        """Take tasks from the front of a list, as many at a time as there are jobs.

        Each job has a pool of one process: a pool is lost with any of its processes, and with it all that they do.
        """
        running: dict[Future[Result], tuple[Any, ProcessPoolExecutor]] = {}
        with ExitStack() as pools:
            idle = [pools.enter_context(_process()) for _ in range(jobs)]
            while running or (left and in_time()):
                while left and idle and in_time():
                    task, pool = left.pop(0), idle.pop()
                    if alone is not None and alone(task):
                        pool = _another(pools, pool)
                    running[pool.submit(attempt, one, task)] = task, pool
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    (task, pool), error = running.pop(future), future.exception()
                    result = failed(error) if error is not None else future.result()
                    used = isinstance(error, BrokenExecutor) or (alone is not None and alone(task))
                    idle.append(_another(pools, pool) if used else pool)
                    taken.append(result.get("seconds", taken[-1]))
                    self.add(task, result, [*(waiting for waiting, _ in running.values()), *left])


def carry_out(
    out: Path,
    about: dict[str, Any],
    tasks: Sequence[Any],
    one: Callable[[Any], Result],
    end: float,
    *,
    jobs: int = 1,
    resume: bool = False,
    grows: Sequence[str] = (),
    dry: bool = False,
) -> None:
    """What the command of a study of many runs does: say the plan, and make what is missing, or as much as fits."""
    study = Study(out, about, resume, grows)
    missing = study.missing(tasks)
    print(f"{len(tasks)} runs, {len(tasks) - len(missing)} of them there", flush=True)
    if not dry:
        study.make(tasks, one, end, jobs=jobs)
        return
    for task in tasks:
        print(f"  {_named(task)}{'' if task in missing else ', there'}")


def attempt(one: Callable[[Any], Result], task: Any) -> Result:
    """A run, or why there is none: the others go on."""
    try:
        return one(task)
    except Exception as error:  # memory, a kernel that cannot be made, another library's refusal
        return failed(error)
    finally:
        gc.collect()  # models and optimizers hang in circles, and the next run's peak would have them in it
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


@contextmanager
def _only_runs_collected() -> Iterator[None]:
    """Leave what was there before out of the collections after runs: modules alone take longer than a small run."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def failed(error: BaseException) -> Result:
    """The result of a run that raised."""
    return {"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"}


def _another(pools: ExitStack, pool: ProcessPoolExecutor) -> ProcessPoolExecutor:
    """A pool with a process of its own in the place of one that is done with."""
    pool.shutdown(wait=False)
    return pools.enter_context(_process())


def _process() -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")  # CUDA does not live through a fork
    return ProcessPoolExecutor(1, context, _one_thread)


def _one_thread() -> None:
    torch.set_num_threads(1)  # the processes share the cores already


def _identity(about: dict[str, Any]) -> dict[str, Any]:
    """What makes two results files of one study."""
    text = about["data"].get("train_tokens")
    return about["training"] | {"device": about["environment"]["device"], "text": text}


def _named(task: Any) -> str:
    fields = asdict(task).items()
    shown = [(name, value) for name, value in fields if isinstance(value, str | float | int)]
    return ", ".join(value if isinstance(value, str) else f"{name} {value:g}" for name, value in shown)


def _said(result: Result) -> str:
    if result.get("unstable"):
        return str(result["unstable"])
    if result.get("validation_loss", 0.0) is None:
        return f"diverged, {result['seconds']:.1f} s"
    keys = {"validation_loss": ".4f", "training_loss": ".4f", "accuracy": ".4f", "step_ms": ".1f", "seconds": ".1f"}
    return ", ".join(f"{key} {result[key]:{form}}" for key, form in keys.items() if result.get(key) is not None)
