"""A run that stops goes on as if it had not, and nothing else goes on as it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import CPU, Silent, assert_it_goes_on, records, run

from narrowgauge.distributed import DamagedCheckpointError, save_checkpoint
from narrowgauge.gauges import read_records
from narrowgauge.trainers import SettingsError, TrainSettings, config_values, fit
from narrowgauge.trainers._build import build_parts
from narrowgauge.trainers._language import LanguageTask
from narrowgauge.trainers._run_folder import CONFIG, HISTORY, Checkpointer, History, read_history
from narrowgauge.trainers._tokens import open_tokens

pytestmark = pytest.mark.usefixtures("surroundings")


STOPPED: dict[str, dict[str, Any]] = {
    "causal, 8-bit states and low words": {"recipe": "adamw8bit-split8"},
    "stochastic rounding": {"recipe": "stochastic"},
    "llama, expansions": {"model": "llama-micro", "recipe": "collage-plus"},
    "masked, lion": {"model": "bert-micro", "recipe": "lion8bit"},
    "masked, in parts": {"model": "roberta-micro", "recipe": "master", "accumulate": 2},
    "a plan, a beta2 schedule": {"linear": "SWITCHBACK", "beta2_schedule": 0.8, "stable_embedding": True},
    "autocast, a scaler": {"autocast": "bf16", "scaler": "tensor", "schedule": "linear"},
}


QUICK = ("causal, 8-bit states and low words", "masked, in parts", "a plan, a beta2 schedule", "autocast, a scaler")


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in STOPPED])
def test_a_run_that_stops_goes_on_as_if_it_had_not(case: str, small: TrainSettings, tmp_path: Path) -> None:
    assert_it_goes_on(small, tmp_path, {}, **STOPPED[case])
    losses = [record["loss"] for record in records(tmp_path / "whole") if "loss" in record]
    assert losses[-1] < losses[0]


def test_a_named_checkpoint_is_gone_on_from(small: TrainSettings, tmp_path: Path) -> None:
    whole = run(small, tmp_path / "whole", save_every=2, keep=3)
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-000000002"
    later = run(small, tmp_path / "later", resume=str(checkpoint))
    assert later == whole[2:]


def test_a_run_that_goes_back_leaves_newer_checkpoints_behind(small: TrainSettings, tmp_path: Path) -> None:
    """They are of another course: a run that dies before its first save must not go on from them."""
    run(small, tmp_path, save_every=2, keep=3)
    folder = tmp_path / "checkpoints"
    older, ours, *_ = sorted(folder.glob("step-*"))
    with pytest.raises(SettingsError, match=f"^--resume must be one checkpoint, such as {folder}/step-"):
        run(small, tmp_path, resume=str(folder))

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    observer = Silent()
    observer.progress = die  # type: ignore[method-assign]
    other = replace(small, lr=0.05, save_every=2, keep=3)
    with pytest.raises(KeyboardInterrupt):
        fit(replace(other, out=tmp_path, resume=str(older)), CPU, observer)
    assert [path.name for path in sorted(folder.glob("step-*"))[:2]] == [older.name, f"{ours.name}.{stamp(folder)}"]
    assert any(line.startswith("kept of an earlier run: ") and ours.name in line for line in observer.told)
    assert records(tmp_path)[-1]["step"] == 3, "before the first save"
    assert (folder / "latest").read_text() == f"{older.name}\n"
    assert config_values(tmp_path / CONFIG)["resume"] == "auto"
    ended = run(other, tmp_path)
    assert ended[2:] == run(other, tmp_path / "straight", resume=str(older))
    assert [path.name for path in sorted(folder.glob("step-?????????"))] == [
        f"step-{step:09}" for step in (2, 4, 6)
    ]


def test_a_run_that_saved_nothing_says_that_it_begins_anew(small: TrainSettings, tmp_path: Path) -> None:
    run(small, tmp_path / "one", save_every=2, keep=3)
    named = tmp_path / "one" / "checkpoints" / "step-000000002"
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / CONFIG).write_text(f"resume = {json.dumps(str(named))}\n")
    observer = Silent()
    fit(replace(small, out=tmp_path / "two", steps=1, warmup=0), CPU, observer)
    says = f"beginning anew: no checkpoint of the run before is here; it had gone on from --resume {named}"
    assert says in observer.told
    aside = tmp_path / "three" / "checkpoints" / "step-000000002.20260101T000000Z"
    aside.mkdir(parents=True)
    observer = Silent()
    fit(replace(small, out=tmp_path / "three", steps=1, warmup=0), CPU, observer)
    assert any(line.startswith("beginning anew: ") and f"such as {aside} for" in line for line in observer.told)


def stamp(folder: Path) -> str:
    """The time after the names of the checkpoints that were set aside."""
    return next(path.name.partition(".")[2] for path in sorted(folder.glob("step-*.*Z")))


@pytest.mark.parametrize("content", ["", "model = 'micr", 'model = "bert-micro"\n'])
def test_a_damaged_configuration_does_not_stop_a_run(content: str, small: TrainSettings, tmp_path: Path) -> None:
    whole = run(small, tmp_path / "whole")
    run(small, tmp_path / "cut", save_every=2)
    (tmp_path / "cut" / CONFIG).write_text(content)
    again = run(small, tmp_path / "cut")
    assert again == whole
    assert config_values(tmp_path / "cut" / CONFIG)["model"] == small.model


def test_a_run_says_that_it_went_on_otherwise_and_one_that_ended_does_not(
    small: TrainSettings, tmp_path: Path
) -> None:
    settings, observer = replace(small, out=tmp_path, lr=0.01), Silent()
    fit(settings, CPU, observer)
    repeats = "# narrowgauge train --config THIS repeats the run"
    assert (tmp_path / CONFIG).read_text().startswith(repeats)
    ended = r"^--steps must be above the 6 of .* to go on otherwise \(another --out .*, got --lr 0.02, before 0.01$"
    with pytest.raises(SettingsError, match=ended):
        fit(replace(settings, lr=0.02), CPU, observer)
    assert (tmp_path / CONFIG).read_text().startswith(repeats)
    longer = replace(settings, lr=0.02, steps=small.steps + 1)
    first = small.steps + 1
    changes = [
        f"from step {first} on --{each}" for each in ("lr 0.02, before 0.01", f"steps {first}, before {first - 1}")
    ]
    for _ in range(2):
        observer.told.clear()
        fit(longer, CPU, observer)
        assert [line for line in observer.told if line.startswith("from step")] == changes
        head, *lines = (tmp_path / CONFIG).read_text().splitlines()
        assert head.startswith("# narrowgauge train --config THIS does not repeat the run")
        assert lines[:2] == [f"# {change}" for change in changes]
    assert any(line.startswith("ended already: ") for line in observer.told)
    for more, reached in ((0, "is reached in the last one"), (1, "is not reached")):
        fit(replace(small, out=tmp_path / f"new {more}", warmup=small.steps + more), CPU, observer)
        assert f"--warmup {small.steps + more} takes all of --steps {small.steps}: --lr {reached}" in observer.told


def test_what_is_in_the_way_of_a_newer_checkpoint_is_said(small: TrainSettings, tmp_path: Path) -> None:
    settings = replace(small, out=tmp_path / "run", save_every=2, keep=2)
    fit(settings, CPU, Silent())
    newest = tmp_path / "run" / "checkpoints" / f"step-{small.steps:09}"
    next(newest.glob("*.safetensors")).write_bytes(b"x")
    observer = Silent()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nobody reads them between lines of progress
        fit(replace(settings, steps=small.steps + 2), CPU, observer)
    way, going = observer.told[0], next(line for line in observer.told if line.startswith("going on from"))
    assert way.startswith("latest_checkpoint: ")
    assert "has 1 bytes" in way
    assert going.endswith(f"step-{small.steps - 2:09}")


def test_where_no_checkpoint_is_whole_it_says_what_to_do(small: TrainSettings, tmp_path: Path) -> None:
    run(small, tmp_path)
    folder = tmp_path / "checkpoints"
    next(folder.glob("step-*/*.safetensors")).write_bytes(b"x")
    way_out = f"; to begin anew take another --out, or move {folder} away"
    says = f"^no checkpoint in {folder} is whole: .* has 1 bytes.*{way_out}$"
    with pytest.raises(DamagedCheckpointError, match=says):
        run(small, tmp_path)
    folder.rename(tmp_path / "away")
    assert len(run(small, tmp_path)) == 6
    assert len(kept(tmp_path)["history"]) == 1


def kept(out: Path) -> dict[str, list[str]]:
    """The content of the renamed files of earlier runs, by what they were called."""
    found: dict[str, list[str]] = {}
    for path in out.glob("*.*Z*.*"):
        found.setdefault(path.name.partition(".")[0], []).append(path.read_text())
    return found


def test_the_records_of_another_run_in_the_folder_are_kept(small: TrainSettings, tmp_path: Path) -> None:
    # An attempt without a checkpoint.
    before = {"history": '{"step": 1, "loss": 3.0}\n', "gauges": '{"kind": "run"', "config": "steps = 1\n"}
    for name, suffix in (("history", "jsonl"), ("gauges", "jsonl"), ("config", "toml")):
        (tmp_path / f"{name}.{suffix}").write_text(before[name])
    observer = Silent()
    fit(replace(small, out=tmp_path, gauges_every=2), CPU, observer)
    assert kept(tmp_path) == {name: [content] for name, content in before.items()}
    (said,) = (line for line in observer.told if line.startswith("kept of an earlier run: "))
    assert sorted(said.partition(": ")[2].split(", ")) == sorted(map(str, tmp_path.glob("*.*Z*.*")))
    assert [r["step"] for r in read_records(tmp_path / "gauges.jsonl") if r["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    # A finished run, where one begins with the checkpoint of another; when that goes on no file is renamed.
    whole = (tmp_path / HISTORY).read_text()
    run(small, tmp_path / "other", save_every=2, keep=3)
    named = str(tmp_path / "other" / "checkpoints" / "step-000000002")
    assert len(run(small, tmp_path, resume=named)) == 4
    assert whole in kept(tmp_path)["history"]
    files = kept(tmp_path)
    run(small, tmp_path, steps=7, schedule="constant", save_every=1)
    assert kept(tmp_path) == files


class Second(Silent):
    """An observer that starts the run once more while it goes on."""

    def __init__(self, settings: TrainSettings) -> None:
        super().__init__()
        self.settings, self.refusals = settings, []

    def progress(self, step: int, loss: float, units: float, unit: str, mfu: float | None) -> None:
        try:
            fit(replace(self.settings, steps=step), CPU, Silent())
        except SettingsError as error:
            self.refusals.append(str(error))


def test_a_folder_has_one_run_at_a_time(
    small: TrainSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(small, out=tmp_path / "one", steps=2, warmup=0)
    observer = Second(settings)
    fit(settings, CPU, observer)
    says = (
        f"--out must be a folder that no other run writes into, got {settings.out}, which process {os.getpid()} on "
    )
    assert len(observer.refusals) == 2
    assert all(line.startswith(says) and line.endswith(" writes into") for line in observer.refusals)
    assert [r["step"] for r in records(settings.out) if "loss" in r] == [1, 2]

    def without(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without)
    assert len(run(small, tmp_path / "two", save_every=0, resume="no")) == 6


def test_gauges_may_begin_where_a_run_goes_on(small: TrainSettings, tmp_path: Path) -> None:
    run(small, tmp_path, steps=2, schedule="constant")
    run(small, tmp_path, steps=4, schedule="constant", gauges_every=1)
    assert [r["step"] for r in read_records(tmp_path / "gauges.jsonl") if r["kind"] == "step"] == [3, 4]


def test_a_history_is_cut_where_the_run_goes_on(tmp_path: Path) -> None:
    lines = [{"step": n, "loss": n / 7} for n in range(1, 9)]
    (tmp_path / HISTORY).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "lo')
    assert read_history(tmp_path / HISTORY) == lines
    history = History(tmp_path, 5)
    history.add(step=6, loss=float("nan"))
    history.close()
    assert read_history(tmp_path / HISTORY) == [*lines[:5], {"step": 6, "loss": None}]
    assert read_history(tmp_path / "nothing") == []


def test_a_damaged_history_is_kept(tmp_path: Path) -> None:
    lines = [json.dumps({"step": n, "loss": n / 7}) + "\n" for n in range(1, 9)]
    damaged = "".join([*lines[:2], "garbage\n", "\n", *lines[3:], '{"step": 9, "loss": 1.5}'])
    (tmp_path / HISTORY).write_text(damaged)
    told: list[str] = []
    History(tmp_path, 7, told.append).close()
    assert [record["step"] for record in read_history(tmp_path / HISTORY)] == [1, 2, 4, 5, 6, 7]
    (copy,) = tmp_path.glob("*.damaged*")
    assert copy.read_text() == damaged
    assert told == [f"{tmp_path / HISTORY}: 1 of its lines are damaged; the whole file is kept as {copy}"]
    History(tmp_path, 7, told.append).close()
    assert len(told) == 1


def test_a_checkpoint_brings_back_the_loss_scale_and_the_draw(small: TrainSettings, tmp_path: Path) -> None:
    keepers = []
    for seed in (0, 1):
        settings = replace(small, out=tmp_path, scaler="dynamic", seed=0)
        source = open_tokens(settings.data, 256)
        task = LanguageTask(source, "causal", batch=4, sequence=16, windows=4, seed=seed)
        keepers.append(Checkpointer(settings, build_parts(settings, 256, CPU), task, source.fingerprint))
    saved, loaded = keepers
    assert saved.parts.scaler is not None
    assert loaded.parts.scaler is not None
    saved.parts.scaler.scale(torch.ones(()))  # it is made by the first loss
    saved.parts.scaler.update(128.0)
    saved.task.draw()
    torch.manual_seed(5)
    path = saved.save(3)
    expected = torch.rand(4)
    torch.manual_seed(6)
    assert loaded.load(path) == 3
    assert torch.equal(torch.rand(4), expected)
    assert loaded.parts.scaler.get_scale() == 128.0
    assert torch.equal(loaded.task.draw()["windows"], saved.task.draw()["windows"])


def test_what_is_no_checkpoint_of_a_training_is_refused(small: TrainSettings, tmp_path: Path) -> None:
    settings = replace(small, out=tmp_path / "out")
    parts = build_parts(settings, 256, CPU)
    path = save_checkpoint(
        tmp_path / "other", model=parts.model, optimizer=parts.optimizer, step=1, random_states=True
    )
    with pytest.raises(SettingsError, match=r"--resume must be a checkpoint of narrowgauge train, got .*"):
        fit(replace(settings, resume=str(path)), CPU, Silent())


def test_a_configuration_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("steps = 9\ngather-codes = false\n")
    assert config_values(tmp_path / "config.toml") == {"steps": 9}
    (tmp_path / "config.toml").write_text("stops = 9\n")
    with pytest.raises(SettingsError, match=r"a key must be one of data, .*, got 'stops'"):
        config_values(tmp_path / "config.toml")


def test_a_key_of_a_configuration_may_have_underscores(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text("weight_decay = 0.2\nsave-every = 3\n")
    assert config_values(tmp_path / CONFIG) == {"weight_decay": 0.2, "save_every": 3}
