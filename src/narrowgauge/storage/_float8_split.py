"""The weight storage of float8 weights: the parameter has an e4m3 code and an int8 low word, the state has neither.

Both are two bytes a parameter, in place of bfloat16's two and a low word. The rule sees twelve significant bits. An
update is rounded to them stochastically: to nearest, weights would stand still at small learning rates, as weights
of bfloat16 do. Eight random bits decide, as for `split4`. Words and scale are described in `_float8_weight`.
"""

from __future__ import annotations

import torch
from torch import Tensor, bitwise_left_shift

from narrowgauge.kernels._codec import Codec, Word
from narrowgauge.storage._float8_weight import Float8Weight, from_words, next_scale, to_words
from narrowgauge.storage._weights import Noise, WeightStorage, Written, add_storage


class Float8Split8(WeightStorage):
    """A `Float8Weight`: a weight of twelve significant bits in two bytes."""

    name = "fp8split8"
    dtypes = (torch.bfloat16,)
    rounded = False
    float8 = True
    random_bits = 8

    def codec(self, dtype: torch.dtype) -> Codec | None:
        return Codec(
            self.name, (Word("low", "int8"),), c="float8_weights.h", needs_random=True, pairs=True, scaled=True
        )

    def read(self, p: Tensor, low: Tensor | None) -> Tensor:
        assert isinstance(p, Float8Weight)
        return from_words(p.codes, p.low, p.scale)

    def add(self, p: Tensor, low: Tensor | None, weight: Tensor, delta: Tensor, noise: Noise) -> Written:
        assert isinstance(p, Float8Weight)
        scale = next_scale(p.largest.to(torch.int32), p.scale)
        codes, lo = to_words(weight + delta, scale, bitwise_left_shift(noise().to(torch.int32), 4) + 8)
        return Float8Weight(codes, scale, lo), None


add_storage(Float8Split8())
