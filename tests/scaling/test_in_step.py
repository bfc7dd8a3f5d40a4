"""Unscaling left to the optimizer's step: the training of an explicit `unscale_`, and gradients untouched."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from narrowgauge import optim
from narrowgauge.optim import _engine
from narrowgauge.scaling import DynamicLossScaler, StaticLossScaler, TensorLossScaler
from pairwise import by_pairs

# Many steps skip, and say so.
pytestmark = pytest.mark.filterwarnings("ignore:.*inf or NaN:UserWarning")
KINDS = [DynamicLossScaler, StaticLossScaler, TensorLossScaler]
NAMED = {kind.__name__: kind for kind in KINDS}
PATHS = ["by kernels", "one by one"]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Kernels for lists run in triton's interpreter, on the CPU."""
    if request.param == "by kernels":
        pytest.importorskip("triton", reason="triton is not installed: kernels cannot run, not even interpreted")
        if torch.cuda.is_available():
            pytest.skip("on a GPU tests/scaling/test_scaling_gpu.py has the kernels")
        monkeypatch.setattr(_engine, "unavailable", lambda device: None)
    with np.errstate(all="ignore"):
        yield request.param


def parameters(dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (16, 8), "b": (8,), "c": (), "d": (3, 5)}
    return [(name, torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype))) for name, s in shapes.items()]


def give(params: list[tuple[str, torch.nn.Parameter]], step: int, scale: float, bad: str = "") -> None:
    generator = torch.Generator().manual_seed(step)
    for name, p in params:
        p.grad_dtype = None
        p.grad = (torch.randn(p.shape, generator=generator) * 0.1).to(p.dtype) * scale
        if name in bad:
            p.grad.view(-1)[-1] = math.inf


@by_pairs(indirect=["path"], kind=NAMED, dtype=[torch.float32, torch.bfloat16, torch.float16], path=PATHS)
def test_it_is_the_training_of_an_explicit_unscale(kind: Any, dtype: torch.dtype, path: str) -> None:
    options = {"lr": 0.1, "weights": "plain" if dtype is torch.float32 else "master"}
    runs: list[Any] = []
    for explicit in (True, False):
        params, scaler = parameters(dtype), kind(init_scale=256.0)
        optimizer = optim.AdamW(params, **options)
        scaler.scale(torch.ones(()))
        for step in range(5):
            give(params, step, scaler.get_scale(), {2: "b", 3: "bd"}.get(step, ""))
            before = [p.grad.clone() for _, p in params]
            if explicit:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if not explicit:
                assert all(torch.equal(p.grad, was) for (_, p), was in zip(params, before, strict=True))
        states = [optimizer.state[p] for _, p in params]
        ends = [p.detach() for _, p in params] + [s[key] for s in states for key in ("m", "v", "step")]
        runs.append((ends, scaler.skipped, scaler.skipped_steps, scaler.get_scale()))
    (wanted, *said), (found, *says) = runs
    assert says == said
    assert said[0] == {"b": 2, "d": 1}
    # Wide gradients of narrow parameters are stepped with eagerly on a CPU: that is an ulp now and then.
    exact = dtype is torch.float32 or path == "by kernels"
    for a, b in zip(wanted, found, strict=True):
        assert torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-2 if a.dtype == dtype else 1e-5)


@by_pairs(indirect=["path"], fused=[None, True], explicit=[False, True], limit=[None, 0.3], path=PATHS)
def test_torchs_scaler(fused: bool | None, explicit: bool, limit: float | None, path: str) -> None:
    """With `fused` it leaves unscaling and skipping to the step, as to torch's own fused optimizers."""
    params, twins = parameters(), parameters()
    optimizer = optim.AdamW(params, lr=0.1, fused=fused, max_grad_norm=limit)
    twin = optim.AdamW(twins, lr=0.1, max_grad_norm=limit)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    for step in range(4):
        give(params, step, scaler.get_scale(), "b" if step == 2 else "")
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert not hasattr(optimizer, "grad_scale")
        if step != 2:
            give(twins, step, 1.0)
            twin.step()
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(params, twins, strict=True))
    assert optimizer.skipped == {}


@by_pairs(indirect=["path"], kind=NAMED, explicit=[False, True], path=PATHS)
def test_clipping_comes_after_unscaling(kind: Any, explicit: bool, path: str) -> None:
    params, twins = parameters(), parameters()
    optimizer, twin = (optim.AdamW(some, lr=0.1, max_grad_norm=0.3) for some in (params, twins))
    scaler = kind(init_scale=1024.0)
    scaler.scale(torch.ones(()))
    for step in range(3):
        give(params, step, 1024.0)
        give(twins, step, 1.0)
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        twin.step()
        assert torch.equal(optimizer.grad_norm, twin.grad_norm)
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(params, twins, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_a_scale_below_one_makes_infinite_is_skipped(kind: Any, path: str) -> None:
    params, scaler = parameters(), kind(init_scale=2.0**-10)
    optimizer = optim.SGD(params, lr=1.0)
    scaler.scale(torch.ones(()))
    give(params, 0, 2.0**-10)
    params[1][1].grad[0] = 2.0**127
    before = [p.detach().clone() for _, p in params]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.skipped == {"b": 1}
    moved = [not torch.equal(p, was) for (_, p), was in zip(params, before, strict=True)]
    assert moved == ([True, False, True, True] if kind is TensorLossScaler else [False] * 4)


@by_pairs(indirect=["path"], kind=NAMED, fused=[None, True], path=PATHS)
def test_hooks_before_the_step_see_unscaled_gradients(fused: bool | None, kind: Any, path: str) -> None:
    params, scaler = parameters(), kind(init_scale=1024.0)
    optimizer = optim.SGD(params, lr=1.0, fused=fused)
    scaler.scale(torch.ones(()))
    give(params, 0, 1.0)
    wanted = [p.grad.clone() for _, p in params]
    give(params, 0, 1024.0)
    seen: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for _, p in params))
    scaler.step(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(seen, wanted, strict=True))
    stepped = [(p.detach() + g, q.detach()) for (_, p), g, (_, q) in zip(params, wanted, parameters(), strict=True)]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in stepped)


def test_torchs_scaler_steps_an_optimizer_without_gradients(path: str) -> None:
    # As one of two that share a scaler, when only the other has a loss this time.
    params, others = parameters(), parameters()
    idle, busy = optim.AdamW(params, fused=True), optim.SGD(others, lr=1.0, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    give(others, 0, 8.0)
    for optimizer in (idle, busy):
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    assert not idle.state
    assert all(not torch.equal(p, q) for (_, p), (_, q) in zip(params, others, strict=True))


def test_steps_without_gradients_and_twice_without_update(path: str) -> None:
    params, scaler = parameters(), DynamicLossScaler(init_scale=8.0)
    optimizer = optim.SGD(params, lr=1.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        scaler.step(optimizer)
    scaler.update()
    assert (scaler.skipped, scaler.skipped_steps, scaler.get_scale()) == ({}, 0, 8.0)
    for another in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        another.scale(torch.ones(()))
        give(params, 0, 8.0)
        another.step(optimizer)
        another.update()


@pytest.mark.parametrize(
    ("make", "explicit"),
    [
        (functools.partial(optim.SGD, lr=1.0), False),
        (functools.partial(optim.SGD, lr=1.0), True),
        (functools.partial(optim.SGD, lr=1.0, fused=True), False),
        (functools.partial(optim.SGD, lr=1.0, fused=True), True),
        (functools.partial(torch.optim.SGD, lr=1.0, fused=True), False),
    ],
    ids=["ours", "ours, unscale_", "ours, fused", "ours, fused, unscale_", "torch's, fused"],
)
def test_a_skip_is_told_of_at_once_where_nothing_has_to_be_waited_for(make: Any, explicit: bool, path: str) -> None:
    params, scaler = parameters(), StaticLossScaler(init_scale=8.0)
    optimizer = make(params)
    scaler.scale(torch.ones(()))
    give(params, 0, 8.0, "bd")
    if explicit:
        scaler.unscale_(optimizer)
    with pytest.warns(UserWarning, match="a step was skipped: b and d had inf or NaN under the loss scale 8;"):
        scaler.step(optimizer)
