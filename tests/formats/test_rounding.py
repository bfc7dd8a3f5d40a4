"""Rounding: nearest is torch's cast, stochastic is unbiased and takes a neighbor, Philox is Philox."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.formats import (
    BF16,
    FP4_E2M1,
    FP8_E4M3,
    FP16,
    FloatFormat,
    random_bits,
    random_halves,
    round_to,
    round_with_bits,
)
from narrowgauge.formats._philox import philox


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_published_answers(counter, key, wanted) -> None:
    assert tuple(int(word) for word in philox(tuple(map(torch.tensor, counter)), key)) == wanted


@given(st.integers(0, 50), st.integers(1, 40), st.integers(0, 2**40))
def test_a_shard_draws_the_bits_of_the_whole(offset: int, count: int, step: int) -> None:
    whole = random_bits(offset + count, seed=3, stream=5, step=step)
    assert torch.equal(random_bits(count, seed=3, stream=5, step=step, offset=offset), whole[offset:])
    assert torch.equal(random_bits(count, seed=3, stream=5, step=torch.tensor(step), offset=offset), whole[offset:])


def test_seed_stream_and_step_all_matter_and_bits_are_uniform() -> None:
    n = 1 << 16
    base = random_bits(n, seed=0, stream=0, step=1)
    for other in ({"seed": 1}, {"stream": 1}, {"step": 2}):
        assert (random_bits(n, **({"seed": 0, "stream": 0, "step": 1} | other)) == base).float().mean() < 1e-3
    assert base.min() >= 0
    assert base.max() < 2**32
    for bit in range(32):
        assert abs(float(((base >> bit) & 1).double().mean()) - 0.5) < 5 * 0.5 / n**0.5


@pytest.mark.parametrize("fmt", [BF16, FP16, FP8_E4M3], ids=lambda fmt: fmt.name)
def test_stochastic_rounding_takes_a_neighbor_and_keeps_numbers_of_the_format(fmt: FloatFormat) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, generator=generator) * 10.0 ** torch.empty(20_000).uniform_(-6, 2, generator=generator)
    up = round_with_bits(x, fmt, torch.zeros(x.shape, dtype=torch.int64)).to(torch.float64)
    down = round_with_bits(x, fmt, torch.full(x.shape, 2**32 - 1)).to(torch.float64)
    assert (down.abs() <= x.abs()).all()
    assert (up.abs() >= x.abs()).all()
    assert ((up - down).abs() <= fmt.ulp(x.to(torch.float64))).all()
    exact = x.to(fmt.dtype)
    for bits in (0, 2**31, 2**32 - 1):
        again = round_with_bits(exact, fmt, torch.full(x.shape, bits))
        assert torch.equal(again.to(torch.float32), exact.to(torch.float32))


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)
def test_stochastic_rounding_rounds_up_with_exactly_the_covered_share(fmt: FloatFormat) -> None:
    """All 2^16 upper halves of the random word: the number of those that round up is the share, exactly."""
    bits = torch.arange(2**16, dtype=torch.int64) << 16
    for steps in (1, 77, 2**12, 2**13 - 1):
        share = steps / 2**13
        x = torch.full((2**16,), 1.0 + share * float(fmt.ulp(torch.ones(()))))
        rounded_up = round_with_bits(x, fmt, bits).to(torch.float32) > x
        assert int(rounded_up.sum()) == share * 2**16


def test_stochastic_rounding_is_reproducible() -> None:
    x = torch.linspace(-3, 3, 1000)
    first, again = (round_to(x, BF16, "stochastic", torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, again)


def test_nonfinite_numbers_and_overflow_round_as_torch_casts_them() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38])
    rounded = round_with_bits(x, BF16, torch.zeros(4, dtype=torch.int64))
    assert rounded[:2].tolist() == [torch.inf, -torch.inf]
    assert torch.isnan(rounded[2])
    assert rounded[3] == torch.inf


def test_a_number_far_below_the_smallest_comes_out_as_it_no_more_often_than_once_in_2_to_the_24() -> None:
    x = torch.full((4,), 2.0**-35)
    bits = torch.tensor([0, 255, 256, 2**32 - 1])
    assert round_with_bits(x, FP8_E4M3, bits).float().tolist() == [2.0**-9, 2.0**-9, 0.0, 0.0]


def test_what_is_no_tensor_of_floats_and_unknown_roundings_are_refused() -> None:
    for x in (0.1, torch.arange(3)):
        with pytest.raises(ValueError, match=r"x must be a tensor of floats.*, got .*"):
            round_to(x, BF16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rounding must be 'nearest' or 'stochastic'.*, got 'up'"):
        round_to(torch.ones(1), BF16, "up")  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [300, torch.tensor(300.0), torch.tensor(300, dtype=torch.int32)])
def test_halves_of_a_step_in_any_dtype_are_those_of_the_integer(step: int | torch.Tensor) -> None:
    options = {"seed": 0, "stream": 0, "device": torch.device("cpu")}
    for purpose in (0, 1, 5):
        found = random_halves(64, step=step, purpose=purpose, **options)
        assert torch.equal(found, random_halves(64, step=300, purpose=purpose, **options))
    assert not torch.equal(found, random_halves(64, step=step, purpose=0, **options))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("fmt", [BF16, FP8_E4M3, FP4_E2M1, FloatFormat("e3m4", 3, 4)], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_pass_as_if_nothing_were_rounded(dtype: torch.dtype, fmt: FloatFormat, rounding: str) -> None:
    x = torch.tensor([-1000.0, -0.3, 0.0, 0.7, 1000.0], dtype=dtype, requires_grad=True)
    found = round_to(x, fmt, rounding, torch.Generator().manual_seed(0))
    weights = torch.arange(1.0, 6.0)
    (found.float() * weights).sum().backward()
    assert x.grad.dtype == dtype
    assert torch.equal(x.grad.float(), weights)
    if torch.__version__ >= "2.13":  # 2.11 has no batched view in another dtype
        each = torch.func.vmap(torch.func.grad(lambda one: round_to(one, fmt, "nearest").float()))(x.detach())
        assert each.eq(1).all()
    plain = round_to(x.detach(), fmt, rounding, torch.Generator().manual_seed(0))
    assert torch.equal(found.float(), plain.float())
