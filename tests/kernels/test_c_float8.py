"""The C words of float8 weights are the specification's, bit for bit; test_fused_float8.py has whole steps."""

from __future__ import annotations

import ctypes
import functools

import pytest
import torch
from torch import Tensor

from narrowgauge.kernels._c_library import load
from narrowgauge.kernels._c_source import source
from narrowgauge.storage._float8_weight import from_words, largest_code, next_scale, to_words

BLOCKS = (64, 16)  # of one part of 64 elements and of one of 16, for which compilers make other code


@functools.cache
def functions(block: int) -> ctypes.CDLL:
    calls = """
void read(long n, const u8 *codes, const int8_t *low, float *w, const float *scale) {
    for (long o = 0; o < n; o += BLOCK) fp8split8_read(codes + o, low + o, w + o, *scale);
}
void add(long n, u8 *codes, int8_t *low, float *w, float *delta, const u16 *random, const float *inverse) {
    for (long o = 0; o < n; o += BLOCK) fp8split8_add(codes + o, low + o, w + o, delta + o, random + o, *inverse);
}
int largest(long n, const u8 *codes) { return largest_code(codes, n); }
void scales(long n, const int *largest, float *scale) {
    for (long i = 0; i < n; i++) scale[i] = next_scale(largest[i], scale[i]);
}
"""
    return load("\n".join([f"#define BLOCK {block}", source("words.h"), source("float8_weights.h"), calls]))


def call(name: str, block: int, *tensors: Tensor) -> int:
    return getattr(functions(block), name)(len(tensors[0]), *(ctypes.c_void_p(x.data_ptr()) for x in tensors))


def bits(x: Tensor) -> Tensor:
    """The patterns, of NaN one."""
    return torch.where(x.isnan(), 0x7FC00000, x.view(torch.int32))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("power", [-32, 0, 7])
def test_every_pair_of_words_is_read_alike(power: int, block: int) -> None:
    codes, low = torch.meshgrid(torch.arange(256), torch.arange(-128, 128), indexing="ij")
    codes, low = codes.reshape(-1).to(torch.uint8), low.reshape(-1).to(torch.int8)
    found, scale = torch.empty(len(codes)), torch.tensor(2.0**power)
    call("read", block, codes, low, found, scale)
    assert torch.equal(bits(found), bits(from_words(codes.view(torch.float8_e4m3fn), low, scale)))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("power", [-32, -3, 7])
def test_words_are_written_alike_of_numbers_of_every_size(power: int, block: int) -> None:
    count, generator = 1 << 18, torch.Generator().manual_seed(power)
    patterns = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)
    weight = patterns.view(torch.float32).clone()  # inf, NaN and subnormal numbers among them
    weight[::2] = 2.0**power * torch.randn(count // 2, generator=generator) * 100
    weight[1::4] = 2.0**power * torch.randn(count // 4, generator=generator) / 32
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e30, -1e-38, 448 * 2.0**power])
    weight[::7] = special.repeat(count)[: len(weight[::7])]
    random = torch.randint(-(1 << 15), 1 << 15, (count,), generator=generator).to(torch.int16)
    codes, low = torch.empty(count, dtype=torch.uint8), torch.empty(count, dtype=torch.int8)
    delta = torch.full((count,), -0.0)
    call("add", block, codes, low, weight, delta, random, torch.tensor(2.0**-power))
    up = ((random.to(torch.int32) & 0xFF) << 4) + 8
    wanted, wanted_low = to_words(weight, torch.tensor(2.0**power), up)
    assert torch.equal(codes, wanted.view(torch.uint8))
    assert torch.equal(low, wanted_low)


def test_the_largest_code_and_the_scale_that_it_asks_for() -> None:
    for count in (1, 63, 64, 1000):
        for most in range(128):
            codes = torch.randint(most + 1, (count,), generator=torch.Generator().manual_seed(most)).to(torch.uint8)
            codes[count // 3] = most + 0x80 * (most % 2)
            codes[count // 2 :: 3] = 0x7F + 0x80 * (most % 2)
            assert call("largest", 64, codes) == int(largest_code(codes.view(torch.float8_e4m3fn))), (count, most)
    largest = torch.arange(127, dtype=torch.int32).repeat(40)
    scale = 2.0 ** torch.arange(-32, 8.0).repeat_interleave(127)
    wanted = next_scale(largest, scale)
    call("scales", 64, largest, scale)
    assert torch.equal(scale, wanted)
