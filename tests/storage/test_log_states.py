"""What all codecs of `log8` and `log4` have in common."""

import pytest
import torch
from coded_states import Coded

from pairwise import cases

CODECS = {
    "unsigned 8": Coded.of(8, signed=False),
    "unsigned 4": Coded.of(4, signed=False),
    "signed 8": Coded.of(8, signed=True),
    "normalized 8": Coded.of(8, signed=True, has_normalizer=True),
    "normalized 4": Coded.of(4, signed=True, has_normalizer=True),
}


def data(name: str, decades: float, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A moment of normals with scales over some decades; and the second moment that is its unit, if it has one."""
    generator = torch.Generator().manual_seed(0)
    scale = 10 ** (decades * (torch.rand(shape, generator=generator) - 0.5))
    x = scale * torch.randn(shape, generator=generator)
    v = (scale * torch.randn(shape, generator=generator)).square()
    return x.square() if "unsigned" in name else x, v if "normalized" in name else None


@pytest.mark.parametrize(("name", "block"), cases(CODECS, [1, 3, 64, 1000, 10**6]))
def test_blocks_of_any_size_and_a_short_last_one(name: str, block: int) -> None:
    codes, (x, v) = CODECS[name], data(name, 3, (7, 101))
    found, numbers = codes.encode(x, block, v=v)
    assert found.shape == x.shape
    again = codes.decode(found, numbers, block, v).reshape(-1)
    for first in range(0, x.numel(), block):
        place = slice(first, first + block)
        one, unit = x.reshape(-1)[place], None if v is None else v.reshape(-1)[place]
        assert torch.equal(again[place], codes.decode(*codes.encode(one, block, v=unit), block, unit))
    empty = torch.zeros(0, 4)
    none, numbers = codes.encode(empty, block, v=None if v is None else empty)
    assert (none.shape, len(numbers)) == ((0, 4), 0)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "decades"), cases(CODECS, [0, 6, 12]))
def test_a_gpu_gives_the_same_codes_and_values(name: str, decades: float) -> None:
    codes, (x, v) = CODECS[name], data(name, decades, (300, 1000))
    unit = None if v is None else v.cuda()
    halves = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32) if "unsigned" in name else None
    for random in dict.fromkeys((None, halves)):
        here, numbers = codes.encode(x, 256, random, v)
        there, others = codes.encode(x.cuda(), 256, None if random is None else random.cuda(), unit)
        assert torch.equal(there.cpu(), here)
        assert torch.equal(others.cpu(), numbers)
        assert torch.equal(codes.decode(there, others, 256, unit).cpu(), codes.decode(here, numbers, 256, v))
