# mypy: disable-error-code="import-not-found,import-untyped"
"""Choosing the configuration of a multiply: the fastest that was measured on this GPU, else the table's.

Nothing is measured unless `tune` is called: a first step takes the table's defaults. `tune` times every candidate
once per shape; later processes find the winners in the user's cache folder, by GPU, Triton's version and shape
(`kernels._cache`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from narrowgauge.kernels import _cache
from narrowgauge.kernels._linear._configs import CANDIDATES, MatmulConfig, MatmulShape, default, fits
from narrowgauge.kernels._linear._multiply import Steps, fits_descriptors, fits_sides, prepared
from narrowgauge.kernels._linear._sizes import over

_HOPPER = 9
BLOCK = 128  # what shares a scale, along rows or along K
_NEAR = 1.03  # timing noise: closer times count as equal
_FILE = "multiplies.json"

Product = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


def shape_of(
    rows: int, inner: int, columns: int, codes: torch.dtype, one: bool | Steps, other: bool | Steps,
    dtype: torch.dtype, full: bool,
) -> MatmulShape:  # fmt: skip
    """The shape of (M, K) codes times (N, K) codes; `one` and `other` say whether their scales are vectors, or how
    those of blocks lie.
    """
    integer = codes == torch.int8
    names = (_scaling(one), _scaling(other))
    how = "blocks" if isinstance(one, tuple) else "full" if full or integer else "fast"
    return MatmulShape(
        "int8" if integer else "float8", *names, str(dtype).removeprefix("torch."), how, rows, columns, inner
    )


def _scaling(lie: bool | Steps) -> str:
    if isinstance(lie, bool):
        return "vector" if lie else "tensor"
    return "blocks" if lie[0] == 1 else "tiles"


def lies(codes: Tensor, scale: Tensor, blocks: bool) -> bool | Steps:
    """Whether the scales of (rows, K) codes are several; if they are of blocks, how they lie.

    Scales of blocks are float32 of (rows, ⌈rows / 128⌉ or 1, ⌈K / 128⌉ or 1), in any strides.
    """
    if not blocks:
        return scale.numel() > 1
    (high, wide), rows = scale.shape, codes.shape[0]
    step, along = scale.stride(0) if high > 1 else 0, scale.stride(1) if wide > 1 else 0
    return 1 if high == rows else BLOCK, step, along


def multiply_codes(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, bias: Tensor | None,
    dtype: torch.dtype, accumulation: str, config: MatmulConfig | None = None,
) -> Tensor:  # fmt: skip
    """Multiply codes.

    Args:
        left: contiguous (M, K), K at least 1; int8 with int8, or float8 with float8 of either kind.
        right: contiguous (N, K).
        left_scale: float32, (M, 1) contiguous or one number; of blocks as in `lies`.
        right_scale: float32, (1, N) contiguous or one number; of blocks as in `lies`, for (N, K).
        bias: (N,) contiguous or None.
        dtype: of the result (M, N): bfloat16, float16 or float32.
        accumulation: ``"full"`` adds sums of float8 in float32 after every tile along K, ``"fast"`` does not;
            ``"blocks"``: scales are of blocks.
        config: one that fits; the best known if None.
    """
    rows, inner = left.shape
    blocks = accumulation == "blocks"
    product = _product(
        rows, inner, right.shape[0], left.dtype, right.dtype, lies(left, left_scale, blocks),
        lies(right, right_scale, blocks), None if bias is None else bias.dtype, dtype, accumulation == "full",
        left.device, (left.data_ptr() | right.data_ptr()) % 16 == 0, config,
    )  # fmt: skip
    return product(left, right, left_scale, right_scale, bias)


@functools.lru_cache(maxsize=4096)
def _product(
    rows: int, inner: int, columns: int, left: torch.dtype, right: torch.dtype, one: bool | Steps,
    other: bool | Steps, bias: torch.dtype | None, dtype: torch.dtype, full: bool, device: torch.device,
    aligned: bool, config: MatmulConfig | None,
) -> Product:  # fmt: skip
    """The function that multiplies such operands."""
    if config is None:
        kind = shape_of(rows, inner, columns, left, one, other, dtype, full)
        cublas = _has_cublas(device, kind) and _cublas_takes(left, right, one, other, bias, dtype, kind)
        config = _chosen(kind, device, cublas, _is_hopper(device) and aligned and fits_sides(inner, columns, dtype))
    if config.kernel == "cublas":
        if isinstance(other, tuple):
            return functools.partial(_blocks_by_cublas, tiles=other[0] > 1, dtype=dtype)
        return functools.partial(_by_cublas, dtype=dtype, full=full)
    return prepared(rows, columns, inner, left, right, one, other, bias, dtype, full, config, device)


def tune(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, bias: Tensor | None,
    dtype: torch.dtype, accumulation: str,
) -> tuple[MatmulShape, dict[MatmulConfig, float], dict[MatmulConfig, str]]:  # fmt: skip
    """Time every config of a multiply, with arguments as `multiply_codes` takes them, and store the fastest.

    Returns:
        The shape; milliseconds of each config, the fastest first; the errors of the others.
    """
    rows, inner = left.shape
    blocks = accumulation == "blocks"
    lie = lies(left, left_scale, blocks), lies(right, right_scale, blocks)
    kind = shape_of(rows, inner, right.shape[0], left.dtype, *lie, dtype, accumulation == "full")
    allowed = _allowed(left, right, *lie, bias, dtype, kind)
    known = default(kind, False, allowed[1], _is_hopper(left.device))
    operands = (left, right, left_scale, right_scale, bias, dtype, accumulation)
    wanted = multiply_codes(*operands, known).to(torch.float32)
    size = wanted.abs().mean()

    def agrees(got: Tensor) -> bool:
        # In float8 sums differ in their order, and in how much the accumulators keep.
        off = (got.to(torch.float32) - wanted).abs().max()
        return bool(off == 0) if kind.format == "int8" else bool(off <= 0.1 * size)

    times: dict[MatmulConfig, float] = {}
    failed: dict[MatmulConfig, str] = {}
    with torch.cuda.device(left.device):
        for config in CANDIDATES:
            if not fits(config, kind, *allowed):
                continue
            run = functools.partial(multiply_codes, *operands, config)
            try:
                if agrees(run()):
                    times[config] = _time(run)
                else:
                    failed[config] = "its result differs"
            except Exception as error:  # a tile that does not fit, a compiler that refuses
                failed[config] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    times = dict(sorted(times.items(), key=lambda item: item[1]))
    if times:
        best = _lightest(kind, times)
        keep(left.device, kind, best, times[best])
        _product.cache_clear()
    return kind, times, failed


def _lightest(kind: MatmulShape, times: dict[MatmulConfig, float]) -> MatmulConfig:
    """The fastest config, or an equally fast kernel of ours where cuBLAS needs a scale expanded to a vector, which
    takes more kernels, and more of the host's time than all of ours.
    """
    best = next(iter(times))
    if best.kernel == "cublas" and {kind.left, kind.right} == {"vector", "tensor"}:
        near = (config for config, ms in times.items() if config.kernel != "cublas" and ms <= _NEAR * times[best])
        return next(near, best)
    return best


def _chosen(kind: MatmulShape, device: torch.device, cublas: bool, descriptors: bool) -> MatmulConfig:
    config = measured(device, kind) if device.type == "cuda" else None
    if config is not None and fits(config, kind, cublas, descriptors):
        return config
    return default(kind, cublas, descriptors, _is_hopper(device))


@functools.lru_cache(maxsize=64)
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _HOPPER


def _has_cublas(device: torch.device, kind: MatmulShape) -> bool:
    """Whether cuBLAS multiplies so on a device: with scales of blocks on Hopper alone, from CUDA 12.9 on."""
    if kind.accumulation != "blocks" or not _is_hopper(device):
        return _is_hopper(device)
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    return torch.cuda.get_device_capability(device)[0] == _HOPPER and version >= (12, 9)


def _allowed(
    left: Tensor, right: Tensor, one: bool | Steps, other: bool | Steps, bias: Tensor | None, dtype: torch.dtype,
    kind: MatmulShape,
) -> tuple[bool, bool]:  # fmt: skip
    """Whether cuBLAS, and whether the copy engine, take these operands on this device."""
    if not _is_hopper(left.device):
        return False, False
    added = None if bias is None else bias.dtype
    cublas = _has_cublas(left.device, kind) and _cublas_takes(
        left.dtype, right.dtype, one, other, added, dtype, kind
    )
    return cublas, fits_descriptors(left, right, dtype)


def _cublas_takes(
    left: torch.dtype, right: torch.dtype, one: bool | Steps, other: bool | Steps, bias: torch.dtype | None,
    dtype: torch.dtype, kind: MatmulShape,
) -> bool:  # fmt: skip
    if kind.format != "float8" or left == right == torch.float8_e5m2:
        return False
    if kind.inner % 16 or kind.columns % 16 or torch.version.hip is not None:
        return False
    if isinstance(one, tuple):
        # As the quantizers leave scales of rows and, for the right operand, of tiles.
        tiles = BLOCK, over(kind.inner, 4 * BLOCK) * 4, 1
        lie = one == (1, 1, kind.rows) and other in ((1, 1, kind.columns), tiles)
        whole = kind.inner % BLOCK == 0 and kind.rows % 4 == 0
        return lie and whole and dtype == torch.bfloat16 and bias in (None, dtype)
    # With vectors of scales cuBLAS writes bfloat16 only; to bfloat16 it adds a bfloat16 bias only.
    half = dtype == torch.bfloat16 or (dtype == torch.float16 and kind.left == kind.right == "tensor")
    return half and bias in (None, dtype)


def _blocks_by_cublas(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, bias: Tensor | None,
    tiles: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    by_rows, how = ScalingType.BlockWise1x128, ScalingType.BlockWise1x128
    if tiles:
        # Those along K in a column, with what fills it to 16 bytes.
        how, (count, step) = ScalingType.BlockWise128x128, (right_scale.shape[0], right_scale.stride(0))
        right_scale = right_scale.as_strided((step, count), (1, step))
    return scaled_mm(left, right.t(), left_scale, by_rows, right_scale, how, bias=bias, output_dtype=dtype)


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


def measured(device: torch.device, kind: MatmulShape) -> MatmulConfig | None:
    """The fastest config that was measured for a shape on a device, if any."""
    return _kept(_name(device)).get(kind.key)


def keep(device: torch.device, kind: MatmulShape, config: MatmulConfig, ms: float) -> bool:
    """Store the config of a shape and its time for this process and, if the file can be written, for later ones."""
    name = _name(device)
    _kept(name)[kind.key] = config
    record = {**dataclasses.asdict(config), "ms": ms}
    return _cache.merge_records(_cache.folder() / _FILE, name, {kind.key: record})


def _time(run: Callable[[], Any], rounds: int = 3, budget_ms: float = 20.0) -> float:
    """Milliseconds a run, the best of some rounds of runs in a row.

    They are replayed from a CUDA graph: launched one by one, a small multiply would measure the host.
    """
    ms = _elapsed(run, 2)
    runs = max(3, min(100, int(budget_ms / max(ms / 2, 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(runs):
            run()
    graph.replay()
    return min(_elapsed(graph.replay, 1) for _ in range(rounds)) / runs


def _elapsed(run: Callable[[], Any], times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _name(device: torch.device) -> str:
    # By the module: a distribution of it need not be called triton (pytorch-triton, triton-windows).
    return f"{torch.cuda.get_device_name(device)}, triton {triton.__version__}"


@functools.lru_cache(maxsize=16)
def _kept(name: str) -> dict[str, MatmulConfig]:
    """Configs by shape, as the file had them at the first request."""
    configs = {}
    for key, record in _cache.read_records(_cache.folder() / _FILE).get(name, {}).items():
        with contextlib.suppress(TypeError, ValueError):
            configs[key] = _config(record)
    return configs


def _config(record: Any) -> MatmulConfig:
    """A config from the file.

    Raises:
        TypeError, ValueError: if the file is damaged there.
    """
    if not isinstance(record, dict):
        raise ValueError(f"not a config: {record}")
    config = MatmulConfig(**{name: value for name, value in record.items() if name != "ms"})
    sides = (config.rows, config.columns, config.inner, config.warps, config.stages, config.group, config.resident)
    known = config.kernel in ("pointers", "descriptors", "cublas") and isinstance(config.halves, bool)
    if not known or not all(isinstance(side, int) and 0 < side <= 1024 for side in sides):
        raise ValueError(f"not a config: {record}")
    return config
