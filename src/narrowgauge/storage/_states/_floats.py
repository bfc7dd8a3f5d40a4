"""Moments as floats: one word, or the unevaluated sum of two."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.storage._expansion import Expansion, grow, mul

Words = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class StateContext:
    """What words do not say of the moment that they stand for.

    Attributes:
        shape: the moment's, which is the parameter's.
        signed: whether it has a sign.
        block_size: elements a block, along the flattened tensor.
        beside: where the storage is `relative`, the second moment that is kept beside it, decoded; None where
            there is none.
    """

    shape: torch.Size
    signed: bool
    block_size: int
    beside: Tensor | None = None


@dataclass(frozen=True)
class StateStorage:
    """One float tensor of the parameter's shape. Also the base that the other storages extend.

    Attributes:
        name: what users type.
        dtype: the words' dtype.
        quantized: whether small tensors are better off in fp32 (see `min_quantized_size`).
        rounded: whether it has the arithmetic of `accumulate` and `value`.
        relative: whether a moment is kept in units of another, which must be there to decode it.
    """

    name: str
    dtype: torch.dtype
    quantized: bool = False
    rounded: bool = True
    relative: bool = False

    def for_slot(self, signed: bool, beside: bool) -> StateStorage:
        """What this name means for a slot, by whether it has a sign and whether its unit is another slot's root."""
        return self

    def nbytes(self, numel: int, block_size: int) -> int:
        """Bytes that a moment of numel elements takes, scales included."""
        return numel * self.dtype.itemsize

    def hands_over(self, signed: bool) -> bool:
        """Whether the weight is given what a moment loses here (see `Rule.reach`)."""
        return False

    def stochastic(self, signed: bool) -> bool:
        """Whether `encode` rounds stochastically where it is given random numbers."""
        return False

    def init(self, p: Tensor, signed: bool, block_size: int) -> Words:
        """The words of a moment that is zero, on p's device."""
        return {"": torch.zeros_like(p, dtype=self.dtype, memory_format=torch.preserve_format)}

    def decode(self, words: Words, context: StateContext) -> Tensor:
        """The moment in float32, in its shape."""
        return words[""].to(torch.float32)

    def encode(self, moment: Tensor, context: StateContext, random: Tensor | None = None) -> Words:
        """The words of a float32 moment.

        Args:
            moment: any shape.
            context: the same for `decode`.
            random: integers in [0, 2^16) in its shape where the storage is `stochastic`; to nearest without.
        """
        return {"": moment.to(self.dtype)}

    def codes(self, words: Words, shape: torch.Size) -> Tensor:
        """One code a byte, uint8 in this shape, where moments are kept in codes.

        Raises:
            NotImplementedError: where they are not.
        """
        raise NotImplementedError(f"{self.name} states have no codes")

    def flaw(self, words: Words, signed: bool) -> str | None:
        """What no `encode` writes and is in these words all the same, such as a negative mean of squares; or None.

        Infinities and NaN of a float are none: a gradient may have brought them.
        """
        return "negative numbers" if not signed and bool((self.value(words) < 0).any()) else None

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

    def decode(self, words: Words, context: StateContext) -> Tensor:
        return words["hi"].to(torch.float32) + words["lo"].to(torch.float32)

    def encode(self, moment: Tensor, context: StateContext, random: Tensor | None = None) -> Words:
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


def _constant(value: float, like: Tensor) -> Tensor:
    """A constant of the equation as a number of the tensor's format."""
    return torch.tensor(value, dtype=torch.float64).to(like.dtype).to(like.device)
