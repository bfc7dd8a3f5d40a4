"""Ways to keep a weight in fewer bytes than float32: what is read back of what was written, for the bench.

A codec here is a function of updated weights in float32, flat, and of uniform noise of their shape; it gives what a
reader would read. Most storages are a word that the model computes with and a low word beside it. Both together are
a float with a longer fraction, and what is left to choose is how it is rounded: `Digits`.

What the rounding loses may go into the first moment: `Simulation.feed`. Where a step should have led to the weight
u and led to w, ECO changes m by

    m <- m + (1 - beta1^t) / lr * (1 - 1 / beta1) * (sqrt(v / (1 - beta2^t)) + eps) * (u - w)

which leaves z = w - lr beta1 / (1 - beta1) / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps) as it would be
with w = u. Where m is narrow, m is coded and its error given to the weight, the weight is rounded, and m is coded
again with what the weight lost.

Sources: Nikdan et al. 2026, ECO, arXiv 2601.22101, Algorithm 3. FlashOptim (Ortiz et al. 2026) and its code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.storage import weight_storage
from narrowgauge.storage._factored import factors, product
from studies.state_codecs.gradients import UNIT

_LEAST = {False: -126, True: -6}  # exponents of the smallest normal numbers of bfloat16 and e4m3
_E4M3_LARGEST = 448.0
_FACTORED = 64  # columns of a matrix


def float32(w: Tensor, noise: Tensor) -> Tensor:
    """A master weight."""
    return w


@dataclass(frozen=True)
class Kept:
    """The library's own storage of a bfloat16 parameter."""

    weights: str

    def __call__(self, w: Tensor, noise: Tensor) -> Tensor:
        storage, p = weight_storage(self.weights), w.to(torch.bfloat16)
        written = storage.add(p, storage.init(p), w, torch.zeros_like(w), lambda: (noise.double() * 2**32).long())
        return storage.read(*written)


@dataclass(frozen=True)
class Digits:
    """A float's fraction of so many binary digits: bfloat16 has 7, e4m3 has 3, a low word the others.

    Magnitudes are rounded, halves away from zero. With 11 digits this is bfloat16 with a 4-bit word. An e4m3 code
    has one scale a tensor, the largest power of two with which the largest element is a finite code. Every `UNIT`
    of elements counts as a tensor.
    """

    digits: int
    stochastic: bool = False
    e4m3: bool = False

    def __call__(self, w: Tensor, noise: Tensor) -> Tensor:
        wide = w.double()
        if self.e4m3:
            largest = w.view(-1, UNIT).abs().amax(1, keepdim=True).double().clamp_min(2.0**-126)
            scale = torch.exp2(torch.floor(torch.log2(_E4M3_LARGEST / largest))).expand(-1, UNIT).reshape(-1)
            wide = wide * scale
        exponent = (torch.frexp(wide).exponent - 1).clamp_min(_LEAST[self.e4m3])
        unit = torch.ldexp(torch.ones_like(wide), exponent - self.digits)
        steps = torch.floor(wide.abs() / unit + (noise.double() if self.stochastic else 0.5))
        rounded = (steps * unit).copysign(wide)
        return (rounded / scale if self.e4m3 else rounded).float()


def flashoptim(w: Tensor, noise: Tensor) -> Tensor:
    """FlashOptim's pair: bfloat16, and what is missing in 127ths of half its spacing, to nearest."""
    hi = w.to(torch.bfloat16).float()
    half = torch.ldexp(torch.ones_like(hi), (torch.frexp(hi).exponent - 1).clamp_min(-126) - 8)
    return hi + ((w - hi) / half).clamp(-1, 1).mul(127).round() / 127 * half


def factored(x: Tensor, noise: Tensor) -> Tensor:
    """A second moment by its row and column means: the library's `factored`, of matrices 64 wide.

    Every `UNIT` of elements is a matrix, whatever the blocks.
    """
    return product(*factors(x.reshape(-1, UNIT // _FACTORED, _FACTORED))).view(x.shape)


def exact(x: Tensor, noise: Tensor) -> Tensor:
    """A moment in float32."""
    return x
