"""Float8 weights that kernels or C step are the specification's, bit for bit: every word, any update, any scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: kernels cannot run, not even interpreted")

from fused_runs import kept
from test_fused_weights import Move

from narrowgauge.optim import SGD
from narrowgauge.rules import Slot
from narrowgauge.storage import Float8Weight


class Both(Move):
    """The weight moves by the gradient, and a moment is rounded stochastically, by the same random bits."""

    name = "both"
    moments = (Slot("v", signed=False),)

    def update(self, arithmetic: Any, weight: Tensor, grad: Tensor, moments: Any, s: Any) -> Any:
        return grad * 1.0, {"v": grad * grad}


def words(count: int) -> tuple[Tensor, Tensor]:
    """All codes beside all low words, 65,536, the last `count` of them; NaN, and low words that no code has."""
    codes, low = torch.meshgrid(torch.arange(256), torch.arange(-128, 128), indexing="ij")
    return codes.reshape(-1)[-count:].to(torch.uint8), low.reshape(-1)[-count:].to(torch.int8)


def compared(
    weights: list[Tensor], grads: list[Tensor], where: str, rule: Any = Move, block: int = 256
) -> list[float]:
    """The scales after two steps, which are taken alike by kernels on a device, or by C, and by eager torch."""
    states, device = {"v": "log8"} if rule is Both else {}, where.removeprefix("C on ")
    weights, grads = ([x.to(device) for x in some] for some in (weights, grads))
    eager, fused = kept(rule(), states, block, weights, grads, where != device, weights="fp8split8")
    for (p, state), (q, other) in zip(eager, fused, strict=True):
        assert isinstance(p, Float8Weight)
        assert isinstance(q, Float8Weight)
        assert torch.equal(p.scale, q.scale)
        assert torch.equal(p.largest, q.largest)
        assert torch.equal(p.codes.view(torch.uint8), q.codes.view(torch.uint8))
        assert torch.equal(p.low, q.low)
        for key in state.keys() - {"step", "skipped"}:
            assert torch.equal(state[key], other[key]), key
    return [float(p.scale) for p, _ in eager]


@pytest.fixture(params=["kernels", "C"])
def where(request: pytest.FixtureRequest, device: str) -> str:
    return device if request.param == "kernels" else "C on cpu"


@pytest.mark.parametrize(
    ("rule", "count", "block", "power"),
    # In long blocks, of which a program takes one at a time: the interpreter is slow by the program.
    [(Both, 65_536, 4096, -9), (Both, 5999, 256, -32), (Move, 5999, 256, 7), (Both, 1, 256, 0)],
    ids=str,
)
def test_every_pair_of_words_under_any_update(rule: type, count: int, block: int, power: int, where: str) -> None:
    generator = torch.Generator().manual_seed(count)
    codes, low = words(count)
    grads = torch.randn(count, generator=generator) * 2.0**power
    grads *= 10 ** (torch.rand(count, generator=generator) * 20 - 14)
    grads.clamp_(-3e38, 3e38)
    grads[::97] = 0.0
    grads[1::101] = torch.inf
    grads[2::103] = torch.nan
    weight = Float8Weight(codes.view(torch.float8_e4m3fn), torch.tensor(2.0**power), low)
    compared([weight], [grads], where, rule, block)


def test_scales_grow_and_shrink_each_by_its_own_tensor(where: str) -> None:
    """In one launch: by every largest code, and tensors of zeros, of NaN, of one element, of no element."""
    weights, grads = [], []
    for largest in (*range(0, 128, 5), 101, 102, 118, 119, 126, 127):
        codes = torch.arange(600) % (largest + 1) + 128 * (torch.arange(600) % 2)
        if largest in (0, 127):
            codes = torch.full((600,), largest)
        weights.append(Float8Weight(codes.to(torch.uint8).view(torch.float8_e4m3fn), torch.tensor(0.25)))
    weights += [Float8Weight.of(torch.zeros(300)), Float8Weight.of(torch.ones(1)), Float8Weight.of(torch.ones(0))]
    for number, weight in enumerate(weights):
        generator = torch.Generator().manual_seed(number)
        size = float(weight.scale) * 2.0 ** (number % 5)
        grads.append(torch.randn(weight.shape, generator=generator) * size)
    scales = compared(weights, grads, where)
    assert len(set(scales)) > 8


@pytest.mark.usefixtures("kernels")
def test_codes_at_odd_addresses_and_a_view_of_a_weight(device: str) -> None:
    """Words one by one; and what is not the whole weight, whose scale it shares, is stepped eagerly."""
    codes, low = (x.to(device) for x in words(3001))
    codes[(codes & 0x7F) == 0x7F] = 3
    scale = torch.tensor(0.5, device=device)
    ends = []
    for backends in (("triton",), ("c",) if device == "cpu" else (), ()):
        weight = Float8Weight(codes.clone()[1:].view(torch.float8_e4m3fn), scale, low.clone()[1:])
        p = torch.nn.Parameter(weight)
        optimizer = SGD([p], lr=1.0)
        optimizer._engine.backends = backends
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            p.grad = torch.randn(p.shape, generator=generator).to(torch.bfloat16).to(device)
            optimizer.step()
        path = optimizer.describe().rows[0].path
        assert path.startswith("fused") == bool(backends)
        ends.append([p.codes.view(torch.uint8), p.low, p.numbers])
    assert all(map(torch.equal, ends[0], ends[2]))
    assert all(map(torch.equal, ends[1], ends[2]))
    part = torch.nn.Parameter(Float8Weight(codes.view(torch.float8_e4m3fn), scale, low)[100:200])
    optimizer = SGD([part], lr=1.0)
    part.grad = torch.ones_like(part)
    optimizer.step()
    assert optimizer.describe().rows[0].why == "not fused: not whole and contiguous"
    assert float(part.largest) == float((part._words.codes.view(torch.uint8) & 0x7F).max())
