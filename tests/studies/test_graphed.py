"""Passes that are captured once and replayed: on a GPU beside eager ones, elsewhere with a made-up graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from studies.shared import graphed
from studies.shared.graphed import EAGER, Gradients

STEPS = EAGER + 4


def network(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)


def examples(step: int, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(5, 8, generator=generator)
    return {"x": x.to(device), "labels": torch.randint(4, (5,), generator=generator).to(device)}


def loss_of(model: nn.Module) -> Callable[[Any], Tensor]:
    return lambda given: F.cross_entropy(model(given["x"]), given["labels"])


def trained(device: str, how: str, clear: bool = False, factors: bool = False) -> tuple[list[Tensor], nn.Module]:
    """Losses of some steps of plain descent, and what they end at."""
    model = network(device)
    gradients = Gradients(model, loss_of(model), device)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for step in range(STEPS):
        scale = torch.tensor(2.0**step, device=device) if factors else None
        losses.append(gradients(examples(step, device), scale))
        for p in model.parameters():
            assert p.grad is not None
            if scale is not None:
                p.grad /= scale
        optimizer.step()
        if clear:
            optimizer.zero_grad()
    assert gradients.how == how
    return losses, model


def by_hand(device: str) -> tuple[list[Tensor], nn.Module]:
    model = network(device)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model)(examples(step, device))
        found = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), found, strict=True):
                p -= 0.1 * gradient
        losses.append(loss.detach())
    return losses, model


def same(one: tuple[list[Tensor], nn.Module], other: tuple[list[Tensor], nn.Module]) -> None:
    torch.testing.assert_close(torch.stack(one[0]), torch.stack(other[0]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one[1].state_dict(), other[1].state_dict(), rtol=1e-5, atol=1e-6)


class MadeUp:
    """A graph on a CPU: what it captures is computed at every replay, into the tensors of the first time."""

    model: nn.Module

    def __init__(self) -> None:
        self.replays = 0

    def captured(self, passes: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        found = passes().clone()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        kept = [p.grad for p in parameters]

        def replay() -> None:
            self.replays += 1
            now = passes()
            with torch.no_grad():
                found.copy_(now)
                for p, at in zip(parameters, kept, strict=True):
                    assert p.grad is not None
                    assert at is not None
                    at.copy_(p.grad)
                    p.grad = None  # a graph does not know of it

        return replay, found


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    graph, real = MadeUp(), Gradients.__init__

    class Stream:
        def wait_stream(self, other: Any) -> None: ...

    def begun(self: Gradients, model: nn.Module, *rest: Any) -> None:
        real(self, model, *rest)
        graph.model, self._stream = model, Stream()  # type: ignore[assignment]

    monkeypatch.setattr(Gradients, "__init__", begun)
    monkeypatch.setattr(graphed, "captured", graph.captured)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return graph


def test_eager_steps_are_those_by_hand() -> None:
    same(trained("cpu", "eager"), by_hand("cpu"))


@pytest.mark.parametrize("factors", [False, True])
def test_replays_read_their_examples_and_fill_the_gradients(made_up: MadeUp, factors: bool) -> None:
    # Gradients are cleared between steps, as loops do: they have to be found again.
    same(trained("cpu", "graph", clear=True, factors=factors), by_hand("cpu"))
    assert made_up.replays == STEPS - EAGER


def test_what_cannot_be_captured_goes_on_eagerly(made_up: MadeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(passes: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphed, "captured", fails)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    how = "eager, not captured: RuntimeError: operation not permitted when stream is capturing"
    same(trained("cpu", how), by_hand("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("factors", [False, True])
def test_a_graph_on_a_gpu(factors: bool) -> None:
    same(trained("cuda", "graph", clear=True, factors=factors), by_hand("cuda"))


@pytest.mark.gpu
def test_what_a_graph_cannot_do_on_a_gpu() -> None:
    model = network("cuda")
    gradients = Gradients(model, lambda given: loss_of(model)(given) * model(given["x"]).mean().item(), "cuda")
    for step in range(STEPS):
        assert gradients(examples(step, "cuda")).isfinite()
    assert gradients.how.startswith("eager, not captured")
