"""Float8 weights: every word by an oracle in float64, the scale, and what a tensor of torch can be asked."""

from __future__ import annotations

import copy
import io
import math
import multiprocessing
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.formats import FP8_E4M3, FloatFormat, random_bits
from narrowgauge.storage import Float8Weight, weight_storage
from narrowgauge.storage._float8_weight import (
    LARGEST_SCALE,
    SCALE_OF_ZEROS,
    SMALLEST_SCALE,
    from_words,
    largest_code,
    next_scale,
    scale_for,
    to_words,
)

STORAGE = weight_storage("fp8split8")
# Four bits of exponent and eleven of fraction: the numbers that code and low word are together.
BOTH_WORDS = FloatFormat("e4m11", 4, 11, has_infinity=False)
ONE = torch.tensor(1.0)


def every_pair() -> tuple[Tensor, Tensor]:
    """All codes beside all low words that they can have: 65,536 without those of zeros below 0 and of NaN."""
    codes, low = torch.meshgrid(torch.arange(256), torch.arange(-128, 128), indexing="ij")
    bare = codes & 0x7F
    possible = ((bare > 0) | (low >= 0)) & (bare < 0x7F)
    return codes[possible].to(torch.uint8).view(torch.float8_e4m3fn), low[possible].to(torch.int8)


def nearest(p: Tensor) -> Tensor:
    return torch.full(p.shape, 128, dtype=torch.int64)


@pytest.mark.parametrize("power", [-32, -9, 0, 7])
def test_every_pair_of_words_is_the_number_of_its_pattern_and_comes_back(power: int) -> None:
    codes, low = every_pair()
    patterns = (codes.view(torch.uint8).long() & 0x7F) * 256 + low
    sign = torch.where(codes.view(torch.uint8) >= 0x80, -1.0, 1.0).double()
    exponent, fraction = (patterns >> 11).double(), (patterns & 2047).double() / 2048
    wanted = torch.where(exponent > 0, 2.0 ** (exponent - 7) * (1 + fraction), 2.0**-6 * fraction)
    assert wanted[::997].tolist() == [BOTH_WORDS.decode(int(n)) for n in patterns[::997]]
    wanted = wanted * sign * 2.0**power
    weight = from_words(codes, low, torch.tensor(2.0**power))
    assert torch.equal(weight.double(), wanted)
    assert torch.equal(torch.signbit(weight), sign < 0)
    below = weight.abs() <= 224 * 2.0**power  # the largest with which the scale stays
    p = Float8Weight(codes[below], torch.tensor(2.0**power), low[below])
    zero = torch.full(p.shape, -0.0)  # which changes the sign of no zero
    for random in (nearest(p), torch.zeros(p.shape, dtype=torch.int64), torch.full(p.shape, 255)):
        new, _ = STORAGE.add(p, None, weight[below], zero, lambda random=random: random)
        assert torch.equal(new.scale, p.scale)
        assert torch.equal(new.codes.view(torch.uint8), p.codes.view(torch.uint8))
        assert torch.equal(new.low, p.low)


def test_low_words_that_their_code_cannot_have_are_cut_off() -> None:
    codes = torch.tensor([0x00, 0x80, 0x7F, 0xFF], dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = from_words(codes, torch.tensor([-5, -5, 3, 3], dtype=torch.int8), ONE)
    assert weight[:2].tolist() == [0.0, 0.0]
    assert weight[2:].isnan().all()


def test_rounding_is_to_the_nearest_of_both_words_and_of_the_codes() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, generator=generator) * torch.logspace(-8, 2, 20_000)
    x = x.clamp(-448, 448)
    codes, low = to_words(x, ONE)
    found, wanted = from_words(codes, low, ONE).double(), BOTH_WORDS.nearest(x.double())
    # The oracle rounds halves to even. Subnormal numbers are first rounded to multiples of 2^-29.
    assert ((found - x).abs() <= (wanted - x).abs() + 2.0**-30 * (x.abs() < 2.0**-6)).all()
    assert (found == wanted).double().mean() > 0.99
    half = FP8_E4M3.ulp(x.double()) / 2 + BOTH_WORDS.ulp(x.double()) / 2
    assert ((codes.double() - x.double()).abs() <= half).all()
    assert ((from_words(codes, low, ONE) - x).abs() <= BOTH_WORDS.ulp(x.double()) / 2).all()


@pytest.mark.parametrize("size", [300.0, 1.0, 0.01, 1e-4])
def test_stochastic_rounding_is_right_on_average_and_between_neighbors(size: float) -> None:
    """A step a hundred times below the spacing of the low words; also among subnormal codes."""
    start = torch.full((200_000,), size)
    spacing = BOTH_WORDS.ulp(start.double())
    for share in (0.01, 0.3, -0.3):
        x = (BOTH_WORDS.nearest(start.double()) + share * spacing).float()
        random = random_bits(len(x), seed=0, stream=0, step=1) >> 20
        found = from_words(*to_words(x, ONE, random), ONE).double()
        assert ((found - x.double()).abs() < spacing).all()
        moved = (found - BOTH_WORDS.nearest(start.double())) / spacing
        # Twelve random bits: a share is a multiple of 2^-12; and the noise of 200,000 draws, four deviations.
        assert abs(float(moved.mean()) - share) < 2.0**-12 + 4 * math.sqrt(0.25 / len(x))


@pytest.mark.parametrize("largest", [1e-30, 2.0**-25, 0.02, 0.0546875, 111.9, 112.0, 224.0, 28_000.0, 3e38])
def test_the_scale_leaves_a_factor_of_two_above_the_largest(largest: float) -> None:
    scale = float(scale_for(torch.tensor(largest)))
    assert math.log2(scale) == int(math.log2(scale))
    codes = largest / scale
    assert (
        112 <= codes < 224
        or (scale == SMALLEST_SCALE and codes < 112)
        or (scale == LARGEST_SCALE and largest > 28_672)
    )


def test_the_next_scale_puts_every_largest_code_between_112_and_224_unless_it_is_from_56() -> None:
    assert float(scale_for(torch.tensor(0.0))) == SCALE_OF_ZEROS
    for code in range(127):
        codes = torch.tensor([3, 0x7F, 0x80 | code] if code > 3 else [0xFF, code], dtype=torch.uint8)
        largest = largest_code(codes.view(torch.float8_e4m3fn))
        assert int(largest) == code
        number = float(codes[-1:].view(torch.float8_e4m3fn).float().abs())
        scale = float(next_scale(largest, ONE))
        if number == 0 or 56 <= number <= 224:
            assert scale == 1
        elif code >= 8:
            assert 112 < number / scale <= 224
        else:  # a subnormal code: less in one step, never too much
            assert scale <= 2.0**-13
            assert number / scale <= 224
    for scale in (SMALLEST_SCALE, LARGEST_SCALE):
        assert SMALLEST_SCALE <= float(next_scale(torch.tensor(20), ONE * scale)) <= LARGEST_SCALE
        assert SMALLEST_SCALE <= float(next_scale(torch.tensor(126), ONE * scale)) <= LARGEST_SCALE


def test_weights_that_grow_and_shrink_keep_twelve_bits() -> None:
    """Down by factors of ten a step, and up by factors of two: no element saturates, and none is lost."""
    shape = torch.linspace(-1, 1, 999)
    p = Float8Weight.of(1e3 * shape)
    scales = set()
    for size in (*(10.0**-n for n in range(-2, 7)), *(1e-6 * 2.0**n for n in range(34))):
        wanted = size * shape
        weight = STORAGE.read(p, None)
        random = nearest(p)
        p, _ = STORAGE.add(p, None, weight, wanted - weight, lambda random=random: random)
        scales.add(float(p.scale))
        error = (STORAGE.read(p, None).double() - wanted.double()).abs()
        # To the nearest but for a 256th.
        assert (error <= 2.0**-11.99 * wanted.abs() + p.scale.double() * 2.0**-17.9 + 2.0**-20 * size).all()
    assert len(scales) > 10


def test_zeros_keep_their_scale_and_what_grows_beyond_448_codes_ends_there() -> None:
    p = Float8Weight.of(torch.zeros(3))
    for _ in range(2):
        p, _ = STORAGE.add(p, None, STORAGE.read(p, None), torch.zeros(3), lambda: torch.full((3,), 128))
    assert float(p.scale) == SCALE_OF_ZEROS
    for wanted in (448 * SCALE_OF_ZEROS, 2 * 448 * SCALE_OF_ZEROS, 5.0):
        weight = STORAGE.read(p, None)
        p, _ = STORAGE.add(p, None, weight, 5.0 - weight, lambda: torch.full((3,), 128))
        assert torch.equal(STORAGE.read(p, None), torch.full((3,), wanted))


def test_one_scale_after_another_loses_the_low_words_last_bit_alone() -> None:
    codes, low = every_pair()
    weight = from_words(codes, low, ONE)
    for factor in (0.25, 0.5, 2.0, 4.0):
        scale = ONE * factor
        inside = weight.abs() <= 448 * factor
        again = from_words(*to_words(weight[inside], scale), scale).double()
        wanted = weight[inside].double()
        normal = wanted.abs() >= 2.0**-6 * factor
        assert torch.equal(again[normal], wanted[normal])
        assert ((again - wanted).abs() <= 2.0**-18 * factor).all()


# The tensor


def sample(rows: int = 12, columns: int = 8) -> Tensor:
    return 0.02 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def test_outside_it_is_a_bfloat16_tensor_of_the_codes_numbers() -> None:
    x = sample()
    w = Float8Weight.of(x)
    assert (w.shape, w.dtype, w.device, w.is_contiguous()) == (x.shape, torch.bfloat16, x.device, True)
    plain = w.dequantize()
    assert type(plain) is Tensor
    assert torch.equal(plain.double(), w.codes.double() * w.scale.double())
    for result in (w + 0, w @ w.t(), w.float(), w.sum(), torch.cat([w, w]), w.abs().max()):
        assert type(result) is Tensor
    assert torch.equal(w.float(), plain.float())
    assert torch.equal(w @ w.t(), plain @ plain.t())
    assert w.nbytes == w.numel() * 2 + 8  # codes, low words, scale and largest code


def test_a_parameter_of_it_has_ordinary_gradients() -> None:
    p, q = nn.Parameter(Float8Weight.of(sample())), nn.Parameter(Float8Weight.of(sample()).dequantize())
    x = torch.randn(5, 8).to(torch.bfloat16)
    for weight in (p, q):
        for _ in range(2):  # the second is added
            nn.functional.linear(x, weight).float().square().sum().backward()
    assert isinstance(p, nn.Parameter)
    assert isinstance(p, Float8Weight)
    assert type(p.grad) is Tensor
    assert p.grad.dtype == torch.bfloat16
    assert torch.equal(p.grad, q.grad)


@torch.no_grad()
def test_writes_encode_again_and_choose_the_scale() -> None:
    p = nn.Parameter(Float8Weight.of(sample()))
    plain, version = from_words(p.codes, p.low, p.scale).bfloat16(), p._version
    p.mul_(1000)
    assert p._version > version
    assert torch.equal(p, Float8Weight.of(plain * 1000).dequantize())
    assert 112 <= float(p.codes.float().abs().max()) <= 224
    p.copy_(sample())
    assert torch.equal(p, Float8Weight.of(sample()).dequantize())
    torch._foreach_add_([p], 1.0)
    nn.init.normal_(p, std=1e-3)
    p.data.zero_()
    assert not p.any()
    assert not p.low.any()
    p.data = torch.ones(12, 8, dtype=torch.bfloat16)
    assert isinstance(p, Float8Weight)
    assert p.eq(1).all()
    p.copy_(torch.tensor(float("inf")))
    assert p.isnan().all()


@torch.no_grad()
def test_a_write_to_a_view_is_a_write_to_the_weight() -> None:
    p = nn.Parameter(Float8Weight.of(sample()))
    plain = from_words(p.codes, p.low, p.scale).bfloat16()
    p[0] = plain[0] = 5.0  # beyond all others: the scale changes
    p[2:4, ::2].mul_(0.5)
    plain[2:4, ::2].mul_(0.5)
    p.t()[1].zero_()
    plain.t()[1].zero_()
    p.view(-1)[-3:].copy_(torch.ones(3))
    plain.view(-1)[-3:].copy_(torch.ones(3))
    for part in p.chunk(2):
        part.neg_()
    plain.neg_()
    assert ((p.float() - plain.float()).abs() <= 2.0**-4 * plain.float().abs() + p.scale * 2.0**-9).all()
    assert torch.equal(p[0].dequantize(), plain[0])
    assert p.t().codes.data_ptr() == p.codes.data_ptr()


@torch.no_grad()
def test_codes_may_begin_anywhere_in_memory_and_in_any_order() -> None:
    room = torch.zeros(2, 12, 8).to(torch.float8_e4m3fn)
    w = Float8Weight(room[1], torch.tensor(1.0))
    w.copy_(sample())
    assert torch.equal(w, Float8Weight.of(sample()).dequantize())
    w[3, 2:5] = 7.0
    assert torch.equal(w[3, 2:5].float(), torch.full((3,), 7.0))
    turned = w.t().clone()
    assert turned.stride() == w.t().stride()
    turned[2:5, 3].mul_(2)
    assert torch.equal(turned[2:5, 3].float(), torch.full((3,), 14.0))
    assert torch.equal(turned[5:], w.t()[5:])
    assert not room[0].float().any()
    with pytest.raises(ValueError, match=r"codes must be dense, got shape \(2, 6, 8\)"):
        Float8Weight(room[:, ::2], torch.tensor(1.0))


@torch.no_grad()
def test_what_codes_do_not_hold_is_kept_of_every_write() -> None:
    x = sample()
    p = nn.Parameter(Float8Weight.of(x))
    for _ in range(2):
        assert ((STORAGE.read(p, None) - x).abs() <= 2.0**-12 * x.abs() + p.scale * 2.0**-18).all()
        x = sample() + 0.1
        p.copy_(x)
    p[3, 2:5] = 0.3
    for part in (p, p[3], p.t()):
        assert part.low.shape == part.shape
        assert float(part.largest) == float((p.codes.view(torch.uint8) & 0x7F).max())
    wide = from_words(p[3, 2:5].codes, p[3, 2:5].low, p.scale)
    assert ((wide - 0.3).abs() < 2.0**-8).all()  # written by way of bfloat16


def equal(a: Tensor, b: Tensor) -> bool:
    assert isinstance(a, Float8Weight)
    assert isinstance(b, Float8Weight)
    words = (a.codes.view(torch.uint8), b.codes.view(torch.uint8)), (a.scale, b.scale), (a.low, b.low)
    words = (*words, (a.largest, b.largest))
    return all(torch.equal(one, other) for one, other in words) and a.requires_grad == b.requires_grad


def test_copies_files_and_modules_keep_every_word() -> None:
    layer = nn.Linear(8, 12, dtype=torch.bfloat16)
    layer.weight = nn.Parameter(Float8Weight.of(sample()))
    assert equal(layer.weight.detach().clone().requires_grad_(), layer.weight)
    assert layer.weight.detach().clone().codes.data_ptr() != layer.weight.codes.data_ptr()
    twin = copy.deepcopy(layer)
    assert equal(twin.weight, layer.weight)
    assert isinstance(twin.weight, nn.Parameter)
    for saved in (layer.state_dict(), {"weight": layer.weight, "bias": layer.bias}):
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        with torch.no_grad():
            twin.weight.zero_()
        twin.load_state_dict(loaded)
        assert equal(twin.weight, layer.weight)
    assert isinstance(loaded["weight"], nn.Parameter)
    view = layer.weight.detach()[1:3]
    file = io.BytesIO()
    torch.save(view, file)
    file.seek(0)
    assert equal(torch.load(file), view.clone())


def test_a_module_moves_to_devices_and_dtypes_with_the_same_parameter() -> None:
    layer = nn.Linear(8, 12, dtype=torch.bfloat16)
    layer.weight = weight = nn.Parameter(Float8Weight.of(sample()))
    numbers = weight.float()
    layer.weight.grad = torch.ones_like(weight)
    layer.to("meta").to(torch.bfloat16)
    assert layer.weight is weight
    assert isinstance(weight, Float8Weight)
    assert weight.codes.is_meta
    layer.weight = weight = nn.Parameter(Float8Weight.of(sample()))
    layer.weight.grad = torch.ones_like(weight)
    layer.bias = None
    layer.float()
    assert layer.weight is weight
    assert type(weight) is nn.Parameter
    assert torch.equal(weight, numbers)
    assert weight.grad.dtype == torch.float32


def test_wrong_words_are_refused() -> None:
    codes = torch.zeros(3, 2).to(torch.float8_e4m3fn)
    for given, message in (
        ((torch.zeros(3, 2), ONE), "codes must be float8_e4m3fn, got torch.float32"),
        ((codes, torch.ones(2)), r"scale must be one float32 on cpu, got torch.float32 of shape \(2,\) on cpu"),
        (
            (codes, ONE, torch.zeros(3)),
            r"low must be int8 of shape \(3, 2\) with strides \(2, 1\), got torch.float32 of shape \(3,\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Float8Weight(*given)


def test_a_write_keeps_the_words_of_what_it_does_not_change() -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 40) / 30
    row, rest = torch.arange(60) == 3, torch.arange(60) != 3
    writes = [
        (lambda w: w.clamp_(-10, 10), None), (lambda w: w[3].zero_(), 0.0),
        (lambda w: w.t()[:, 3].fill_(0.25), 0.25), (lambda w: w.mul_(rest[:, None]), 0.0),
        (lambda w: w[3].copy_(torch.full((40,), 0.125)), 0.125),
    ]  # fmt: skip
    for write, value in writes:
        w = Float8Weight.of(x)
        codes, low = w.codes.view(torch.uint8).clone(), w.low.clone()
        write(w)
        kept = rest if value is not None else row | rest
        assert torch.equal(w.codes.view(torch.uint8)[kept], codes[kept])
        assert torch.equal(w.low[kept], low[kept])
        if value is not None:
            assert (from_words(w.codes, w.low, w.scale)[3] == value).all()


def test_zeros_written_are_zeros_and_have_their_scale() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-8, 0, 64)
    for zero in (
        lambda w: w.zero_(), lambda w: w.mul_(0), lambda w: w.fill_(0.0), lambda w: torch._foreach_zero_([w]),
        lambda w: w.mul_(torch.zeros(64, 64)), lambda w: nn.init.zeros_(w), lambda w: w.__setitem__(slice(None), 0),
    ):  # fmt: skip
        w = Float8Weight.of(x)
        zero(w)
        assert not from_words(w.codes, w.low, w.scale).any()
        assert float(w.scale) == 2.0**-8


def test_a_write_that_needs_another_scale() -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 40) / 30
    before = from_words(*(lambda w: (w.codes, w.low, w.scale))(Float8Weight.of(x)))
    w = Float8Weight.of(x)
    w[3].fill_(2.0)  # the scale has to change: what is normal under it keeps its eleven bits of fraction
    after = from_words(w.codes, w.low, w.scale)
    assert (after[3] == 2).all()
    normal = (before.abs() >= 2.0**-6 * w.scale) & (torch.arange(60) != 3)[:, None]
    assert ((after - before).abs() <= 2.0**-12 * before.abs())[normal].all()
    assert normal.float().mean() > 0.3


def test_trained_weights_stay_the_same_under_a_clamp_after_every_step() -> None:
    means = []
    for clamp in (False, True):
        p = torch.nn.Parameter(Float8Weight.of(torch.ones(50, 40)))
        optimizer = ng.optim.AdamW([p], lr=1e-4, weight_decay=0.0, weights="fp8split8")
        for _ in range(100):
            p.grad = torch.ones(50, 40, dtype=torch.bfloat16)
            optimizer.step()
            if clamp:
                with torch.no_grad():
                    p.clamp_(-10, 10)
        means.append(float(optimizer.full_weights()[p].mean()))
    assert means[0] == means[1] < 1 - 50e-4


def _fill(w: Tensor, value: float) -> None:
    w.fill_(value)


def test_processes_and_plain_pickle_have_every_word() -> None:
    w = Float8Weight.of(torch.randn(5, 7))
    layer = torch.nn.Linear(7, 5)
    layer.weight = torch.nn.Parameter(w)
    layer.share_memory()
    assert all(words.is_shared() for words in (w.codes, w.low, w.numbers))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(_fill, (w, 64.0))
    assert w.eq(64).all()
    again = pickle.loads(pickle.dumps(w))
    assert torch.equal(again.codes.view(torch.uint8), w.codes.view(torch.uint8))
    assert torch.equal(again.low, w.low)
    assert torch.equal(again.scale, w.scale)


@torch.no_grad()
def test_one_operation_reads_and_writes_the_same_numbers() -> None:
    w = Float8Weight.of(torch.tensor([1.03, 0.3, 0.77]))
    w.sub_(w.detach())
    assert not from_words(w.codes, w.low, w.scale).any()
    w = Float8Weight.of(torch.tensor([1.03, 0.3, 0.77]))
    w[0:1].copy_(w[1:2])
    assert float(from_words(w.codes, w.low, w.scale)[0]) == float(torch.tensor(0.3).bfloat16())


def test_a_collective_is_refused(tmp_path: Path) -> None:
    """It would send a copy, and write to one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="send the codes, low and numbers of a Float8Weight"):
            torch.distributed.broadcast(Float8Weight.of(torch.ones(8)), 0)
    finally:
        torch.distributed.destroy_process_group()
