"""The multiplies' kernels against the specification: int8 bit for bit, float8 within float32's sums."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: there are no kernels")

from narrowgauge.kernels._linear import _autotune, _configs
from narrowgauge.kernels._linear._autotune import multiply_codes
from narrowgauge.kernels._linear._configs import CUBLAS, MatmulConfig, MatmulShape
from narrowgauge.kernels._linear._multiply import fits_descriptors
from narrowgauge.linear import _ops, quantize
from narrowgauge.linear._quantize import ScaledCodes, spread
from narrowgauge.linear._reference import blocked_matmul, scaled_matmul
from pairwise import cases

FORMS = {"int8": ("int8", "int8"), "e4m3": ("e4m3", "e4m3"), "e5m2 and e4m3": ("e5m2", "e4m3")}
WAYS = (
    MatmulConfig("pointers", 32, 32, 32, group=2),
    MatmulConfig("descriptors", 32, 32, 32),
    MatmulConfig("descriptors", 16, 64, 32, halves=True),
)
SHAPES = ((64, 64, 48), (33, 80, 48), (70, 48, 64), (5, 7, 3), (1, 33, 1))


def operands(m: int, k: int, n: int, forms: tuple, scalings: tuple, device: str) -> tuple[ScaledCodes, ScaledCodes]:
    """X (m, k) and W (n, k)."""
    random = torch.Generator().manual_seed(m + k + n)
    x, w = (torch.randn(shape, generator=random).to(device) for shape in ((m, k), (n, k)))
    return quantize(x, scalings[0], forms[0]), quantize(w, scalings[1], forms[1])


def right(got: Tensor, left: ScaledCodes, right: ScaledCodes, bias: Tensor | None, fast: bool = False) -> bool:
    """Whether a product is what the specification says: int8 to the bit, float8 but for the width of its sums."""
    wanted = scaled_matmul(left, right.t(), bias, got.dtype, "simulated" if left.codes.is_cuda else "real")
    if left.codes.dtype == torch.int8:
        return torch.equal(got, wanted)
    exact = (left.codes.double() @ right.codes.double().t()) * (left.scale.double() * right.scale.double().t())
    size = (left.codes.double().abs() @ right.codes.double().abs().t()) * (left.scale * right.scale.t()).double()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    # Tensor cores keep 13 bits below the largest of the products that they add at once.
    unit = 2.0**-12 if fast else 2.0**-20
    return bool(((got.double() - exact).abs() <= size * unit + exact.abs() * torch.finfo(got.dtype).eps).all())


SCALINGS = [("row", "tensor"), ("row", "row"), ("tensor", "tensor"), ("tensor", "row")]


@pytest.mark.parametrize(
    ("shape", "config", "forms", "scalings"), cases(SHAPES, WAYS, FORMS.values(), SCALINGS), ids=str
)
def test_a_product_is_the_specifications(
    shape: tuple[int, int, int], config: MatmulConfig, forms: tuple, scalings: tuple, device: str
) -> None:
    one, other = operands(*shape, forms, scalings, device)
    for dtype, biased, how in (
        (torch.bfloat16, True, "fast"), (torch.float16, False, "full"), (torch.float32, True, "full"),
    ):  # fmt: skip
        if config.kernel == "descriptors" and not fits_descriptors(one.codes, other.codes, dtype):
            continue
        bias = torch.randn(shape[2], device=device).to(dtype) if biased else None
        got = multiply_codes(one.codes, other.codes, one.scale, other.scale.t(), bias, dtype, how, config)
        assert (got.shape, got.dtype) == ((shape[0], shape[2]), dtype)
        assert right(got, one, other, bias, fast=device == "cuda")


BLOCK_WAYS = (
    MatmulConfig("pointers", 32, 32, 128, group=2),
    MatmulConfig("descriptors", 32, 32, 128),
    MatmulConfig("descriptors", 16, 64, 128, halves=True),
)
BLOCK_SHAPES = ((130, 320, 144), (33, 80, 16), (1, 200, 3))
BLOCK_SCALINGS = [("row128", "row128"), ("row128", "tile128"), ("tile128", "row"), ("tensor", "row128")]


@pytest.mark.parametrize(
    ("shape", "config", "forms", "scalings"),
    cases(BLOCK_SHAPES, BLOCK_WAYS, FORMS.values(), BLOCK_SCALINGS),
    ids=str,
)
def test_a_product_of_blocks_is_the_specifications(
    shape: tuple[int, int, int], config: MatmulConfig, forms: tuple, scalings: tuple, device: str
) -> None:
    """Against float64: products of 128 by themselves, ragged or not, whatever shares a scale."""
    one, other = operands(*shape, forms, scalings, device)
    if config.kernel == "descriptors" and not fits_descriptors(one.codes, other.codes, torch.bfloat16):
        config = BLOCK_WAYS[0]
    bias = torch.randn(shape[2], device=device)
    scales = one.scale.t().contiguous().t(), other.scale  # both orders of memory
    got = multiply_codes(one.codes, other.codes, *scales, bias, torch.bfloat16, "blocks", config)
    left, right = (spread(of.scale, of.codes.shape).double() * of.codes.double() for of in (one, other))
    exact, size = left @ right.t() + bias.double(), left.abs() @ right.abs().t() + bias.double().abs()
    unit = 2.0**-12 if device == "cuda" else 2.0**-20
    assert bool(((got.double() - exact).abs() <= size * unit + exact.abs() * 2.0**-8).all())


def test_the_order_of_tiles_takes_each_once(device: str) -> None:
    """13 x 7 tiles in groups of 4 rows: every element is written once, by the right program."""
    one, other = operands(16 * 13 - 3, 16, 16 * 7 - 5, ("int8", "int8"), ("row", "row"), device)
    config = MatmulConfig("pointers", 16, 16, 32, group=4)  # 32 along K is the least that tensor cores take
    got = multiply_codes(one.codes, other.codes, one.scale, other.scale.t(), None, torch.float32, "fast", config)
    assert right(got, one, other, None)


def test_nan_scales_lose_their_rows_and_no_others(device: str) -> None:
    one, other = operands(40, 32, 24, ("int8", "int8"), ("row", "tensor"), device)
    one.scale[7] = torch.nan
    got = multiply_codes(one.codes, other.codes, one.scale, other.scale, None, torch.bfloat16, "fast", WAYS[0])
    assert got[7].isnan().all()
    assert int(got.isnan().sum()) == 24


@pytest.mark.parametrize("scalings", SCALINGS)
@pytest.mark.parametrize("turned", [False, True])
def test_cublas_has_scales_as_it_takes_them(
    scalings: tuple, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Scales come as (M, 1) and (N, 1) or turned; it takes (M, 1) and (1, N), contiguous, or two numbers."""
    one, other = operands(16, 32, 48, ("e4m3", "e4m3"), scalings, "cpu")

    def scaled(left: Tensor, right: Tensor, *, scale_a: Tensor, scale_b: Tensor, **rest: object) -> Tensor:
        single = scalings == ("tensor", "tensor")
        assert (scale_a.shape, scale_b.shape) == (((), ()) if single else ((16, 1), (1, 48)))
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        return (left.float() @ right.float()) * (scale_a * scale_b)

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    scales = (one.scale.t(), other.scale.t()) if turned else (one.scale, other.scale)
    got = multiply_codes(one.codes, other.codes, *scales, None, torch.float32, "fast", CUBLAS)
    assert right(got, one, other, None)


@pytest.mark.gpu  # the interpreter reads NaN as 480
def test_nan_codes_of_float8_lose_their_rows_and_no_others() -> None:
    device = "cuda"
    x, w = torch.randn(40, 32, device=device), torch.randn(24, 32, device=device)
    x[7, 3] = torch.nan
    one, other = quantize(x, "row", "e4m3"), quantize(w, "tensor", "e4m3")
    got = multiply_codes(one.codes, other.codes, one.scale, other.scale, None, torch.bfloat16, "fast", WAYS[0])
    assert got[7].isnan().all()
    assert int(got.isnan().sum()) == 24


# Choosing


def kind(**other: object) -> MatmulShape:
    return replace(MatmulShape("float8", "vector", "tensor", "bfloat16", "fast", 32768, 5120, 1280), **other)


def test_defaults_are_ways_for_their_kinds() -> None:
    for form, accumulation in (("int8", "full"), ("float8", "fast"), ("float8", "full")):
        for rows, columns in ((32768, 5120), (2048, 1024), (100, 100), (1, 1)):
            of = kind(format=form, accumulation=accumulation, rows=rows, columns=columns)
            for hopper, descriptors in ((False, False), (True, False), (True, True)):
                config = _configs.default(of, False, descriptors, hopper)
                assert _configs.fits(config, of, False, descriptors)
                assert config.kernel == "pointers" or descriptors
                assert hopper or config.inner * (config.rows + config.columns) * config.stages <= 96 * 1024
    for form, right in (("float8", "tiles"), ("float8", "blocks"), ("int8", "tiles")):
        of = kind(format=form, left="blocks", right=right, accumulation="blocks")
        assert _configs.fits(ours := _configs.default(of, False, True, True), of, False, True)
        assert ours.kernel == "descriptors"
        assert _configs.fits(_configs.default(of, False, False, False), of, False, False)
    assert _configs.default(kind(), True, True, True) is CUBLAS
    assert _configs.default(kind(), False, True, True).kernel == "descriptors"
    assert len(set(_configs.CANDIDATES)) == len(_configs.CANDIDATES)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_autotune, "_name", lambda device: f"GPU {device.index or 0}")
    _autotune._kept.cache_clear()
    return tmp_path / "narrowgauge" / "multiplies.json"


CUDA = torch.device("cuda", 0)


def test_what_was_measured_is_found_by_the_next_process(cache: Path) -> None:
    config, other = MatmulConfig("descriptors", 256, 128, stages=4, halves=True), torch.device("cuda", 1)
    assert _autotune.measured(CUDA, kind()) is None
    assert _autotune.keep(CUDA, kind(), config, 0.25)
    assert _autotune.measured(CUDA, kind()) == config
    assert _autotune.measured(CUDA, kind(rows=1)) is None
    assert _autotune.measured(other, kind()) is None
    _autotune.keep(other, kind(), CUBLAS, 0.2)
    _autotune.keep(CUDA, kind(rows=1), CUBLAS, 0.1)
    _autotune._kept.cache_clear()  # as a new process has it
    assert _autotune.measured(CUDA, kind()) == config
    assert _autotune.measured(other, kind()) == CUBLAS
    assert json.loads(cache.read_text())["devices"]["GPU 0"][kind().key]["ms"] == 0.25
    # Without a folder it is remembered by this process.
    shutil.rmtree(cache.parent)
    cache.parent.write_text("a file")
    assert not _autotune.keep(CUDA, kind(), CUBLAS, 1.0)
    assert _autotune.measured(CUDA, kind()) == CUBLAS


@pytest.mark.parametrize(
    "damage",
    ["", "[]", '{"version": 0, "devices": {}}', '{"version": 1, "devices": []}',
     '{"version": 1, "devices": {"GPU 0": 3}}', '{"version": 1, "devices": {"GPU 0": {"KEY": 3}}}',
     '{"version": 1, "devices": {"GPU 0": {"KEY": {"kernel": "magic"}}}}',
     '{"version": 1, "devices": {"GPU 0": {"KEY": {"kernel": "pointers", "rows": "many"}}}}',
     '{"version": 1, "devices": {"GPU 0": {"KEY": {"kernel": "pointers", "rows": -16, "new": 1}}}}'],
)  # fmt: skip
def test_a_damaged_file_is_as_none_and_is_replaced(cache: Path, damage: str) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(damage.replace("KEY", kind().key))
    assert _autotune.measured(CUDA, kind()) is None
    assert _autotune.keep(CUDA, kind(), CUBLAS, 1.0)
    _autotune._kept.cache_clear()
    assert _autotune.measured(CUDA, kind()) == CUBLAS


def _write(start: int) -> None:
    for rows in range(start, start + 25):
        _autotune.keep(CUDA, kind(rows=rows), CUBLAS, 1.0)


def test_processes_that_write_at_once_lose_nothing(cache: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.map(_write, range(0, 100, 25))
    assert len(json.loads(cache.read_text())["devices"]["GPU 0"]) == 100


@pytest.mark.gpu
@pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("config", _configs.CANDIDATES, ids=str)
def test_every_shipped_way_is_right(config: MatmulConfig, forms: tuple) -> None:
    for shape in ((1024, 1280, 768), (520, 336, 272)):
        for scalings in (("row", "tensor"), ("row", "row"), ("tensor", "tensor")):
            one, other = operands(*shape, forms, scalings, "cuda")
            for how in ("fast", "full"):
                bias = torch.randn(shape[2], device="cuda").bfloat16()
                vectors = scalings[0] == "row", scalings[1] == "row"
                of = _autotune.shape_of(*shape, one.codes.dtype, *vectors, torch.bfloat16, how == "full")
                allowed = _autotune._allowed(one.codes, other.codes, *vectors, bias, torch.bfloat16, of)
                if not _configs.fits(config, of, *allowed):
                    continue
                got = multiply_codes(
                    one.codes, other.codes, one.scale, other.scale.t(), bias, torch.bfloat16, how, config
                )
                assert right(got, one, other, bias, fast=True), (shape, scalings, how)


@pytest.mark.gpu
@pytest.mark.parametrize("scalings", [("row128", "tile128"), ("row128", "row128")], ids=str)
@pytest.mark.parametrize("config", _configs.CANDIDATES, ids=str)
def test_every_shipped_way_is_right_with_blocks(config: MatmulConfig, scalings: tuple[str, str]) -> None:
    """Scales as quantizers leave them, which cuBLAS takes too; 1280 and 384 are no multiples of 512."""
    for shape in ((1024, 1280, 768), (520, 384, 272), (520, 336, 272)):
        x, w = (torch.randn(of, device="cuda") for of in (shape[:2], (shape[2], shape[1])))
        made = [_ops.CUDA.quantize_blocks(x, of, "", "e4m3", False) for x, of in zip((x, w), scalings, strict=True)]
        (left, left_scale), (right, right_scale) = (of[:2] for of in made)
        lie = _autotune.lies(left, left_scale, True), _autotune.lies(right, right_scale, True)
        of = _autotune.shape_of(*shape, left.dtype, *lie, torch.bfloat16, False)
        bias = torch.randn(shape[2], device="cuda").bfloat16()
        allowed = _autotune._allowed(left, right, *lie, bias, torch.bfloat16, of)
        assert allowed[0] == (shape[1] % 128 == 0) or config.kernel != "cublas"
        if not _configs.fits(config, of, *allowed):
            continue
        scales = left_scale, right_scale
        got = multiply_codes(left, right, *scales, bias, torch.bfloat16, "blocks", config)
        codes = ScaledCodes(left, left_scale), ScaledCodes(right, right_scale).t()
        exact = blocked_matmul(*codes, bias, torch.float32)
        assert float((got - exact).norm() / exact.norm()) < 2.5e-3, shape


@pytest.mark.gpu
def test_autotune_finds_a_way_and_the_next_call_takes_it(cache: Path) -> None:
    one, other = operands(512, 256, 512, ("int8", "int8"), ("row", "tensor"), "cuda")
    arguments = (one.codes, other.codes, one.scale, other.scale.t(), None, torch.bfloat16, "fast")
    of, times, failed = _autotune.tune(*arguments)
    assert times
    assert not failed, failed
    allowed = _autotune._allowed(one.codes, other.codes, True, False, None, torch.bfloat16, of)
    assert _autotune._chosen(of, one.codes.device, *allowed) == next(iter(times))
    assert right(multiply_codes(*arguments), one, other, None)
