"""Passes of a training: eager ones beside a loop by hand, and on a GPU replayed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from studies.shared import graphed
from studies.shared.graphed import EAGER, Gradients

STEPS = EAGER + 4


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)


def examples(step: int, device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(5, 8, generator=generator)
    return {"x": x.to(device), "labels": torch.randint(4, (5,), generator=generator).to(device)}


def loss_of(model: nn.Module) -> Callable[[Any], Tensor]:
    return lambda given: F.cross_entropy(model(given["x"]), given["labels"])


@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_losses_and_gradients_are_those_by_hand(device: str, factors: bool) -> None:
    """Gradients are cleared between steps, as loops do: a replay has to find them again."""
    model, other = network(device), network(device)
    gradients = Gradients(model, loss_of(model), device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        scale = torch.tensor(2.0**step if factors else 1.0, device=device)
        loss = gradients(examples(step, device), scale if factors else None)
        exact = loss_of(other)(examples(step, device))
        torch.testing.assert_close(loss, exact.detach(), rtol=1e-5, atol=1e-6)
        found = torch.autograd.grad(exact, list(other.parameters()))
        with torch.no_grad():
            for p, q, gradient in zip(model.parameters(), other.parameters(), found, strict=True):
                assert p.grad is not None
                p.grad /= scale
                q -= 0.1 * gradient
        optimizer.step()
        optimizer.zero_grad()
    assert gradients.how == ("eager" if device == "cpu" else "graph")
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_what_cannot_be_captured_goes_on_eagerly() -> None:
    model = network("cuda")
    gradients = Gradients(model, lambda given: loss_of(model)(given) * model(given["x"]).mean().item(), "cuda")
    for step in range(STEPS):
        assert gradients(examples(step, "cuda")).isfinite()
    assert gradients.how.startswith("eager, not captured")
    assert torch.randn(3, device="cuda").isfinite().all()  # a model may have dropout


def test_a_reason_names_no_folder() -> None:
    assert graphed.reason(OSError("no /some/where/x.so\nfound")) == "OSError: no x.so"
