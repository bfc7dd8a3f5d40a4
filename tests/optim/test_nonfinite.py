"""A gradient with inf or NaN: skipped whole, raised, or let through to its own element and no further."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch

from narrowgauge.optim import AdamW

STORAGES = [
    ("plain", "fp32"),
    ("plain", "8bit"),
    ("expansion", "expansion"),
    ("split8", "8bit"),
    ("master", "bf16"),
]


def make(weights: str, states: Any, **options) -> tuple[torch.nn.Parameter, AdamW]:
    p = torch.nn.Parameter(torch.linspace(-1, 1, 6000).to(torch.bfloat16))
    return p, AdamW([("layer.weight", p)], weights=weights, states=states, **options)


def step(p: torch.nn.Parameter, optimizer: AdamW, bad: float | None = None, position: int = 7) -> None:
    p.grad = torch.cos(torch.arange(6000.0)).to(torch.bfloat16)
    if bad is not None:
        p.grad[position] = bad
        if math.isnan(bad) and math.copysign(1, bad) < 0:
            p.grad.view(torch.int16)[position] = -1  # of a NaN that is rounded torch keeps no sign
    optimizer.step()


def test_reading_what_was_skipped_changes_nothing() -> None:
    p, optimizer = make("plain", "8bit")
    step(p, optimizer, torch.nan)
    before = copy.deepcopy(optimizer.state[p])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            optimizer.state_dict()
            assert optimizer.describe().rows[0].skipped == 1
            assert optimizer.skipped == {"layer.weight": 1}
    assert all(torch.equal(optimizer.state[p][key], value) for key, value in before.items())


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize(("weights", "states"), STORAGES)
def test_skipping_leaves_weight_state_decay_and_step_untouched(weights: str, states: str, bad: float) -> None:
    p, optimizer = make(weights, states)
    step(p, optimizer)
    before = {key: value.clone() for key, value in optimizer.state[p].items()} | {"p": p.detach().clone()}
    step(p, optimizer, bad)
    step(p, optimizer, bad)
    after = optimizer.state[p] | {"p": p.detach()}
    for key in before.keys() - {"skipped"}:
        assert torch.equal(before[key], after[key]), key
    assert optimizer.skipped == {"layer.weight": 2}
    # And the run goes on as if those gradients had never been.
    twin_p, twin = make(weights, states)
    for _ in range(2):
        step(twin_p, twin)
    step(p, optimizer)
    assert torch.equal(p, twin_p)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan, -torch.nan])
@pytest.mark.parametrize(("weights", "states"), [*STORAGES, ("plain", {"m": "log8", "v": "fp32"})])
def test_propagating_never_reaches_beyond_the_element(weights: str, states: Any, bad: float) -> None:
    p, optimizer = make(weights, states, nonfinite="propagate")
    twin_p, twin = make(weights, states, nonfinite="propagate")
    # An element whose gradient is small: without it the block's scale is the same.
    for index in range(4):
        step(p, optimizer, bad if index == 1 else None, position=11)
        step(twin_p, twin)
    others = torch.arange(6000) != 11
    assert torch.equal(p[others], twin_p[others])
    assert not torch.isfinite(p[11])
    assert optimizer.skipped == {}


@pytest.mark.parametrize("limit", [None, 1.0])
def test_what_float32_does_not_hold_is_not_finite(limit: float | None) -> None:
    p = torch.nn.Parameter(torch.ones(4))
    p.grad_dtype = None
    optimizer = AdamW([p], lr=0.1, max_grad_norm=limit)
    p.grad = torch.tensor([1.0, 1e300, 1.0, 1.0], dtype=torch.float64)
    optimizer.step()
    assert optimizer.skipped == {"0.0": 1}
    assert torch.equal(p, torch.ones(4))
    raising = AdamW([p], lr=0.1, max_grad_norm=limit, nonfinite="raise")
    with pytest.raises(FloatingPointError, match=r"0\.0: the gradient has inf or NaN"):
        raising.step()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_after_an_error_the_norm_has_all_gradients_again(device: str) -> None:
    ps = [torch.nn.Parameter(torch.zeros(8, device=device)) for _ in range(2)]
    optimizer = AdamW(ps, nonfinite="raise", max_grad_norm=1.0)
    for bad in (None, math.inf, None):
        for p in ps:
            p.grad = torch.ones_like(p)
        if bad is not None:
            ps[0].grad[3] = bad
            with pytest.raises(FloatingPointError, match=r"^0\.0: the gradient has inf or NaN"):
                optimizer.step()
            continue
        optimizer.step()
        assert float(optimizer.grad_norm) == 4.0
    assert optimizer.state[ps[0]]["step"] == 2


def test_saving_a_state_warns_once_of_parameters_that_skip_most_steps() -> None:
    stuck, sound = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    optimizer = AdamW([("stuck", stuck), ("sound", sound)])
    for step in range(201):
        stuck.grad = torch.full((4,), math.nan if step >= 100 else 1.0)
        sound.grad = torch.full((4,), math.nan if step < 50 else 1.0)
        optimizer.step()
        if step == 198:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                optimizer.state_dict()
    with pytest.warns(
        UserWarning, match=r"^stuck skipped 101 of 201 steps: .* inf or NaN; see `skipped`$"
    ) as caught:
        optimizer.state_dict()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.state_dict()
