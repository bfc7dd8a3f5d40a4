"""The C codecs alone, bit for bit what the storages make of the same float32 blocks, and read back."""

from __future__ import annotations

import ctypes
import functools

import pytest
import torch
from torch import Tensor

from codec_functions import codec_source
from narrowgauge.formats import Coder, coder, random_halves
from narrowgauge.kernels._c_library import load
from narrowgauge.kernels._codec import CodebookTable, Codec
from narrowgauge.storage import StateContext, state_storage
from pairwise import cases

CPU = torch.device("cpu")
SEED, STREAM, STEP = 5, 7, (3 << 32) + 11
NAMES = ["fp32", "bf16", "expansion", "8bit", "fp8", "4bit", "log8", "log4"]
SIZES = (16, 64, 256, 4096)


def stored(name: str, signed: bool, has_normalizer: bool, size: int) -> bool:
    return not has_normalizer or (signed and name in ("log8", "log4"))


@functools.cache
def blocks(size: int) -> Tensor:
    """Rows of all kinds: ordinary, of mixed scales, zero, tiny, huge, with infinities and NaN, and with ties."""
    generator = torch.Generator().manual_seed(size)

    def normal(count: int = 1) -> Tensor:
        return torch.randn(count, size, generator=generator)

    def spread(low: float, high: float, count: int) -> Tensor:
        return normal(count) * 10.0 ** torch.empty(count, size).uniform_(low, high, generator=generator)

    rows = [normal(8), spread(-8, 2, 8), spread(-37, -30, 4), spread(30, 38, 4).clamp(-3e38, 3e38)]
    rows += [torch.zeros(1, size), -torch.zeros(1, size), normal() * 1e-41, spread(-45, -36, 4)]
    for bad in (torch.inf, -torch.inf, torch.nan, -torch.nan):
        row = spread(-4, 4, 3)
        row[0, size // 2], row[1, 0], row[2, ::3] = bad, bad, bad
        rows += [row, torch.full((1, size), bad), torch.where(normal() > 0, bad, 0.0)]
        rows.append((normal() * 1e-41).index_fill(1, torch.tensor([3]), bad))
    row = normal().clamp(-1, 1)
    row[0, 2], row[0, 5], row[0, 7] = -2.0, 2.0, torch.inf  # two extrema of both signs beside an infinity
    rows += [row, row.flip(1), normal().sign() * torch.finfo(torch.float32).max, normal().sign() * 2.0**126]
    # Values and boundaries of the codebook, and their neighbors.
    for signed in (False, True):
        made = coder("dynamic", signed, CPU)
        near = torch.cat([made.values, made.boundaries])
        near = torch.cat([near, near.nextafter(torch.tensor(9.0)), near.nextafter(torch.tensor(-9.0))])
        near = torch.nn.functional.pad(near, (0, -len(near) % (size - 1))).view(-1, size - 1)
        for unit in (1.0, -3.0, 2.0**-120, 2.0**127):
            rows.append(torch.cat([torch.ones(len(near), 1), near.clamp(-1, 1)], dim=1) * unit)
    return torch.cat(rows)


@functools.cache
def functions(codec: Codec, size: int) -> ctypes.CDLL:
    return load(codec_source(codec, size))


def called(function: str, codec: Codec, x: Tensor, words: dict[str, Tensor], v: Tensor | None, size: int) -> None:
    """A codec's C function on every block of a tensor."""
    key = (ctypes.c_uint32 * 6)(SEED, STREAM, STEP & 0xFFFFFFFF, STEP >> 32)
    table = [codec.table.values, codec.table.entries] if codec.table is not None else []
    getattr(functions(codec, size), function)(
        ctypes.c_long(x.numel() // size),
        ctypes.c_void_p(x.data_ptr()),
        (ctypes.c_void_p * 4)(*(words[word.name].data_ptr() for word in codec.words)),
        (ctypes.c_void_p * 2)(*(array.ctypes.data for array in table)),
        ctypes.c_void_p(v.data_ptr() if v is not None else None),
        key,
    )


def bits(x: Tensor) -> Tensor:
    """A tensor's bits, those of every NaN the same."""
    if x.is_floating_point() and x.dtype.itemsize > 1:
        x = torch.where(x.isnan(), torch.full_like(x, torch.nan), x)
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


@pytest.mark.parametrize(
    ("name", "signed", "has_normalizer", "size"), cases(NAMES, (True, False), (False, True), SIZES, allowed=stored)
)
def test_codes_and_values_are_the_storages(name: str, signed: bool, has_normalizer: bool, size: int) -> None:
    storage = state_storage(name).for_slot(signed, has_normalizer)
    codec = storage.codec(signed)
    assert codec is not None
    x = blocks(size).reshape(-1).clone()
    v = None
    if has_normalizer:
        squares, of = state_storage(name), StateContext(x.shape, False, size)
        v = squares.decode(squares.encode(x.square().roll(1), of), of)
        # One that is kept as a float can be NaN, of either sign.
        v = v.index_fill(0, torch.tensor([3]), torch.nan).index_fill(0, torch.tensor([size + 5]), -torch.nan)
    context = StateContext(x.shape, signed, size, v)
    random = None
    if storage.stochastic:
        random = random_halves(x.numel(), seed=SEED, stream=STREAM, step=STEP, purpose=1, device=CPU)
    expected = storage.encode(x, context, random)
    words = {key: torch.full_like(word, 77) for key, word in expected.items()}
    called("encode", codec, x, words, v, size)
    for key, word in expected.items():
        wrong = (bits(words[key]) != bits(word)).nonzero()
        assert not len(wrong), (key, wrong[:4])
    values = torch.full_like(x, 77)
    called("decode", codec, values, expected, v, size)
    right = storage.decode(expected, context)
    assert torch.equal(bits(values), bits(right))


def test_bfloat16_is_rounded_as_torch_does() -> None:
    """Every upper half of a pattern with the lower halves that decide, in parts of one kind and of several."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    patterns = torch.cat([(upper + low) for low in lower])
    shuffled = patterns[torch.randperm(len(patterns), generator=torch.Generator().manual_seed(0))]
    x = torch.cat([patterns, shuffled]).to(torch.int32).view(torch.float32)
    words = torch.zeros(len(x), dtype=torch.bfloat16)
    codec = state_storage("bf16").codec(signed=True)
    assert codec is not None
    called("encode", codec, x, {"": words}, None, 256)
    assert torch.equal(bits(words), bits(x.bfloat16()))


def test_a_cell_holds_one_boundary() -> None:
    with pytest.raises(ValueError, match="two are in one"):
        CodebookTable.of(Coder.of(torch.tensor([0.0, 0.5, 0.5001, 0.5002, 1.0])))
