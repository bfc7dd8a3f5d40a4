"""Optimizers that hook into the backward pass end with the last reference to them, and their models with them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.distributed import CPUOffload

MAKE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "in backward": lambda model: ng.optim.step_in_backward(model, ng.optim.AdamW),
    "offload": lambda model: CPUOffload(ng.optim.AdamW, model.parameters()),
    "offload, freed": lambda model: CPUOffload(ng.optim.AdamW, model.parameters(), gradients="freed"),
}


def stepped(make: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    model[1].bias.requires_grad_(False)
    optimizer = make(model)
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", MAKE)
def test_nothing_stays_of_a_model_and_an_optimizer_that_nobody_has(name: str) -> None:
    model, optimizer = stepped(MAKE[name])
    left = [weakref.ref(x) for x in (*model.parameters(), optimizer)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in left] == [None] * len(left)


@pytest.mark.parametrize("name", MAKE)
def test_a_model_goes_on_without_an_optimizer_that_is_gone(name: str) -> None:
    model, optimizer = stepped(MAKE[name])
    gone = weakref.ref(optimizer)
    model.zero_grad()
    before = model[0].weight.detach().clone()
    del optimizer
    gc.collect()
    assert gone() is None
    model(torch.randn(4, 8)).sum().backward()
    assert model[0].weight.grad is not None
    assert torch.equal(model[0].weight, before)
    again = MAKE[name](model)  # takes the model: no other optimizer is at it
    model.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    again.step()
    assert not torch.equal(model[0].weight, before)


def test_one_that_is_not_collected_yet_does_not_keep_others_from_a_model() -> None:
    model = nn.Linear(8, 8)
    gc.disable()
    try:
        first = ng.optim.step_in_backward(model, ng.optim.AdamW)
        gone = weakref.ref(first)
        del first
        assert gone() is not None  # torch's optimizers are in cycles
        second = ng.optim.step_in_backward(model, ng.optim.AdamW)
    finally:
        gc.enable()
    assert gone() is None
    with pytest.raises(ValueError, match="model must not be stepped in backward already, as weight is"):
        ng.optim.step_in_backward(model, ng.optim.AdamW)
    assert second.in_backward is not None
