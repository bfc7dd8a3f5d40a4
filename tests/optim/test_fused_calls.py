"""What compiled steps have in common is worked out once: whatever changes in between must be noticed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from narrowgauge import optim
from narrowgauge.optim._c_backend import CKernel, kernel_of, why_not
from narrowgauge.optim._optimizer import NarrowOptimizer
from narrowgauge.optim._plan import ParamStep

SIZES = (700, 300, 1000)


def made(fused: bool, lr: Any = 1e-2) -> NarrowOptimizer:
    generator = torch.Generator().manual_seed(1)
    ps = [torch.nn.Parameter(torch.randn(size, generator=generator).bfloat16()) for size in SIZES]
    optimizer = optim.AdamW(
        [{"params": ps[:2]}, {"params": ps[2:], "weight_decay": 0.3}],
        lr=lr,
        states="8bit",
        weights="split",
        min_quantized_size=0,
    )
    if not fused:
        optimizer._engine.backends = ()
    return optimizer


def stepped(optimizer: NarrowOptimizer, seed: int, bad: bool = False) -> None:
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    if bad:
        optimizer.param_groups[0]["params"][0].grad[5] = torch.inf
    optimizer.step()


def assign(name: str, value: Any) -> Callable[[NarrowOptimizer], None]:
    return lambda optimizer: optimizer.param_groups[0].update({name: value})


def in_place(optimizer: NarrowOptimizer) -> None:
    optimizer.param_groups[0]["lr"].fill_(0.5)


def elsewhere(optimizer: NarrowOptimizer) -> None:
    """Parameters and states in other memory, and one of them not contiguous."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data = p.data.clone()
            for key, value in optimizer.state[p].items():
                optimizer.state[p][key] = value.clone()
    p = optimizer.param_groups[0]["params"][1]
    p.data = p.data.repeat_interleave(2)[::2]


def reloaded(optimizer: NarrowOptimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def other_storages(optimizer: NarrowOptimizer) -> None:
    for group in optimizer.param_groups:
        group["block_size"] = 64


def another_count(optimizer: NarrowOptimizer) -> None:
    """One parameter of a group is behind the other."""
    stepped(optimizer, 50, bad=True)


CHANGES: dict[str, Callable[[NarrowOptimizer], None]] = {
    "lr": assign("lr", 0.5),
    "betas": assign("betas", (0.5, 0.6)),
    "weight_decay": assign("weight_decay", 0.9),
    "eps": assign("eps", 1.0),
    "maximize": assign("maximize", True),
    "nonfinite": assign("nonfinite", "propagate"),
    "elsewhere": elsewhere,
    "reloaded": reloaded,
    "other storages": other_storages,
    "another count": another_count,
}


def compare(change: Callable[[NarrowOptimizer], None], lr: Callable[[], Any]) -> None:
    found = []
    for fused in (True, False):
        optimizer = made(fused, lr())
        for seed in (1, 2):
            stepped(optimizer, seed)
        change(optimizer)
        for seed in (3, 4):
            stepped(optimizer, seed)
        found.append([p.detach().float() for group in optimizer.param_groups for p in group["params"]])
    for p, twin in zip(*found, strict=True):
        assert (p != twin).double().mean() <= 0.02
        torch.testing.assert_close(p, twin, rtol=2.0**-7, atol=1e-4)


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_noticed(change: str) -> None:
    compare(CHANGES[change], lambda: 1e-2)


def test_a_tensor_that_changes_in_place_is_noticed() -> None:
    compare(in_place, lambda: torch.tensor(1e-2))


@pytest.mark.parametrize("what", ["p", "m.codes", "m.scales", "low"])
@pytest.mark.parametrize("size", [3, 299, 301, 5000])
def test_what_has_another_size_is_not_given_to_c(what: str, size: int) -> None:
    """It would be read and written beyond its end."""
    optimizer = made(fused=True)
    stepped(optimizer, 1)
    group = optimizer.param_groups[0]
    p = group["params"][1]
    state, plan = optimizer.state[p], optimizer._engine.plans[p]
    kernel = kernel_of(plan, group, p.dtype, False)
    assert isinstance(kernel, CKernel)
    assert p.grad is not None
    assert why_not(kernel, ParamStep(0, plan, group, p, p.grad, state)) is None
    if what == "p":
        p.data = torch.ones(size, dtype=p.dtype)
        p.grad = torch.ones_like(p)
    else:
        key = plan.weight_key if what == "low" else what
        assert key is not None
        state[key] = torch.zeros(size, dtype=state[key].dtype)
    assert why_not(kernel, ParamStep(0, plan, group, p, p.grad, state)) == "the state is not what was planned"


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
def test_optimizers_in_threads_do_not_meet() -> None:
    """They share the kernel, which is given the numbers of one at a time."""

    def trained(lr: float) -> torch.Tensor:
        p = torch.nn.Parameter(torch.zeros(64))
        optimizer = optim.StableAdamW([p], lr=lr, weight_decay=0.0)
        p.grad = torch.ones(64)
        for _ in range(1000):
            optimizer.step()
        return p.detach()

    alone = {lr: trained(lr) for lr in (1e-3, 1e-1)}
    found: dict[float, torch.Tensor] = {}
    threads = [threading.Thread(target=lambda lr=lr: found.update({lr: trained(lr)})) for lr in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for lr, p in alone.items():
        assert torch.equal(found[lr], p), lr
