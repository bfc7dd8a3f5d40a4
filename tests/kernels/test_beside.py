"""A stream beside the current one: what waits for what."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowgauge.kernels._beside import Beside


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is asked of torch, in order; streams are their names."""
    told: list[tuple[Any, ...]] = []
    current = ["main"]

    names = iter(("before", "after"))

    class Event:
        def __init__(self) -> None:
            self.name = next(names)

        def record(self, stream: str) -> None:
            told.append((self.name, "records", stream))

        def wait(self, stream: str) -> None:
            told.append((stream, "waits for", self.name))

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "side")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))
    told.append(current)  # type: ignore[arg-type]
    return told


def test_it_begins_after_what_was_and_ends_before_what_comes(done: list[Any]) -> None:
    (current,) = done
    side = Beside(torch.device("cuda", 0))
    done.clear()
    with side:
        assert current == ["side"]
        done.append("work")
    assert current == ["main"]
    side.join()
    assert done == [
        ("before", "records", "main"), ("side", "waits for", "before"), "work", ("after", "records", "side"),
        ("main", "waits for", "after"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="broken"), side:
        raise ValueError("broken")
    assert current == ["main"]


@pytest.mark.gpu
def test_orders_hold_on_a_gpu() -> None:
    """A long kernel before, one beside and one after, on the same numbers: many times, or luck would do."""
    side, x = Beside(torch.device("cuda", torch.cuda.current_device())), torch.zeros(1 << 22, device="cuda")
    for _ in range(50):
        x.zero_()
        for _ in range(20):
            x.add_(1)
        with side:
            y = x * 2
        side.join()
        x.fill_(7)
        assert (y == 40).all()
