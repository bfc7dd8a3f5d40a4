"""A multiply of codes by the way that is right for it: measured on this GPU, else from the table."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from narrowgauge.kernels._linear._multiply import fits_descriptors, multiply
from narrowgauge.kernels._linear._tuning import fastest, keep, measured
from narrowgauge.kernels._linear._ways import CANDIDATES, Kind, Way, default, fits

_HOPPER = 9


def kind_of(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, full: bool
) -> Kind:
    """The kind of (M, K) codes times (N, K) codes."""
    integer = left.dtype == torch.int8
    one, other = ("vector" if scale.numel() > 1 else "tensor" for scale in (left_scale, right_scale))
    return Kind(
        "int8" if integer else "float8", one, other, str(dtype).removeprefix("torch."),
        "full" if full or integer else "fast", left.shape[0], right.shape[0], left.shape[1],
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
    if way is None:
        kind = kind_of(left, right, left_scale, right_scale, dtype, full)
        way = _chosen(kind, left.device, *_allowed(left, right, bias, dtype, kind))
    if way.kernel == "cublas":
        return _by_cublas(left, right, left_scale, right_scale, bias, dtype, full)
    return multiply(left, right, left_scale, right_scale, bias, dtype, full, way)


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
    known = default(kind, False, allowed[1])
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
        best = next(iter(times))
        keep(left.device, {kind: (best, times[best])})
        _chosen.cache_clear()
    return kind, times, failed


@functools.lru_cache(maxsize=4096)
def _chosen(kind: Kind, device: torch.device, cublas: bool, descriptors: bool) -> Way:
    way = measured(device, kind) if device.type == "cuda" else None
    if way is not None and fits(way, kind, cublas, descriptors):
        return way
    return default(kind, cublas, _is_hopper(device))


@functools.lru_cache(maxsize=64)
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _HOPPER


def _allowed(left: Tensor, right: Tensor, bias: Tensor | None, dtype: torch.dtype, kind: Kind) -> tuple[bool, bool]:
    """Whether cuBLAS, and whether the copy engine, take these operands on this device."""
    hopper = _is_hopper(left.device)
    return hopper and _cublas_takes(left, right, bias, dtype, kind), hopper and fits_descriptors(left, right, dtype)


def _cublas_takes(left: Tensor, right: Tensor, bias: Tensor | None, dtype: torch.dtype, kind: Kind) -> bool:
    if kind.format != "float8" or left.dtype == right.dtype == torch.float8_e5m2:
        return False
    if left.shape[1] % 16 or right.shape[0] % 16 or torch.version.hip is not None:
        return False
    # With vectors of scales it writes bfloat16 only; with bfloat16 it adds a bias of the same.
    half = dtype == torch.bfloat16 or (dtype == torch.float16 and kind.left == kind.right == "tensor")
    return half and (bias is None or bias.dtype == dtype)


def _by_cublas(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, bias: Tensor | None,
    dtype: torch.dtype, full: bool,
) -> Tensor:  # fmt: skip
    if left_scale.numel() == right_scale.numel() == 1:
        left_scale, right_scale = left_scale.reshape(()), right_scale.reshape(())
    else:
        left_scale = left_scale.expand(left.shape[0], 1).contiguous()
        right_scale = right_scale.expand(1, right.shape[0]).contiguous()
    return torch._scaled_mm(
        left, right.t(), scale_a=left_scale, scale_b=right_scale, bias=bias, out_dtype=dtype,
        use_fast_accum=not full,
    )  # fmt: skip
