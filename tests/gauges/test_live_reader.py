"""A file of records that grows, shrinks, comes and goes: what was followed is what reading it whole would give."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from narrowgauge.gauges import read_records
from narrowgauge.gauges._history import History, LiveReader
from narrowgauge.gauges._records import line_of
from recorded import header, sound, step


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gauges.jsonl"


def test_a_file_that_is_not_there_yet_is_waited_for(path: Path) -> None:
    reader = LiveReader(path.parent)
    assert not reader.read()
    assert not reader.exists
    path.write_text(line_of(header()))
    assert reader.read()
    assert reader.exists
    assert reader.history.header["optimizer"] == "AdamW8bit"
    assert not reader.read()


@pytest.mark.parametrize("seed", range(5))
def test_in_pieces_of_any_size_it_is_the_same_as_whole(path: Path, seed: int) -> None:
    data = "".join(map(line_of, sound(60))).encode()
    reader, generator, written = LiveReader(path), random.Random(seed), 0
    while written < len(data):
        size = generator.choice([1, 7, 100, 5000])
        with path.open("ab") as file:
            file.write(data[written : written + size])
        written += size
        reader.read()
    whole = History(read_records(path))
    assert reader.history.count == whole.count == len(sound(60))
    for kind, field, name in (
        ("step", "loss", ""),
        ("update", "rms", "ln.weight"),
        ("gradient", "mean", "wte.weight"),
    ):
        one, other = (each.series(kind, field, name) for each in (reader.history, whole))
        assert one.steps.tolist() == other.steps.tolist()
        assert one.values.tolist() == other.values.tolist()
    assert reader.history.damage is None


def test_half_a_line_is_no_damage_until_its_end_is_there(path: Path) -> None:
    path.write_text(line_of(header()) + '{"kind": "step", "st')
    reader = LiveReader(path)
    reader.read()
    assert (reader.history.count, reader.history.damage) == (1, None)
    with path.open("a") as file:
        file.write('ep": 1, "loss": 2.5}\n')
    assert reader.read()
    assert reader.history.loss.values.tolist() == [2.5]


def test_a_damage_ends_reading_as_it_does_for_the_whole_file(path: Path) -> None:
    path.write_text(line_of(header()) + line_of(step(1)) + "\0\0\0\n" + line_of(step(2)))
    reader = LiveReader(path)
    reader.read()
    records = read_records(path)
    assert reader.history.damage == records.damage
    assert reader.history.count == len(records) == 2
    assert not reader.read()


def test_a_shorter_file_and_another_file_are_read_from_their_beginning(path: Path) -> None:
    path.write_text("".join(map(line_of, sound(50))))
    reader = LiveReader(path)
    reader.read()
    assert reader.history.last_step == 50
    path.write_text(line_of(header()) + line_of(step(3)))
    assert reader.read()
    assert (reader.history.last_step, reader.history.count) == (3, 2)
    other = path.with_name("other")
    other.write_text("".join(map(line_of, sound(70))))
    other.replace(path)
    assert reader.read()
    assert reader.history.last_step == 70


def test_a_file_that_goes_is_said_and_what_was_read_stays(path: Path) -> None:
    path.write_text("".join(map(line_of, sound(50))))
    reader = LiveReader(path)
    reader.read()
    path.unlink()
    assert reader.read()
    assert not reader.exists
    assert reader.history.last_step == 50
    assert not reader.read()
