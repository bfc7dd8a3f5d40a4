"""The page in the terminal: what it shows, how it follows, how it ends."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from forked import Command
from narrowgauge.cli import main
from narrowgauge.cli._report._run_page import page as run_page
from narrowgauge.cli._watch import Advisor, WatchOptions, sparkline, watch
from narrowgauge.gauges._history import History
from narrowgauge.gauges._records import line_of
from recorded import changed, header, sound, step
from recorded import compared as results


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gauges.jsonl"


def show(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int = 100) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["watch", str(path), "--once"]) == 0
    return capsys.readouterr().out


def test_once_prints_the_run_as_it_stands(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = changed(sound(), "update", ["ln.weight"], lost=1.0, descent_quality=0.0)
    records.append({"kind": "spike", "step": 90, "of": "rms", "name": "wte.weight", "value": 3.5, "threshold": 2.3})
    records.append({"kind": "nonfinite", "step": 95, "of": "gradient", "name": "wte.weight", "value": 2})
    records.append({"kind": "lost", "step": 97, "of": "lost updates", "name": "ln.weight", "value": 1.0})
    path.write_text("".join(map(line_of, records)))
    text = show(path, capsys, monkeypatch)
    assert "step 97: every update of ln.weight is lost\n" in text
    assert "AdamW8bit, cpu, step 200, 10 steps/s" in text
    assert "loss" in text
    assert "2.04" in text
    lines = text.splitlines()
    worst = next(i for i, line in enumerate(lines) if line.startswith("worst tensors"))
    assert lines[worst + 1].split() == ["ln.weight", "1", "0", "100", "0"]
    assert "step 90: spike of rms wte.weight, 3.5" in text
    assert "step 95: inf or NaN in gradient wte.weight, 2" in text
    assert "lost updates: ln.weight does not move at all" in text


@pytest.mark.parametrize("width", [40, 200])
def test_no_line_is_wider_than_the_terminal(
    width: int, path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text("".join(map(line_of, sound())))
    assert max(map(len, show(path, capsys, monkeypatch, width).splitlines())) <= width


def test_names_are_text_and_no_markup(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [
        record | {"name": "[red]x[/]"} if record.get("name") == "ln.weight" else record for record in sound()
    ]
    path.write_text("".join(map(line_of, changed(records, "update", ["[red]x[/]"], rms=2.0))))
    assert "[red]x[/]" in show(path, capsys, monkeypatch)


@pytest.mark.parametrize(
    ("content", "complaint"), [(None, "there are no records"), ("", "no whole record"), ("nonsense\n", "line 1")]
)
def test_once_refuses_what_has_no_records(
    content: str | None, complaint: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        path.write_text(content)
    assert main(["watch", str(path), "--once"]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("command", [["watch", "--once"], ["report"]])
def test_a_folder_without_records_names_the_files_that_may_have_some(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("generator.jsonl", "critic.jsonl"):
        (tmp_path / name).touch()
    assert main([*command, str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.endswith("; it has critic.jsonl and generator.jsonl: give the file\n")
    assert error.count("\n") == 1


def test_a_run_without_a_loss_says_so(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = {"kind": "missing", "step": 5, "of": "loss", "names": [], "why": "call gauges.loss"}
    records = [*changed(sound(), "step", loss=None), missing]
    path.write_text("".join(map(line_of, records)))
    assert "no loss: call gauges.loss" in show(path, capsys, monkeypatch)
    page = run_page(History(records), "run")
    assert "No loss was recorded: call gauges.loss." in page
    assert "recorded of :" not in page
    # One that came later
    records = [*sound(), missing]
    path.write_text("".join(map(line_of, records)))
    assert "no loss" not in show(path, capsys, monkeypatch)
    assert "No loss was recorded" not in run_page(History(records), "run")


def test_an_interval_has_to_be_above_zero(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(path), "--interval", "0"]) == 2
    assert "--interval must be above 0 seconds, got 0" in capsys.readouterr().err


def test_it_waits_follows_and_takes_a_new_start(path: Path) -> None:
    """One round for each stage of a file's life; the page after each is in what was written."""
    stages = ["", line_of(header()) + line_of(step(1, 5.5)), line_of(step(2, 4.25)), "new", "gone"]
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=100, height=40, highlight=False)

    def advance(seconds: float) -> None:
        stage = stages.pop(0)
        if stage == "new":
            path.write_text(line_of(header(optimizer="Lion8bit")) + line_of(step(1, 7.75)))
        elif stage == "gone":
            path.unlink()
        else:
            with path.open("a") as file:
                file.write(stage)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", advance)
        assert watch(WatchOptions([path], once=False, interval=0.01), console, rounds=6) == 0
    text = written.getvalue()
    order = [text.index(word) for word in ("waiting for the file", "waiting for the first record", "5.5", "4.25")]
    assert order == sorted(order)
    assert text.index("4.25") < text.index("Lion8bit")
    assert text.rindex("waiting for the file") > text.index("7.75")


def test_several_runs_have_a_line_each_and_so_have_the_recipes_of_a_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("gauges.jsonl")
    path.write_text("".join(map(line_of, sound())))
    other = path.with_name("other.jsonl")
    other.write_text("".join(map(line_of, [header(), step(1, 5.0), step(2, math.nan)])))
    compared = path.parent / "compared"
    compared.mkdir()
    (compared / "results.json").write_text(json.dumps(results(interrupted=True)))
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["watch", str(path), str(other), str(compared), "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    shown = [line.split() for line in lines]
    assert shown[1][1:] == ["200", "10", "2.04", "100", "0", "1", "0"]
    assert shown[2][1:] == ["2", "10", "NaN", "—", "—", "—", "0"]
    # of a comparison the last step of each run, and the update of the step that was measured
    assert shown[4] == ["D,", "seed", "0", "3", "—", "2.5", "100", "1", "—", "0"]
    assert shown[7] == ["A,", "seed", "1", "3", "—", "2.5", "50", "40", "—", "0"]
    assert lines[-1].endswith("not complete; runs appear when they are done")
    assert main(["watch", str(compared), "--once"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 7
    (compared / "results.json").write_text(json.dumps(results(interrupted=True) | {"stopped": True}))
    assert main(["watch", str(compared), "--once"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "compared: interrupted before its end"
    assert main(["watch", str(path), str(path.parent / "nowhere"), "--once"]) == 2
    assert "nowhere': there are no records" in capsys.readouterr().err


def test_it_follows_a_comparison_that_begins_and_a_run_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("gauges.jsonl")
    compared = path.parent / "compared"
    path.write_text(line_of(header()) + line_of(step(1, 5.5)))
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=100, height=40, highlight=False)
    stages = [results(("D",), interrupted=True), results()]

    def advance(seconds: float) -> None:
        compared.mkdir(exist_ok=True)
        (compared / "new").write_text(json.dumps(stages.pop(0)))
        (compared / "new").replace(compared / "results.json")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", advance)
        assert watch(WatchOptions([compared, path], once=False, interval=0.01), console, rounds=3) == 0
    text = written.getvalue()
    places = [text.index(word) for word in ("waiting for the file", "D, seed 0", "not complete", "A, seed 0")]
    assert places == sorted(places)
    assert text.rindex("not complete") < text.index("A, seed 0")


def test_ctrl_c_ends_it_quietly(path: Path, tmp_path: Path) -> None:
    """In a terminal of its own, as a person would."""
    path.write_text("".join(map(line_of, sound(20))))
    parent, child = pty.openpty()
    command = Command(["watch", str(path), "--interval", "0.1"], tmp_path, terminal=os.ttyname(child))
    seen = b""
    try:
        while b"step 20" not in seen:
            seen += os.read(parent, 65536)
        command.send_signal(signal.SIGINT)
        _, errors = command.communicate(timeout=60)
    finally:
        command.kill()
        os.close(child)
        os.close(parent)
    assert command.returncode == 0
    assert errors == ""


def test_advice_takes_a_small_share_of_the_time() -> None:
    clock = iter([0.0, 2.0, 5.0, 23.0, 24.0])
    advisor = Advisor(clock=lambda: next(clock))
    bad = changed(sound(), "update", ["ln.weight"], lost=1.0, descent_quality=0.0)
    history = History(bad)
    assert len(advisor.of(history)) == 1  # from 0 to 2: not again before 22
    for record in changed(sound(), "update", ["ln.weight"], lost=0.0, descent_quality=1.0)[1:]:
        history.add(record)
    assert len(advisor.of(history)) == 1  # at 5
    assert advisor.of(history) == []  # at 23


def test_a_sparkline_shows_order_and_what_is_not_finite() -> None:
    assert sparkline(np.array([0.0, 1.0, 2.0, 3.0]), 4) == "▁▃▆█"
    assert sparkline(np.array([1.0, math.nan, 2.0]), 10) == "▁!█"
    assert sparkline(np.array([5.0, 5.0]), 10) == "▄▄"
    assert sparkline(np.array([math.inf]), 10) == "!"
    assert len(sparkline(np.arange(1000.0), 30)) == 30
