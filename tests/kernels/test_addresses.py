"""Addresses of tensors, read in C: those that Python reads, and every change of a state is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from narrowgauge.kernels import _c_addresses
from narrowgauge.kernels._c_addresses import StateAddresses, look, reader

States = tuple[dict[str, Tensor], ...]


@pytest.fixture(params=["C", "Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Python":
        monkeypatch.setattr(_c_addresses, "reader", lambda: None)
    elif reader() is None:
        pytest.skip("no C compiler")


def made() -> States:
    return tuple({name: torch.zeros(size) for name in ("m", "v", "step")} for size in (3, 0, 5))


@pytest.mark.usefixtures("way")
def test_they_are_those_that_python_reads() -> None:
    memory = torch.arange(100)
    tensors = (memory, memory[7:], torch.nn.Parameter(torch.ones(2)), torch.ones(0), torch.ones(2, 3).t())
    found, kinds = look(tensors)
    assert found.dtype == np.int64
    assert found.tolist() == [x.data_ptr() for x in tensors]
    assert look(tensors)[1] == kinds
    assert look(tuple(x.detach().clone() for x in tensors[:4]) + tensors[4:])[1] == kinds
    others = (memory[:99], memory.view(torch.float64), memory.expand(1, 100).view(10, 10).t())
    assert all(look((other, *tensors[1:]))[1] != kinds for other in others)
    assert look(())[0].tolist() == []
    with pytest.raises(RuntimeError):
        look((memory, torch.ones(3).to_sparse()))


def swap_data(states: States) -> Any:
    kept, states[0]["v"].data = states[0]["v"].data, torch.ones(3)
    return kept


def replace_entry(states: States) -> Any:
    kept, states[2]["m"] = states[2]["m"], torch.zeros(5)
    return kept


def put_a_number(states: States) -> Any:
    kept, states[2]["m"] = states[2]["m"], 7  # type: ignore[assignment]
    return kept


def move_entry(states: States) -> None:
    """All tensors are in the order in which they were, and one has another owner."""
    first = dict(states[1])
    states[1].clear()
    states[1].update({"moved": states[0].pop("step")} | first)


CHANGES: dict[str, Callable[[States], Any]] = {
    "data": swap_data,
    "entry": replace_entry,
    "number": put_a_number,
    "owner": move_entry,
    "more": lambda states: states[2].update(more=torch.zeros(1)),
    "fewer": lambda states: states[2].pop("step"),
    "none": lambda states: [state.clear() for state in states],
    "order": lambda states: states[0].update(m=states[0].pop("m")),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_states_are_found(change: str) -> None:
    states = made()
    known = StateAddresses(states)
    assert known.hold(states)
    kept = CHANGES[change](states)
    assert not known.hold(states)
    del kept


@pytest.mark.usefixtures("way")
def test_what_lies_where_it_lay_holds() -> None:
    states = made()
    known = StateAddresses(states)
    for state in states:
        state.update({name: tensor.detach() for name, tensor in state.items()})
    assert known.hold(states)
    states[0]["m"] = torch.nn.Parameter(states[0]["m"])
    assert known.hold(states)
    assert known.hold(tuple(map(dict, states)))
    assert StateAddresses(()).hold(())
