"""Weights that kernels read and write are the storages', bit for bit: any word, any update, two steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: kernels cannot run, not even interpreted")

from fused_runs import kept

from narrowgauge.rules import Rule

HALVES = (torch.bfloat16, torch.float16)
CASES = [(name, dtype) for name in ("plain", "stochastic", "kahan", "expansion", "master") for dtype in HALVES]
COUNT = 5999  # an odd number: the last 4-bit word has a byte of its own
CASES += [
    ("split", torch.bfloat16),
    ("split8", torch.bfloat16),
    ("split4", torch.bfloat16),
    ("plain", torch.float32),
]


class Move(Rule):
    """The weight moves by the gradient."""

    name = "move"

    def scalars(self, group: Any, step: Any) -> dict[str, Any]:
        return {"lr": group["lr"]}

    def update(self, arithmetic: Any, weight: Tensor, grad: Tensor, moments: Any, s: Any) -> Any:
        return grad * 1.0, {}


@pytest.mark.parametrize(("weights", "dtype"), CASES, ids=str)
def test_weights(weights: str, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    if dtype == torch.float32:
        words = torch.randint(-(2**31), 2**31, (COUNT,), generator=generator).to(torch.int32).view(dtype)
    else:
        words = torch.randint(-(2**15), 2**15, (COUNT,), generator=generator).to(torch.int16).view(dtype)
    size = words.float().abs().nan_to_num(1.0, 1.0).clamp(1e-30, 1e30)
    grads = (
        torch.randn(COUNT, generator=generator) * size * 10 ** (torch.rand(COUNT, generator=generator) * 20 - 14)
    )
    grads = grads.clamp(-3e38, 3e38)
    grads[::97] = 0.0
    grads[1::101] = torch.inf
    grads[2::103] = torch.nan
    eager, fused = kept(Move(), {}, 256, [words.to(device)], [grads.to(device)], weights=weights)
    for (p, state), (q, other) in zip(eager, fused, strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=0, equal_nan=True)
        for name in state.keys() - {"step", "skipped"}:
            torch.testing.assert_close(other[name], state[name], rtol=0, atol=0, equal_nan=True)
