"""The two arithmetics in which a rule's equation can be evaluated.

`Fp32Arithmetic`: moments are float32 tensors, decoded before and encoded after; every storage rounds once.
`StrictArithmetic`: moments are words of their storage, and each operation of the equation is rounded to the
format of its operands, constants included, as Collage's Algorithm 2 is written. An average is made in the format
of its own words, the rest of the equation in the widest format that the parameter and its moments have: with
bf16 throughout, all of it is bf16. The equation itself needs no second version: torch rounds every operation on
narrow tensors, and the constants are made narrow beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from narrowgauge.optim._shards import Shard, of_whole
from narrowgauge.rules import Scalar
from narrowgauge.storage import StateStorage

Words = dict[str, Tensor]
Moment = tuple[StateStorage, Words]


@dataclass(frozen=True)
class Fp32Arithmetic:
    """Averages of float32 tensors.

    Attributes:
        shard: what lies here of the parameter; None if all of it.
    """

    shard: Shard | None = None

    def accumulate(self, average: Tensor, x: Tensor, decay: Scalar, share: Scalar) -> Tensor:
        return decay * average + share * x

    def accumulate_square(self, average: Tensor, x: Tensor, decay: Scalar, share: Scalar) -> Tensor:
        return decay * average + share * x * x

    def square(self, x: Tensor) -> Tensor:
        # A gradient of 1e20 is a float32 number, and so is one of 1e-24; their squares are not.
        return x.to(torch.float64).square()

    def total(self, summed: Scalar) -> Scalar:
        """A sum over all elements, which was made in float64, as the equation takes it."""
        return summed

    def of_whole(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return of_whole(self.shard, x, function)

    def value(self, average: Tensor) -> Tensor:
        return average

    def root(self, x: Tensor, by: Scalar) -> Tensor:
        # The number's root is one for all elements, and dividing by it later spares x an overflow.
        return x.sqrt() / by**0.5


@dataclass(frozen=True)
class StrictArithmetic:
    """Averages as each slot's storage makes them; a moment is the pair (storage, words).

    Attributes:
        dtype: the format of the rest of the equation.
        shard: what lies here of the parameter; None if all of it.
    """

    dtype: torch.dtype
    shard: Shard | None = None

    def accumulate(self, average: Moment, x: Tensor, decay: Scalar, share: Scalar) -> Moment:
        storage, words = average
        return storage, storage.accumulate(words, x, float(decay), float(share))

    def accumulate_square(self, average: Moment, x: Tensor, decay: Scalar, share: Scalar) -> Moment:
        # The algorithm says (1 - beta) * x^2, and its overflow is part of it.
        return self.accumulate(average, x * x, decay, share)

    def square(self, x: Tensor) -> Tensor:
        return x * x

    def total(self, summed: Scalar) -> Scalar:
        """A sum over all elements, which was made in float64: a 0-d tensor of the format, rounded once."""
        # In float64 the order of summation does not matter: its rounding is far below that of one term.
        return torch.as_tensor(summed, dtype=torch.float64).to(self.dtype)

    def of_whole(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return of_whole(self.shard, x, function)

    def value(self, average: Moment) -> Tensor:
        storage, words = average
        return storage.value(words).to(self.dtype)

    def root(self, x: Tensor, by: Scalar) -> Tensor:
        return (x / by).sqrt()


def widest(operands: list[Tensor]) -> torch.dtype:
    """The format that holds every operand's format."""
    return reduce(torch.promote_types, (operand.dtype for operand in operands))


def narrow_scalars(
    scalars: Mapping[str, Scalar], averaging: tuple[str, ...], dtype: torch.dtype, device: torch.device
) -> dict[str, Scalar]:
    """The scalars as numbers of a format.

    They become 0-d tensors on the device, because torch multiplies by the reciprocal where a tensor on a GPU is
    divided by a number of the host. Those that decay or weigh averages stay as they are: `accumulate` rounds them
    to the format of the moment, as one word or, for an expansion, as two.
    """
    return {
        name: value if name in averaging else torch.tensor(float(value), dtype=torch.float64).to(dtype).to(device)
        for name, value in scalars.items()
    }
