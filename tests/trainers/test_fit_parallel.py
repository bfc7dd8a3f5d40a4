"""A training on two processes is the training of one: the same batches, losses and weights, and one folder."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import CPU, Silent, small_settings, weights
from parallel_runs import Trainings

from narrowgauge.trainers import SettingsError, TrainSettings, fit
from narrowgauge.trainers._parallel import ProcessGroup
from narrowgauge.trainers._run_folder import HISTORY, locked, read_history

pytestmark = pytest.mark.usefixtures("surroundings")


@pytest.fixture
def small(tmp_path: Path) -> TrainSettings:
    return replace(small_settings(tmp_path / "text.txt"), keep=3)


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in read_history(out / HISTORY) if "loss" in record]


def validations(out: Path) -> list[float]:
    return [record["validation_loss"] for record in read_history(out / HISTORY) if "validation_loss" in record]


def given(settings: TrainSettings, **changes: Any) -> dict[str, Any]:
    return asdict(replace(settings, **changes))


def ended(answers: list[Any]) -> list[Any]:
    for answer in answers:
        assert not isinstance(answer, str), answer
        assert not answer["initialized"]
    return answers


def assert_close(out: Path, reference: Path, least: float = 1e-5) -> None:
    for found, wanted in ((losses, losses), (validations, validations)):
        torch.testing.assert_close(found(out), wanted(reference), rtol=least, atol=least)
    one, two = weights(out), weights(reference)
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert value.dtype == two[name].dtype
        torch.testing.assert_close(value.float(), two[name].float(), rtol=100 * least, atol=100 * least)


@pytest.mark.parametrize(
    ("parallel", "accumulate"),
    [("ddp", 1), ("fsdp", 2), *(pytest.param(*way, marks=pytest.mark.slow) for way in (("ddp", 2), ("fsdp", 1)))],
)
def test_two_processes_train_as_one(
    trainings: Trainings, small: TrainSettings, tmp_path: Path, parallel: str, accumulate: int
) -> None:
    changes: dict[str, Any] = {"accumulate": accumulate, "gauges_every": 2, "stable_embedding": accumulate == 2}
    if accumulate == 2:
        changes |= {"layer_scale": 0.5, "validation_windows": 5}  # parts that two cannot share evenly
    fit(replace(small, out=tmp_path / "one", **changes), CPU, Silent())
    answers = ended(
        trainings(given(small, out=tmp_path / "two", parallel=parallel, **changes), tmp_path / "answers")
    )
    assert_close(tmp_path / "two", tmp_path / "one")
    first, other = answers
    assert first["outcome"] == other["outcome"]
    assert first["told"]
    assert not other["told"]
    assert f"2 processes, {parallel}" in first["told"]
    files = {p.name for p in (tmp_path / "two").iterdir()}
    assert files == {p.name for p in (tmp_path / "one").iterdir()}


def test_states_on_the_cpu_are_those_of_two_processes(
    trainings: Trainings, small: TrainSettings, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"recipe": "adamw8bit-split8", "accumulate": 2, "gauges_every": 3, "steps": 3}
    for offload in ("none", "states"):
        ended(trainings(given(small, out=tmp_path / offload, offload=offload, **changes), tmp_path / f"a{offload}"))
    assert losses(tmp_path / "states") == losses(tmp_path / "none")
    one, two = weights(tmp_path / "states"), weights(tmp_path / "none")
    assert all(torch.equal(one[name], two[name]) for name in two)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_run_goes_on_with_another_number_of_processes(
    trainings: Trainings, small: TrainSettings, tmp_path: Path, parallel: str
) -> None:
    recipe = {"schedule": "constant", "validate_every": 0}
    fit(replace(small, out=tmp_path / "one", **recipe), CPU, Silent())
    out = tmp_path / "moved"
    (first, other) = ended(trainings(given(small, out=out, steps=2, parallel=parallel, **recipe), tmp_path / "a"))
    assert first["outcome"]["step"] == other["outcome"]["step"] == 2
    fit(replace(small, out=out, steps=4, **recipe), CPU, Silent())
    ended(trainings(given(small, out=out, parallel=parallel, **recipe), tmp_path / "b"))
    assert len(losses(out)) == 6
    torch.testing.assert_close(losses(out), losses(tmp_path / "one"), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(validations(out)[-1:], validations(tmp_path / "one"), rtol=1e-4, atol=1e-4)


def test_one_that_is_asked_to_stop_stops_all(trainings: Trainings, small: TrainSettings, tmp_path: Path) -> None:
    out = tmp_path / "out"
    answers = ended(trainings(given(small, out=out, log_every=2), tmp_path / "a", stops={1: 1}))
    assert [a["outcome"]["step"] for a in answers] == [2, 2]
    assert all(a["outcome"]["stopped"] for a in answers)
    answers = ended(trainings(given(small, out=out, log_every=2), tmp_path / "b"))
    fit(replace(small, out=tmp_path / "one"), CPU, Silent())
    assert_close(out, tmp_path / "one")


def test_an_error_of_one_ends_all(trainings: Trainings, small: TrainSettings, tmp_path: Path) -> None:
    first, other = trainings(given(small, out=tmp_path / "out", data=tmp_path / "none.txt"), tmp_path / "a")
    assert "--data" in first.splitlines()[-1]
    assert "another process has failed" in other
    for answer in trainings(given(small, out=tmp_path / "out", batch=6, accumulate=2), tmp_path / "b"):
        assert "--batch must be a multiple of 4, " in answer
    with locked(tmp_path / "out", ProcessGroup()):
        for answer in trainings(given(small, out=tmp_path / "out"), tmp_path / "c"):
            assert "--out must be a folder that no other run writes into, " in answer.splitlines()[-1]


def test_what_is_refused_and_shared() -> None:
    with pytest.raises(SettingsError, match=r"--parallel must be ddp in a process .*, got 'fsdp'"):
        ProcessGroup.of(TrainSettings(parallel="fsdp"))
    with pytest.raises(SettingsError, match="--parallel must be one of ddp, fsdp, got 'tp'"):
        TrainSettings(parallel="tp")
    x = {"a": torch.arange(12), "b": torch.arange(24).view(12, 2)}
    shares = [ProcessGroup(rank, 3, joined=True).share(x) for rank in range(3)]
    for name, whole in x.items():
        assert torch.equal(torch.cat([share[name] for share in shares]), whole)
    for world, count in ((1, 4), (3, 7), (4, 2)):
        turns = [ProcessGroup(rank, world).turns(count) for rank in range(world)]
        assert len({len(of) for of in turns}) == 1
        taken = [number for of in turns for number, counts in of if counts]
        assert sorted(taken) == list(range(count))


def test_processes_that_were_started_otherwise_are_refused(
    trainings: Trainings, small: TrainSettings, tmp_path: Path
) -> None:
    """A learning rate of its own would part the copies of DDP without a word."""
    for answer in trainings(given(small, out=tmp_path / "two"), tmp_path / "answers", other={"lr": 0.5}):
        assert "SettingsError: --lr must be one value in all processes" in answer
        assert " in process 0 and 0.5 in process 1" in answer


def test_other_data_of_the_same_settings_is_refused(
    trainings: Trainings, small: TrainSettings, tmp_path: Path
) -> None:
    """Its place may differ, as with a disk for each machine."""
    text = small.data.read_text()
    (tmp_path / "same.txt").write_text(text)
    (tmp_path / "other.txt").write_text(text[: len(text) // 2])
    same = trainings(
        given(small, out=tmp_path / "a", steps=1), tmp_path / "ok", other={"data": str(tmp_path / "same.txt")}
    )
    ended(same)
    answers = trainings(
        given(small, out=tmp_path / "b"), tmp_path / "no", other={"data": str(tmp_path / "other.txt")}
    )
    for answer in answers:
        assert "SettingsError: --data must have the same content in all processes, got " in answer
