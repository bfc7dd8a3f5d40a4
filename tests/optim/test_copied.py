"""Channels-last weights: stepped by kernels, from copies, with the bits of contiguous ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from narrowgauge import optim
from narrowgauge.optim import NarrowOptimizer, step_in_backward
from narrowgauge.optim._copied import CopiedSteps
from narrowgauge.scaling import DynamicLossScaler

SHAPES = ((8, 6, 3, 3), (5, 7), (4, 20, 2, 2))
CASES = [
    ("AdamW", {"states": "8bit", "min_quantized_size": 0}, torch.bfloat16),
    ("AdamW", {"weights": "split4", "states": "log8"}, torch.bfloat16),
    ("StableAdamW", {"weights": "kahan", "states": "bf16"}, torch.bfloat16),
    ("LAMB", {"states": "fp32"}, torch.float32),
    ("SGD", {"momentum": 0.9, "states": "log8"}, torch.bfloat16),
]


class Twins:
    """One list of parameters as they are used to be, the other channels last, over the same gradients."""

    def __init__(self, name: str, options: dict[str, Any], dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.device, self.taken = device, 0
        start = [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]
        self.rows = [nn.Parameter(x.clone()) for x in start]
        self.last = [nn.Parameter(channels_last(x.clone())) for x in start]
        self.optimizers: list[NarrowOptimizer] = [
            getattr(optim, name)(ps, lr=0.01, **options) for ps in (self.rows, self.last)
        ]

    def gradients(self, nonfinite: bool = False) -> list[Tensor]:
        generator = torch.Generator().manual_seed(10 + self.taken)
        self.taken += 1
        made = [torch.randn(shape, generator=generator).to(self.device, self.rows[0].dtype) for shape in SHAPES]
        if nonfinite:
            made[0].view(-1)[5] = torch.nan
        for p, q, grad in zip(self.rows, self.last, made, strict=True):
            p.grad, q.grad = grad, channels_last(grad.clone())
        return made

    def step(self, nonfinite: bool = False) -> None:
        self.gradients(nonfinite)
        for optimizer in self.optimizers:
            optimizer.step()

    def check(self) -> None:
        first, second = self.optimizers
        for p, q in zip(self.rows, self.last, strict=True):
            assert torch.equal(p, q)
            assert first.state[p].keys() == second.state[q].keys()
            for key, x in first.state[p].items():
                assert torch.equal(x, second.state[q][key]), key
        assert {row.path for row in second.describe().rows} == {row.path for row in first.describe().rows}
        copied = [some for roster in second._engine._rosters.values() for some in roster.lists]
        mine = [some for some in copied if isinstance(some, CopiedSteps)]
        assert mine
        assert not any(some._copies or some._lists for some in mine)


def channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last) if x.dim() == 4 else x


@pytest.fixture(params=["C", "Triton"])
def home(request: pytest.FixtureRequest, device: str) -> str:
    """Where the tensors are; Triton's kernels are interpreted on a CPU."""
    if request.param == "Triton":
        pytest.importorskip("triton")
        request.getfixturevalue("kernels")
        return device
    return "cpu"


@pytest.mark.parametrize(("name", "options", "dtype"), CASES, ids=str)
def test_they_have_the_bits_of_contiguous_ones(
    name: str, options: dict[str, Any], dtype: torch.dtype, home: str
) -> None:
    twins = Twins(name, options, dtype, home)
    assert not twins.last[0].is_contiguous()
    for _ in range(3):
        twins.step()
    twins.check()


@pytest.mark.parametrize("way", ["skip", "clip", "gauges", "scaler"])
def test_also_where_steps_depend_on_gradients(way: str, home: str) -> None:
    options = {"max_grad_norm": 0.5} if way == "clip" else {"nonfinite": "skip"} if way == "skip" else {}
    twins = Twins("AdamW", {"states": "log8", **options}, torch.bfloat16, home)
    scalers = [DynamicLossScaler(home, init_scale=4.0) for _ in twins.optimizers]
    for scaler in scalers:
        scaler.scale(torch.ones((), device=home))
    for number in range(4):
        if way == "scaler":
            twins.gradients(nonfinite=number == 1)
            for scaler, optimizer in zip(scalers, twins.optimizers, strict=True):
                scaler.step(optimizer)
                scaler.update()
        else:
            for optimizer in twins.optimizers:
                optimizer.gauges = way == "gauges"
            twins.step(nonfinite=way == "skip" and number == 1)
    twins.check()
    if way == "gauges":
        first, second = (
            {p.shape: rows[number] for ps, rows in optimizer.measured() for number, p in enumerate(ps)}
            for optimizer in twins.optimizers
        )
        for p in twins.rows:
            torch.testing.assert_close(first[p.shape], second[p.shape], rtol=1e-5, atol=1e-12)


def test_a_model_that_becomes_channels_last_goes_on() -> None:
    twins = Twins("AdamW", {"states": "8bit", "min_quantized_size": 0}, torch.bfloat16, "cpu")
    for q in twins.last:
        q.data = q.data.contiguous()
    twins.step()
    for q in twins.last:
        q.data = channels_last(q.data)
    twins.step()
    twins.check()


def test_parameters_that_are_stepped_in_backward() -> None:
    p = nn.Parameter(torch.randn(8, 6, 3, 3, generator=torch.Generator().manual_seed(1)).bfloat16())
    q = nn.Parameter(channels_last(p.detach().clone()))
    for parameter in (p, q):
        model = nn.Module()
        model.weight = parameter
        optimizer = step_in_backward(model, optim.AdamW, lr=0.01, states="8bit", min_quantized_size=0)
        for _ in range(3):
            parameter.square().sum().backward()
            optimizer.step()
    assert torch.equal(p, q)
