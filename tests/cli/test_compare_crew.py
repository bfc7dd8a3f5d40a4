"""Comparisons whose runs several processes share: the numbers of one process, and what is kept when one fails."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from narrowgauge.cli._crew import Crew

from forked import Command
from narrowgauge.cli import main
from narrowgauge.optim import UpdateStats
from narrowgauge.trainers import Run

pytestmark = pytest.mark.usefixtures("surroundings")

SMALL = ("--steps", "8", "--batch", "2", "--sequence", "16", "--vocabulary", "256", "--validation-windows", "4")
TIMES = ("optimizer_ms", "step_ms", "tokens_per_second", "peak_memory_bytes")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{n} bottles of beer on the wall, {n} bottles of beer.\n" for n in range(400)))
    return path


def started(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*command, "-m", "narrowgauge.cli", "compare", *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def numbers(out: Path) -> dict[str, Any]:
    """What was measured, without times."""
    recipes = json.loads((out / "results.json").read_text())["recipes"]
    return {name: {key: value for key, value in row.items() if key not in TIMES} for name, row in recipes.items()}


def test_processes_share_the_runs_of_one(text: Path, tmp_path: Path) -> None:
    """Processes as torchrun starts them; torchrun itself starts those of the next test."""
    asked = ("--data", text, "--recipes", "D,A,adamw8bit-split8", "--seeds", "2", *SMALL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        there = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    command = ["compare", "--out", str(tmp_path / "two"), *map(str, asked)]
    processes = [Command(command, tmp_path, RANK=str(rank), **there) for rank in range(2)]
    assert main(["compare", "--out", str(tmp_path / "one"), *map(str, asked)]) == 0
    (printed, errors), (other, complaints) = (process.communicate(timeout=120) for process in processes)
    assert [process.returncode for process in processes] == [0, 0], errors + complaints
    assert (printed + other).count(": validation loss") == 6
    assert numbers(tmp_path / "two") == numbers(tmp_path / "one")
    results = json.loads((tmp_path / "two" / "results.json").read_text())
    assert results["interrupted"] is False
    assert results["environment"]["processes"] == "2, each with runs of its own"
    assert (tmp_path / "two" / "report.html").exists()


def test_ctrl_c_keeps_the_runs_of_all(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = started("--out", out, "--data", text, "--recipes", "A,D", "--seeds", "100000", *SMALL)
    try:
        deadline = time.monotonic() + 120
        while not (out / "results.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
    results = json.loads((out / "results.json").read_text())
    assert results["interrupted"] is True
    assert results["recipes"]["A"]["validation_loss"] > 0
    assert (out / "report.html").exists()


def pair(silence: float = 60.0) -> tuple[Crew, Crew]:
    store = dist.HashStore()
    return Crew(store, 0, 2, silence), Crew(store, 1, 2, silence)


def a_run(seed: int) -> Run:
    sums = torch.tensor([1 / 3, float("nan"), float("inf"), 0.0, -0.0, 5e-324, 7.0, 8.0], dtype=torch.float64)
    return Run(
        seed, loss=[0.1, 1e-300, float("nan")], stats={5: UpdateStats(sums)}, measured_bytes={"states": 2.03}
    )


def test_runs_come_over_with_the_same_bits() -> None:
    first, other = pair()
    assert next(other.numbers(2)) == 0
    other.hand_in(0, a_run(7))
    (found,) = first.handed_in(2).values()
    wanted = a_run(7)
    assert found.stats[5].sums.view(torch.int64).tolist() == wanted.stats[5].sums.view(torch.int64).tolist()
    assert str(found.loss) == str(wanted.loss)
    assert (found.seed, found.measured_bytes) == (wanted.seed, wanted.measured_bytes)
    assert first.handed_in(2) == {}


def test_every_number_is_taken_once() -> None:
    crews = pair()
    taken: list[int] = []
    threads = [threading.Thread(target=lambda crew=crew: taken.extend(crew.numbers(100))) for crew in crews]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(100))


def test_after_a_failure_nobody_begins_and_nobody_waits() -> None:
    first, other = pair()
    mine, theirs = first.numbers(10), other.numbers(10)
    assert (next(mine), next(theirs), next(theirs)) == (0, 1, 2)
    other.hand_in(1, a_run(1))
    other.fail(2, "too large")
    first.hand_in(0, a_run(0))
    assert list(mine) == []
    kept: dict[int, Run] = {}
    for runs in first.rest(10):
        kept |= runs
    assert sorted(kept) == [0, 1]
    assert first.failure == "too large"


def test_the_first_waits_for_who_still_trains_and_not_for_who_is_silent() -> None:
    first, other = pair(silence=0.5)
    numbers = other.numbers(2)
    next(numbers)
    waiting = first.rest(2)
    for _ in range(4):
        other._last_beat = 0.0
        other.beat()
        assert next(waiting) == {}
    with pytest.raises(RuntimeError, match="no step for 0 s in processes that still have runs to make: 1"):
        list(waiting)


def test_a_process_that_was_started_otherwise_makes_no_runs() -> None:
    store = dist.HashStore()
    first, other, same = (Crew(store, rank, 3) for rank in range(3))
    first.agree({"steps": 3, "recipes": ["A", "D"], "beta1": 0.9})
    same.agree({"beta1": 0.9, "steps": 3, "recipes": ["A", "D"]})
    assert first.failure is None
    with pytest.raises(ValueError, match=r"--steps: got 4 here and 3 in another process; takes one value in all"):
        other.agree({"steps": 4, "recipes": ["A", "D"], "beta1": 0.9})
    assert str(first.failure).startswith("--steps: got 4 here")
    assert list(first.numbers(6)) == []
