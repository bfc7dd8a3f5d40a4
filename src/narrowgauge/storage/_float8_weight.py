"""A weight that *is* float8 codes: e4m3 and one power of two for the tensor; outside a bfloat16 tensor.

A float8 matrix multiply rounds its weight to e4m3 whenever it reads it. `Float8Weight` has that rounding in a byte
an element: the multiply takes the codes as they are, and everything else reads the bfloat16 number that a code
stands for, which is exact (four significant bits times a power of two). What an update adds below that is in a
second byte, which optimizers alone read.

**The low word.** The pattern of an e4m3 code without its sign, read as an integer, counts the numbers of the
format, subnormals included. Eight more bits below it make the numbers of a format with 4 bits of exponent and 11 of
fraction, which has twelve significant bits:

    pattern = (code << 8) + low          low in [-128, 127], in 1/256 of the spacing at the weight

Rounding a pattern to its upper bits (halves away from zero) gives the code, and what is left over is the low word.
Code 0 has no negative low word, NaN has none at all.

**The scale** is the value of the code 1. A write from outside chooses it so that the largest magnitude lies in
[112, 224) codes, a factor of two below the largest code, 448. A step looks at the largest code that is there
before it: beyond [56, 224], the new words have another scale, by which that code would be in (112, 224]. So a step
need not know its new weights to choose a scale, and weights that shrink keep their digits. What grows beyond 448
codes in one step ends there, and the next step doubles the scale. Scales are from 2^-32 to 2^7: the largest weight
is 57,344, as of float16 it is 65,504, and larger ones become it. A tensor of zeros has 2^-8, and keeps it until a
code is not zero.

**Writes from outside** round to the nearest weight of twelve significant bits. `copy_`, and with it a loaded
checkpoint, chooses the scale anew. Any other operation in place (a clamp, a row set to zero) works on the weights
rounded to bfloat16, which has eight significant bits. Elements that it does not change keep their words. The scale
stays while the largest weight lies in [56, 448] codes.

Operations return plain bfloat16 tensors. Of the same class are copies (`clone`, `detach`, `.to(device)`,
`deepcopy`) and views (`t()`, slices), which share the words: a write to a view is a write to the weight, whose
scale it may change. `.to(dtype)` with another dtype, and ``p.data = x`` with a tensor that is not bfloat16 of the
same shape, give plain tensors again. Infinities become NaN, because e4m3 has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, bitwise_left_shift, bitwise_right_shift
from torch.utils._pytree import tree_map

from narrowgauge._torch_private import unsubclassed, written_arguments

SMALLEST_SCALE, LARGEST_SCALE, SCALE_OF_ZEROS = 2.0**-32, 2.0**7, 2.0**-8
LARGEST_CODE = 448.0
LEAST_LARGEST_CODE = 56.0  # below it the scale changes
_NAN, _SIGN = 0x7F, 0x80
_SPARE = 12  # bits of a float32's fraction beyond those of a weight
NEAREST = 1 << (_SPARE - 1)  # in place of random bits: to the nearest weight
_SMALLEST_NORMAL = 2.0**-6
_REBIAS = 120 << 23  # between the exponents of float32 and e4m3

aten = torch.ops.aten


# Scales and words


def scale_for(largest: Tensor) -> Tensor:
    """The power of two by which a magnitude lies in [112, 224) codes, within the bounds of scales.

    Args:
        largest: float32, 0-d, finite: the largest magnitude of a tensor.
    """
    share, exponent = torch.frexp(largest)  # the magnitude is share 2^exponent, share in [1/2, 1)
    exponent = exponent - 7 - (share < 0.875).to(torch.int32)
    return _power(torch.where(largest > 0, exponent, -8))


def largest_code(codes: Tensor) -> Tensor:
    """The largest code that is a number, without sign, int32, 0-d; 0 for no elements."""
    bare = codes.contiguous().view(torch.uint8) & _NAN
    bare = bare * (bare != _NAN)
    return (bare.amax() if bare.numel() else bare.new_zeros(())).to(torch.int32)


def next_scale(largest: Tensor, scale: Tensor) -> Tensor:
    """The scale of the words that a step writes.

    Args:
        largest: of the codes before it, as `largest_code` gives it.
        scale: of these codes, float32, 0-d.
    """
    # Codes count 8 a power of two: 102 is 56, 118 is 224, 126 is 448. Below 8 they are subnormal, and move further.
    octaves = -bitwise_right_shift(118 - largest, 3)
    stays = (largest == 0) | ((largest >= 102) & (largest <= 118))
    return _power(bitwise_right_shift(scale.view(torch.int32), 23) - 127 + torch.where(stays, 0, octaves))


def _power(exponent: Tensor) -> Tensor:
    """A power of two, within the bounds of scales."""
    return bitwise_left_shift(exponent.clamp(-32, 7) + 127, 23).to(torch.int32).view(torch.float32)


def largest_of(x: Tensor) -> Tensor:
    """The largest finite magnitude, float32, 0-d; 0 for no elements."""
    magnitude = x.to(torch.float32).abs()
    return torch.where(magnitude < torch.inf, magnitude, 0.0).amax() if x.numel() else magnitude.new_zeros(())


def to_words(weight: Tensor, scale: Tensor, random: Tensor | int = NEAREST) -> tuple[Tensor, Tensor]:
    """Codes and low words of weights, rounded to twelve significant bits of the scale's format.

    Args:
        weight: float32 tensor; magnitudes beyond 448 codes saturate.
        scale: float32, 0-d.
        random: twelve random bits an element for stochastic rounding, int32 or int64 of weight's shape; or
            `NEAREST`.

    Returns:
        (codes, low): float8_e4m3fn and int8, of weight's shape. Infinity and NaN are NaN, without a sign.
    """
    finite = torch.isfinite(weight)
    scaled = torch.where(finite, weight, 0.0) * scale.reciprocal()
    magnitude = scaled.abs().clamp(max=LARGEST_CODE)
    # Adding the smallest normal number puts subnormals on a grid of fixed spacing.
    subnormal = magnitude < _SMALLEST_NORMAL
    pattern = torch.where(subnormal, magnitude + _SMALLEST_NORMAL, magnitude).view(torch.int32) - _REBIAS
    pattern = pattern - subnormal.to(torch.int32) * (1 << 23)
    pattern = bitwise_right_shift(pattern + random, _SPARE).to(torch.int32)
    code = bitwise_right_shift(pattern + 0x80, 8)
    low = pattern - bitwise_left_shift(code, 8)
    code = torch.where(finite, code | torch.where(torch.signbit(weight), _SIGN, 0), _NAN)
    return code.to(torch.uint8).view(torch.float8_e4m3fn), torch.where(finite, low, 0).to(torch.int8)


def from_words(codes: Tensor, low: Tensor, scale: Tensor) -> Tensor:
    """The float32 weights of codes and low words; a low word that its code cannot have is cut off."""
    code = codes.contiguous().view(torch.uint8).to(torch.int32)
    bare, wide = code & _NAN, low.to(torch.int32)
    pattern = bitwise_left_shift(bare, 8) + torch.where(bare == 0, wide.clamp_min(0), wide)
    subnormal = pattern < 1 << 11
    shifted = bitwise_left_shift(pattern + subnormal.to(torch.int32) * (1 << 11), _SPARE) + _REBIAS
    magnitude = shifted.view(torch.float32) - torch.where(subnormal, _SMALLEST_NORMAL, 0.0)
    magnitude = torch.where(bare == _NAN, torch.nan, magnitude * scale)
    return torch.where(code >= _SIGN, -magnitude, magnitude)


# The tensor


class _Words:
    """What a weight and its views share.

    Attributes:
        codes: float8_e4m3fn, of the weight's shape, dense.
        low: int8, like codes.
        numbers: float32 (2,): the scale, and the largest code, as `largest_code` gives it.
    """

    def __init__(self, codes: Tensor, low: Tensor, numbers: Tensor) -> None:
        self.codes, self.low, self.numbers = codes, low, numbers

    def write(self, x: Tensor, changed: Tensor | None = None) -> None:
        """Become the weights nearest to x, a float tensor of the codes' shape.

        With `changed`, a mask, only its elements are written, and the scale stays while it fits the largest weight.
        """
        wide = x.to(torch.float32)
        if changed is not None:
            wide = torch.where(changed, wide, from_words(self.codes, self.low, self.numbers[0]))
        largest = largest_of(wide)
        scale = scale_for(largest)
        if changed is not None:
            in_codes = largest / self.numbers[0]
            fits = (in_codes >= LEAST_LARGEST_CODE) & (in_codes <= LARGEST_CODE)
            scale = torch.where(fits, self.numbers[0], scale)
        codes, low = to_words(wide, scale)
        self.codes.copy_(codes)
        self.low.copy_(low)
        self.numbers.copy_(_numbers(codes, scale))

    def copy(self, other: _Words) -> None:
        """Become the same words, bit for bit."""
        self.codes.copy_(other.codes)
        self.low.copy_(other.low)
        self.numbers.copy_(other.numbers)


def _numbers(codes: Tensor, scale: Tensor) -> Tensor:
    return torch.stack([scale, largest_code(codes).to(torch.float32)])


class Float8Weight(Tensor):
    """A bfloat16 tensor that is kept as e4m3 codes and one power-of-two scale; see the module.

    Train it with optimizers of this library. Others write it in place, as a bfloat16 tensor.

    Args:
        codes: float8_e4m3fn, dense; shared, not copied.
        scale: float32, of one element on the same device: a power of two from 2^-32 to 2^7; copied.
        low: int8 of the codes' shape and strides, shared; None for zeros.

    Raises:
        ValueError: for tensors that are not so; what scale holds is not looked at.
    """

    _words: _Words
    _codes: Tensor  # the words' codes, or a view of them

    def __new__(cls, codes: Tensor, scale: Tensor, low: Tensor | None = None) -> Self:
        if codes.dtype != torch.float8_e4m3fn:
            raise ValueError(f"codes must be float8_e4m3fn, got {codes.dtype}")
        if not codes.is_contiguous() and not _is_dense(codes):
            raise ValueError(f"codes must be dense, got shape {tuple(codes.shape)} with strides {codes.stride()}")
        if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != codes.device:
            got = f"{scale.dtype} of shape {tuple(scale.shape)} on {scale.device}"
            raise ValueError(f"scale must be one float32 on {codes.device}, got {got}")
        if low is None:
            low = torch.zeros_like(codes, dtype=torch.int8)
        if (low.dtype, low.shape, low.stride()) != (torch.int8, codes.shape, codes.stride()):
            got = f"{low.dtype} of shape {tuple(low.shape)} with strides {low.stride()}"
            wanted = f"int8 of shape {tuple(codes.shape)} with strides {codes.stride()}"
            raise ValueError(f"low must be {wanted}, got {got}")
        return cls._of(_Words(codes, low, _numbers(codes, scale.reshape(()))), codes)

    @classmethod
    def _of(cls, words: _Words, codes: Tensor) -> Self:
        made: Self = Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), storage_offset=codes.storage_offset(), dtype=torch.bfloat16,
            device=codes.device, requires_grad=False,
        )  # fmt: skip
        made._words, made._codes = words, codes
        return made

    @classmethod
    @torch.no_grad()
    def of(cls, x: Tensor) -> Self:
        """The weights of twelve significant bits nearest to a float tensor, of its shape and device."""
        x = x.detach()
        codes = torch.empty_like(x, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
        low, numbers = torch.empty_like(codes, dtype=torch.int8), torch.empty(2, device=x.device)
        words = _Words(codes, low, numbers)
        words.write(x)
        return cls._of(words, codes)

    @property
    def codes(self) -> Tensor:
        """The codes: float8_e4m3fn, of the shape; shared, not copied."""
        return self._codes

    @property
    def scale(self) -> Tensor:
        """The value of the code 1: float32, 0-d; shared, not copied."""
        return self.numbers[0]

    @property
    def largest(self) -> Tensor:
        """The largest code that is a number, without sign: float32, 0-d; shared. Who writes codes writes it too."""
        return self.numbers[1]

    @property
    def numbers(self) -> Tensor:
        """Scale and largest code: float32 (2,); shared, not copied."""
        return self._words.numbers

    @property
    def low(self) -> Tensor:
        """The low words: int8, of the shape; shared, not copied."""
        return self._part(self._words.low)

    @property
    def is_whole(self) -> bool:
        """Whether it is a weight, not a view of a part of one, or in another order."""
        return self._codes is self._words.codes

    def dequantize(self) -> Tensor:
        """The codes' numbers, as a plain bfloat16 tensor."""
        return self._codes.to(torch.bfloat16) * self.scale.to(torch.bfloat16)

    def _part(self, whole: Tensor) -> Tensor:
        """The part of a tensor like the words' codes that this is a view of."""
        if self.is_whole:
            return whole
        offset = whole.storage_offset() + self._codes.storage_offset() - self._words.codes.storage_offset()
        return whole.as_strided(self._codes.size(), self._codes.stride(), offset)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of codes, low words, scale and largest code."""
        return 2 * self._codes.nbytes + self._words.numbers.nbytes

    @property
    def data(self) -> Tensor:
        """As of any tensor. A bfloat16 tensor of the shape is written; after any other this is a plain tensor."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        fits = (value.dtype, value.device, value.shape) == (torch.bfloat16, self.device, self.shape)
        with torch.no_grad():
            if fits and not isinstance(value, Float8Weight):
                self.detach().copy_(value)
                return
            become(self, value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        of = f"shape={tuple(self.shape)}, device='{self.device}', requires_grad={self.requires_grad}"
        return f"{type(self).__name__}({of})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        codes, low = (x if self.is_whole else x.clone() for x in (self._codes, self.low))
        codes = codes.view(torch.uint8)  # plain pickle has no float8
        numbers = self.numbers if self.is_whole else self.scale
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _rebuilt, (codes, numbers, low, self.requires_grad, is_parameter)

    def is_shared(self) -> bool:
        """As of any tensor."""
        return bool(self._words.codes.is_shared())  # type: ignore[no-untyped-call]

    def share_memory_(self) -> Self:
        """As of any tensor: moves what it consists of to memory that processes share."""
        for words in (self._words.codes, self._words.low, self._words.numbers):
            words.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "low", "numbers"], None

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], _: None, size: Any, stride: Any) -> Float8Weight:
        return Float8Weight._of(_Words(inner["codes"], inner["low"], inner["numbers"]), inner["codes"])

    __torch_function__ = unsubclassed  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":  # it would write to a copy
            raise RuntimeError(
                f"{func}: send the codes, low and numbers of a Float8Weight; DDP of one takes init_sync=False"
            )
        if func in _OWN:
            found = _OWN[func](func, args, kwargs)
            if found is not NotImplemented:
                return found
        if func.is_view and func is not aten.view.dtype and isinstance(args[0], Float8Weight):
            weight = args[0]
            views = func(weight._codes, *args[1:], **kwargs)
            return tree_map(lambda codes: cls._of(weight._words, codes), views)
        return _plainly(func, args, kwargs)


def _is_dense(x: Tensor) -> bool:
    """Whether a tensor fills its memory, in any order of its dimensions."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.numel() in (0, last + 1)


def _plainly(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """An operation on what codes stand for, and on the weights, rounded to bfloat16, that it writes to.

    Of these the elements that it changes are encoded again.
    """
    written = {id(x): x._words for x in written_arguments(func, args, kwargs) if isinstance(x, Float8Weight)}
    changing = {id(words) for words in written.values()}
    # By the words' id, so that views of one weight are written once: the weights in bfloat16, and a copy.
    wholes: dict[int, tuple[_Words, Tensor, Tensor]] = {}
    plain: dict[int, Tensor] = {}
    owners: dict[int, Tensor] = {}

    def read(x: Any) -> Any:
        if not isinstance(x, Float8Weight):
            return x
        if id(x) in plain:
            return plain[id(x)]
        if id(x._words) not in changing:
            plain[id(x)] = x.dequantize()
        else:
            words = x._words
            if id(words) not in wholes:
                whole = torch.empty_like(words.codes, dtype=torch.bfloat16)
                whole.copy_(from_words(words.codes, words.low, words.numbers[0]))
                wholes[id(words)] = words, whole, whole.clone()
            plain[id(x)] = x._part(wholes[id(words)][1])
            if id(x) in written:
                owners[id(plain[id(x)])] = x
        return plain[id(x)]

    result = func(*tree_map(read, args), **tree_map(read, dict(kwargs)))
    for words, whole, before in wholes.values():
        words.write(whole, whole.view(torch.int16) != before.view(torch.int16))
    return tree_map(lambda x: owners.get(id(x), x), result)


def become(x: Tensor, value: Tensor) -> None:
    """Make a tensor, or a parameter, another tensor, of another class perhaps; it stays the same object.

    Raises:
        RuntimeError: if a graph or a weak reference refers to it.
    """
    made = torch.nn.Parameter(value, x.requires_grad) if isinstance(x, torch.nn.Parameter) else value
    grad, x.grad = x.grad, None
    torch.utils.swap_tensors(x, made)  # type: ignore[no-untyped-call]
    if grad is not None and grad.shape == value.shape:
        x.grad = grad.to(value.device, value.dtype)


# Operations that keep the codes


def _detach(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return Float8Weight._of(args[0]._words, args[0]._codes)


def _copied(weight: Float8Weight, run: Callable[[Tensor], Tensor]) -> Float8Weight:
    """A weight of copies of the words."""
    codes = run(weight._codes)
    return Float8Weight(codes, weight.scale.to(codes.device), run(weight.low))


def _clone(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return _copied(args[0], lambda x: func(x, **kwargs))


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    options = dict(kwargs)
    if options.pop("dtype", None) not in (None, torch.bfloat16) or options.get("layout") not in (
        None,
        torch.strided,
    ):
        return NotImplemented
    return _copied(args[0], lambda x: func(x, **options))


def _copy_(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    to, source = args[:2]
    if not isinstance(to, Float8Weight) or not to.is_whole:
        return NotImplemented
    if not isinstance(source, Float8Weight):
        to._words.write(source.to(to.device, torch.float32).expand(to.shape))
    elif source.shape != to.shape or not source.is_whole:
        return NotImplemented
    elif source._words is not to._words:
        to._words.copy(source._words)
    return to


def _where(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """One weight or the other, by a condition of one element."""
    condition, one, other = args
    weights = isinstance(one, Float8Weight) and isinstance(other, Float8Weight) and one.shape == other.shape
    if condition.numel() != 1 or not weights:
        return NotImplemented
    codes = torch.where(condition, one.codes.view(torch.uint8), other.codes.view(torch.uint8))
    low = torch.where(condition, one.low, other.low)
    scale = torch.where(condition.reshape(()), one.scale, other.scale)
    return Float8Weight(codes.view(torch.float8_e4m3fn), scale, low)


_OWN: dict[Any, Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]] = {
    aten.detach.default: _detach,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_,
    aten.where.self: _where,
}


def _rebuilt(codes: Tensor, numbers: Tensor, low: Tensor, requires_grad: bool, is_parameter: bool) -> Tensor:
    codes = codes.view(torch.float8_e4m3fn)
    if numbers.dim():  # memory that processes share stays shared
        made = Float8Weight._of(_Words(codes, low, numbers), codes)
    else:  # the scale of a part
        made = Float8Weight(codes, numbers, low)
    return torch.nn.Parameter(made, requires_grad) if is_parameter else made.requires_grad_(requires_grad)


# `torch.load` reads a file of them with weights_only=True, its default.
torch.serialization.add_safe_globals([_rebuilt])
