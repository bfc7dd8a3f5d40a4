"""Records go out in order, by a thread of their own; callbacks are the loop's."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.gauges._records import Record, read_records
from narrowgauge.gauges._watch._alarms import Alarms
from narrowgauge.gauges._watch._sink import RecordSink

HEADER: Record = {"kind": "run", "version": 1}


def in_memory(alarms: Alarms | None = None, path: Path | None = None) -> RecordSink:
    return RecordSink(path, None, None, alarms or Alarms(None, warmup=0))


def step(number: int, **more: object) -> Record:
    return {"kind": "step", "step": number, "loss": 1.0, **more}


def test_the_loop_does_not_wait_and_order_is_kept(tmp_path: Path) -> None:
    path, go = tmp_path / "gauges.jsonl", threading.Event()
    sink = in_memory(path=path)
    sink.open(HEADER, first=True)

    def slow() -> list[Record]:
        assert go.wait(20)
        return [step(1)]

    sink.submit(slow)
    for number in range(2, 20):
        sink.submit(lambda number=number: [step(number)])
    assert read_records(path) == [HEADER]  # and yet all of that was handed over
    go.set()
    sink.flush()
    assert [record.get("step") for record in read_records(path)] == [None, *range(1, 20)]
    sink.close()


def test_alarms_are_called_by_the_thread_that_puts() -> None:
    alarmed: list[tuple[str, int, int]] = []
    alarms = Alarms(lambda alarm: alarmed.append((alarm["kind"], alarm["step"], threading.get_ident())), warmup=0)
    sink = in_memory(alarms)
    sink.submit(lambda: [{"kind": "gradient", "step": 3, "name": "x", "nonfinite": 2}])
    sink.flush()
    assert alarmed == [("nonfinite", 3, threading.get_ident())]
    assert [record["kind"] for record in sink.rows] == ["gradient", "nonfinite"]
    sink.close()


def test_what_the_thread_or_a_callback_raises_is_the_loops() -> None:
    def broken(alarm: Record | None = None) -> list[Record]:
        raise InterruptedError("no such row")

    bad = [{"kind": "gradient", "step": 1, "name": "x", "nonfinite": 1}]
    for sink, make in ((in_memory(), broken), (in_memory(Alarms(broken, warmup=0)), lambda: bad)):

        def put(sink: RecordSink = sink, make: Any = make) -> None:  # raises at once or a little later
            sink.submit(make)
            sink.flush()

        with pytest.raises(InterruptedError, match="no such row"):
            put()
        sink.submit(lambda: [step(1)])  # the others are taken
        sink.close()
        assert sink.rows[-1] == step(1)


def test_a_slow_disk_holds_the_loop_up_and_not_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowgauge.gauges._watch._sink._MOST", 2)
    sink, go, waiting = in_memory(), threading.Event(), threading.Event()
    for number in (1, 2):
        sink.submit(lambda number=number: [step(number)] if go.wait(20) else [])

    def third() -> None:
        waiting.set()
        sink.submit(lambda: [step(3)])

    loop = threading.Thread(target=third)
    loop.start()
    assert waiting.wait(20)
    loop.join(0.05)
    assert loop.is_alive()
    go.set()
    loop.join(20)
    sink.close()
    assert [record["step"] for record in sink.rows] == [1, 2, 3]
