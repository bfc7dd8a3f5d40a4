"""The quantizers' kernels against eager torch: codes and scales bit for bit, in every dtype, format and shape."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: there are no kernels")

from narrowgauge.formats import FP8_E4M3, FP8_E5M2
from narrowgauge.kernels._linear import _blocks, _dequantize, _rows, _tiles
from narrowgauge.linear import _ops, quantize
from pairwise import cases

FORMS = ("int8", "e4m3", "e5m2")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PAIRS = list(zip(DTYPES, FORMS, strict=True))
# Less than a tile, whole tiles, what ends within one, a row in two pieces, one element, longer than the rest.
SHAPES = ((5, 7), (128, 128), (33, 130), (2, 1280), (1, 1), (1, 300), (300, 1), (1100, 24))


@pytest.fixture(autouse=True)
def _numpys_warnings() -> Iterator[None]:
    """The interpreter's numpy warns of infinity times zero, which kernels do on purpose."""
    with np.errstate(all="ignore"):
        yield


def matrix(shape: tuple[int, int], dtype: torch.dtype, device: str, nonfinite: bool = False) -> Tensor:
    random = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    x = torch.randn(shape, generator=random) * torch.exp(2 * torch.randn(shape, generator=random))
    if shape[0] > 3:
        x[1] = 0
        x[3] *= 2.0**-111 / x[3].abs().max()  # less than counts
    if nonfinite:
        x[-1, shape[1] // 2], x[0, 0] = float("nan"), float("-inf")
    return x.to(device, dtype)


def words(form: str, shape: tuple[int, ...], device: str) -> Tensor:
    return torch.full(shape, 99, dtype=torch.int8 if form == "int8" else torch.uint8, device=device)


def same(got: Tensor, wanted: Tensor) -> bool:
    """The same bits, whatever they are taken for; NaN are all one."""
    if got.dtype == torch.float32:
        got, wanted = got.nan_to_num(nan=-1.0), wanted.nan_to_num(nan=-1.0)
        return got.shape == wanted.shape and torch.equal(got.view(torch.int32), wanted.view(torch.int32))
    return torch.equal(got.view(torch.uint8), wanted.contiguous().view(torch.uint8))


def summed(got: Tensor, x: Tensor) -> bool:
    wanted, size = x.double().sum(0), x.double().abs().sum(0)
    close = (got.double() - wanted).abs() <= size * 2.0**-23 * (4 + len(x) ** 0.5)
    return got.dtype == torch.float32 and bool((close | ~wanted.isfinite() & ~got.isfinite()).all())


@pytest.mark.parametrize(("shape", "pair", "nonfinite"), cases(SHAPES, PAIRS, (False, True)), ids=str)
def test_rows(shape: tuple[int, int], pair: tuple[torch.dtype, str], nonfinite: bool, device: str) -> None:
    dtype, form = pair
    x = matrix(shape, dtype, device, nonfinite)
    wanted = quantize(x, "row", form)
    for sums in (False, True):
        codes = words(form, shape, device)
        scale, total = _rows.quantize_rows(x, form, codes, sums)
        assert same(codes, wanted.codes)
        assert same(scale, wanted.scale)
        assert summed(total, x) if sums else total is None


def test_a_tile_of_rows_has_as_many_codes_as_an_instruction_makes() -> None:
    """Compilers refuse fewer than four; the interpreter does not."""
    for rows, columns in itertools.product(range(1, 9), range(1, 40)):
        height, first, second, _ = _rows.layout(rows, columns, False)
        assert height * first % 4 == height * second % 4 == 0, (rows, columns)


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_are_longer_than_registers(form: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if registers held fewer; a row is still longer than what is read at once."""
    if device == "cpu":
        monkeypatch.setattr(_rows, "_LONGEST", 1 << 11)
        _rows._launch.cache_clear()
    x = matrix((2, 300 + (1 << 12 if device == "cpu" else 1 << 14)), torch.bfloat16, device, nonfinite=True)
    codes = words(form, tuple(x.shape), device)
    scale, total = _rows.quantize_rows(x, form, codes, True)
    _rows._launch.cache_clear()
    wanted = quantize(x, "row", form)
    assert same(codes, wanted.codes)
    assert same(scale, wanted.scale)
    assert summed(total, x)


@pytest.mark.parametrize(("shape", "pair", "nonfinite"), cases(SHAPES, PAIRS, (False, True)), ids=str)
def test_columns(shape: tuple[int, int], pair: tuple[torch.dtype, str], nonfinite: bool, device: str) -> None:
    dtype, form = pair
    x = matrix(shape, dtype, device, nonfinite)
    codes = words(form, shape[::-1], device)
    scale, total = _tiles.quantize_columns(x, form, codes, True)
    wanted = quantize(x, "column", form)
    assert same(codes, wanted.codes.t())
    assert same(scale, wanted.scale)
    assert summed(total, x)


# What blocks and tiles end in, and a whole tile.
BLOCKED = ((5, 7), (128, 128), (130, 257))
ORDERS = (("row128", "column128"), ("", "column128"), ("tile128", "tile128"), ("row128", "tile128"))


@pytest.mark.parametrize(
    ("shape", "pair", "orders", "nonfinite"), cases(BLOCKED, PAIRS, ORDERS, (False, True)), ids=str
)
def test_blocks(
    shape: tuple[int, int], pair: tuple[torch.dtype, str], orders: tuple[str, str], nonfinite: bool, device: str
) -> None:
    """Codes in each order and scales of each, from one pass."""
    dtype, form = pair
    x = matrix(shape, dtype, device, nonfinite)
    sums = nonfinite or orders[0] == "row128"
    straight, turned = (words(form, of, device) for of in (shape, shape[::-1]))
    scales = [_ops._block_scales(x, how, of) for how, of in zip(orders, (False, True), strict=True)]
    total = _blocks.quantize_blocks(x, form, *orders, straight, scales[0], turned, scales[1], sums)
    for scaling, codes, got in zip(orders, (straight, turned.t()), scales, strict=True):
        if scaling:
            wanted = quantize(x, scaling, form)
            assert same(codes.contiguous(), wanted.codes)
            assert same(got.contiguous(), wanted.scale)
        else:
            assert bool((codes == 99).all())
    assert summed(total, x) if sums else total is None


AVERAGES = [("int8", None), ("int8", 0.5), ("e4m3", 0.0), ("e5m2", 1e30)]


@pytest.mark.parametrize(
    ("shape", "given", "nonfinite", "dtype"), cases(SHAPES, AVERAGES, (False, True), DTYPES), ids=str
)
def test_tensor(
    shape: tuple[int, int], given: tuple[str, float | None], nonfinite: bool, dtype: torch.dtype, device: str
) -> None:
    form, average = given
    x = matrix(shape, dtype, device, nonfinite)
    known = None if average is None else torch.tensor(average, device=device)
    wanted = quantize(x, "tensor", form, known.reshape(1, 1) if average else None)
    for straight, transposed, sums in ((True, True, True), (True, False, False), (False, True, False)):
        codes = words(form, shape, device) if straight else None
        turned = words(form, shape[::-1], device) if transposed else None
        scale, own, total = _tiles.quantize_tensor(x, form, known, codes, turned, sums)
        assert codes is None or same(codes, wanted.codes)
        assert turned is None or same(turned, wanted.codes.t())
        assert same(scale, wanted.scale)
        own_wanted = x.float().abs()
        if form != "int8":
            own_wanted = own_wanted.where(own_wanted < torch.inf, 0.0)
        assert same(own, own_wanted.amax().reshape(1, 1))
        assert summed(total, x) if sums else total is None
    # With the absmax of each of some parts, where it is known.
    turned = words(form, shape[::-1], device)
    again = _tiles.quantize_tensor(x, form, known, None, turned, True, maxima=_ops._maxima(x, form))
    assert all(map(same, again[:2], (scale, own)))
    assert summed(again[2], x)
    assert same(turned, wanted.codes.t())


@pytest.mark.parametrize(
    ("shape", "pair", "scaling"), cases(SHAPES, PAIRS, ("row", "column", "tensor", "row128")), ids=str
)
def test_dequantize(shape: tuple[int, int], pair: tuple[torch.dtype, str], scaling: str, device: str) -> None:
    """What the specification makes of the same codes, bit for bit; NaN where a scale or a code is NaN."""
    dtype, form = pair
    nonfinite = device == "cuda" or form == "int8"  # the interpreter reads float8's NaN as 480
    coded = quantize(matrix(shape, torch.float32, device, nonfinite), scaling, form)
    scale = coded.scale.t().contiguous().t() if scaling == "row128" else coded.scale.contiguous()
    got = _dequantize.dequantize(coded.codes.contiguous(), scale, dtype)
    wanted = coded.dequantize(dtype)
    assert got.dtype == dtype
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(nan=-1.0), wanted.nan_to_num(nan=-1.0))


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_orders_as_compiled(dtype: torch.dtype, form: str) -> None:
    """Sides that 128, 16 and nothing divides: each pair compiles to code of its own, some to wrong one once."""
    for rows in (33, 48, 70, 128, 256):
        for columns in (24, 40, 48, 128, 200, 384):
            x = matrix((rows, columns), dtype, "cuda")
            wanted = quantize(x, "tensor", form)
            by_columns = quantize(x, "column", form)
            for straight in (True, False):
                codes = words(form, (rows, columns), "cuda") if straight else None
                turned = words(form, (columns, rows), "cuda")
                _tiles.quantize_tensor(x, form, None, codes, turned, False)
                assert codes is None or same(codes, wanted.codes), (rows, columns)
                assert same(turned, wanted.codes.t()), (rows, columns, straight)
            _tiles.quantize_columns(x, form, turned, False)
            assert same(turned, by_columns.codes.t()), (rows, columns)


@pytest.mark.parametrize("form", FORMS)
def test_every_code_and_every_tie(form: str, device: str) -> None:
    """All values, the midpoints between them and their float32 neighbors, of both signs, at a scale of 1."""
    if form == "int8":
        values = np.arange(128.0)
    else:
        floats = {"e4m3": FP8_E4M3, "e5m2": FP8_E5M2}[form]
        values = np.array([floats.decode(code) for code in range(128)])
        values = np.unique(values[np.isfinite(values)])
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(1e30))])
    points = points[points <= values[-1]]
    x = torch.from_numpy(np.concatenate([points, -points, values[-1:]]).astype(np.float32))[None].to(device)
    codes = words(form, x.shape, device)
    scale, _ = _rows.quantize_rows(x, form, codes, False)
    assert scale.item() == 1
    assert same(codes, quantize(x, "row", form).codes)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1280, 5120, 8192, 16384, 16400, 65536])
@pytest.mark.parametrize("form", FORMS)
def test_long_rows_and_large_matrices(columns: int, form: str) -> None:
    x = matrix((2**27 // columns, columns), torch.bfloat16, "cuda")
    codes, turned = words(form, x.shape, "cuda"), words(form, tuple(x.shape)[::-1], "cuda")
    scale, total = _rows.quantize_rows(x, form, codes, True)
    wanted = quantize(x, "row", form)
    assert same(codes, wanted.codes)
    assert same(scale, wanted.scale)
    assert summed(total, x)
    again = words(form, x.shape, "cuda")
    assert torch.equal(total, _rows.quantize_rows(x, form, again, True)[1])  # nothing depends on who comes first
    _tiles.quantize_tensor(x, form, None, codes, turned, True)
    wanted = quantize(x, "tensor", form)
    assert same(codes, wanted.codes)
    assert same(turned, wanted.codes.t())


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    x = torch.zeros((2**19 + 64, 4096 + 16), dtype=torch.bfloat16, device="cuda")
    x[-1, :] = torch.linspace(-3, 5, x.shape[1], device="cuda")
    last = quantize(x[-1:], "row")
    codes, turned = words("int8", x.shape, "cuda"), words("int8", tuple(x.shape)[::-1], "cuda")
    scale, _ = _rows.quantize_rows(x, "int8", codes, False)
    assert torch.equal(codes[-1:], last.codes)
    assert not scale[:-1].any()
    _tiles.quantize_tensor(x, "int8", None, codes, turned, False)
    assert torch.equal(codes[-1:], last.codes)
    assert torch.equal(turned[:, -1:].t(), last.codes)
    assert int(turned.count_nonzero()) == int(last.codes.count_nonzero())


@pytest.mark.parametrize("shape", [(129, 257), (300, 1), (1100, 24)], ids=str)
def test_more_rows_than_the_second_side_of_a_grid_takes(
    shape: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 million rows of features, such as pixels: their tiles go along the first side, and are the same."""
    assert _tiles._launch_tiles(65535 * 128, 64, torch.bfloat16, "int8", 1, None, True, True).grid == (1, 65535)
    long = _tiles._launch_tiles(65535 * 128 + 1, 200, torch.bfloat16, "int8", 1, None, True, True)
    assert long.grid == (65536, 2)
    _tiles._launch_tiles.cache_clear()
    monkeypatch.setattr(_tiles, "MOST", 1)
    try:
        x = matrix(shape, torch.bfloat16, device)
        codes, turned = words("int8", shape, device), words("int8", shape[::-1], device)
        scale, _, _ = _tiles.quantize_tensor(x, "int8", None, codes, turned, False)
        wanted = quantize(x, "tensor", "int8")
        assert same(codes, wanted.codes)
        assert same(turned, wanted.codes.t())
        assert same(scale, wanted.scale)
        scale, _ = _tiles.quantize_columns(x, "e4m3", turned := words("e4m3", shape[::-1], device), False)
        wanted = quantize(x, "column", "e4m3")
        assert same(turned, wanted.codes.t())
        assert same(scale, wanted.scale)
    finally:
        _tiles._launch_tiles.cache_clear()


@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (256, 40), (700, 33)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sums_of_columns_are_rounded_once(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    total = _tiles.add_up(x, torch.float32)
    exact, size = x.double().sum(0), x.double().abs().sum(0)
    assert bool(((total.double() - exact).abs() <= size * 2.0**-23 * (2 + shape[0] ** 0.5)).all())
    assert torch.equal(_tiles.add_up(x, dtype), total.to(dtype))
