"""Pieces of matrices in eight bits, each matrix with one scale: what ranks agree on, and codes by it.

Every rank finds the absmax of its pieces. The largest of all ranks is the whole matrix's, and by it a piece has
those codes that the whole matrix has there. Between the two there is one maximum over ranks, of integers: the bits
of a float32 without its sign order as the number does, with NaN above infinity, so that no rank's NaN is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgauge.linear import _ops
from narrowgauge.linear._quantize import FORMATS, Format, codes_by, largest_magnitude, scales_by

_WIDTH = 4  # integers for each matrix, as kernels read them


def find_absmax(pieces: Sequence[Tensor], format: Format) -> Tensor:
    """What the ranks take the maximum of: int32 (pieces, 4), the same shape on all.

    Args:
        pieces: plain matrices (rows, columns) of one device; some may be empty.
        format: what codes they get.
    """
    if _have_kernels(pieces, format):
        found: Tensor = _ops._modules()[1].find_absmax([piece.contiguous() for piece in pieces], format)
        return found
    own = torch.cat([largest_magnitude(piece, "tensor", format) for piece in pieces])
    # A NaN of torch's may have a sign.
    bits = own.nan_to_num(nan=torch.inf, posinf=torch.inf).view(torch.int32)
    return bits.expand(-1, _WIDTH).contiguous()


def encode(
    pieces: Sequence[Tensor], rows: Sequence[int], agreed: Tensor, format: Format
) -> list[tuple[Tensor, Tensor]]:
    """Codes of pieces, and the scales (1, 1) of their matrices.

    Args:
        pieces: as above.
        rows: how many rows of codes each gets, its own or more; those below are zeros.
        agreed: the maximum over ranks of what `find_absmax` says.
        format: as above.
    """
    if not _have_kernels(pieces, format):
        return _eager(pieces, rows, agreed, format)
    return [
        _by_kernel(piece, high, agreed[at], format)
        if piece.numel()
        else _eager([piece], [high], agreed[at : at + 1], format)[0]
        for at, (piece, high) in enumerate(zip(pieces, rows, strict=True))
    ]


def _have_kernels(pieces: Sequence[Tensor], format: Format) -> bool:
    return _ops.no_kernels(pieces[0].device, FORMATS[format].dtype) is None


def _by_kernel(piece: Tensor, high: int, absmax: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    made = piece.new_empty if len(piece) == high else piece.new_zeros
    codes = made((high, piece.shape[1]), dtype=FORMATS[format].dtype)
    return codes, _ops._modules()[1].quantize_by(piece.contiguous(), format, absmax, codes)


def _eager(
    pieces: Sequence[Tensor], rows: Sequence[int], agreed: Tensor, format: Format
) -> list[tuple[Tensor, Tensor]]:
    absmax = agreed.view(torch.float32).amax(1)
    inverses, scales = (found.view(-1, 1, 1).unbind() for found in scales_by(absmax, absmax, format))
    coded = []
    for piece, high, inverse, scale in zip(pieces, rows, inverses, scales, strict=True):
        codes = codes_by(piece, inverse, format)
        if len(codes) < high:
            below = codes.new_zeros((high - len(codes), codes.shape[1]), dtype=torch.uint8)
            codes = torch.cat([codes.view(torch.uint8), below]).view(codes.dtype)
        coded.append((codes, scale))
    return coded
