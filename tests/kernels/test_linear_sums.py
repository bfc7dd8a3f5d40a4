"""Sums of columns, of partial sums."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: there are no kernels")

from narrowgauge.kernels._linear import _sums


@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (256, 40), (700, 33)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sums_are_rounded_once(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    total = _sums.add_up(x, torch.float32)
    exact, size = x.double().sum(0), x.double().abs().sum(0)
    assert bool(((total.double() - exact).abs() <= size * 2.0**-23 * (2 + shape[0] ** 0.5)).all())
    assert torch.equal(_sums.add_up(x, dtype), total.to(dtype))
