"""What a codebook is, as a value, and what makes a tensor one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CodebookMap:
    """The definition of a codebook.

    Attributes:
        name: what users type.
        summary: what it is, in a line.
        source: where it is defined.
        build: signed, bits -> ascending float32 tensor of at most 2^bits values in [-1, 1], with 0 and 1.
        signed_bits, unsigned_bits: the code widths it is defined for; empty if it is not.
        build_from: data, signed, bits -> such a tensor, for maps that are made from data.
    """

    name: str
    summary: str
    source: str
    build: Callable[[bool, int], Tensor]
    signed_bits: Sequence[int] = range(2, 9)
    unsigned_bits: Sequence[int] = range(2, 9)
    build_from: Callable[[Tensor, bool, int], Tensor] | None = None


def checked(values: Tensor, bits: int = 8) -> Tensor:
    """The values, if they are a codebook.

    Zero must be a code, or a parameter without a gradient would drift; one must be a code, so that the element a
    block is scaled by comes back exactly.

    Raises:
        ValueError: for anything else.
    """
    if not isinstance(values, Tensor):
        raise ValueError(
            f"codebook: got {values!r}, takes a tensor such as narrowgauge.formats.codebook('dynamic')"
        )
    if values.dtype != torch.float32 or values.dim() != 1 or not 2 <= len(values) <= 1 << bits:
        got = f"{values.dtype} of shape {tuple(values.shape)}"
        raise ValueError(f"codebook: got {got}, takes a float32 tensor of 2 to {1 << bits} values")
    host = values.detach().cpu()
    ordered = bool((host.diff() > 0).all()) and bool((host == 0).any())
    if not (ordered and host[-1] == 1 and host[0] >= -1):
        raise ValueError(
            "codebook: takes ascending, distinct values in [-1, 1] with 0 and 1 among them, "
            f"got values from {float(host[0]):g} to {float(host[-1]):g}"
        )
    return values
