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

from narrowgauge.kernels._step._codebooks import fast_codebook_encode, fast_float8_encode
from narrowgauge.kernels._step._log_states import (
    fast_log_signed_encode,
    fast_log_unsigned4_encode,
    fast_log_unsigned8_encode,
    fast_normalized8_encode,
)
from narrowgauge.storage import _states, register_state

SIZES = (1, 256 + 100)
KINDS = ("one scale", "mixed", "zeros", "blocks of zeros", "tiny", "huge", "not finite", "ties", "some v zero")


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
    if kind == "some v zero":
        return torch.where((spread < 0.1) & (seed < 20), 0.0, x)
    if kind == "ties":
        return (x * 4).round() / 4
    return x * 0.01


def same(found: Tensor, wanted: Tensor, what: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{what}: {m}")


def check(rule: Keep, states: dict[str, str], block: int, kind: str, device: str) -> None:
    sizes = SIZES if kind in ("one scale", "zeros") else SIZES[1:]
    weights = [numbers(kind, size, 10 + i).abs().to(device) for i, size in enumerate(sizes)]
    grads = [numbers(kind, size, 20 + i).to(device) for i, size in enumerate(sizes)]
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


# The moments that a rule has, the storage of each, the kinds of numbers.
CASES: list[tuple[str, dict[str, str], tuple[str, ...]]] = [
    *(("v", {"v": states}, KINDS) for states in ("expansion", "log8", "8bit", "fp8", "log4", "4bit")),
    *(("mv", {"m": states, "v": "fp32"}, KINDS) for states in ("8bit", "fp8", "4bit")),
    # In units of the second, of which floats have no blocks, leave no value alone, and may be NaN of either sign.
    *(("mv", {"m": states, "v": states}, KINDS) for states in ("log8", "log4")),
    *(
        ("mv", {"m": first, "v": second}, ("one scale", "mixed", "zeros", "not finite"))
        for first, second in (("log8", "fp32"), ("log4", "bf16"), ("log8", "expansion"))
    ),
    ("mv", {"m": "log8", "v": "8bit"}, ("mixed",)),
    *(("m", {"m": states}, KINDS) for states in ("log8", "log4")),
]


@pytest.mark.parametrize(
    ("slots", "states", "kind"),
    [(slots, states, kind) for slots, states, kinds in CASES for kind in kinds],
    ids=str,
)
def test_moments(slots: str, states: dict[str, str], kind: str, device: str) -> None:
    check(Keep(slots, "m" if "m" in slots else "v"), states, 256, kind, device)


@pytest.mark.parametrize("kind", ["mixed", "zeros", "not finite", "ties"])
@pytest.mark.parametrize(("codebook", "bits"), [("dynamic_tree", 8), ("linear", 4), ("quantile", 8)])
def test_first_moments_in_codebooks_with_minus_one(
    codebook: str, bits: int, kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their scales are magnitudes."""
    monkeypatch.setattr(_states, "_STORAGES", dict(_states._STORAGES))
    register_state(codebook, _states.CodebookState(codebook, bits=bits, codebook=codebook))
    check(Keep("mv", "m"), {"m": codebook, "v": "fp32"}, 256, kind, device)


@pytest.mark.parametrize("block", [64, 512, 4096])
@pytest.mark.parametrize("states", ["log8", "8bit", "fp8", "log4", "4bit"])
def test_block_sizes(states: str, block: int, device: str) -> None:
    check(Keep("mv", "m"), {"m": states, "v": states}, block, "one scale", device)


@triton.jit
def _unusual(x_at, values, cells, found):
    """Which of the fast encoders find a block unusual."""
    x = tl.load(x_at + tl.arange(0, 256)[None, :])
    random = tl.zeros([1, 256], tl.uint32)
    _, _, _, table = fast_codebook_encode(x, values, cells, 127, 0, 1, 8, False)
    _, _, _, unsigned = fast_codebook_encode(x, values, cells, 0, 0, 0, 8, False)
    _, _, _, float8 = fast_float8_encode(x, 2, 8, False)
    _, _, kept, pattern8 = fast_log_unsigned8_encode(x, random, 8, False)
    _, _, _, _, pattern4 = fast_log_unsigned4_encode(x, random, 4, False)
    _, _, _, relative = fast_normalized8_encode(x, kept, 8, False)
    _, _, _, _, signed = fast_log_signed_encode(x, 8, False)
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
    values = torch.zeros(1 << 15, device=device)

    def unusual(x: Tensor) -> list[int]:
        found = torch.full((7,), -1, dtype=torch.int32, device=device)
        with np.errstate(all="ignore"):
            _unusual[(1,)](x.to(device), values, cells, found, enable_fp_fusion=False)
        return found.tolist()

    assert unusual(torch.zeros(256)) == [0] * 7
    assert unusual(torch.rand(256, generator=torch.Generator().manual_seed(0)) + 1) == [0] * 7
    one = torch.zeros(256)
    one[7] = 2.0**-130
    assert unusual(one) == [1, 1, 1, 1, 1, 0, 1]  # in its unit it is not too small
