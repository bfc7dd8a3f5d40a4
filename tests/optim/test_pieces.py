"""A large parameter's eager step in chunks is the step of the whole, to the bit; what cannot be divided is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import narrowgauge as ng
from narrowgauge.optim import _eager

SMALL = 4096  # elements of a chunk, here
STATES = ("fp32", "bf16", "expansion", "8bit", "log8", "log4", "4bit", "fp8")
WEIGHTS = ("plain", "kahan", "expansion", "split", "split8", "stochastic", "master")


pytestmark = pytest.mark.usefixtures("eager")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many chunks each step was taken in."""
    found: list[int] = []
    real = _eager.chunks

    def counting(*given: Any) -> Any:
        chunks = list(real(*given))
        found.append(len(chunks))
        return chunks

    monkeypatch.setattr(_eager, "chunks", counting)
    return found


def stepped(
    monkeypatch: pytest.MonkeyPatch, elements: int, size: tuple[int, ...], name: str = "AdamW", **options: Any
) -> dict[str, Tensor]:
    """The parameter and its state after three steps, in chunks of so many elements."""
    monkeypatch.setattr(_eager, "_CHUNK", elements)
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(size, generator=generator).to(torch.bfloat16))
    optimizer = getattr(ng.optim, name)([p], lr=1e-2, min_quantized_size=1, **options)
    for _ in range(3):
        wide = torch.randn(size, generator=generator) * torch.exp(2 * torch.randn(size, generator=generator))
        p.grad = wide.to(torch.bfloat16)
        optimizer.step()
    assert (p.detach() != 0).any()
    return {"p": p.detach(), **optimizer.state[p]}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert torch.equal(tensor, other[key]), key


@pytest.mark.parametrize(
    ("states", "weights"),
    [(name, WEIGHTS[(place + more) % 7]) for place, name in enumerate(STATES) for more in (0, 3)],
)
def test_every_storage(monkeypatch: pytest.MonkeyPatch, counted: list[int], states: str, weights: str) -> None:
    size = (3, 5 * SMALL // 3 + 1)
    options = {"states": states, "weights": weights, "weight_decay": 0.1}
    chunks = stepped(monkeypatch, SMALL, size, **options)
    assert counted == [6] * 3
    same(chunks, stepped(monkeypatch, 1 << 40, size, **options))


@pytest.mark.parametrize("block", [64, 96, 4096])
@pytest.mark.parametrize("elements", [1, 1000, 2 * SMALL, 3 * SMALL - 8])
def test_chunks_of_whole_blocks(monkeypatch: pytest.MonkeyPatch, elements: int, block: int) -> None:
    size = (2 * SMALL + 3,)
    options = {"states": "log8", "weights": "stochastic", "block_size": block}
    same(stepped(monkeypatch, elements, size, **options), stepped(monkeypatch, 1 << 40, size, **options))


@pytest.mark.parametrize("name", ["SGD", "Lion", "Adam", "Adagrad", "CollageAdamW"])
def test_rules_by_element(monkeypatch: pytest.MonkeyPatch, counted: list[int], name: str) -> None:
    more = {"momentum": 0.9} if name == "SGD" else {}
    chunks = stepped(monkeypatch, SMALL, (3 * SMALL,), name, **more)
    assert counted == [3] * 3
    same(chunks, stepped(monkeypatch, 1 << 40, (3 * SMALL,), name, **more))


@pytest.mark.parametrize("name", ["LAMB", "LARS", "StableAdamW", "Muon"])
def test_what_looks_at_the_whole_parameter_has_it(
    monkeypatch: pytest.MonkeyPatch, counted: list[int], name: str
) -> None:
    stepped(monkeypatch, SMALL, (64, 3 * SMALL // 64), name)
    assert counted == [1] * 3


def test_clipped_and_refused_gradients(monkeypatch: pytest.MonkeyPatch, counted: list[int]) -> None:
    options: dict[str, Any] = {"max_grad_norm": 1.0, "maximize": True}
    chunks = stepped(monkeypatch, SMALL, (2 * SMALL + 1,), **options)
    assert counted == [3] * 3
    same(chunks, stepped(monkeypatch, 1 << 40, (2 * SMALL + 1,), **options))
    p = torch.nn.Parameter(torch.ones(2 * SMALL))
    optimizer = ng.optim.AdamW([p], lr=1.0)
    monkeypatch.setattr(_eager, "_CHUNK", SMALL)
    p.grad = torch.ones(2 * SMALL)
    p.grad[-1] = torch.inf
    optimizer.step()
    assert (p == 1).all()  # no chunk of it has moved


def test_what_is_measured_is_a_whole_step(monkeypatch: pytest.MonkeyPatch, counted: list[int]) -> None:
    monkeypatch.setattr(_eager, "_CHUNK", SMALL)
    p = torch.nn.Parameter(torch.randn(2 * SMALL))
    optimizer = ng.optim.AdamW([("p", p)], lr=0.1)
    optimizer.gauges = True
    p.grad = torch.randn_like(p)
    optimizer.step()
    assert counted == []
    assert optimizer.last_stats["p"].lost_updates < 1e-3


def test_a_state_of_another_size_is_refused_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_eager, "_CHUNK", SMALL)
    p = torch.nn.Parameter(torch.ones(2 * SMALL))
    optimizer = ng.optim.AdamW([p], lr=0.1)
    p.grad = torch.ones_like(p)
    optimizer.step()
    before = p.detach().clone()
    optimizer.state[p]["m"] = torch.zeros(SMALL)
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert torch.equal(p, before)
