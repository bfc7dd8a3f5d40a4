"""The heavy operations of a linear layer: eager torch, kernels, and operators of torch for compilers.

They quantize a matrix by rows, by columns, as a whole or in blocks, dequantize it, and multiply two in codes. On
CUDA they are Triton kernels where Triton runs, elsewhere eager torch, which is the specification. The kernels match
its codes and scales bit for bit, its products of int8 too but with scales of blocks, and those of float8 up to the
order and width of sums.

Codes are in the memory order that a multiply reads: *straight*, (rows, columns), or *transposed*, (columns, rows),
both contiguous. An order that was not requested is an empty tensor. Scales of blocks lie as a multiply reads them
beside these codes (`_block_scales`). Column sums are float32: the bias gradient needs them, and they cost nothing
where G is read anyway.

Each is an operator too (`narrowgauge::quantize_rows`, `quantize_columns`, `quantize_tensor`, `quantize_blocks`,
`dequantize`, `multiply_codes`), so that `torch.compile` does not trace into it. An operator serves a compiler, a
tensor subclass (sharded, fake, batched), or a mode that observes or changes every operation. Eager training has
none of these, and torch's dispatcher takes longer to call a Python function than most of these run. So plain
tensors on a CPU or a CUDA device, with no mode active, go to the functions themselves (`operations`). The numbers
are the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from narrowgauge._torch_private import operators_observed, when_traced
from narrowgauge.kernels import _triton
from narrowgauge.kernels._triton import unavailable
from narrowgauge.linear._quantize import (
    FORMATS,
    SMALLEST_ABSMAX,
    Format,
    ScaledCodes,
    Scaling,
    largest_magnitude,
    quantize,
    quantize_by,
    scale_shape,
)
from narrowgauge.linear._reference import LONGEST_INT32_SUM, blocked_matmul, is_real, scaled_matmul

# Codes, scales, and sums of columns if requested.
Vectors = tuple[Tensor, Tensor, Tensor | None]
# Straight codes, transposed ones, the scale, the matrix's own absmax, and sums of columns if requested.
Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
# Straight codes and their scales, transposed ones and theirs, and sums of columns if requested.
Blocks = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
_LIBRARY: Any = torch.library.Library("narrowgauge", "FRAGMENT")  # type: ignore[no-untyped-call]
_FLOAT8 = (8, 9)  # the compute capability from which tensor cores take it
_INT8 = (8, 0)


@functools.lru_cache(maxsize=256)
def no_kernels(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why codes of a dtype have no kernels on a device; None if they have."""
    why = unavailable(device)
    if why is None and torch.version.hip is None:
        needed = _INT8 if dtype == torch.int8 else _FLOAT8
        if torch.cuda.get_device_capability(device) < needed:
            why = f"compute capability must be at least {needed[0]}.{needed[1]}"
    return why


def path(format: Format, device: torch.device, arithmetic: str, blocks: bool = False) -> str:
    """How codes of a format are multiplied on a device, in words; `blocks`: with scales of blocks."""
    dtype = FORMATS[format].dtype
    if arithmetic == "simulated":
        return f"{format} simulated"
    why = no_kernels(device, dtype)
    if why is None:
        return f"{format} real ({_triton.name()}{'' if dtype == torch.int8 else ', cuBLAS'})"
    real = "real" if is_real(dtype, device.type) and not blocks else "simulated"
    return f"{format} {real}" + (f" ({why})" if device.type == "cuda" else "")


def _kernels(x: Tensor, dtype: torch.dtype) -> bool:
    return x.numel() > 0 and no_kernels(x.device, dtype) is None


@functools.cache
def _modules() -> tuple[Any, Any, Any, Any, Any]:
    """The kernels' modules; an import statement at every call takes a microsecond each."""
    from narrowgauge.kernels._linear import _autotune, _blocks, _dequantize, _rows, _tiles

    return _rows, _tiles, _autotune, _dequantize, _blocks


def _sums(x: Tensor, sums: bool, dtype: torch.dtype) -> Tensor | None:
    return x.sum(0, dtype=torch.float32).to(dtype) if sums else None


def _codes(x: Tensor, format: str, rows: int, columns: int) -> Tensor:
    return x.new_empty((rows, columns), dtype=FORMATS[format].dtype)


def _both_codes(x: Tensor, format: str, straight: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    one = _codes(x, format, rows, columns) if straight else _codes(x, format, 0, 0)
    return one, _codes(x, format, columns, rows) if transposed else _codes(x, format, 0, 0)


def _floats(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.float32)


def _summed(x: Tensor, sums: bool, dtype: torch.dtype | None) -> Tensor:
    return x.new_empty((x.shape[1] if sums else 0,), dtype=dtype or torch.float32)


def _transposed(codes: Tensor) -> Tensor:
    # Not `.contiguous()`, which returns a single row or column itself: an operator must not return a view.
    return codes.t().clone(memory_format=torch.contiguous_format)


# Rows


def _eager_rows(x: Tensor, format: Format, sums: bool, dtype: torch.dtype = torch.float32) -> Vectors:
    codes, scale = quantize(x, "row", format)
    return codes.contiguous(), scale.contiguous(), _sums(x, sums, dtype)


def _cuda_rows(x: Tensor, format: Format, sums: bool, dtype: torch.dtype = torch.float32) -> Vectors:
    if not _kernels(x, FORMATS[format].dtype):
        return _eager_rows(x, format, sums, dtype)
    if not x.is_contiguous():
        if x.t().is_contiguous() and not sums:
            # Its rows are the columns of its contiguous transpose.
            codes, scale, total = _cuda_columns(x.t(), format, False)
            return codes, scale.reshape(-1, 1), total
        x = x.contiguous()
    codes = _codes(x, format, *x.shape)
    return codes, *_modules()[0].quantize_rows(x, format, codes, sums, dtype)


def _fake_rows(
    x: Tensor, format: Format, sums: bool, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    return _codes(x, format, rows, columns), _floats(x, rows, 1), _summed(x, sums, dtype)


# Columns


def _eager_columns(x: Tensor, format: Format, sums: bool, dtype: torch.dtype = torch.float32) -> Vectors:
    codes, scale = quantize(x, "column", format)
    return _transposed(codes), scale.contiguous(), _sums(x, sums, dtype)


def _cuda_columns(x: Tensor, format: Format, sums: bool, dtype: torch.dtype = torch.float32) -> Vectors:
    if not _kernels(x, FORMATS[format].dtype):
        return _eager_columns(x, format, sums, dtype)
    if not x.is_contiguous():
        if x.t().is_contiguous() and not sums:
            codes, scale, total = _cuda_rows(x.t(), format, False)
            return codes, scale.reshape(1, -1), total
        x = x.contiguous()
    transposed = _codes(x, format, x.shape[1], x.shape[0])
    return transposed, *_modules()[1].quantize_columns(x, format, transposed, sums, dtype)


def _fake_columns(
    x: Tensor, format: Format, sums: bool, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    return _codes(x, format, columns, rows), _floats(x, 1, columns), _summed(x, sums, dtype)


# Tensor


def _eager_tensor(
    x: Tensor, average: Tensor | None, format: Format, straight: bool, transposed: bool, sums: bool,
    dtype: torch.dtype = torch.float32, maxima: Tensor | None = None,
) -> Tensors:  # fmt: skip
    if maxima is None:
        own = largest_magnitude(x, "tensor", format)
    else:
        own = maxima.view(torch.float32).amax().reshape(1, 1)
    absmax = own
    if average is not None:
        known = average.to(torch.float32).reshape(1, 1)
        absmax = torch.where(known > 0, known, own)
    codes, scale = quantize_by(x, own, absmax, format)
    none = codes.new_empty((0, 0))
    turned = _transposed(codes) if transposed else none
    return codes.contiguous() if straight else none.clone(), turned, scale, own.clone(), _sums(x, sums, dtype)


def _cuda_tensor(
    x: Tensor, average: Tensor | None, format: Format, straight: bool, transposed: bool, sums: bool,
    dtype: torch.dtype = torch.float32, maxima: Tensor | None = None,
) -> Tensors:  # fmt: skip
    if not _kernels(x, FORMATS[format].dtype):
        return _eager_tensor(x, average, format, straight, transposed, sums, dtype, maxima)
    if not x.is_contiguous():
        if x.t().is_contiguous() and not sums:
            turned, codes, scale, own, _ = _cuda_tensor(
                x.t(), average, format, transposed, straight, False, maxima=maxima
            )
            return codes, turned, scale, own, None
        x = x.contiguous()
    tiles = _modules()[1]
    codes, turned = _both_codes(x, format, straight, transposed)
    scale, own, total = tiles.quantize_tensor(
        x, format, average, codes if straight else None, turned if transposed else None, sums, dtype, maxima
    )
    return codes, turned, scale, own, total


def _fake_tensor(
    x: Tensor, average: Tensor | None, format: Format, straight: bool, transposed: bool, sums: bool, *,
    dtype: torch.dtype | None = None, maxima: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    codes = _both_codes(x, format, straight, transposed)
    return *codes, _floats(x, 1, 1), _floats(x, 1, 1), _summed(x, sums, dtype)


# Blocks


# The scaling of a matrix's transpose.
_TURNED = {"": "", "row128": "column128", "column128": "row128", "tile128": "tile128"}


def _block_scales(x: Tensor, scaling: str, transposed: bool) -> Tensor:
    """Scales of a matrix, to be written, in the memory that a multiply reads beside straight or transposed codes:
    those of a block along the sum one after the other; of tiles those along the sum, in rows of 16 bytes.
    """
    if not scaling:
        return _floats(x, 0, 0)
    high, wide = scale_shape(cast(Scaling, scaling), *x.shape)
    if scaling == "tile128":
        along, across = (high, wide) if transposed else (wide, high)
        made = _floats(x, across, -(-along // 4) * 4)[:, :along]
        return made.t() if transposed else made
    return _floats(x, high, wide) if transposed else _floats(x, wide, high).t()


def _eager_blocks(
    x: Tensor, straight: str, transposed: str, format: Format, sums: bool, dtype: torch.dtype = torch.float32
) -> Blocks:
    """Straight codes by ``"row128"`` or ``"tile128"``, transposed ones by ``"column128"`` or ``"tile128"``; of an
    order that is not requested, ``""``, codes and scales are empty.
    """
    codes, turned = _both_codes(x, format, False, False)
    scale, turned_scale = _block_scales(x, straight, False), _block_scales(x, transposed, True)
    if straight:
        made = quantize(x, cast(Scaling, straight), format)
        codes = made.codes.contiguous()
        scale.copy_(made.scale)
    if transposed:
        made = quantize(x, cast(Scaling, transposed), format)
        turned = _transposed(made.codes)
        turned_scale.copy_(made.scale)
    return codes, scale, turned, turned_scale, _sums(x, sums, dtype)


def _cuda_blocks(
    x: Tensor, straight: str, transposed: str, format: Format, sums: bool, dtype: torch.dtype = torch.float32
) -> Blocks:
    if not _kernels(x, FORMATS[format].dtype):
        return _eager_blocks(x, straight, transposed, format, sums, dtype)
    if not x.is_contiguous():
        if x.t().is_contiguous() and not sums:
            turned, turned_scale, codes, scale, _ = _cuda_blocks(
                x.t(), _TURNED[transposed], _TURNED[straight], format, False
            )
            return codes, scale.t(), turned, turned_scale.t(), None
        x = x.contiguous()
    codes, turned = _both_codes(x, format, bool(straight), bool(transposed))
    scale, turned_scale = _block_scales(x, straight, False), _block_scales(x, transposed, True)
    total = _modules()[4].quantize_blocks(
        x, format, straight, transposed, codes, scale, turned, turned_scale, sums, dtype
    )
    return codes, scale, turned, turned_scale, total


def _fake_blocks(
    x: Tensor, straight: str, transposed: str, format: str, sums: bool, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    codes, turned = _both_codes(x, format, bool(straight), bool(transposed))
    one, other = _block_scales(x, straight, False), _block_scales(x, transposed, True)
    return codes, one, turned, other, _summed(x, sums, dtype)


# Multiply


def eager_product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, bias: Tensor | None,
    dtype: torch.dtype, accumulation: str, arithmetic: str = "real",
) -> Tensor:  # fmt: skip
    """(M, K) codes times (N, K) codes, both contiguous, with M and N scales of any shape, or one.

    If `accumulation` is ``"blocks"``, or ``"simulated blocks"`` (never by a kernel), the scales are those of these
    (M, K) and (N, K) as `quantize` gives them.
    """
    if accumulation.endswith("blocks"):
        return blocked_matmul(ScaledCodes(left, left_scale), ScaledCodes(right, right_scale).t(), bias, dtype)
    one, other = ScaledCodes(left, left_scale.reshape(-1, 1)), ScaledCodes(right.t(), right_scale.reshape(1, -1))
    return scaled_matmul(one, other, bias, dtype, arithmetic)


def cuda_product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, bias: Tensor | None,
    dtype: torch.dtype, accumulation: str,
) -> Tensor:  # fmt: skip
    """The same by a kernel, if there is one."""
    blocks = accumulation == "blocks"
    long = left.dtype == torch.int8 and left.shape[1] > LONGEST_INT32_SUM and not blocks
    none = accumulation == "simulated blocks" or long or not (left.numel() and right.numel())
    if none or no_kernels(left.device, left.dtype) is not None:
        return eager_product(left, right, left_scale, right_scale, bias, dtype, accumulation)
    scales = (left_scale, right_scale) if blocks else (left_scale.contiguous(), right_scale.contiguous())
    product: Tensor = _modules()[2].multiply_codes(
        left.contiguous(), right.contiguous(), *scales, None if bias is None else bias.contiguous(),
        torch.float32 if dtype == torch.float64 else dtype, accumulation,
    )  # fmt: skip
    return product if product.dtype == dtype else product.to(dtype)


# Dequantize


def _eager_dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return ScaledCodes(codes, scale).dequantize(dtype)


def _cuda_dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    rows, columns = codes.shape
    known = (scale.shape[0] in (1, rows) and scale.shape[1] in (1, columns)) or (
        tuple(scale.shape) == scale_shape("row128", rows, columns)
    )
    if not known or dtype == torch.float64 or not _kernels(codes, codes.dtype):
        return _eager_dequantize(codes, scale, dtype)
    product: Tensor = _modules()[3].dequantize(codes.contiguous(), scale, dtype)
    return product


class Operations(NamedTuple):
    """One implementation of the operations.

    Quantizers take a matrix, their settings, whether to sum columns, and the dtype of the sums.
    """

    quantize_rows: Callable[..., Vectors]
    quantize_columns: Callable[..., Vectors]
    quantize_tensor: Callable[..., Tensors]
    quantize_blocks: Callable[..., Blocks]
    dequantize: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    product: Callable[..., Tensor]  # of contiguous codes


EAGER = Operations(_eager_rows, _eager_columns, _eager_tensor, _eager_blocks, _eager_dequantize, eager_product)
CUDA = Operations(_cuda_rows, _cuda_columns, _cuda_tensor, _cuda_blocks, _cuda_dequantize, cuda_product)


# The operators


def _complete(run: Any) -> Any:
    """A quantizer as an operator, which returns an empty tensor instead of None for sums, float32 if not told."""

    def quantizer(x: Tensor, *rest: Any, dtype: torch.dtype | None = None, **named: Any) -> tuple[Tensor, ...]:
        *results, total = run(x, *rest, dtype or torch.float32, **named)
        return *results, _summed(x, False, dtype) if total is None else total

    return quantizer


def _turning(product: Any) -> Any:
    """A product as an operator, which takes the right codes as (K, N), and their scales likewise."""
    return lambda left, right, left_scale, right_scale, *rest: product(
        left, right.t(), left_scale, right_scale.t(), *rest
    )


def _fake_product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, bias: Tensor | None,
    dtype: torch.dtype, accumulation: str,
) -> Tensor:  # fmt: skip
    return left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)


# By the operation: the operator's name and signature, its shapes, and what makes an operator of the function.
_OPERATORS: dict[str, tuple[str, Any, Any]] = {
    "quantize_rows": (
        "quantize_rows(Tensor x, str format, bool sums, *, ScalarType? dtype=None) -> (Tensor, Tensor, Tensor)",
        _fake_rows, _complete,
    ),
    "quantize_columns": (
        "quantize_columns(Tensor x, str format, bool sums, *, ScalarType? dtype=None) -> (Tensor, Tensor, Tensor)",
        _fake_columns, _complete,
    ),
    "quantize_tensor": (
        "quantize_tensor(Tensor x, Tensor? average, str format, bool straight, bool transposed, bool sums, *, "
        "ScalarType? dtype=None, Tensor? maxima=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        _fake_tensor, _complete,
    ),
    "quantize_blocks": (
        "quantize_blocks(Tensor x, str straight, str transposed, str format, bool sums, *, "
        "ScalarType? dtype=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", _fake_blocks, _complete,
    ),
    "dequantize": (
        "dequantize(Tensor codes, Tensor scale, ScalarType dtype) -> Tensor",
        lambda codes, scale, dtype: codes.new_empty(codes.shape, dtype=dtype), lambda run: run,
    ),
    "product": (
        "multiply_codes(Tensor left, Tensor right, Tensor left_scale, Tensor right_scale, Tensor? bias, "
        "ScalarType dtype, str accumulation) -> Tensor", _fake_product, _turning,
    ),
}  # fmt: skip

for _field, (_schema, _fake, _adapted) in _OPERATORS.items():
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_name, _adapted(getattr(EAGER, _field)), "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _adapted(getattr(CUDA, _field)), "CUDA")
    torch.library.register_fake(f"narrowgauge::{_name}", _fake, lib=_LIBRARY)


# What a compiler sees of them on CUDA devices


# Elements up to which a matrix is quantized with one scale by operations: of most weights, whose quantization takes
# less on a GPU than the launches of two kernels take on a host. Generated kernels are launched with less.
_FEW = 1 << 24


# Absmaxima that a quantizing program may take the largest of.
_PARTS = 256


def _stored(x: Tensor) -> Tensor:
    """A matrix as memory has it, for compilers, which join what follows with what wrote it.

    They would go on with numbers that are not rounded yet, but round before they look at bits.
    """
    return (x.view(torch.int16) | 0).view(x.dtype) if x.element_size() == 2 else x


def _maxima(x: Tensor, format: Format) -> Tensor:
    """The bits of the absmax of parts of x, int32 (parts,), in operations that a compiler joins.

    First the absmax of each row, which a compiler joins to the kernel that writes x, then, in one more launch, that
    of groups of rows. A row is contiguous in memory: of a transposed matrix it is a column.
    """
    rows = largest_magnitude(_stored(x if x.is_contiguous() else x.t()), "row", format)
    return rows.reshape(math.gcd(len(rows), _PARTS), -1).amax(1).view(torch.int32)


def _plain_tensor(x: Tensor, format: Format, straight: bool, transposed: bool) -> Tensors:
    """The codes, scale and absmax of `_eager_tensor`, in few operations, for compilers.

    They divide float32 less exactly than torch. Rounded to float64 and then to float32 a quotient is the same.
    Nothing is beyond its own absmax, and what a rounded inverse takes beyond the largest code is rounded to it.
    """
    target, values = FORMATS[format], _stored(x).to(torch.float32)
    rows = largest_magnitude(values if x.is_contiguous() else values.t(), "row", format)  # as in `_maxima`
    own = rows.amax().reshape(1, 1)
    usable = (own >= SMALLEST_ABSMAX) & (own < torch.inf)
    wide = own.to(torch.float64)
    inverse = torch.where(usable, (target.largest / wide).to(torch.float32), 0.0)
    scale = torch.where(usable, (wide / target.largest).to(torch.float32), 0.0)
    if target.floats is None:
        scale = torch.where(own < torch.inf, scale, torch.nan)
        codes = torch.where(inverse > 0, values * inverse, 0.0).round().to(target.dtype)
    else:
        codes = (values * inverse + values * 0.0).to(target.dtype)  # inf and NaN are NaN
    none = _codes(x, format, 0, 0)
    turned = _transposed(codes) if transposed else none
    return codes.contiguous() if straight else none.clone(), turned, scale, own, None


def _takes_long(field: str, args: tuple[Any, ...]) -> bool:
    """Whether a GPU is busy with an operation for longer than a host needs to call an operator.

    Such operations stay operators: with all kernels in the graph a large block took 1 to 5 % longer
    (docs/decisions/compiled-layers.md).
    """
    if field == "product":
        left, right = args[:2]
        return bool(left.numel() * right.shape[1] >= 1 << 37)
    return bool(args[0].numel() >= 1 << 25)


def _plainly(field: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """An operation, or what finds its absmax, in torch's, where a compiler does better with them; else None.

    Rows stay kernels. Joined with the activation before it, their quantization takes longer than both apart.
    """
    if field == "dequantize" and not _takes_long(field, args):
        return _eager_dequantize(*args)
    if field == "quantize_tensor" and "maxima" not in named:
        x, average, format, straight, transposed, sums = args
        if sums or not x.numel():  # for its sums it is read anyway
            return None
        if average is None and x.numel() <= _FEW:
            return _complete(lambda x, *rest: _plain_tensor(x, *rest[:-1]))(x, format, straight, transposed)
        maxima = _maxima(x, format)
        return quantize_tensor(*args, **named, maxima=maxima)
    return None


def _seen(field: str, adapted: Any) -> Any:
    """The rule of an operator."""

    def rule(*args: Any, **named: Any) -> Any:
        x = args[0]
        if _DIRECT.get(x.device.type) is not CUDA or no_kernels(x.device, torch.int8) is not None:
            return None
        tensors = [arg for arg in (*args, *named.values()) if isinstance(arg, Tensor)]
        if not all(isinstance(size, int) for each in tensors for size in (*each.shape, *each.stride())):
            return None
        plain = _plainly(field, args, named)
        if plain is not None:
            return plain
        if _takes_long(field, args):
            return None

        def whole(*stand_ins: Any) -> list[Tensor]:
            given = iter(stand_ins)
            filled = [next(given) if isinstance(arg, Tensor) else arg for arg in (*args, *named.values())]
            by_name = dict(zip(named, filled[len(args) :], strict=True))
            made = adapted(getattr(CUDA, field))(*filled[: len(args)], **by_name)
            return list(made) if isinstance(made, tuple) else [made]

        made = _traced()(tensors, whole)
        return made if made is None or len(made) > 1 else made[0]

    return rule


@functools.cache
def _traced() -> Any:
    from narrowgauge.kernels._linear._traced import traced

    return traced


for _field, (_schema, _, _adapted) in _OPERATORS.items():
    when_traced(f"narrowgauge::{_schema.partition('(')[0]}", _seen(_field, _adapted), _LIBRARY)

quantize_rows = torch.ops.narrowgauge.quantize_rows.default
quantize_columns = torch.ops.narrowgauge.quantize_columns.default
quantize_tensor = torch.ops.narrowgauge.quantize_tensor.default
quantize_blocks = torch.ops.narrowgauge.quantize_blocks.default
dequantize = torch.ops.narrowgauge.dequantize.default
multiply_codes = torch.ops.narrowgauge.multiply_codes.default


@functools.cache
def count_flops() -> None:
    """Let torch's `FlopCounterMode` count multiplies in eight bits as those in high precision.

    Called with the first plan of a layer, because the counter's module imports Triton.
    """
    from torch.utils.flop_counter import mm_flop, register_flop_formula

    def formula(left: Any, right: Any, *others: Any, **named: Any) -> int:
        return mm_flop(left, right)

    register_flop_formula(torch.ops.narrowgauge.multiply_codes)(formula)


# The operations by operators


def _quantizer(operator: Callable[..., Any]) -> Callable[..., Any]:
    """A quantizer by its operator, which has no None among its results."""

    def run(x: Tensor, *settings: Any) -> tuple[Tensor | None, ...]:
        *others, sums, dtype = settings
        *results, total = operator(x, *others, sums, dtype=dtype)
        return *results, total if sums else None

    return run


def _product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, bias: Tensor | None,
    dtype: torch.dtype, accumulation: str,
) -> Tensor:  # fmt: skip
    """`multiply_codes` by the operator, which takes right codes transposed, scales as a column and a row."""
    if not accumulation.endswith("blocks"):
        left_scale, right_scale = left_scale.reshape(-1, 1), right_scale.reshape(-1, 1)
    product: Tensor = multiply_codes(left, right.t(), left_scale, right_scale.t(), bias, dtype, accumulation)
    return product


OPERATORS = Operations(
    _quantizer(quantize_rows), _quantizer(quantize_columns), _quantizer(quantize_tensor),
    _quantizer(quantize_blocks), dequantize, _product,
)  # fmt: skip
_DIRECT = {"cpu": EAGER, "cuda": CUDA}
_PLAIN = (Tensor, torch.nn.Parameter)


def operations(*tensors: Tensor) -> Operations:
    """The implementation for tensors of one device."""
    # First, so that a compiler traces no further.
    if torch.compiler.is_compiling() or operators_observed():
        return OPERATORS
    for tensor in tensors:
        # A lazy negation is a flag on the tensor, which the dispatcher resolves.
        if type(tensor) not in _PLAIN or tensor.is_neg():
            return OPERATORS
    if tensors[0].is_cuda:
        return _DIRECT["cuda"]
    return _DIRECT["cpu"] if tensors[0].is_cpu else OPERATORS
