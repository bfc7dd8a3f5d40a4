"""Studies that go on: several processes make what one makes, and one that is killed loses no other's work."""

import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from studies.shared.resumable import Study, attempt


@dataclass(frozen=True)
class Task:
    row: str
    seed: int


def squared(task: Task) -> dict[str, Any]:
    return {"validation_loss": float(task.seed**2), "seconds": 0.0}


def killed_at_two(task: Task) -> dict[str, Any]:
    if task.seed == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return squared(task)


def about(**changes: Any) -> dict[str, Any]:
    training = {"lr": 1e-3, "seeds": 2, "betas": [0.9]} | changes
    return {
        "command": "python x.py", "environment": {"device": "cpu"}, "training": training, "data": {},
        "rows": [{"name": "a"}],
    }  # fmt: skip


pytestmark = pytest.mark.usefixtures("forked")

TASKS = [Task("a", seed) for seed in range(4)]
NEVER = float("inf")


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_run_is_made_once(jobs: int, tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    study = Study(out, about(), resume=False)
    assert study.make(TASKS[:2], squared, NEVER) == []
    assert study.make(TASKS, squared, NEVER, jobs=jobs) == []
    found = json.loads(out.read_text())
    assert {run["seed"]: run["validation_loss"] for run in found["runs"]} == {0: 0, 1: 1, 2: 4, 3: 9}
    assert len(found["runs"]) == 4
    assert found["unfinished"] == []


def test_a_killed_process_loses_its_own_work_alone(tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    assert Study(out, about(), resume=False).make(TASKS, killed_at_two, NEVER, jobs=2) == []
    found = json.loads(out.read_text())
    assert {run["seed"] for run in found["runs"] if "failed" not in run} == {0, 1, 3}
    assert ["BrokenProcessPool" in run["failed"] for run in found["runs"] if run["seed"] == 2] == [True]
    again = Study(out, about(), resume=True)
    assert again.missing(TASKS) == [Task("a", 2)]
    again.make(TASKS, squared, NEVER)
    assert {run["seed"] for run in json.loads(out.read_text())["runs"]} == set(range(4))


def of_process(task: Task) -> dict[str, Any]:
    return {"validation_loss": float(os.getpid()), "seconds": 0.0}


def test_a_run_made_alone_shares_its_process_with_no_other(tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    Study(out, about(), resume=False).make(TASKS, of_process, NEVER, alone=lambda task: task.seed == 1)
    used = {run["seed"]: run["validation_loss"] for run in json.loads(out.read_text())["runs"]}
    assert used[1] not in (os.getpid(), used[0], used[2])
    assert used[2] == used[3] != os.getpid()


@pytest.mark.parametrize(
    ("later", "kept"),
    [("python x.py --all", ["python x.py --all"]), ("python x.py --only a", ["first", "python x.py --only a"])],
)
def test_the_command_is_the_last_that_makes_all_of_it(later: str, kept: list[str], tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    Study(out, about() | {"command": "first"}, resume=False).make(TASKS[:1], squared, NEVER)
    for _ in range(2):
        Study(out, about() | {"command": later}, resume=True).make(TASKS, squared, NEVER)
    found = json.loads(out.read_text())
    assert [found["command"], *found.get("resumed", ())] == kept


def test_what_an_earlier_call_left_is_left_until_it_is_made(tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    Study(out, about(), resume=False).make(TASKS[:3], squared, -1.0)
    for asked, left in ((TASKS[:1], TASKS[1:3]), (TASKS[1:2], TASKS[2:3]), (TASKS[2:3], [])):
        Study(out, about(), resume=True).make(asked, squared, NEVER)
        assert json.loads(out.read_text())["unfinished"] == [asdict(task) for task in left]


def test_what_may_grow_grows(tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    Study(out, about(seeds=3), resume=False).make(TASKS[:1], squared, NEVER)
    new = about(betas=[0.99]) | {"rows": [{"name": "b"}]}
    study = Study(out, new, resume=True, grows=("seeds", "betas"))
    assert study.about["training"] == {"lr": 1e-3, "seeds": 3, "betas": [0.9, 0.99]}
    assert [row["name"] for row in study.about["rows"]] == ["a", "b"]
    with pytest.raises(typer.BadParameter, match=r"--resume: got lr 0.01, takes 0.001"):
        Study(out, about(lr=1e-2, seeds=3), resume=True)
    with pytest.raises(typer.BadParameter, match="--resume: got device 'NVIDIA H200', takes 'cpu'"):
        Study(out, about(seeds=3) | {"environment": {"device": "NVIDIA H200"}}, resume=True)
    elsewhere = about(seeds=3) | {"environment": {"device": "NVIDIA H200"}}
    study = Study(out, elsewhere, resume=True, ignores=("device",))
    assert len(study.runs) == 1
    assert len(Study(out, about(lr=1e-2, seeds=3), resume=True, ignores=("lr",)).runs) == 1
    assert study.about["environment"]["device"] == "cpu"


def test_no_run_is_begun_that_would_end_too_late(tmp_path: Path) -> None:
    study = Study(tmp_path / "x.json", about(), resume=False)
    assert study.make(TASKS, squared, 0.0, expected=1.0) == TASKS
    assert study.make(TASKS, squared, 0.0, expected=1.0, jobs=2) == TASKS


def test_an_exception_is_a_result() -> None:
    def broken(task: Task) -> dict[str, Any]:
        raise ValueError("lr: got -1\ntakes more")

    assert attempt(broken, TASKS[0]) == {"failed": "ValueError: lr: got -1"}
