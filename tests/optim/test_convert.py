"""One parameter of a group kept otherwise: its state follows, others keep theirs, checkpoints bring it back."""

from __future__ import annotations

import copy

import pytest
import torch

from narrowgauge.optim import AdamW


def stepped(n: int = 3, **options: object) -> tuple[list[torch.nn.Parameter], AdamW]:
    torch.manual_seed(0)
    ps = [torch.nn.Parameter(torch.randn(64, 64).bfloat16()) for _ in range(3)]
    optimizer = AdamW(ps, **{"weights": "split8", "states": "8bit", **options})  # type: ignore[arg-type]
    step(ps, optimizer, n)
    return ps, optimizer


def step(ps: list[torch.nn.Parameter], optimizer: AdamW, n: int) -> None:
    for _ in range(n):
        for p in ps:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(n)).bfloat16()
        optimizer.step()


def test_it_is_as_if_the_parameter_had_a_group_of_its_own() -> None:
    """Streams of random bits included: its place among all parameters stays."""
    ps, optimizer = stepped(0, weights="stochastic")
    qs = [torch.nn.Parameter(p.detach().clone()) for p in ps]
    apart = AdamW([{"params": [q]} for q in qs], weights="stochastic", states="8bit")
    for some, each in ((ps, optimizer), (qs, apart)):
        step(some, each, 2)
    optimizer.convert(ps[1], weights="split8", v="fp32")
    apart.param_groups[1].update(weights="split8", states={"m": "8bit", "v": "fp32"})
    for some, each in ((ps, optimizer), (qs, apart)):
        step(some, each, 2)
    assert [plan.weight.name for _, plan in optimizer.plans()] == ["stochastic", "split8", "stochastic"]
    for p, q in zip(ps, qs, strict=True):
        assert torch.equal(p, q)
        assert optimizer.state[p].keys() == apart.state[q].keys()
        assert all(torch.equal(x, apart.state[q][key]) for key, x in optimizer.state[p].items())


def test_a_checkpoint_brings_it_back() -> None:
    ps, optimizer = stepped()
    optimizer.convert(ps[1], weights="split", v="fp32")
    step(ps, optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = [p.detach().clone() for p in ps]
    step(ps, optimizer, 2)
    qs = [torch.nn.Parameter(w) for w in weights]
    other = AdamW(qs, weights="split8", states="8bit")
    other.load_state_dict(saved)
    step(qs, other, 2)
    assert all(map(torch.equal, ps, qs))
    assert other.state[qs[1]]["weight.lo"].dtype == torch.int16
    assert all(torch.equal(x, other.state[qs[1]][key]) for key, x in optimizer.state[ps[1]].items())


def test_an_optimizer_of_other_storages_keeps_its_own() -> None:
    ps, optimizer = stepped()
    optimizer.convert(ps[1], v="fp32")
    qs = [torch.nn.Parameter(p.detach().clone()) for p in ps]
    other = AdamW(qs, weights="split8", states="log8")
    with pytest.warns(UserWarning, match="left out 'storages' of single parameters"):
        other.load_state_dict(optimizer.state_dict())
    assert {slot.storage.name for _, plan in other.plans() for slot in plan.slots} == {"log8"}


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    ps, optimizer = stepped()
    before = dict(optimizer.param_groups[0])
    for storages, match in (
        ({"v": "log9"}, "states must be"),
        ({"w": "log8"}, "states must name a storage for each"),
        ({"weights": "nothing"}, "weights must be"),
    ):
        with pytest.raises(ValueError, match=match):
            optimizer.convert(ps[0], **storages)
    with pytest.raises(ValueError, match="p must be a parameter of the optimizer"):
        optimizer.convert(torch.zeros(3), m="log8")
    wide = torch.nn.Parameter(torch.zeros(8, 8))
    with pytest.raises(ValueError, match=r"weights must be a storage for torch\.float32"):
        AdamW([wide]).convert(wide, weights="split8")
    assert optimizer.param_groups[0] == before
    saved = optimizer.state_dict()
    saved["param_groups"][0]["storages"] = {"0.0": 3}
    with pytest.raises(ValueError, match="'storages' of group 0 must be a dict"):
        optimizer.load_state_dict(saved)
    step(ps, optimizer, 1)
