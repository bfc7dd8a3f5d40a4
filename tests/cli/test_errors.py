"""Errors of the input are one line; errors of the program keep their traceback."""

from __future__ import annotations

import errno
import traceback
from pathlib import Path

import pytest

from narrowgauge import recipes, trainers
from narrowgauge.cli import main
from narrowgauge.cli._files import UsageError, user_input, write_output
from narrowgauge.trainers import _compare


def test_wrong_input_is_a_line_and_with_debug_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["formats", "fp16", "--unsigned"]
    line = "narrowgauge: --unsigned must be given with a codebook, got the float format fp16\n"
    assert main(words) == 2
    assert capsys.readouterr().err == line
    for debugged in (["--debug", *words], [*words, "--debug"]):
        assert main(debugged) == 2
        told = capsys.readouterr().err
        assert told.startswith("Traceback (most recent call last):")
        assert told.endswith(line)


def test_a_defect_is_not_blamed_on_the_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A ValueError from the middle of a training is no user's error."""

    def broken(*arguments: object, **options: object) -> None:
        raise ValueError("matrices do not match")

    text = tmp_path / "text.txt"
    text.write_text("bottles of beer on the wall\n" * 400)
    monkeypatch.setattr(_compare, "train", broken)
    small = ("--steps", "1", "--batch", "2", "--sequence", "16", "--vocabulary", "256", "--validation-windows", "2")
    with pytest.raises(ValueError, match="matrices do not match") as raised:
        main(["compare", "--data", str(text), "--out", str(tmp_path / "out"), "--recipes", "A", *small])
    assert not isinstance(raised.value, UsageError)


@pytest.mark.parametrize("begun", [False, True])
def test_a_training_blames_the_input_only_before_its_first_step(
    begun: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(settings: object, device: object, observer: trainers.TrainSettings, stop: object) -> None:
        if begun:
            observer.begin(0, 3)  # type: ignore[attr-defined]
        raise ValueError("model: the checkpoint lacks 'w'")

    monkeypatch.setattr(trainers, "fit", broken)
    words = ["train", "--out", str(tmp_path)]
    if begun:
        with pytest.raises(ValueError, match="the checkpoint lacks 'w'"):
            main(words)
    else:
        assert main(words) == 2
        assert capsys.readouterr().err == "narrowgauge: model: the checkpoint lacks 'w'\n"


def test_a_full_disk_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(name: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "results.json")

    monkeypatch.setattr(recipes, "get", full)
    assert main(["plan", "7B"]) == 2
    assert capsys.readouterr().err == "narrowgauge: [Errno 28] No space left on device: 'results.json'\n"


def test_only_errors_of_values_are_the_users() -> None:
    with pytest.raises(UsageError, match="one") as raised, user_input():
        raise ValueError("one")
    assert "ValueError: one" in "".join(traceback.format_exception(raised.value))
    with pytest.raises(KeyError), user_input():
        raise KeyError("two")


def test_an_output_goes_through_a_link_and_replaces_a_file_whole(tmp_path: Path) -> None:
    file, link = tmp_path / "file.json", tmp_path / "link.json"
    file.write_text("old")
    link.symlink_to(file)
    write_output("--json", link, "new")
    assert link.is_symlink()
    assert file.read_text() == "new"
    before = file.stat().st_ino
    write_output("--json", file, b"newer")
    assert file.stat().st_ino != before
    assert sorted(tmp_path.iterdir()) == [file, link]
