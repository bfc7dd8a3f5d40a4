"""Learning rates begin and end where they should, and products of bf16 matrices are rounded once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge._schedule import SCHEDULES, schedule
from narrowgauge.trainers._loop import _PRODUCTS, Float32Products, fast_products


def test_the_ends_and_the_middle() -> None:
    at = {
        kind: [schedule(kind, n, steps=110, warmup=10, final=0.1) for n in (1, 5, 10, 60, 110)]
        for kind in SCHEDULES
    }
    assert at["constant"] == [0.1, 0.5, 1.0, 1.0, 1.0]
    assert at["linear"] == pytest.approx([0.1, 0.5, 1.0, 0.55, 0.1])
    assert at["cosine"] == pytest.approx([0.1, 0.5, 1.0, 0.55, 0.1])
    quarter = schedule("cosine", 35, steps=110, warmup=10, final=0.1)
    assert quarter == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)


@given(st.sampled_from(SCHEDULES), st.integers(1, 300), st.integers(0, 300), st.floats(0, 1))
def test_it_rises_then_falls_and_stays_between(kind: str, steps: int, warmup: int, final: float) -> None:
    factors = [schedule(kind, n, steps=steps, warmup=warmup, final=final) for n in range(1, steps + 1)]
    assert all(0 <= factor <= 1 for factor in factors)
    top = min(warmup, steps)
    assert factors[:top] == sorted(factors[:top])
    if top:
        assert factors[top:] == sorted(factors[top:], reverse=True)
    if kind != "constant" and steps > warmup:
        assert factors[-1] == pytest.approx(final)


class Seen(TorchDispatchMode):
    """The dtypes of the products that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _PRODUCTS:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def whole(*shape: int) -> Tensor:
    """Whole numbers in bf16 whose sums of products float32 holds exactly."""
    return torch.randint(-200, 201, shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_a_product_is_rounded_once() -> None:
    a, b, c = whole(3, 40, 70), whole(3, 70, 50), whole(3, 40, 50)
    with Float32Products():
        found = [torch.bmm(a, b), a[0] @ b[0], torch.addmm(c[0], a[0], b[0]), torch.baddbmm(c, a, b)]
    exact = a.double() @ b.double()
    wanted = [exact, exact[0], exact[0] + c[0].double(), exact + c.double()]
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, other.bfloat16())


def test_no_product_of_a_training_step_is_left_in_bf16() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(32, 96, dtype=torch.bfloat16)
    x = torch.randn(2, 8, 32, dtype=torch.bfloat16, requires_grad=True)

    def gradients() -> list[Tensor]:
        q, k, v = layer(x).view(2, 8, 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return list(torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()]))

    with Seen() as seen, Float32Products():
        found = gradients()
    assert len(seen.dtypes) == 5
    assert set(seen.dtypes) == {torch.float32}
    for one, other in zip(found, gradients(), strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one, other, rtol=0.03, atol=0.03 * float(other.abs().max()))


@pytest.mark.parametrize("supported", [False, True])
def test_it_is_used_where_torch_has_no_fast_products(supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: supported)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert isinstance(fast_products(torch.device("cpu")), Float32Products) is not supported
    assert not isinstance(fast_products(torch.device("cuda")), Float32Products)
