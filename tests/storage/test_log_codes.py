"""Logarithmic codes against their definition in exact integers, and what they promise."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from narrowgauge.storage._log_codes import LogCodes

UNSIGNED, SIGNED = LogCodes(False, 8, 48), LogCodes(True, 8, 24)
UNSIGNED4 = LogCodes(False, 4, 48)
ALL = {"unsigned": UNSIGNED, "signed": SIGNED, "unsigned4": UNSIGNED4}
every = pytest.mark.parametrize("codes", ALL.values(), ids=ALL)
F = np.float32


def data(codes: LogCodes, decades: float, shape=(64, 256), seed: int = 0) -> torch.Tensor:
    """Normals times 10^u, u uniform over some decades; squares where there is no sign."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 10 ** (
        torch.rand(shape, generator=generator) * decades - decades / 2
    )
    return x if codes.signed else x.square()


def pattern(x: np.ndarray | np.float32) -> np.ndarray:
    return np.asarray(x, F).view(np.int32).astype(np.int64)


def oracle(codes: LogCodes, x: np.ndarray, random: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One block, by the module's definition: codes and decoded values, element by element."""
    magnitude = np.abs(x) if codes.signed else np.maximum(x, F(0))
    magnitude[magnitude < F(2.0**-126)] = 0
    if not magnitude.any():
        return np.zeros(len(x), np.uint8), np.zeros(len(x), F)
    top, least = magnitude.max(), magnitude[magnitude > 0].min()
    if codes.signed:
        foot = min(max(F(8) * least, top * F(2.0**-codes.binades), F(2.0**-126)), F(2) * top)
        foot = F(2.0 ** np.floor(np.log2(np.float64(foot))))
    else:
        floor = int(pattern(top)) - (codes.binades << 23)
        foot = max(least, np.int32(max(floor, 1 << 23)).view(F))
    shift = foot if codes.signed else F(0)
    lo, hi, n = int(pattern(foot)), int(pattern(top + shift)), codes.steps
    rate = F(n * 65536) / F(hi - lo) if hi > lo else F(0)
    step = F(hi - lo) / F(n)
    out, values = np.zeros(len(x), np.uint8), np.zeros(len(x), F)
    for i, m in enumerate(magnitude):
        if m == 0:
            continue
        fine = int(F(max(int(pattern(m + shift)) - lo, 0)) * rate)
        k = n if m == top else min((fine + int(random[i])) >> 16, n)
        value = top if k == n else np.int32(lo + int(np.rint(F(k) * step))).view(F) - shift
        if codes.signed:
            negative = x[i] < 0 and k > 0
            out[i], values[i] = k + (codes.sign if negative else 0), -value if x[i] < 0 else value
        else:
            out[i], values[i] = k + 1, value
    return out, values


@every
@pytest.mark.parametrize("decades", [0, 2, 7, 30])
@pytest.mark.parametrize("stochastic", [False, True])
def test_codes_and_values_are_those_of_the_definition(codes: LogCodes, decades: int, stochastic: bool) -> None:
    x = data(codes, decades, (6, 50)) if decades < 30 or codes.signed else data(codes, 15, (6, 50))
    x[0, 3] = 0.0
    x[1] = 0.0
    x[2, :] = x[2, 0]
    random = torch.randint(0, 1 << 16, x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    found, ranges = codes.encode(x, 50, random if stochastic else None)
    values = codes.decode(found, ranges, 50)
    half = np.full(50, 1 << 15)
    for row in range(len(x)):
        wanted, decoded = oracle(codes, x[row].numpy().copy(), random[row].numpy() if stochastic else half)
        assert np.array_equal(found[row].numpy(), wanted)
        assert np.array_equal(values[row].numpy(), decoded)


@every
@pytest.mark.parametrize("decades", [0, 2, 6, 12])
def test_what_is_kept_exactly_and_how_far_the_rest_is_off(codes: LogCodes, decades: int) -> None:
    x = data(codes, decades)
    x[5, 7] = 0.0
    x[6] = 0.0
    found, ranges = codes.encode(x, 256)
    again = codes.decode(found, ranges, 256)
    magnitude = x.abs()
    top = magnitude.amax(dim=1, keepdim=True)
    assert torch.equal(again[magnitude == top], x[magnitude == top])
    assert not again[x == 0].any()
    assert torch.equal(torch.sign(again) * (again != 0), torch.sign(x) * (again != 0))
    error = (again.double() - x.double()).abs()
    if codes.signed:
        assert (error <= magnitude).all()
        lo, hi = ranges[:, 0].view(torch.int32), (ranges[:, 0] + ranges[:, 1]).view(torch.int32)
        width = ranges[:, :1].double() * ((hi - lo).double() / codes.steps / 2**23)[:, None]
        below = magnitude + width < ranges[:, :1]  # equal steps up to c
        assert (error <= width / 2 * 1.00001)[below].all()
    else:
        inside = (x >= ranges[:, :1]) & (x > 0)
        lo, hi = ranges[:, 0].view(torch.int32), ranges[:, 1].view(torch.int32)
        steps = ((hi - lo).double() / codes.steps)[:, None]
        miss = (again.view(torch.int32).double() - x.view(torch.int32).double()).abs()
        assert (miss <= steps / 2 + 1 + steps * 1e-6)[inside].all()
        assert (again[x > 0] > 0).all()
        assert torch.equal(again[~inside & (x > 0)], ranges[:, :1].expand_as(x)[~inside & (x > 0)])


@every
def test_symmetries(codes: LogCodes) -> None:
    x = data(codes, 4)
    found, ranges = codes.encode(x, 256)
    scaled, scaled_ranges = codes.encode(x * 2.0**-20, 256)
    assert torch.equal(scaled, found)
    assert torch.equal(scaled_ranges, ranges * 2.0**-20)
    if codes.signed:
        negated, _ = codes.encode(-x, 256)
        assert torch.equal(negated ^ found, torch.where((found & (codes.sign - 1)) > 0, codes.sign, 0).byte())
    order = x.argsort(dim=1)
    again = codes.decode(found, ranges, 256).gather(1, order)
    assert (again.diff(dim=1) >= 0).all()


def test_second_moments_that_were_rounded_are_not_rounded_again() -> None:
    for codes in (UNSIGNED, UNSIGNED4):
        once = codes.decode(*codes.encode(data(codes, 5), 256), 256)
        assert torch.equal(codes.decode(*codes.encode(once, 256), 256), once)


@pytest.mark.parametrize("block", [1, 3, 64, 1000, 10**6])
@every
def test_blocks_of_any_size_and_a_short_last_one(codes: LogCodes, block: int) -> None:
    x = data(codes, 3, (7, 101))
    found, ranges = codes.encode(x, block)
    assert found.shape == x.shape
    again = codes.decode(found, ranges, block)
    flat = x.reshape(-1)
    for first in range(0, flat.numel(), block):
        one = flat[first : first + block]
        assert torch.equal(again.reshape(-1)[first : first + block], codes.decode(*codes.encode(one, block), block))
    empty, none = codes.encode(torch.zeros(0, 4), block)
    assert (empty.shape, none.shape) == ((0, 4), (0, 2))


@every
def test_what_is_no_number_stays_in_its_place(codes: LogCodes) -> None:
    x = data(codes, 1, (4, 32))
    clean = codes.decode(*codes.encode(x, 32), 32)
    x[0, 3], x[1, 4], x[2, 5] = float("nan"), float("inf"), -float("inf")
    x[3] = 0.0
    x[3, 0] = float("inf")
    again = codes.decode(*codes.encode(x, 32), 32)
    assert again[0, 3] == 0
    assert again[1, 4] == x[1, torch.arange(32) != 4].abs().max()
    assert again[2, 5] == (-x[2, torch.arange(32) != 5].abs().max() if codes.signed else 0)
    assert again[3, 0] == torch.finfo(torch.float32).max
    assert not again[3, 1:].any()
    assert torch.isfinite(again).all()
    others = torch.ones_like(x, dtype=torch.bool)
    others[0, 3] = others[1, 4] = others[2, 5] = False
    others[3] = False
    # The block's largest or least may have been what was replaced; within a step all else is as before.
    assert ((again - clean).abs() <= 0.5 * clean.abs() + 1e-3)[others].all()


@pytest.mark.parametrize("scale", [2.0**-126, 1.5 * 2.0**-120, 1e-30, 1.0, 1e30, 2.0**126, 3.0e38])
@every
def test_the_ends_of_float32(codes: LogCodes, scale: float) -> None:
    x = torch.tensor([[1.0, 0.75, 0.5, 0.0, 2.0**-20, 2.0**-40]], dtype=torch.float64) * scale
    x = x.to(torch.float32)
    again = codes.decode(*codes.encode(x, 6), 6)
    assert torch.isfinite(again).all()
    assert again[0, 0] == x[0, 0]
    assert again[0, 3] == 0
    normal = x >= 2.0**-126
    assert not again[~normal].any()
    assert codes.signed or (again[normal] > 0).all()


def test_stochastic_rounding_takes_the_share_of_random_numbers_that_the_place_in_its_step_asks_for() -> None:
    """All 2^16 random numbers for one element: exactly the share floor(...) / 2^16 of them rounds up."""
    x = torch.tensor([1.0, 1.0e-3, 0.37, 0.0112])
    random = torch.arange(1 << 16, dtype=torch.int32)[:, None].expand(-1, 4).contiguous()
    found, ranges = UNSIGNED.encode(x.expand(1 << 16, 4), 4, random)
    assert (ranges == ranges[0]).all()
    assert set(found[:, 0].tolist()) == {255}
    assert set(found[:, 1].tolist()) == {1}
    lo, hi = int(pattern(F(1e-3))), int(pattern(F(1.0)))
    for column in (2, 3):
        values = found[:, column].long()
        place = Fraction(int(pattern(F(x[column].item()))) - lo, hi - lo) * 254
        low = int(place)
        assert set(values.tolist()) == {low + 1, low + 2}
        share = float((values == low + 2).double().mean())
        assert share == pytest.approx(float(place - low), abs=2.0**-14)


def test_it_is_unbiased_in_value_inside_a_binade() -> None:
    generator = torch.Generator().manual_seed(0)
    x = 1.0 + 0.9 * torch.rand(1, 64, generator=generator)
    x[0, 0], x[0, 1] = 1.0, 1.9999
    rows = x.expand(20000, 64).contiguous()
    random = torch.randint(0, 1 << 16, rows.shape, generator=generator, dtype=torch.int32)
    mean = UNSIGNED4.decode(*UNSIGNED4.encode(rows, 64, random), 64).double().mean(dim=0)
    step = 1.0 / 14
    assert ((mean - x[0].double()).abs() < 5 * step / 2 / 20000**0.5).all()


@pytest.mark.gpu
@every
@pytest.mark.parametrize("decades", [0, 6, 12])
def test_a_gpu_gives_the_same_codes_and_values(codes: LogCodes, decades: int) -> None:
    x = data(codes, decades, (300, 1000))
    random = torch.randint(0, 1 << 16, x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    for bits in (None, random):
        here, ranges = codes.encode(x, 256, bits)
        there, there_ranges = codes.encode(x.cuda(), 256, None if bits is None else bits.cuda())
        assert torch.equal(there.cpu(), here)
        assert torch.equal(there_ranges.cpu(), ranges)
        assert torch.equal(codes.decode(there, there_ranges, 256).cpu(), codes.decode(here, ranges, 256))
