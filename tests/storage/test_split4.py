"""Weights of 20 bits: a bf16 and a 4-bit word, rounded stochastically."""

import torch
from torch import Tensor

from narrowgauge.storage import StateContext, state_storage, weight_storage
from narrowgauge.storage._weights import join, to_bytes, to_nibbles

SPLIT4 = weight_storage("split4")
HALF = 127  # as random bits: to nearest


def every_weight() -> tuple[Tensor, Tensor]:
    """Every bf16 beside each of the 16 words, as split4 stores them."""
    hi = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).repeat_interleave(16)
    words = torch.arange(-128, 128, 16, dtype=torch.int16).to(torch.int8).repeat(2**16)
    return hi, to_nibbles(words)


def plus(p: Tensor, low: Tensor, delta: Tensor, random: int | Tensor) -> tuple[Tensor, Tensor]:
    """The words after an update; random bits are 8 an element."""
    bits = random if isinstance(random, Tensor) else torch.full(p.shape, random, dtype=torch.int32)
    hi, made = SPLIT4.add(p, low, SPLIT4.read(p, low), delta, lambda: bits)
    assert made is not None
    return hi, made


def test_what_is_stored_stays_stored_whatever_the_random_bits() -> None:
    p, low = every_weight()
    weight = SPLIT4.read(p, low)
    for random in (0, HALF, 255):
        hi, made = plus(p, low, torch.zeros(p.shape), random)
        read = SPLIT4.read(hi, made)
        assert torch.equal(read.nan_to_num(1.5), weight.nan_to_num(1.5))


def test_a_weight_reads_as_split8_reads_the_same_word() -> None:
    p, low = every_weight()
    words = to_bytes(low, p.shape)
    assert torch.equal(words, torch.arange(-128, 128, 16, dtype=torch.int16).to(torch.int8).repeat(2**16))
    read, same = SPLIT4.read(p, low), join(p, words)
    assert torch.equal(read.view(torch.int32), same.view(torch.int32))
    assert weight_storage("split4").init(p[:5]).shape == (3,)


def test_rounding_is_up_in_as_many_cases_of_the_random_bits_as_the_share_cut_off() -> None:
    """All 256 values of the random bits, against float64: the mean is the number itself, to the nearest 256th."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(400, generator=generator) * 10.0 ** torch.randint(-20, 20, (400,), generator=generator)
    random = torch.arange(256, dtype=torch.int32).repeat(len(values))
    p = torch.zeros(random.shape, dtype=torch.bfloat16)
    hi, low = plus(p, SPLIT4.init(p), values.repeat_interleave(256), random)
    kept = SPLIT4.read(hi, low).double().view(len(values), 256)
    unit = 2.0 ** (torch.frexp(values).exponent.double() - 12)
    assert ((kept.mean(1) - values.double()).abs() <= unit / 512).all()
    assert ((kept - values.double()[:, None]).abs() < unit[:, None]).all()
    exact = (values.view(torch.int32) & ~0xF).view(torch.float32)  # 28 bits: the mean of these has no error at all
    hi, low = plus(p, SPLIT4.init(p), exact.repeat_interleave(256), random)
    assert torch.equal(SPLIT4.read(hi, low).double().view(len(values), 256).mean(1), exact.double())


def test_small_steps_arrive_in_the_mean_and_to_nearest_not_at_all() -> None:
    p = torch.ones(1 << 14, dtype=torch.bfloat16)
    low, fixed, fixed_low = SPLIT4.init(p), p, SPLIT4.init(p)
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        delta = torch.full(p.shape, -(2.0**-17))  # 1/64 of the spacing of the 20-bit weight
        random = torch.randint(0, 256, p.shape, generator=generator, dtype=torch.int32)
        p, low = plus(p, low, delta, random)
        fixed, fixed_low = plus(fixed, fixed_low, delta, HALF)
    moved = 1 - SPLIT4.read(p, low).double().mean()
    assert abs(moved / (200 * 2.0**-17) - 1) < 0.02
    assert torch.equal(SPLIT4.read(fixed, fixed_low), torch.ones(p.shape))


def test_infinity_and_nan_are_in_the_bf16_alone() -> None:
    p = torch.tensor([1.0, 1.0, 1.0, 3.38e38], dtype=torch.bfloat16)
    hi, low = plus(p, SPLIT4.init(p), torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38]), 255)
    assert hi.tolist()[:2] == [torch.inf, -torch.inf]
    assert hi[2].isnan()
    assert hi[3] == torch.inf
    assert not low.any()


def test_split8_words_become_the_nearest_that_leave_the_bf16_alone() -> None:
    lo = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8)
    found = to_bytes(to_nibbles(lo), lo.shape).short()
    assert ((found - lo.short()).abs() <= 8 + 8 * (lo.short() > 119)).all()
    assert found.max() == 112


def test_the_bits_that_v_leaves_over_hardly_depend_on_how_v_was_rounded() -> None:
    """`log8` with all 16-bit numbers: it rounds up as often beside each lower byte as without, to a 256th."""
    random = torch.cat([torch.arange(1 << 16), torch.zeros(2)]).to(torch.int32)
    for x in (1.0003, 1.01, 1.3, 1.7001):
        moment = torch.cat([torch.full((1 << 16,), x), torch.tensor([1e-6, 2.0])])  # and the ends of the range
        context = StateContext(moment.shape, False, moment.numel())
        codes = state_storage("log8").encode(moment, context, random)["codes"][: 1 << 16].int()
        up = (codes > codes.min()).view(256, 256).double()
        assert 0 < up.mean() < 1
        assert codes.max() - codes.min() == 1
        assert ((up.mean(0) - up.mean()).abs() <= 1 / 256).all()
