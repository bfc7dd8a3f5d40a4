"""Records on disk: what is written is read, and what a kill leaves is read up to where it stops."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.gauges import read_records
from narrowgauge.gauges._records import Writer, line_of, rounded

HEADER = {"kind": "run", "version": 1, "every": 10, "parameters": {"nan": [3]}}
STEP = {"kind": "step", "step": 1, "loss": 2.5}


def write(path: Path, *records: dict) -> Path:
    path.write_bytes(b"".join(line_of(record).encode() for record in records))
    return path


def test_numbers_that_json_has_not_come_back_and_names_stay_names(tmp_path: Path) -> None:
    record = {
        "kind": "update",
        "step": 3,
        "name": "inf",
        "sums": [math.nan, math.inf, -math.inf, 1.5],
        "future": {"x": [1]},
    }
    path = write(tmp_path / "a", HEADER, record, {"kind": "later", "step": 4, "odd": "-inf"})
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda constant: pytest.fail(constant))
    header, update, later = read_records(path)
    assert header == HEADER
    assert update["name"] == "inf"
    assert math.isnan(update["sums"][0])
    assert update["sums"][1:] == [math.inf, -math.inf, 1.5]
    assert update["future"] == {"x": [1]}
    assert later == {"kind": "later", "step": 4, "odd": -math.inf}
    assert read_records(path).damage is None


def test_a_killed_run_is_read_up_to_the_kill(tmp_path: Path) -> None:
    records = [HEADER, STEP, {**STEP, "step": 12, "name": "é"}]
    whole = b"".join(line_of(record).encode() for record in records)
    ends = [0]
    for record in records:
        ends.append(ends[-1] + len(line_of(record).encode()))
    path = tmp_path / "a"
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        found = read_records(path)
        complete = sum(end <= cut for end in ends) - 1
        assert list(found) == records[:complete]
        if cut == 0:
            assert found.damage == "line 1 (byte 0): the file is empty"
        elif cut in ends:
            assert found.damage is None
        else:
            assert found.damage is not None
            assert found.damage.startswith(f"line {complete + 1} (byte {ends[complete]}): ")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{]", "no record"), (b"[1]", "must be an object with a kind"), (b"\xff\xfe", "no record"),
        (b"", "no record"), (b'{"kind":"step","step":1,"loss":NaN}', "NaN is not JSON"),
        (b'{"kind": 3}', "must be an object with a kind"),
        (b'{"kind": "step"}', "step must be an integer, got None"),
        (b'{"kind": "step", "step": true}', "step must be an integer, got True"),
        (b'{"kind": "run", "version": 2}', "version must be 1, got 2"), (b"[" * 100_000, "no record"),
    ],
)  # fmt: skip
def test_damage_is_named_and_ends_the_reading(tmp_path: Path, line: bytes, why: str) -> None:
    good = line_of(HEADER).encode()
    path = tmp_path / "a"
    path.write_bytes(good + line + b"\n" + line_of(STEP).encode())
    found = read_records(path)
    assert list(found) == [HEADER]
    assert found.damage is not None
    assert found.damage.startswith(f"line 2 (byte {len(good)}): ")
    assert why in found.damage


def test_a_folder_means_its_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gauges\.jsonl"):
        read_records(tmp_path)
    write(tmp_path / "gauges.jsonl", HEADER)
    assert list(read_records(tmp_path)) == [HEADER]
    found = read_records(write(tmp_path / "a", STEP, HEADER))
    assert (found, found.damage) == (
        [],
        "line 1 (byte 0): no record: kind must be 'run' in the first line, got 'step'",
    )


def test_a_file_is_not_overwritten_and_goes_on_where_it_is_told_to(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "gauges.jsonl"
    writer = Writer(path, None)
    writer.write([HEADER, *({"kind": "step", "step": n} for n in range(1, 6))])
    assert len(read_records(path)) == 6  # flushed
    writer.close()
    with path.open("a") as file:
        file.write('{"kind": "st')
    with pytest.raises(FileExistsError, match="path must be a new file, or resume_from"):
        Writer(path, None)
    writer = Writer(path, 3)
    assert writer.continues
    writer.write([{"kind": "step", "step": 4, "again": True}])
    writer.close()
    records = read_records(path)
    assert records.damage is None
    assert [r.get("step") for r in records] == [None, 1, 2, 3, 4]
    assert records[-1]["again"]
    path.write_text("nonsense\n")
    with pytest.raises(ValueError, match="cannot be continued: line 1"):
        Writer(path, 3)


@given(st.floats(1e-280, 1e280) | st.floats(-1e6, 1e6))
def test_nine_digits_are_kept_and_whole_numbers_exactly(x: float) -> None:
    (found,) = rounded(torch.tensor([x], dtype=torch.float64)).tolist()
    assert found == pytest.approx(x, rel=1e-8, abs=1e-290)
    if 1e-13 < abs(x) < 1e15 and x != round(x):
        assert len(repr(abs(found)).partition("e")[0].replace(".", "").strip("0")) <= 9
    whole = torch.tensor([float(int(x)) if abs(x) < 2**53 else 3.0, math.inf, -math.inf, 0.0], dtype=torch.float64)
    assert torch.equal(rounded(whole), whole)
    assert rounded(torch.tensor([math.nan], dtype=torch.float64)).isnan().all()
