"""Steps of the bit pattern against their definition in Python's integers, and what they promise."""

import numpy as np
import pytest
import torch
from coded_states import Coded

from narrowgauge.storage._log_states import LogUnsignedState

EIGHT, FOUR = (Coded.of(bits, signed=False) for bits in (8, 4))
both = pytest.mark.parametrize("codes", [EIGHT, FOUR], ids=["8 bits", "4 bits"])
STEPS = {8: 254, 4: 14}
BINADES = {8: 63, 4: 48}
LARGEST = 0x7F7FFFFF
F = np.float32


def data(decades: float, shape: tuple[int, int] = (64, 256), seed: int = 0) -> torch.Tensor:
    """Squares of normals with scales of 10^u, u uniform over some decades."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** (torch.rand(shape, generator=generator, dtype=torch.float64) * decades - decades / 2)
    return (torch.randn(shape, generator=generator) * scale).square().clamp_max(3e38).to(torch.float32)


def halves(x: torch.Tensor, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 1 << 16, x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def patterns(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32).long()


def base_and_step(codes: Coded, ranges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(codes.storage, LogUnsignedState)
    return codes.storage.base_and_step(ranges)


def sound(codes: Coded, ranges: torch.Tensor) -> bool:
    return codes.storage.validate({"ranges": ranges}, signed=False) is None


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def a_range(bits: int, lo: int, hi: int) -> tuple[int, int, int | list[int]]:
    """Base, step, word or words; in 8 bits by trying one power of two after the other."""
    if bits == 4:
        step = max(ceil(hi - lo, 14), 1)
        return lo, step, [lo, step]
    s = next(s for s in range(12, 32) if ceil(hi, 1 << s) - (lo >> s) <= 254)
    return lo >> s << s, 1 << s, (lo >> s << s) + s


def oracle(bits: int, x: list[float], random: list[int] | None) -> tuple[list[int], int | list[int], list[float]]:
    """One block by the module's definition: codes, word, values."""
    numbers = [int(F(value).view(np.int32)) for value in x]
    there = [b for b in numbers if 1 << 23 <= b <= LARGEST]
    if not there:
        return [0] * len(x), 0 if bits == 8 else [0, 0], [0.0] * len(x)
    hi = max(there)
    lo = max(min(there), hi - (BINADES[bits] << 23), 1 << 23)
    base, step, word = a_range(bits, lo, hi)
    codes = []
    for i, b in enumerate(numbers):
        d = step // 2 if random is None else random[i] * step // 65536
        k = min((max(b, lo) - base + d) // step, (LARGEST - base) // step) + 1
        codes.append(k if b >= 1 << 23 else 0)
    return codes, word, [float(np.int32(base + (k - 1) * step).view(F)) if k else 0.0 for k in codes]


@both
@pytest.mark.parametrize("decades", [0, 3, 12, 36])
@pytest.mark.parametrize("stochastic", [False, True])
def test_codes_ranges_and_values_are_those_of_the_definition(
    codes: Coded, decades: float, stochastic: bool
) -> None:
    x = data(decades, (12, 50))
    x[0, 3], x[1], x[2, 0] = 0.0, 0.0, 1e-39
    x[2, 1:] = x[2, 1]
    x[3] = 1.0 + 1e-6 * torch.rand(50)
    x[4] = 1.0 + torch.rand(50)
    x[5] = torch.rand(50) * 3.4e38
    x[6] = 2.0**-126 * (1 + torch.rand(50))
    random = halves(x)
    found, ranges = codes.encode(x, 50, random if stochastic else None)
    values = codes.decode(found, ranges, 50)
    for row in range(len(x)):
        noise = random[row].tolist() if stochastic else None
        wanted, word, decoded = oracle(codes.bits, x[row].tolist(), noise)
        assert ranges[row].tolist() == word
        assert found[row].tolist() == wanted
        assert values[row].tolist() == decoded
    assert sound(codes, ranges)


@both
def test_every_pair_of_ends_has_the_narrowest_step_that_is_wide_enough(codes: Coded) -> None:
    generator = torch.Generator().manual_seed(0)
    hi = torch.randint(1 << 23, LARGEST, (3000,), generator=generator)
    span = (2 ** (torch.rand(3000, generator=generator, dtype=torch.float64) * 31)).long()
    lo = torch.maximum(hi - span, torch.full_like(hi, 1 << 23))
    # Where a step becomes too narrow by one, on both sides.
    edges = torch.tensor([(STEPS[codes.bits] + i) << s for s in range(12, 22) for i in (-1, 0, 1)])
    lo, hi = torch.cat([lo, torch.full_like(edges, 1 << 29)]), torch.cat([hi, (1 << 29) + edges])
    x = torch.stack([lo, hi], dim=1).to(torch.int32).view(torch.float32)
    _, ranges = codes.encode(x, 2)
    for word, low, high in zip(ranges.tolist(), lo.tolist(), hi.tolist(), strict=True):
        assert word == a_range(codes.bits, max(low, high - (BINADES[codes.bits] << 23)), high)[2]


@both
@pytest.mark.parametrize("decades", [0, 2, 6, 12])
def test_an_error_is_at_most_half_a_step_and_nothing_but_zero_becomes_zero(codes: Coded, decades: float) -> None:
    x = data(decades)
    x[5, 7] = 0.0
    x[6] = 0.0
    found, ranges = codes.encode(x, 256)
    again = codes.decode(found, ranges, 256)
    assert torch.equal(again == 0, x < 2.0**-126)
    base, step = (part.squeeze(1) for part in base_and_step(codes, ranges))
    lowest = (patterns(x.amax(dim=1)) - (BINADES[codes.bits] << 23)).clamp_min(0)
    inside = (patterns(x) >= lowest[:, None]) & (again > 0)
    miss = (patterns(again) - patterns(x)).abs()
    assert (miss <= step[:, None] / 2)[inside].all()
    # Below the range all count as its lower end.
    below = ~inside & (again > 0)
    miss = (patterns(again) - torch.maximum(lowest, base.long())[:, None]).abs()
    assert (miss <= step[:, None])[below].all()


def test_what_was_rounded_once_is_kept_unchanged() -> None:
    """With any random numbers: a code of 8 bits is a float of few bits, whatever else is in its block. A range in 4
    bits does not widen by being kept: else it would a little at every step, without end."""
    once = EIGHT.decode(*EIGHT.encode(data(5), 256, halves(data(5))), 256)
    for seed in range(3):
        assert torch.equal(EIGHT.decode(*EIGHT.encode(once, 256, halves(once, seed)), 256), once)
    part = once[:, ::2].contiguous()
    assert torch.equal(EIGHT.decode(*EIGHT.encode(part, 128, halves(part)), 128), part)
    first = FOUR.decode(*FOUR.encode(data(3), 256), 256)
    again = FOUR.decode(*FOUR.encode(first, 256), 256)
    assert (patterns(again) - patterns(first)).abs().max() <= 14  # whole patterns, 14 steps


@both
def test_what_is_no_number_stays_in_its_place(codes: Coded) -> None:
    x = data(0, (5, 32)).clamp_min(0.5).clamp_max(2.0)
    clean = codes.decode(*codes.encode(x, 32), 32)
    spoilt = x.clone()
    spoilt[0, 3], spoilt[1, 4], spoilt[2, 5] = torch.nan, torch.inf, -torch.inf
    spoilt[3] = 0.0
    spoilt[3, 0] = torch.inf
    spoilt[4, 6] = -1.0
    spoilt.view(torch.int32)[0, 9] = -1  # a NaN with a sign
    again = codes.decode(*codes.encode(spoilt, 32), 32)
    assert torch.isfinite(again).all()
    for row, column in ((0, 3), (0, 9), (1, 4)):
        assert again[row, column] == again[row].max() >= x[row].median()
    assert again[2, 5] == again[4, 6] == 0
    assert again[3, 0] > 1e38
    assert not again[3, 1:].any()
    others = torch.ones_like(x, dtype=torch.bool)
    others[3] = False
    others[[0, 0, 1, 2, 4], [3, 9, 4, 5, 6]] = False
    assert ((again - clean).abs() <= (0.02 if codes.bits == 8 else 0.3) * clean)[others].all()


@pytest.mark.parametrize("scale", [2.0**-126, 1.5 * 2.0**-120, 1e-30, 2.0**126, 3.4e38])
@both
def test_the_ends_of_float32(codes: Coded, scale: float) -> None:
    x = (torch.tensor([[1.0, 0.75, 0.5, 0.0, 2.0**-20, 2.0**-40]], dtype=torch.float64) * scale).to(torch.float32)
    for random in (None, torch.full((1, 6), 65535, dtype=torch.int32)):
        again = codes.decode(*codes.encode(x, 6, random), 6)
        assert torch.isfinite(again).all()
        assert again[0, 3] == 0
        assert torch.equal(again > 0, x >= 2.0**-126)


@both
def test_stochastic_rounding_takes_the_share_of_random_numbers_that_the_place_in_its_step_asks_for(
    codes: Coded,
) -> None:
    """All 2^16 random numbers for each of four elements: the share that rounds up is the place, to 2^-16."""
    x = torch.tensor([1.0, 1.0e-3, 0.37, 0.0112])
    random = torch.arange(1 << 16, dtype=torch.int32)[:, None].expand(-1, 4).contiguous()
    found, ranges = codes.encode(x.expand(1 << 16, 4), 4, random)
    base, step = (int(value) for value in base_and_step(codes, ranges[:1]))
    for column in range(4):
        place = (int(patterns(x)[column]) - base) / step
        up = (found[:, column].long() == int(place) + 2).double().mean().item()
        assert set(found[:, column].tolist()) <= {int(place) + 1, int(place) + 2}
        assert up == pytest.approx(place - int(place), abs=2.0**-16)


def test_ranges_that_no_encoder_makes_are_told() -> None:
    words = torch.tensor([-1, 7, (1 << 30) + 31, (1 << 22) + 13, 0x7F800000 + 13, (1 << 30) + 9, (1 << 30) + 4000])
    assert not any(sound(EIGHT, word[None]) for word in words.to(torch.int32))
    pairs = [[-1, 5], [1 << 30, 0], [0, 5], [1 << 22, 5], [0x7F800000, 5], [1 << 30, -5], [1 << 30, 1 << 29]]
    assert not any(sound(FOUR, torch.tensor([pair], dtype=torch.int32)) for pair in pairs)
