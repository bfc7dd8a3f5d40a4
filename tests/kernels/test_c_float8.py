"""The compiled words of float8 weights are the specification's, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from narrowgauge.formats import random_halves
from narrowgauge.kernels import _c_float8
from narrowgauge.storage._float8_weight import from_words, largest_code, to_words

pytestmark = pytest.mark.skipif(_c_float8.unavailable() is not None, reason=f"{_c_float8.unavailable()}")


def bits(x: Tensor) -> Tensor:
    """The patterns, of NaN one."""
    return torch.where(x.isnan(), 0x7FC00000, x.view(torch.int32))


@pytest.mark.parametrize("power", [-32, 0, 7])
def test_every_pair_of_words_is_read_alike(power: int) -> None:
    codes, low = torch.meshgrid(torch.arange(256), torch.arange(-128, 128), indexing="ij")
    codes, low = codes.reshape(-1).to(torch.uint8).view(torch.float8_e4m3fn), low.reshape(-1).to(torch.int8)
    found = torch.empty(len(codes))
    _c_float8.read(codes, low, 2.0**power, found)
    assert torch.equal(bits(found), bits(from_words(codes, low, torch.tensor(2.0**power))))


@pytest.mark.parametrize("power", [-32, -3, 7])
@pytest.mark.parametrize("count", [1, 1000, 3 * 1024, 200_001])
def test_words_are_written_alike_of_numbers_of_every_size(power: int, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    patterns = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)
    weight = patterns.view(torch.float32).clone()  # inf, NaN and subnormal numbers among them
    weight[::2] = 2.0**power * torch.randn(len(weight[::2]), generator=generator) * 100
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e30, -1e-38])
    weight[::7] = special.repeat(count)[: len(weight[::7])]
    scale = torch.tensor(2.0**power)
    codes, low = torch.empty(count, dtype=torch.float8_e4m3fn), torch.empty(count, dtype=torch.int8)
    key = {"seed": 5, "stream": 3, "step": (7 << 32) + 1, "purpose": 2}
    largest = _c_float8.write(weight, float(scale), codes, low, **key)
    random = ((random_halves(count, **key, device=weight.device) & 0xFF) << 4) + 8
    wanted, wanted_low = to_words(weight, scale, random)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(low, wanted_low)
    assert largest == int(largest_code(codes))
