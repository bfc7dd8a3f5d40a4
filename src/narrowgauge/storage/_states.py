"""State storages: how an optimizer keeps a moment between steps.

A moment is a running average. In a narrow format it meets two enemies: its values span many orders of magnitude
(block-wise dynamic codes are made for that), and its steps are small. With beta2 = 0.999 a second moment moves
by a thousandth a step, below half a unit in the last place of bf16: kept as one bf16 word it cannot shrink.
Kept as an expansion of two, it follows.

A storage keeps one or two tensors, its *words*. Like a weight storage it knows two arithmetics: `decode` and
`encode` move a moment to float32 registers and back, rounded once; `accumulate` averages in the words' own format,
every operation rounded, for storages whose words are floats.

Sources: 8-bit Optimizers via Block-wise Quantization, Section 2; Collage, Algorithm 2, line 9.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.formats import FP8_E4M3, Coder, coder, round_to
from narrowgauge.storage._blockwise import (
    block_count,
    decode_blocks,
    encode_blocks,
    normalise_blocks,
    scale_blocks,
)
from narrowgauge.storage._expansion import Expansion, grow, mul

Words = dict[str, Tensor]


@dataclass(frozen=True)
class StateStorage:
    """One float tensor of the parameter's shape. Also the base that the other storages extend.

    Attributes:
        name: what users type.
        dtype: the words' dtype.
        quantized: whether small tensors are better off in fp32 (see `min_quantized_size`).
        rounded: whether it has the arithmetic of `accumulate` and `value`.
    """

    name: str
    dtype: torch.dtype
    quantized: bool = False
    rounded: bool = True

    def nbytes(self, numel: int, block_size: int) -> int:
        """Bytes that a moment of numel elements takes, scales included."""
        return numel * self.dtype.itemsize

    def init(self, p: Tensor, signed: bool, block_size: int) -> Words:
        """The words of a moment that is zero, on p's device."""
        return {"": torch.zeros_like(p, dtype=self.dtype, memory_format=torch.preserve_format)}

    def decode(self, words: Words, shape: torch.Size, signed: bool, block_size: int) -> Tensor:
        """The moment in float32, in the parameter's shape."""
        return words[""].to(torch.float32)

    def encode(self, moment: Tensor, signed: bool, block_size: int) -> Words:
        """The words of a float32 moment."""
        return {"": moment.to(self.dtype)}

    def accumulate(self, words: Words, x: Tensor, decay: float, share: float) -> Words:
        """decay * average + share * x, constants and every operation rounded to the words' format."""
        average = words[""]
        x = x.to(average.dtype)
        return {"": _constant(decay, average) * average + _constant(share, average) * x}

    def value(self, words: Words) -> Tensor:
        """The number that the rest of a strict equation reads."""
        return words[""]


@dataclass(frozen=True)
class ExpansionState(StateStorage):
    """The unevaluated sum hi + lo of two bf16 words (Collage-plus's second moment)."""

    def nbytes(self, numel: int, block_size: int) -> int:
        return 2 * numel * self.dtype.itemsize

    def init(self, p: Tensor, signed: bool, block_size: int) -> Words:
        word = torch.zeros_like(p, dtype=self.dtype, memory_format=torch.preserve_format)
        return {"hi": word, "lo": word.clone()}

    def decode(self, words: Words, shape: torch.Size, signed: bool, block_size: int) -> Tensor:
        return words["hi"].to(torch.float32) + words["lo"].to(torch.float32)

    def encode(self, moment: Tensor, signed: bool, block_size: int) -> Words:
        hi = moment.to(self.dtype)
        lo = moment - hi.to(torch.float32)
        return {"hi": hi, "lo": torch.where(torch.isfinite(hi), lo, 0.0).to(self.dtype)}

    def accumulate(self, words: Words, x: Tensor, decay: float, share: float) -> Words:
        """Collage's Grow(Mul((beta, d_beta), (v, d_v)), (1 - beta) * x)."""
        average: Expansion = (words["hi"], words["lo"])
        x = x.to(self.dtype)
        hi = _constant(decay, x)
        lo = _constant(decay - float(hi), x)
        a, b = grow(mul((hi, lo), average), _constant(share, x) * x)
        return {"hi": a, "lo": b}

    def value(self, words: Words) -> Tensor:
        return words["hi"]


@dataclass(frozen=True)
class BlockwiseState(StateStorage):
    """Codes of a codebook and one float32 scale a block."""

    codebook: str = "dynamic"

    def nbytes(self, numel: int, block_size: int) -> int:
        return numel * self.dtype.itemsize + 4 * block_count(numel, block_size)

    def init(self, p: Tensor, signed: bool, block_size: int) -> Words:
        zero = coder(self.codebook, signed, p.device).encode(p.new_zeros(()))
        scales = torch.zeros(block_count(p.numel(), block_size), dtype=torch.float32, device=p.device)
        return {"codes": zero.expand(p.shape).clone(memory_format=torch.contiguous_format), "scales": scales}

    def decode(self, words: Words, shape: torch.Size, signed: bool, block_size: int) -> Tensor:
        values = coder(self.codebook, signed, words["codes"].device).values
        return decode_blocks(words["codes"], words["scales"], values, block_size)

    def encode(self, moment: Tensor, signed: bool, block_size: int) -> Words:
        codes, scales = encode_blocks(moment, coder(self.codebook, signed, moment.device), block_size)
        return {"codes": codes, "scales": scales}

    def accumulate(self, words: Words, x: Tensor, decay: float, share: float) -> Words:
        raise NotImplementedError(f"{self.name} states have no arithmetic of their own")

    def value(self, words: Words) -> Tensor:
        raise NotImplementedError(f"{self.name} states have no arithmetic of their own")


@dataclass(frozen=True)
class Float8State(BlockwiseState):
    """Numbers of float8 e4m3 and one float32 scale a block: x is the number times the scale.

    The scale is the block's absolute maximum over 448, so that its largest element is the format's largest number
    (and comes back but for a rounding of float32); what hardware converts, and what a float8 matrix multiply takes.
    Normalised and bounded as blocks of codes are (see `quantize`).
    """

    def init(self, p: Tensor, signed: bool, block_size: int) -> Words:
        scales = torch.zeros(block_count(p.numel(), block_size), dtype=torch.float32, device=p.device)
        return {"codes": torch.zeros(p.shape, dtype=self.dtype, device=p.device), "scales": scales}

    def decode(self, words: Words, shape: torch.Size, signed: bool, block_size: int) -> Tensor:
        values = words["codes"].to(torch.float32)
        return scale_blocks(values, words["scales"], block_size)

    def encode(self, moment: Tensor, signed: bool, block_size: int) -> Words:
        normalised, extrema = normalise_blocks(moment, -1.0 if signed else 0.0, block_size)
        largest = FP8_E4M3.max
        return {"codes": round_to(normalised * largest, FP8_E4M3), "scales": extrema / largest}


@dataclass(frozen=True)
class FourBitState(BlockwiseState):
    """Two codes a byte, and one float32 scale a block.

    A first moment takes the 4-bit dynamic map. A second moment takes 1/16, 2/16, ... 1: it has no zero, because
    what rounds to zero divides. A block of zeros stays zeros, by its scale.

    Source: Li et al. 2023, Memory Efficient Optimizers with 4-bit States (the zero-point problem).
    """

    def nbytes(self, numel: int, block_size: int) -> int:
        return (numel + 1) // 2 + 4 * block_count(numel, block_size)

    def init(self, p: Tensor, signed: bool, block_size: int) -> Words:
        zeros = torch.zeros(p.shape, dtype=torch.float32, device=p.device)
        return self.encode(zeros, signed, block_size)

    def decode(self, words: Words, shape: torch.Size, signed: bool, block_size: int) -> Tensor:
        packed = words["codes"]
        codes = torch.stack([packed & 0xF, packed >> 4], dim=1).reshape(-1)[: shape.numel()].reshape(shape)
        return decode_blocks(codes, words["scales"], _four_bits(signed, packed.device).values, block_size)

    def encode(self, moment: Tensor, signed: bool, block_size: int) -> Words:
        codes, scales = encode_blocks(moment, _four_bits(signed, moment.device), block_size)
        pairs = torch.nn.functional.pad(codes.reshape(-1), (0, codes.numel() % 2)).view(-1, 2)
        return {"codes": pairs[:, 0] | pairs[:, 1] << 4, "scales": scales}


@functools.lru_cache(maxsize=16)
def _four_bits(signed: bool, device: torch.device) -> Coder:
    if signed:
        return coder("dynamic", True, device, 4)
    return Coder.positive((torch.arange(1, 17, dtype=torch.float32, device="cpu") / 16).to(device))


def _constant(value: float, like: Tensor) -> Tensor:
    """A constant of the equation as a number of the tensor's format."""
    return torch.tensor(value, dtype=torch.float64).to(like.dtype).to(like.device)


_STORAGES: dict[str, StateStorage] = {
    storage.name: storage
    for storage in (
        StateStorage("fp32", torch.float32),
        StateStorage("bf16", torch.bfloat16),
        ExpansionState("expansion", torch.bfloat16),
        BlockwiseState("8bit", torch.uint8, quantized=True, rounded=False),
        Float8State("fp8", torch.float8_e4m3fn, quantized=True, rounded=False),
        FourBitState("4bit", torch.uint8, quantized=True, rounded=False),
    )
}


def state_storages() -> tuple[str, ...]:
    """The names of all state storages."""
    return tuple(_STORAGES)


def state_storage(name: str) -> StateStorage:
    """A state storage by name.

    Raises:
        ValueError: for an unknown name; the message lists those that exist.
    """
    if name not in _STORAGES:
        raise ValueError(f"states: got {name!r}, takes one of {', '.join(map(repr, _STORAGES))}")
    return _STORAGES[name]
