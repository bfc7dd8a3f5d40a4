"""Moments and weights that kernels read and write are the storages', bit for bit, whatever the numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: kernels cannot run, not even interpreted")

import triton
import triton.language as tl
from fused_runs import Keep, kept

from narrowgauge.kernels._step._blockwise import usual_e4m3_encode, usual_table_encode
from narrowgauge.kernels._step._signed import usual_signed_encode
from narrowgauge.kernels._step._states import usual_pattern4_encode, usual_pattern8_encode, usual_relative_encode

SIZES = (1, 2 * 256 + 100)
KINDS = ("one scale", "mixed", "zeros", "blocks of zeros", "tiny", "huge", "not finite", "ties")


def numbers(kind: str, size: int, seed: int) -> Tensor:
    """Fresh numbers of a kind, with a sign."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator)
    spread = torch.rand(size, generator=generator)
    if kind == "mixed":
        return x * 10 ** (spread * 70 - 35)
    if kind == "zeros":
        return torch.where(spread < 0.5, 0.0, x) * (0.0 if seed % 2 else 1.0)
    if kind == "blocks of zeros":
        return torch.where(torch.arange(size) // 256 % 2 == 0, 0.0, x)
    if kind == "tiny":
        return x * 2.0**-126 * (spread * 4)
    if kind == "huge":
        return (x.clamp(-1, 1) * torch.finfo(torch.float32).max * spread).nan_to_num()
    if kind == "not finite":
        odd = torch.tensor([torch.inf, -torch.inf, torch.nan])[torch.randint(0, 3, (size,), generator=generator)]
        return torch.where(spread < 0.01 * (seed % 3), odd, x)
    if kind == "ties":
        return (x * 4).round() / 4
    return x * 0.01


def same(found: Tensor, wanted: Tensor, what: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{what}: {m}")


def check(rule: Keep, states: dict[str, str], block: int, kind: str, device: str) -> None:
    weights = [numbers(kind, size, 10 + i).abs().to(device) for i, size in enumerate(SIZES)]
    grads = [numbers(kind, size, 20 + i).to(device) for i, size in enumerate(SIZES)]
    if "v" not in states:
        weights = [torch.zeros_like(weight) for weight in weights]
    if "m" not in states:
        grads, weights = [grad.abs() for grad in grads], [torch.zeros_like(weight) for weight in weights]
    eager, fused = kept(rule, states, block, weights, grads)
    for (p, state), (q, words) in zip(eager, fused, strict=True):
        for name in sorted(state.keys() - {"step", "skipped"}):
            value, word = state[name], words[name]
            if value.dtype == torch.float8_e4m3fn:
                value, word = value.view(torch.uint8), word.view(torch.uint8)
            same(word, value, name)
        same(q, p, "weight")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("states", ["expansion", "log8", "8bit", "fp8", "log4", "4bit"])
def test_second_moments(states: str, kind: str, device: str) -> None:
    check(Keep("v", "v"), {"v": states}, 256, kind, device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("states", ["8bit", "fp8", "4bit"])
def test_first_moments(states: str, kind: str, device: str) -> None:
    check(Keep("mv", "m"), {"m": states, "v": "fp32"}, 256, kind, device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("states", ["log8", "log4"])
def test_first_moments_in_units_of_the_second(states: str, kind: str, device: str) -> None:
    check(Keep("mv", "m"), {"m": states, "v": states}, 256, kind, device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("states", ["log8", "log4"])
def test_first_moments_that_are_alone(states: str, kind: str, device: str) -> None:
    check(Keep("m", "m"), {"m": states}, 256, kind, device)


@pytest.mark.parametrize("block", [64, 512, 4096])
@pytest.mark.parametrize("states", ["log8", "8bit", "fp8", "log4", "4bit"])
def test_block_sizes(states: str, block: int, device: str) -> None:
    check(Keep("mv", "m"), {"m": states, "v": states}, block, "one scale", device)


@triton.jit
def _unusual(x_at, cells, found):
    """Which of the ways of the usual units have something against a block."""
    x = tl.load(x_at + tl.arange(0, 256)[None, :])
    random = tl.zeros([1, 256], tl.uint32)
    _, _, table = usual_table_encode(x, cells, 0, True, 254)
    _, _, unsigned = usual_table_encode(x, cells, 0, False, 254)
    _, _, float8 = usual_e4m3_encode(x, True)
    _, _, kept, pattern8 = usual_pattern8_encode(x, random)
    _, _, _, _, pattern4 = usual_pattern4_encode(x, random)
    _, _, _, relative = usual_relative_encode(x, kept, 8)
    _, _, _, _, signed = usual_signed_encode(x)
    column = tl.arange(0, 1)[:, None]
    tl.store(found + 0 + column, table.to(tl.int32))
    tl.store(found + 1 + column, unsigned.to(tl.int32))
    tl.store(found + 2 + column, float8.to(tl.int32))
    tl.store(found + 3 + column, pattern8.to(tl.int32))
    tl.store(found + 4 + column, pattern4.to(tl.int32))
    tl.store(found + 5 + column, relative.to(tl.int32))
    tl.store(found + 6 + column, signed.to(tl.int32))


def test_zeros_are_nothing_unusual(device: str) -> None:
    """An embedding has many such blocks at first: done twice, they took five times as long as others."""
    cells = torch.zeros(1 << 15, dtype=torch.int32, device=device)

    def unusual(x: Tensor) -> list[int]:
        found = torch.full((7,), -1, dtype=torch.int32, device=device)
        with np.errstate(all="ignore"):
            _unusual[(1,)](x.to(device), cells, found, enable_fp_fusion=False)
        return found.tolist()

    assert unusual(torch.zeros(256)) == [0] * 7
    assert unusual(torch.rand(256, generator=torch.Generator().manual_seed(0)) + 1) == [0] * 7
    one = torch.zeros(256)
    one[7] = 2.0**-130
    assert unusual(one) == [1, 1, 1, 1, 1, 0, 1]  # in its unit, what is relative is none too small
