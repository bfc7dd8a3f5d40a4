"""A multiply of codes by the way that is right for it: measured on this GPU, else from the table."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from narrowgauge.kernels._linear._multiply import fits_descriptors, fits_sides, multiply, prepared
from narrowgauge.kernels._linear._tuning import fastest, keep, measured
from narrowgauge.kernels._linear._ways import CANDIDATES, Kind, Way, default, fits

_HOPPER = 9
_NEAR = 1.03  # times that a run tells apart no better


Product = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


def kind_of(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, full: bool
) -> Kind:
    """The kind of (M, K) codes times (N, K) codes."""
    rows, inner = left.shape
    one, other = left_scale.numel() > 1, right_scale.numel() > 1
    return _kind(rows, inner, right.shape[0], left.dtype, one, other, dtype, full)


def _kind(
    rows: int, inner: int, columns: int, codes: torch.dtype, one: bool, other: bool, dtype: torch.dtype, full: bool
) -> Kind:
    integer = codes == torch.int8
    return Kind(
        "int8" if integer else "float8", "vector" if one else "tensor", "vector" if other else "tensor",
        str(dtype).removeprefix("torch."), "full" if full or integer else "fast", rows, columns, inner,
    )  # fmt: skip


def multiply_codes(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, bias: Tensor | None,
    dtype: torch.dtype, full: bool, way: Way | None = None,
) -> Tensor:  # fmt: skip
    """Multiply codes.

    Args:
        left, right, left_scale, right_scale, bias, dtype, full: as `_multiply.multiply` takes them.
        way: the way to go; the best that is known if None.

    Returns:
        (M, N).
    """
    rows, inner = left.shape
    product = _product(
        rows, inner, right.shape[0], left.dtype, right.dtype, left_scale.numel() > 1, right_scale.numel() > 1,
        None if bias is None else bias.dtype, dtype, full, left.device,
        (left.data_ptr() | right.data_ptr()) % 16 == 0, way,
    )  # fmt: skip
    return product(left, right, left_scale, right_scale, bias)


@functools.lru_cache(maxsize=4096)
def _product(
    rows: int, inner: int, columns: int, left: torch.dtype, right: torch.dtype, one: bool, other: bool,
    bias: torch.dtype | None, dtype: torch.dtype, full: bool, device: torch.device, aligned: bool, way: Way | None,
) -> Product:  # fmt: skip
    """What multiplies operands that are alike; `one` and `other` say whether their scales are vectors."""
    if way is None:
        kind = _kind(rows, inner, columns, left, one, other, dtype, full)
        cublas = _is_hopper(device) and _cublas_takes(left, right, bias, dtype, kind)
        way = _chosen(kind, device, cublas, _is_hopper(device) and aligned and fits_sides(inner, columns, dtype))
    if way.kernel == "cublas":
        return functools.partial(_by_cublas, dtype=dtype, full=full)
    return prepared(rows, columns, inner, left, right, one, other, bias, dtype, full, way, device)


def tune(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, bias: Tensor | None,
    dtype: torch.dtype, full: bool, ways: tuple[Way, ...] = CANDIDATES,
) -> tuple[Kind, dict[Way, float], dict[Way, str]]:  # fmt: skip
    """Time every way of a multiply and keep the fastest.

    Args:
        left, right, left_scale, right_scale, bias, dtype, full: as `_multiply.multiply` takes them.
        ways: those to try.

    Returns:
        The kind; milliseconds of each way, the fastest first; what the others failed with.
    """
    kind = kind_of(left, right, left_scale, right_scale, dtype, full)
    allowed = _allowed(left, right, bias, dtype, kind)
    known = default(kind, False, allowed[1], _is_hopper(left.device))
    operands = (left, right, left_scale, right_scale, bias, dtype, full)
    wanted = multiply(*operands, known).to(torch.float32)
    size = wanted.abs().mean()

    def agrees(got: Tensor) -> bool:
        # In float8 sums differ in their order, and in how much the accumulators keep.
        off = (got.to(torch.float32) - wanted).abs().max()
        return bool(off == 0) if kind.format == "int8" else bool(off <= 0.1 * size)

    tried = [way for way in ways if fits(way, kind, *allowed)]
    with torch.cuda.device(left.device):
        times, failed = fastest(tried, lambda way: multiply_codes(*operands, way), agrees)
    if times:
        best = _lightest(kind, times)
        keep(left.device, {kind: (best, times[best])})
        _product.cache_clear()
    return kind, times, failed


def _lightest(kind: Kind, times: dict[Way, float]) -> Way:
    """The fastest way, or one of ours that is as good as that where cuBLAS wants a vector made of one scale.

    The making is done by further kernels, which keep the host longer than all of ours.
    """
    best = next(iter(times))
    if best.kernel == "cublas" and kind.left != kind.right:
        near = (way for way, ms in times.items() if way.kernel != "cublas" and ms <= _NEAR * times[best])
        return next(near, best)
    return best


def _chosen(kind: Kind, device: torch.device, cublas: bool, descriptors: bool) -> Way:
    way = measured(device, kind) if device.type == "cuda" else None
    if way is not None and fits(way, kind, cublas, descriptors):
        return way
    return default(kind, cublas, descriptors, _is_hopper(device))


@functools.lru_cache(maxsize=64)
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _HOPPER


def _allowed(left: Tensor, right: Tensor, bias: Tensor | None, dtype: torch.dtype, kind: Kind) -> tuple[bool, bool]:
    """Whether cuBLAS, and whether the copy engine, take these operands on this device."""
    if not _is_hopper(left.device):
        return False, False
    added = None if bias is None else bias.dtype
    return _cublas_takes(left.dtype, right.dtype, added, dtype, kind), fits_descriptors(left, right, dtype)


def _cublas_takes(
    left: torch.dtype, right: torch.dtype, bias: torch.dtype | None, dtype: torch.dtype, kind: Kind
) -> bool:
    if kind.format != "float8" or left == right == torch.float8_e5m2:
        return False
    if kind.inner % 16 or kind.columns % 16 or torch.version.hip is not None:
        return False
    # With vectors of scales it writes bfloat16 only; with bfloat16 it adds a bias of the same.
    half = dtype == torch.bfloat16 or (dtype == torch.float16 and kind.left == kind.right == "tensor")
    return half and bias in (None, dtype)


def _by_cublas(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, bias: Tensor | None,
    dtype: torch.dtype, full: bool,
) -> Tensor:  # fmt: skip
    if left_scale.numel() == right_scale.numel() == 1:
        one, other = left_scale.reshape(()), right_scale.reshape(())
    else:
        one, other = _vector(left_scale, left.shape[0], 1), _vector(right_scale, 1, right.shape[0])
    return torch._scaled_mm(
        left, right.t(), scale_a=one, scale_b=other, bias=bias, out_dtype=dtype, use_fast_accum=not full
    )


def _vector(scale: Tensor, rows: int, columns: int) -> Tensor:
    """As many scales as there are rows or columns, from as many, which may lie along either side, or from one."""
    if scale.shape == (rows, columns):
        return scale
    if scale.numel() == rows * columns:
        return scale.reshape(rows, columns)
    return scale.expand(rows, columns).contiguous()
