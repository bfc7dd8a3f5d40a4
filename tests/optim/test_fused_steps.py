"""Whole steps of lists of parameters by kernels, against the eager path; how close is said once, below."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: kernels cannot run, not even interpreted")

from fused_runs import Kernels, entries, parameters, twins

from narrowgauge.kernels._step._launch import Tables
from narrowgauge.optim import _launch_tables
from narrowgauge.optim._optimizer import NarrowOptimizer
from narrowgauge.optim._plan import ParamStep
from narrowgauge.optim._triton_backend import kernels_of

SHAPES = ((1,), (0,), (3, 100), (16, 16))  # one element, none, a partial block, a whole one

RULES: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"clip_updates": True}),
    ("AdamW", {"beta2_schedule": 0.8, "maximize": True}),
    ("Adam", {"weight_decay": 0.1}),
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5}),
    ("LAMB", {}),
    ("LARS", {"momentum": 0.9, "weight_decay": 0.1}),
    ("Adagrad", {"lr_decay": 0.1}),
    ("Lion", {"weight_decay": 0.1}),
    ("RMSprop", {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("AdEMAMix", {"t_alpha": 100, "t_beta3": 2000}),
    ("Adan", {"weight_decay": 0.1}),
    ("LAMB", {"cautious": True, "clip_updates": True}),
]
KEPT = [
    ("split8", "log8", torch.bfloat16), ("split", "8bit", torch.bfloat16), ("expansion", "fp8", torch.bfloat16),
    ("kahan", "bf16", torch.float16), ("master", "log4", torch.bfloat16), ("stochastic", "log8", torch.bfloat16),
    ("stochastic", "4bit", torch.float16), ("expansion", "expansion", torch.float16),
    ("plain", "log8", torch.float32), ("plain", "4bit", torch.float16),
]  # fmt: skip


def fused(run: Kernels, what: Sequence[ParamStep]) -> None:
    with np.errstate(all="ignore"):
        run(what)


def give_gradients(pairs: list[tuple[Tensor, Tensor]], step: int, odd: bool = False) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for number, (p, q) in enumerate(pairs):
        grad = torch.randn(p.shape, generator=generator) * 0.1
        if odd and number % 2 and grad.numel():
            grad.view(-1)[-1] = torch.inf if number % 4 == 1 else torch.nan
        p.grad = grad.to(p.dtype).to(p.device)
        q.grad = p.grad.clone()


def agree(pairs: list[tuple[Tensor, Tensor]], a: NarrowOptimizer, b: NarrowOptimizer) -> None:
    """Codes are equal, and all else to some 2^-21 of the largest.

    The kernels divide by numbers as products, and round a sum with a product once: where the parts of a first
    moment cancel, they are off by ulps of the parts. Where an element lies at the edge between two codes or words,
    that decides: one in a hundred may differ, by a step of its format, and then what is stored or handed over.
    """
    for p, q in pairs:
        words, others = meanings(p, a), meanings(q, b)
        for name, wanted in words.items():
            found = others[name]
            few = wanted.numel() // 100 + 1
            parts = 0.01 if name.startswith("m") else 0.0
            if not wanted.is_floating_point() or wanted.element_size() == 1:
                if wanted.is_floating_point():
                    wanted, found = wanted.view(torch.uint8), found.view(torch.uint8)
                assert int((found != wanted).sum()) <= few, name
                continue
            step = 2.0**-7 if name == "weight" or wanted.element_size() == 2 else 2.0**-14
            wanted, found = wanted.detach().double(), found.detach().double()
            largest = max(float(wanted.abs().max()), parts) if wanted.numel() else 0.0
            apart = (found - wanted).abs()
            assert int((apart > 2.0**-21 * largest).sum()) <= few, name
            assert bool((apart <= step * largest).all()), name


def meanings(p: Tensor, optimizer: NarrowOptimizer) -> dict[str, Tensor]:
    """What is kept of a parameter, words that are one number in one."""
    words = {**optimizer.state[p], "weight": optimizer.plan_of(p).exact(p, optimizer.state[p])[0]}
    found = {}
    for name, value in words.items():
        if name.startswith("weight.") or name.endswith(".lo"):
            continue  # in the exact weight, or with its upper word
        if name.endswith(".hi"):
            found[name] = value.double() + words[name[:-2] + "lo"].double()
        elif name.endswith("ranges") and value.dtype == torch.int32 and value.ndim == 2:
            found[name] = value // 64  # log4's least pattern, and a fourteenth of a range: some ulps are nothing
        else:
            found[name] = value
    return found


def compare(name: str, dtype: torch.dtype, device: str, odd: bool = False, steps: int = 2, **options: Any) -> None:
    pairs, a, b = twins(name, options, parameters(SHAPES, dtype, device))
    run = Kernels()
    for step in range(steps):
        give_gradients(pairs, step, odd and step == 1)
        a.step()
        fused(run, entries(b))
        agree(pairs, a, b)
    assert all(torch.equal(a.state[p]["step"], b.state[q]["step"]) for p, q in pairs)


@pytest.mark.parametrize(("name", "options"), RULES, ids=str)
def test_rules(name: str, options: dict[str, Any], device: str) -> None:
    compare(name, torch.float32, device, states="fp32", **options)


@pytest.mark.parametrize(("weights", "states", "dtype"), KEPT, ids=str)
def test_storages(weights: str, states: str, dtype: torch.dtype, device: str) -> None:
    compare("AdamW", dtype, device, weights=weights, states=states)


def test_gradients_that_are_not_finite_are_skipped(device: str) -> None:
    """By a rule with sums over its parameter, and narrow states."""
    options = {"weights": "split8", "states": "log8", "clip_updates": True}
    compare("LAMB", torch.bfloat16, device, odd=True, nonfinite="skip", **options)


@pytest.mark.parametrize(("weights", "states"), [("split8", "log8"), ("stochastic", "4bit")])
def test_one_launch_or_one_a_tensor(weights: str, states: str, device: str) -> None:
    options = {"weights": weights, "states": states}
    pairs, a, b = twins("AdamW", options, parameters(SHAPES, torch.bfloat16, device))
    together, apart = Kernels(), [Kernels() for _ in SHAPES]
    for step in range(2):
        give_gradients(pairs, step)
        fused(together, entries(a))
        for run, entry in zip(apart, entries(b), strict=True):
            fused(run, [entry])
    for p, q in pairs:
        assert torch.equal(p, q)
        assert all(torch.equal(value, b.state[q][key]) for key, value in a.state[p].items())


def test_addresses_that_are_no_multiple_of_16_bytes(device: str) -> None:
    pool = torch.randn(2000, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16).to(device)
    ps = [torch.nn.Parameter(pool[1:701]), torch.nn.Parameter(pool[701:1301])]
    pairs, a, b = twins("AdamW", {"weights": "plain", "states": "log8"}, ps)
    run = Kernels()
    for step in range(2):
        give_gradients(pairs, step)
        b.step()
        fused(run, entries(a))
        agree([(q, p) for p, q in pairs], b, a)


class Interrupted(Tables):
    """Tables of a step whose first launch is interrupted."""

    by: Callable[[], None] | None = None

    def buffer(self, *arguments: Any) -> Tensor:
        by, Interrupted.by = Interrupted.by, None
        if by is not None:
            by()
        return super().buffer(*arguments)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> type[Interrupted]:
    """For steps that have not been taken yet in this process."""
    monkeypatch.setattr(_launch_tables, "Tables", Interrupted)
    kernels_of.cache_clear()
    return Interrupted


def test_a_first_step_that_raises_is_not_the_last(interrupted: type[Interrupted], device: str) -> None:
    """As where there is no memory for it: the next one is taken."""

    def full() -> None:
        raise torch.OutOfMemoryError("no memory")

    pairs, a, b = twins("AdamW", {}, parameters(SHAPES, torch.bfloat16, device))
    give_gradients(pairs, 0)
    run, interrupted.by = Kernels(), full
    with pytest.raises(torch.OutOfMemoryError):
        fused(run, entries(a))
    fused(run, entries(a))
    b.step()
    agree(pairs, a, b)


def test_a_step_is_taken_while_another_thread_takes_its_first(interrupted: type[Interrupted], device: str) -> None:
    """Of the same kind, for which there is one set of kernels."""
    pairs, a, b = twins("AdamW", {}, parameters(SHAPES, torch.bfloat16, device))
    others, c, d = twins("AdamW", {}, parameters(SHAPES, torch.bfloat16, device, seed=1))
    give_gradients(pairs, 0)
    give_gradients(others, 1)
    theirs = entries(c)

    def step() -> None:
        thread = threading.Thread(target=fused, args=(Kernels(), theirs))
        thread.start()
        thread.join()

    interrupted.by = step
    fused(Kernels(), entries(a))
    b.step()
    d.step()
    agree(pairs, a, b)
    agree(others, c, d)


def test_what_could_not_be_sent_is_sent_by_the_next_step(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    pairs, a, b = twins("AdamW", {}, parameters(SHAPES, torch.bfloat16, device))
    give_gradients(pairs, 0)
    run = Kernels()
    fused(run, entries(a))
    b.step()
    for optimizer in (a, b):
        optimizer.param_groups[0]["lr"] = 0.5

    def full(board: _launch_tables.LaunchTables) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(_launch_tables.LaunchTables, "_send", full)
        with pytest.raises(torch.OutOfMemoryError):
            fused(run, entries(a))
    fused(run, entries(a))
    b.step()
    agree(pairs, a, b)
