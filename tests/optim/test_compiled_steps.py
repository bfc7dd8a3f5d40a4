"""A step inside a function that `torch.compile` compiles is the step that it is outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from narrowgauge.optim import AdamW8bit, NarrowOptimizer, QuantizedGradients

ROWS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "split8": lambda ps: AdamW8bit(ps, weights="split8", min_quantized_size=0),
    "quantized gradients": lambda ps: QuantizedGradients(AdamW8bit(ps, min_quantized_size=0)),
}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def trained(row: str, compiled: Callable[[Any], Any]) -> list[Tensor]:
    """Parameters and states after three steps."""
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)).bfloat16()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    optimizer = ROWS[row](model.parameters())

    def step(x: Tensor) -> Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = compiled(step)
    for _ in range(3):
        step(torch.randn(8, 32, generator=generator).bfloat16())
    return [*(p.detach() for p in model.parameters()), *(v for s in optimizer.state.values() for v in s.values())]


def same(row: str, backend: str) -> None:
    wanted, found = trained(row, lambda step: step), trained(row, lambda step: torch.compile(step, backend=backend))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("row", ROWS)
def test_a_compiled_function_takes_the_steps_of_the_plain_one(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, compiling = NarrowOptimizer.begin_step, []

    def begin(optimizer: NarrowOptimizer) -> None:
        compiling.append(torch.compiler.is_compiling())
        begun(optimizer)

    monkeypatch.setattr(NarrowOptimizer, "begin_step", begin)
    same(row, "eager")
    assert compiling == [False] * 6
