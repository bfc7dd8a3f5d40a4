"""State storages: how an optimizer keeps a moment between steps.

A moment is a running average. In a narrow format it meets two enemies: its values span many orders of magnitude
(block-wise dynamic codes are made for that), and its steps are small. With beta2 = 0.999 a second moment moves
by a thousandth a step, below half a unit in the last place of bf16: kept as one bf16 word it cannot shrink.
Kept as an expansion of two, it follows.

A storage keeps one or two tensors. Like a weight storage it knows two arithmetics: `decode` and `encode` move a
moment to float32 registers and back, rounded once; `accumulate` averages in the tensors' own format, every
operation rounded, for storages whose tensors are floats. How kernels keep the same moment is its `codec`.

Sources: 8-bit Optimizers via Block-wise Quantization, Section 2; Collage, Algorithm 2, line 9; Li et al. 2023,
Memory Efficient Optimizers with 4-bit States.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge._arguments import check_choice, check_instance
from narrowgauge.formats import FP8_E4M3, Coder, coder, round_to
from narrowgauge.kernels._codec import ABSOLUTE, KINDS, SIGNED, UNSIGNED, CodebookTable, Codec, Word, disown
from narrowgauge.storage._blockwise import (
    block_count,
    decode_blocks,
    encode_blocks,
    normalize_blocks,
    pack_pairs,
    scale_blocks,
    unpack_pairs,
)
from narrowgauge.storage._expansion import Expansion, grow, mul

Tensors = dict[str, Tensor]
_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class StateContext:
    """What a moment's tensors do not say of it.

    Attributes:
        shape: the moment's, which is the parameter's.
        signed: whether it has a sign.
        block_size: elements a block, along the flattened tensor.
        normalizer: where the storage is `normalized`, the decoded second moment whose root is the unit; None where
            there is none.
    """

    shape: torch.Size
    signed: bool
    block_size: int
    normalizer: Tensor | None = None


def is_unknown(m: Tensor, v: Tensor) -> Tensor:
    """Where v is below 2^-126 and m is not tiny: v is no unit for m, which is then kept as zero."""
    return ((v.contiguous().view(torch.int32) & 0x7F800000) == 0) & (m.abs() >= 2.0**-58)


@functools.cache
def _nbytes(storage: StateStorage, shape: torch.Size, block_size: int) -> int:
    tensors = storage.init(torch.empty(shape, device="meta"), False, block_size)
    return sum(x.nbytes for x in tensors.values())


@dataclass(frozen=True)
class StateStorage:
    """One float tensor of the parameter's shape. Also the base that the other storages extend.

    Attributes:
        name: what users type.
        dtype: the tensors' dtype.
        quantized: whether small tensors are better off in fp32 (see `min_quantized_size`).
        rounded: whether it has the arithmetic of `accumulate` and `value`.
        normalized: whether a moment is kept in units of another one's root, which must be there to decode it.
        error_feedback: whether the weight is given what a moment loses here (see `Rule.remaining_effect`).
        stochastic: whether `encode` rounds stochastically where it is given random numbers.
        whole: whether a moment is encoded as a whole, so that no part of it can be decoded or stepped by itself.
        least_dims: a moment of fewer dimensions is stored in fp32.
    """

    name: str
    dtype: torch.dtype
    quantized: bool = False
    rounded: bool = True
    normalized: bool = False
    error_feedback: bool = False
    stochastic: bool = False
    whole: bool = False
    least_dims: int = 0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        disown(cls, "decode", "encode")

    def codec(self, signed: bool) -> Codec | None:
        """How kernels keep the same moment; None if there are none, and eager torch takes every step."""
        name = {torch.float32: "float32", torch.bfloat16: "bfloat16"}.get(self.dtype)
        return Codec(name, (Word("", KINDS[self.dtype]),)) if name is not None else None

    def for_slot(self, signed: bool, has_normalizer: bool) -> StateStorage:
        """What this name means for a slot.

        Args:
            signed: whether its moment has a sign.
            has_normalizer: whether another moment is kept whose root is its unit.
        """
        return self

    def nbytes(self, shape: Sequence[int], block_size: int) -> int:
        """Bytes that a moment of this shape takes: of the tensors of `init`."""
        return _nbytes(self, torch.Size(shape), block_size)

    def init(self, p: Tensor, signed: bool, block_size: int) -> Tensors:
        """The tensors of a moment that is zero, on p's device."""
        return {"": torch.zeros_like(p, dtype=self.dtype, memory_format=torch.preserve_format)}

    def decode(self, tensors: Tensors, context: StateContext) -> Tensor:
        """The moment in float32, in its shape."""
        return tensors[""].to(torch.float32)

    def encode(self, moment: Tensor, context: StateContext, random: Tensor | None = None) -> Tensors:
        """The tensors of a float32 moment.

        Args:
            moment: any shape.
            context: the same for `decode`.
            random: integers in [0, 2^16) in its shape where the storage is `stochastic`; to nearest without.
        """
        return {"": moment.to(self.dtype)}

    def lost(self, moment: Tensor, tensors: Tensors, context: StateContext) -> Tensor:
        """What tensors lose of the moment they encode, as far as a weight can receive it: float32."""
        lost = moment - self.decode(tensors, context)
        lost = torch.where(torch.isfinite(lost), lost, 0.0)
        if context.normalizer is None:
            return lost
        # Over the root of a v that was kept as zero it would be huge.
        return torch.where(is_unknown(moment, context.normalizer), 0.0, lost)

    def codes(self, tensors: Tensors, shape: torch.Size) -> Tensor:
        """One code a byte, uint8 in this shape, for gauges; the tensor ``"codes"`` unless a class replaces it.

        Raises:
            NotImplementedError: where moments are not kept in codes.
            ValueError: for a tensor ``"codes"`` of a wider dtype.
        """
        if "codes" not in tensors:
            raise NotImplementedError(f"{self.name} states have no tensor 'codes': give the class a method codes")
        if (dtype := tensors["codes"].dtype).itemsize > 1:
            raise ValueError(f"codes of storage {self.name!r} must be uint8, got {dtype}")
        return tensors["codes"].view(torch.uint8)

    def validate(self, tensors: Tensors, signed: bool) -> str | None:
        """What is wrong with tensors that no `encode` writes, such as a negative mean of squares; None for nothing.

        Infinities and NaN of a float are not wrong: a gradient may have brought them.
        """
        if signed or "" not in tensors:
            return None
        return "negative numbers" if bool((tensors[""] < 0).any()) else None

    def accumulate(self, tensors: Tensors, x: Tensor, decay: float, share: float) -> Tensors:
        """decay * average + share * x, constants and every operation rounded to the tensors' format."""
        average = tensors[""]
        x = x.to(average.dtype)
        return {"": _constant(decay, average) * average + _constant(share, average) * x}

    def value(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        """The number that the rest of a strict equation reads, in its format, which is no narrower."""
        return tensors[""].to(dtype)


def _constant(value: float, like: Tensor) -> Tensor:
    """A constant of the equation as a number of the tensor's format."""
    return torch.tensor(value, dtype=torch.float64, device="cpu").to(like.dtype).to(like.device)


@dataclass(frozen=True)
class ExpansionState(StateStorage):
    """The unevaluated sum hi + lo of two bf16 words (Collage-plus's second moment)."""

    def codec(self, signed: bool) -> Codec | None:
        return Codec("expansion", (Word("hi", "bf16"), Word("lo", "bf16")))

    def init(self, p: Tensor, signed: bool, block_size: int) -> Tensors:
        word = torch.zeros_like(p, dtype=self.dtype, memory_format=torch.preserve_format)
        return {"hi": word, "lo": word.clone()}

    def decode(self, tensors: Tensors, context: StateContext) -> Tensor:
        return tensors["hi"].to(torch.float32) + tensors["lo"].to(torch.float32)

    def encode(self, moment: Tensor, context: StateContext, random: Tensor | None = None) -> Tensors:
        hi = moment.to(self.dtype)
        lo = moment - hi.to(torch.float32)
        return {"hi": hi, "lo": torch.where(torch.isfinite(hi), lo, 0.0).to(self.dtype)}

    def validate(self, tensors: Tensors, signed: bool) -> str | None:
        return super().validate({"": tensors["hi"]}, signed)

    def accumulate(self, tensors: Tensors, x: Tensor, decay: float, share: float) -> Tensors:
        """Collage's Grow(Mul((beta, d_beta), (v, d_v)), (1 - beta) * x)."""
        average: Expansion = (tensors["hi"], tensors["lo"])
        x = x.to(self.dtype)
        hi = _constant(decay, x)
        lo = _constant(decay - float(hi), x)
        a, b = grow(mul((hi, lo), average), _constant(share, x) * x)
        return {"hi": a, "lo": b}

    def value(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        hi, lo = tensors["hi"], tensors["lo"]
        # In its own format the sum is hi: an expansion is normalized.
        return hi if dtype == self.dtype else hi.to(dtype) + lo.to(dtype)


@dataclass(frozen=True)
class CodedState(StateStorage):
    """The base of storages that keep codes, and numbers a block.

    Attributes:
        bits: of a code; those of 4 bits are kept two a byte.
    """

    dtype: torch.dtype = torch.uint8
    quantized: bool = True
    rounded: bool = False
    bits: int = 8

    def words(self, numbers: str, kind: str = "fp32", per_block: int = 1) -> tuple[Word, Word]:
        """The words of its codec: codes, and numbers of a block by their name and kind."""
        return Word("codes", "uint8", packed=self.bits == 4), Word(numbers, kind, per_block=per_block)

    def init(self, p: Tensor, signed: bool, block_size: int) -> Tensors:
        # One element is encoded, once, on the CPU: a GPU would load dozens of kernels for it in a first step.
        tensors = dict(_encoded_zero(self, signed))
        codes = _repeated(tensors.pop("codes")[0], p.shape, p.device)
        count = block_count(p.numel(), block_size)
        numbers = {name: _repeated(one, (count, *one.shape[1:]), p.device) for name, one in tensors.items()}
        return {"codes": self._pack(codes)} | numbers

    def codes(self, tensors: Tensors, shape: torch.Size) -> Tensor:
        return self._unpack(tensors["codes"], shape).view(torch.uint8)

    def validate(self, tensors: Tensors, signed: bool) -> str | None:
        scales = tensors["scales"]
        if not torch.isfinite(scales).all():
            return "a scale that is not finite"
        return "a negative scale" if not signed and bool((scales < 0).any()) else None

    def _pack(self, codes: Tensor) -> Tensor:
        """Codes as they are kept."""
        return codes if self.bits == 8 else pack_pairs(codes)

    def _unpack(self, codes: Tensor, shape: torch.Size) -> Tensor:
        """What `_pack` was given, in this shape."""
        return codes if self.bits == 8 else unpack_pairs(codes, shape)


@functools.lru_cache(maxsize=64)
def _encoded_zero(storage: CodedState, signed: bool) -> Tensors:
    """A zero as a storage keeps it, in a block of its own; not to be written to."""
    with torch.inference_mode(False):
        zero = torch.zeros(1, dtype=torch.float32, device="cpu")
        return storage.encode(zero, StateContext(zero.shape, signed, 1))


def _repeated(x: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    if len(values := set(x.flatten().tolist())) == 1:
        return torch.full(shape, values.pop(), dtype=x.dtype, device=device)
    return x.to(device).expand(shape).clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class CodebookState(CodedState):
    """Codes of a codebook and one float32 scale a block."""

    codebook: str = "dynamic"

    def codec(self, signed: bool) -> Codec | None:
        made = self.coder(signed, _CPU)
        try:
            table = CodebookTable.of(made)
        except ValueError:
            return None
        kind = UNSIGNED if made.lowest >= 0 else ABSOLUTE if made.lowest == -1 else SIGNED
        return Codec("codebook", self.words("scales"), ("lookup.h", "codebook.h"), constants=(kind,), table=table)

    def decode(self, tensors: Tensors, context: StateContext) -> Tensor:
        codes = self._unpack(tensors["codes"], context.shape)
        values = self.coder(context.signed, codes.device).values
        return decode_blocks(codes, tensors["scales"], values, context.block_size)

    def encode(self, moment: Tensor, context: StateContext, random: Tensor | None = None) -> Tensors:
        codes, scales = encode_blocks(moment, self.coder(context.signed, moment.device), context.block_size)
        return {"codes": self._pack(codes), "scales": scales}

    def coder(self, signed: bool, device: torch.device) -> Coder:
        return coder(self.codebook, signed, device, self.bits)


@dataclass(frozen=True)
class FourBitState(CodebookState):
    """Two codes a byte, and one float32 scale a block.

    A first moment takes the 4-bit dynamic map. A second moment takes 1/16, 2/16, ... 1: it has no zero, because
    what rounds to zero divides. A block of zeros stays zeros, by its scale.

    Source: Li et al. 2023, Memory Efficient Optimizers with 4-bit States (the zero-point problem).
    """

    bits: int = 4

    def coder(self, signed: bool, device: torch.device) -> Coder:
        return super().coder(signed, device) if signed else _sixteenths(device)


@functools.lru_cache(maxsize=16)
def _sixteenths(device: torch.device) -> Coder:
    return Coder.positive((torch.arange(1, 17, dtype=torch.float32, device="cpu") / 16).to(device))


@dataclass(frozen=True)
class Float8State(CodedState):
    """Numbers of float8 e4m3 and one float32 scale a block: x is the number times the scale.

    The scale is the block's absolute maximum over 448, so that its largest element is the format's largest number
    (and comes back but for a rounding of float32); what hardware converts, and what a float8 matrix multiply takes.
    Normalized and bounded as blocks of codes are (see `quantize`).
    """

    dtype: torch.dtype = torch.float8_e4m3fn

    def codec(self, signed: bool) -> Codec | None:
        files = ("lookup.h", "codebook.h", "float8.h")
        return Codec("float8", self.words("scales"), files, constants=(ABSOLUTE if signed else UNSIGNED,), units=8)

    def decode(self, tensors: Tensors, context: StateContext) -> Tensor:
        return scale_blocks(tensors["codes"].to(torch.float32), tensors["scales"], context.block_size)

    def encode(self, moment: Tensor, context: StateContext, random: Tensor | None = None) -> Tensors:
        lowest = -1.0 if context.signed else 0.0
        normalized, extrema = normalize_blocks(moment, lowest, context.block_size)
        largest = FP8_E4M3.max
        # By a tensor: a GPU divides by a number as a product with its reciprocal, which is rounded twice.
        scales = extrema / torch.full_like(extrema, largest)
        return {"codes": round_to(normalized * largest, FP8_E4M3), "scales": scales}

    def validate(self, tensors: Tensors, signed: bool) -> str | None:
        codes = tensors["codes"].view(torch.uint8)
        if ((codes & 0x7F) == 0x7F).any():
            return "codes that are NaN"
        if not signed and (codes > 0x80).any():
            return "negative codes"
        return super().validate(tensors, signed)


_STORAGES: dict[str, StateStorage] = {
    storage.name: storage
    for storage in (
        StateStorage("fp32", torch.float32),
        StateStorage("bf16", torch.bfloat16),
        ExpansionState("expansion", torch.bfloat16),
        CodebookState("8bit"),
        Float8State("fp8"),
        FourBitState("4bit"),
    )
}


def add_storage(storage: StateStorage) -> None:
    """Make a state storage known by its name; a class that is defined anew, as in a notebook, replaces itself.

    Raises:
        ValueError: for a name that another storage has.
    """
    known = _STORAGES.setdefault(storage.name, storage)
    if known != storage:
        old, new = type(known), type(storage)
        if old is new or (old.__module__, old.__qualname__) != (new.__module__, new.__qualname__):
            raise ValueError(f"name must be new, got {storage.name!r}, which another state storage has")
        _STORAGES[storage.name] = storage


def state_storages() -> tuple[str, ...]:
    """The names of all state storages."""
    return tuple(_STORAGES)


def state_storage(name: str) -> StateStorage:
    """A state storage by name.

    Raises:
        ValueError: for an unknown name; the message lists those that exist.
    """
    check_choice("states", name, state_storages())
    return _STORAGES[name]


# A parameter's own storage: an embedding knows that its gradients are sparse and uneven, the optimizer does not.
# The mark travels with the parameter, so that no registry has to be kept and no group has to be made.
_MARK = "narrowgauge_states"  # the attribute of a parameter that holds it
_marked: list[None] = []  # an item for each mark
# How often any parameter was marked: while it stays the same, no mark has changed.
times_marked = _marked.__len__


def mark_states(p: Tensor, states: str) -> None:
    """Have every optimizer of this library keep a parameter's moments in a state storage, over its own option.

    Args:
        p: a parameter. A copy of it (`copy.deepcopy`) has no mark; modules that set one set it again.
        states: the name of a state storage, for all moments.

    Raises:
        ValueError: for an unknown storage.
    """
    check_instance("p", p, Tensor)
    setattr(p, _MARK, state_storage(states).name)
    _marked.append(None)


def marked_states(p: Tensor) -> str | None:
    """The state storage that a parameter is marked with, or None."""
    return getattr(p, _MARK, None)
