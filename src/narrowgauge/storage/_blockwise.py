"""Block-wise quantization: codes of a codebook, and one scale a block.

Each block of elements is divided by its largest and rounded to a value of the codebook. An outlier costs
precision in its own block and nowhere else, and blocks can be worked on in parallel. A block is a run of neighbors
along the flattened tensor, a row, a column, or all of it.

**The scale carries a sign** where the codebook has no -1: it is the element of largest magnitude itself, not its
magnitude, so that this element is 1 times its scale and comes back exactly, whichever its sign. The public signed
map has 1 but not -1, and with a positive scale every block whose extremum is negative would keep it 0.7% too small.
It costs no byte, and codes with positive scales, as others write them, decode as ever.

What is fixed here is fixed for every kernel, bit for bit:

- The scale is the first finite element of largest magnitude, in float32; its magnitude if the codebook has a -1,
  which makes both signs exact by itself. A codebook without negative values takes negative elements for zeros.
- A block whose scale lies below 2^-126 in magnitude (zero, or a float32 subnormal, which GPUs may flush) is kept
  as zeros with scale 0.
- Otherwise x is multiplied by the correctly rounded float32 reciprocal of the scale, the product rounded to
  float32 (in a block whose scale is 2^126 or more both are divided by 4 first: its reciprocal would be subnormal);
  elements as large as the scale become 1 or -1 exactly. The result is encoded to nearest, ties towards
  zero, or stochastically.
- Infinities take the outermost code on their side (that of the first one comes back as the scale, the other as the
  first value of the codebook times it), NaN the code of zero, and neither touches its neighbors. Where an infinity
  has no finite number of 2^-126 or more beside it, the scale is float32's largest number with its sign: an infinite
  second moment must not read back as zero, since it divides.
- Decoding is value times scale, rounded to float32.

Source: 8-bit Optimizers via Block-wise Quantization, Section 2.1, Equation 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from narrowgauge._arguments import check_choice, is_integer
from narrowgauge.formats import Coder
from narrowgauge.formats import codebook as named_codebook
from narrowgauge.formats._rounding import Rounding

Block = int | Literal["row", "column"] | None

SMALLEST = 2.0**-126  # normal float32
LARGEST = torch.finfo(torch.float32).max
_HUGE_SCALE = 2.0**126
# Elements worked on at a time, in whole blocks, with about seven float32 temporaries of that size. On a CPU they
# stay in its cache: 26 ns an element on 2 cores, 36 with chunks of 2^26.
_CHUNK = 1 << 26
_CPU_CHUNK = 1 << 18


@dataclass(frozen=True, eq=False)
class Quantized:
    """A tensor as codes and scales.

    Attributes:
        codes: uint8 tensor of the original's shape, contiguous; a byte a code, whatever the codebook's width.
        scales: float32 tensor (number of blocks,): what the value 1 stands for in each block, of either sign.
        codebook: float32 tensor of the values that codes mean.
        block_size: what a scale serves, as `quantize` takes it.
    """

    codes: Tensor
    scales: Tensor
    codebook: Tensor
    block_size: Block

    def dequantize(self) -> Tensor:
        """The float32 tensor that the codes stand for, in the original's shape."""
        return decode_blocks(self.codes, self.scales, self.codebook, self.block_size)

    def __repr__(self) -> str:
        return (
            f"Quantized(codes={tuple(self.codes.shape)}, scales={tuple(self.scales.shape)}, "
            f"{len(self.codebook)} values, block_size={self.block_size!r})"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


# `torch.load` reads it with weights_only=True, its default.
torch.serialization.add_safe_globals([Quantized])


@torch.no_grad()
def quantize(
    x: Tensor,
    codebook: str | Tensor,
    block_size: Block = 256,
    rounding: Rounding = "nearest",
    generator: torch.Generator | None = None,
) -> Quantized:
    """Quantize a tensor block by block.

    Args:
        x: float tensor of any shape and layout, taken in row-major order; quantized from its float32 values.
        codebook: ascending float32 values in [-1, 1] with 0 and 1, at most 256 (see `formats.codebook`); or the
            name of a signed codebook of 8 bits.
        block_size: elements a block along the flattened tensor, the last block may be shorter; ``"row"`` for a
            scale a vector along the last dimension, ``"column"`` for a scale a position of the last dimension;
            None for one scale (tensor-wise).
        rounding: ``"nearest"``, ties towards zero, of the float32 quotient of x and its scale (see the module), or
            ``"stochastic"``: unbiased between the two values around. Below the first value of a codebook without
            -1 there is no second one: what lies between becomes that value.
        generator: source of the random bits for stochastic rounding; torch's default one if None.

    Returns:
        Codes and scales. The first element of largest magnitude of each block comes back exactly, zero stays zero,
        no sign changes, and x scaled by a power of two has the same codes (as long as no scale leaves float32's
        normal range). A codebook without negative values is for x without: negative elements become zero, and the
        rest is as if they were.

    Raises:
        ValueError: for a tensor that is not of floats, a block size below 1, an invalid codebook, or an unknown
            rounding. The codebook is looked at on the host, which waits for a GPU that holds it.
    """
    if not x.is_floating_point():
        raise ValueError(f"x must be a tensor of floats, got {x.dtype}")
    if block_size not in (None, "row", "column") and not (is_integer(block_size) and block_size >= 1):
        raise ValueError(
            f"block_size must be an integer of at least 1, 'row', 'column' or None, got {block_size!r}"
        )
    check_choice("rounding", rounding, ("nearest", "stochastic"))
    values = named_codebook(codebook) if isinstance(codebook, str) else codebook.detach()
    coder = Coder.of(values.to(x.device))
    bits = None
    if rounding == "stochastic":
        bits = torch.randint(0, 1 << 32, x.shape, dtype=torch.int64, device=x.device, generator=generator)
    codes, scales = encode_blocks(x.to(torch.float32), coder, block_size, bits)
    return Quantized(codes, scales, coder.values.clone(), block_size)


def block_count(numel: int, block_size: int | None) -> int:
    """How many scales a tensor of numel elements has."""
    return math.ceil(numel / block_size) if block_size is not None else min(numel, 1)


def encode_blocks(x: Tensor, coder: Coder, block_size: Block, bits: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes in x's shape and scales (blocks,) of a float32 tensor; stochastic if there are random bits."""
    blocks = to_blocks(x, block_size)
    random = None if bits is None else to_blocks(bits, block_size)
    codes = torch.empty_like(blocks, dtype=torch.uint8)
    scales = torch.zeros(blocks.shape[0], dtype=torch.float32, device=x.device)
    for chunk in chunks(blocks):
        normalized, scales[chunk] = _normalize(blocks[chunk], coder.lowest)
        codes[chunk] = (
            coder.encode(normalized) if random is None else coder.encode_with_bits(normalized, random[chunk])
        )
    return from_blocks(codes, x.shape, block_size), scales


def decode_blocks(codes: Tensor, scales: Tensor, values: Tensor, block_size: Block) -> Tensor:
    """The float32 tensor that codes of these values stand for, in the codes' shape."""
    return scale_blocks(values[codes.to(torch.int32)], scales, block_size)


def scale_blocks(x: Tensor, scales: Tensor, block_size: Block) -> Tensor:
    """x times the scale of each block, in x's shape."""
    return from_blocks(to_blocks(x, block_size) * scales[:, None], x.shape, block_size)


def pack_pairs(codes: Tensor) -> Tensor:
    """Codes below 16, of any shape, two a byte: flat, the first in the lower half, zero after an odd one."""
    pairs = torch.nn.functional.pad(codes.reshape(-1), (0, codes.numel() % 2)).view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4


def unpack_pairs(packed: Tensor, shape: torch.Size) -> Tensor:
    """The codes, in this shape, that `pack_pairs` was given."""
    return torch.stack([packed & 0xF, packed >> 4], dim=1).reshape(-1)[: shape.numel()].reshape(shape)


def normalize_blocks(x: Tensor, lowest: float, block_size: Block) -> tuple[Tensor, Tensor]:
    """A float32 tensor over the scale of each block, in x's shape, and the scales (blocks,)."""
    blocks = to_blocks(x, block_size)
    if not x.numel():
        return x, torch.zeros(blocks.shape[0], dtype=torch.float32, device=x.device)
    normalized, scales = _normalize(blocks, lowest)
    return from_blocks(normalized, x.shape, block_size), scales


def _normalize(blocks: Tensor, lowest: float) -> tuple[Tensor, Tensor]:
    """Blocks (n, size) over their extremum, in [-1, 1] but for infinities; and the extrema (n,)."""
    if lowest >= 0:
        blocks = blocks.clamp_min(0.0)
    magnitude = blocks.abs()
    magnitude = torch.where(magnitude >= SMALLEST, magnitude, 0.0)  # NaN compares false: zero
    magnitude = torch.where(torch.isinf(blocks), SMALLEST / 2, magnitude)
    bounded = blocks.nan_to_num(nan=0.0, posinf=LARGEST, neginf=-LARGEST)
    # argmax gives the first of equals.
    scales = bounded.gather(1, magnitude.argmax(dim=1, keepdim=True))
    if lowest == -1:
        scales = scales.abs()
    empty = scales.abs() < SMALLEST
    scales = torch.where(empty, 0.0, scales)
    quarter = torch.where(scales.abs() >= _HUGE_SCALE, 0.25, 1.0)
    normalized = bounded * quarter * torch.where(empty, 0.0, 1.0 / (scales * quarter))
    # The product of a number and its rounded reciprocal may miss 1 by a unit in the last place.
    one = torch.sign(bounded) * torch.sign(scales)
    return torch.where(bounded.abs() == scales.abs(), one, normalized), scales.squeeze(1)


def chunks(blocks: Tensor) -> Iterator[slice]:
    """Slices of a tensor of blocks (n, size), each to be worked on at once."""
    rows = max(1, (_CPU_CHUNK if blocks.device.type == "cpu" else _CHUNK) // max(1, blocks.shape[1]))
    for first in range(0, blocks.shape[0] if blocks.numel() else 0, rows):
        yield slice(first, first + rows)


def to_blocks(x: Tensor, block_size: Block) -> Tensor:
    """(blocks, elements of a block); of runs, the last padded with zeros."""
    if isinstance(block_size, str):
        last = x.shape[-1] if x.dim() else 1
        matrix = x.reshape(math.prod(x.shape[:-1]), last)
        return matrix if block_size == "row" else matrix.T
    flat = x.reshape(-1)
    # A block longer than the tensor is the tensor: there is nothing to pad.
    size = max(1, flat.numel() if block_size is None else min(block_size, flat.numel()))
    padding = -flat.numel() % size
    if padding:
        flat = torch.nn.functional.pad(flat, (0, padding))
    return flat.view(-1, size)


def from_blocks(blocks: Tensor, shape: torch.Size, block_size: Block) -> Tensor:
    """What `to_blocks` made blocks of, in its shape and contiguous."""
    if block_size == "column":
        blocks = blocks.T
    return blocks.reshape(-1)[: shape.numel()].reshape(shape).contiguous()
