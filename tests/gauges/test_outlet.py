"""Records go out in order, by a thread of their own; callbacks are the loop's."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from narrowgauge.gauges._alarms import Alarms
from narrowgauge.gauges._outlet import Outlet
from narrowgauge.gauges._records import Record, Writer, read_records

HEADER: Record = {"kind": "run", "version": 1}


def step(number: int, **more: object) -> Record:
    return {"kind": "step", "step": number, "loss": 1.0, **more}


def test_the_loop_does_not_wait_and_order_is_kept(tmp_path: Path) -> None:
    writer, go = Writer(tmp_path / "gauges.jsonl", None), threading.Event()
    outlet = Outlet(writer, None, False, None)
    outlet.begin(HEADER)

    def slow() -> list[Record]:
        assert go.wait(20)
        return [step(1)]

    outlet.put(slow)
    for number in range(2, 20):
        outlet.put(lambda number=number: [step(number)])
    assert read_records(writer.path) == [HEADER]  # and yet all of that was handed over
    go.set()
    outlet.settle()
    assert [record.get("step") for record in read_records(writer.path)] == [None, *range(1, 20)]
    outlet.close()


def test_alarms_are_called_by_the_thread_that_puts() -> None:
    heard: list[tuple[str, int, int]] = []
    alarms = Alarms(lambda alarm: heard.append((alarm["kind"], alarm["step"], threading.get_ident())), warmup=0)
    outlet = Outlet(None, None, True, alarms)
    outlet.put(lambda: [{"kind": "gradient", "step": 3, "name": "x", "nonfinite": 2}])
    outlet.settle()
    assert heard == [("nonfinite", 3, threading.get_ident())]
    assert [record["kind"] for record in outlet.rows] == ["gradient", "nonfinite"]
    outlet.close()


def test_what_fails_in_the_thread_is_raised_in_the_loop() -> None:
    outlet = Outlet(None, None, True, None)

    def broken() -> list[Record]:
        raise ValueError("no such row")

    outlet.put(broken)
    with pytest.raises(ValueError, match="no such row"):
        outlet.settle()
    outlet.put(lambda: [step(1)])  # the others are taken
    outlet.close()
    assert outlet.rows == [step(1)]


def test_what_a_callback_raises_is_the_loops() -> None:
    def stop(alarm: Record) -> None:
        raise InterruptedError(alarm["name"])

    outlet = Outlet(None, None, True, Alarms(stop, warmup=0))

    def put() -> None:  # raises at once or a little later
        outlet.put(lambda: [{"kind": "gradient", "step": 1, "name": "x", "nonfinite": 1}])
        outlet.settle()

    with pytest.raises(InterruptedError, match="x"):
        put()
    outlet.close()


def test_a_slow_disk_holds_the_loop_up_and_not_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowgauge.gauges._outlet._MOST", 2)
    outlet, go, waiting = Outlet(None, None, True, None), threading.Event(), threading.Event()
    for number in (1, 2):
        outlet.put(lambda number=number: [step(number)] if go.wait(20) else [])

    def third() -> None:
        waiting.set()
        outlet.put(lambda: [step(3)])

    loop = threading.Thread(target=third)
    loop.start()
    assert waiting.wait(20)
    loop.join(0.05)
    assert loop.is_alive()
    go.set()
    loop.join(20)
    outlet.close()
    assert [record["step"] for record in outlet.rows] == [1, 2, 3]
