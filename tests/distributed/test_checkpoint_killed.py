"""Processes that are killed at any moment, and disks that refuse: what was saved before is found, and goes on."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
from checkpointed import KIND, Net, contents, curve, made, newest
from saving_process import Processes, failing, log

from narrowgauge.distributed import latest_checkpoint, load_checkpoint, save_checkpoint


def said(folder: Path, what: str, world: int = 1) -> list[list[str]]:
    """Lines of all ranks that were written to their ends, or nearly: the last word of a killed process may be
    cut."""
    lines = [words for rank in range(world) for words in log(folder, rank)]
    return [words for words in lines if words[0] == what and len(words) == 3]


def quiet_latest(run: Path) -> Path | None:
    """The newest, whatever it warns of: half-written ones are what killing leaves."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was not finished")
        return latest_checkpoint(run)


def killed(processes: Processes, folder: Path, times: int, world: int, most: float) -> None:
    """Kill a run's processes, or one of them, at random moments, and start it again; what was saved is never lost,
    the others end by themselves, and every loss there ever was is that of a run in one piece."""
    moments, reached = random.Random(0), 0
    for number in range(times):
        pids = processes.start(folder, world=world, steps=10**9)

        def goes_on(number: int = number) -> bool:
            resumed = [sum(words[0] == "resumed" for words in log(folder, rank)) for rank in range(world)]
            return min(resumed) > number and (number > 0 or bool(said(folder, "saved", world)))

        # Until ranks have met: one that is left alone before would wait for the other for minutes. At first also
        # until there is something to lose, on a busy machine too.
        end = time.monotonic() + 60
        while not goes_on() and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(moments.uniform(0.0, most))
        for pid in pids if world == 1 else moments.choice([pids, pids[:1], pids[1:]]):
            os.kill(pid, signal.SIGKILL)
        assert signal.SIGKILL in processes.ended()
        path = quiet_latest(folder / "run")
        net, optimizer = made(KIND, seed=1)
        step = load_checkpoint(path, model=net, optimizer=optimizer).step if path is not None else 0
        # Nothing that `save_checkpoint` has reported is lost, and nothing that was found before.
        assert step >= max([reached, *(int(words[1]) for words in said(folder, "saved", world))])
        reached = step
    found = said(folder, "loss", world)
    wanted = curve(max(int(words[1]) for words in found))
    assert reached > 0
    assert all(wanted[int(step)].startswith(loss) for _, step, loss in found)
    # Two are kept, and a third if the last kill came before it was removed.
    assert len(list((folder / "run").glob("step-*"))) <= 3


def test_killed_at_random_moments_nothing_is_lost(processes: Processes, tmp_path: Path) -> None:
    killed(processes, tmp_path, 7, 1, 0.3)


@pytest.mark.slow
def test_killed_two_hundred_times_nothing_is_lost(processes: Processes, tmp_path: Path) -> None:
    killed(processes, tmp_path, 200, 1, 0.3)


def test_killed_at_every_operation_on_the_disk(processes: Processes, tmp_path: Path) -> None:
    """Each save is killed at its n-th operation on the disk; the one before it or its own is found."""
    processes.start(tmp_path, steps=3)
    assert processes.ended() == [0]
    operations = int(log(tmp_path)[-1][2])
    assert operations > 12
    states = []
    for at in range(1, operations + 1):
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / "run", folder / "run")
        processes.start(folder, steps=4, die_at=at)
        assert processes.ended() == [signal.SIGKILL], log(folder)
        path = quiet_latest(folder / "run")
        assert path is not None
        states.append(int(path.name.removeprefix("step-")))
        if at % 3:  # two of three: it takes long
            continue
        processes.start(folder, steps=5)
        assert processes.ended() == [0]
        assert quiet_latest(folder / "run") == folder / "run" / "step-000000005"
        # What the killed save left is gone.
        names = os.listdir(folder / "run")
        assert len(names) == 4, names
        assert said(folder, "loss")[-1][1:] == ["5", curve(5)[5]]
    assert states == sorted(states)
    assert set(states) == {3, 4}


def test_an_operation_that_fails_is_an_error_and_no_damage(run: Path, tmp_path: Path) -> None:
    """A disk that says no at its n-th operation: the error is raised, what was there before is there."""

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    net, _ = made(KIND)
    before, failures = contents(newest(run)), 0
    for at in range(1, 100):
        work = tmp_path / str(at)
        shutil.copytree(run, work)
        raised: Exception | None = None
        with failing(at, full) as done:
            try:
                save_checkpoint(work, model=net, optimizer=None, step=5)
            except (OSError, UserWarning) as error:
                raised = error
        if len(done) < at:
            break
        # An old one that could not be removed is worth a warning; a folder that is there need not be made.
        failures += isinstance(raised, OSError)
        if raised is None:
            assert latest_checkpoint(work) == work / "step-000000005"
        else:
            assert getattr(raised, "errno", None) == errno.ENOSPC or "could not be removed" in str(raised)
        assert contents(work / "step-000000004") == before
        path = quiet_latest(work)
        assert path is not None
        assert path.name in ("step-000000004", "step-000000005")
        assert not [name for name in os.listdir(work) if name.startswith(".step-") and "removed" not in name]
        save_checkpoint(work, model=net, optimizer=None, step=6)
        assert latest_checkpoint(work) == work / "step-000000006"
    assert failures > 8


def test_a_disk_that_takes_no_more_bytes(run: Path) -> None:
    """The kernel's own refusal in the middle of a file."""
    before = contents(run)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_checkpoint(run, model=Net(), optimizer=None, step=6, extra=torch.ones(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(run) == before
    assert len(os.listdir(run)) == 4


def test_two_ranks_killed_at_random_moments_lose_nothing(processes: Processes, tmp_path: Path) -> None:
    killed(processes, tmp_path, 3, 2, 0.8)


@pytest.mark.slow
def test_two_ranks_killed_two_hundred_times_lose_nothing(processes: Processes, tmp_path: Path) -> None:
    killed(processes, tmp_path, 200, 2, 0.8)
