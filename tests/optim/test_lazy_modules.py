"""Optimizers made before a lazy module's first pass, which gives its parameters their shapes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from narrowgauge.optim import AdamW, AdamW8bit, NarrowOptimizer, QuantizedGradients

OPTIONS: dict[str, Any] = {"lr": 1e-2, "states": "log8", "weights": "stochastic", "min_quantized_size": 1}


def model(lazy: bool) -> nn.Sequential:
    """Lazy or not, with the same weights after the first pass."""
    torch.manual_seed(0)
    last = nn.LazyLinear(6, dtype=torch.bfloat16) if lazy else nn.Linear(24, 6, dtype=torch.bfloat16)
    net = nn.Sequential(nn.Linear(16, 24, dtype=torch.bfloat16), last, nn.Linear(6, 3, dtype=torch.bfloat16))
    return net


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step), dtype=torch.float32).bfloat16()
        optimizer.zero_grad()
        net(x).float().square().mean().backward()
        optimizer.step()


def pair(**options: Any) -> tuple[nn.Module, NarrowOptimizer, nn.Module, NarrowOptimizer]:
    lazy, usual = model(True), model(False)
    early = AdamW(lazy.named_parameters(), **options)
    assert nn.parameter.is_lazy(lazy[1].weight)
    with torch.no_grad():
        lazy(torch.zeros(1, 16, dtype=torch.bfloat16))
    lazy.load_state_dict(usual.state_dict())
    return lazy, early, usual, AdamW(usual.named_parameters(), **options)


def test_it_steps_as_one_that_is_made_afterwards() -> None:
    """Bit for bit, random bits by index included."""
    lazy, early, usual, late = pair(**OPTIONS)
    train(lazy, early, range(4))
    train(usual, late, range(4))
    assert str(early.describe()) == str(late.describe())
    for p, q in zip(lazy.parameters(), usual.parameters(), strict=True):
        assert torch.equal(p, q)
        assert early.state[p].keys() == late.state[q].keys()
        assert all(torch.equal(early.state[p][key], late.state[q][key]) for key in early.state[p])


def test_parameters_that_stay_lazy_for_some_steps() -> None:
    """Others are stepped meanwhile, and the indices of random bits do not shift."""
    usual, lazy = model(False), model(True)
    last = [*usual[2].parameters()]
    reference, early = AdamW(usual.parameters(), **OPTIONS), AdamW(lazy.parameters(), **OPTIONS)
    for net, optimizer in ((usual, reference), (lazy, early)):
        for step in range(3):
            for p in net[2].parameters():
                p.grad = torch.ones_like(p) * (step + 1)
            optimizer.step()
    assert early.skipped == {}
    for p, q in zip(last, lazy[2].parameters(), strict=True):
        p_state, q_state = reference.state[p], early.state[q]
        assert all(torch.equal(p_state[key], q_state[key]) for key in p_state)
    lazy(torch.zeros(1, 16, dtype=torch.bfloat16))
    train(lazy, early, range(1))
    assert [row.shape for row in early.describe().rows][2:4] == [(6, 24), (6,)]
    assert all(early.state[p]["step"] == 1 for p in lazy[1].parameters())
    assert all(early.state[p]["step"] == 4 for p in lazy[2].parameters())


def test_before_the_first_pass() -> None:
    net = model(True)
    optimizer = AdamW8bit(net.parameters())
    saved = optimizer.state_dict()
    assert saved["state"] == {}
    assert optimizer.skipped == {}
    assert optimizer.state_bytes() == 0
    copy.deepcopy(optimizer)
    optimizer.param_groups[0]["block_size"] = 64
    optimizer.step()
    for ask in (optimizer.describe, optimizer.torch_state_dict, lambda: optimizer.load_state_dict(saved)):
        with pytest.raises(RuntimeError, match="params: 2 of 6 must be initialized first"):
            ask()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(torch.zeros(1, 16, dtype=torch.bfloat16))
        optimizer.load_state_dict(saved)
        train(net, optimizer, range(1))
    assert len(optimizer.describe().rows) == 6
    other = model(True)
    QuantizedGradients(AdamW8bit(other.parameters()))


def test_options_that_a_lazy_parameter_cannot_have_are_refused_at_its_first_step() -> None:
    net = nn.LazyLinear(3)
    optimizer = AdamW(net.parameters(), weights="kahan")  # for bfloat16 and float16
    net(torch.ones(1, 4)).sum().backward()
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(ValueError, match="for weights='kahan', got"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
