"""Moments and weights that kernels read and write are the storages', bit for bit, whatever the numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: kernels cannot run, not even interpreted")

from fused_runs import Keep, kept

SIZES = (1, 2 * 256 + 100)
KINDS = ("one scale", "mixed", "zeros", "tiny", "huge", "not finite", "ties")


def numbers(kind: str, size: int, seed: int) -> Tensor:
    """Fresh numbers of a kind, with a sign."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator)
    spread = torch.rand(size, generator=generator)
    if kind == "mixed":
        return x * 10 ** (spread * 70 - 35)
    if kind == "zeros":
        return torch.where(spread < 0.5, 0.0, x) * (0.0 if seed % 2 else 1.0)
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
