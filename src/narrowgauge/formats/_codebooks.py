"""Codebooks: at most 256 sorted numbers in [-1, 1] that stand for all the others.

A tensor divided by the largest magnitude of its block lies in [-1, 1]; a codebook says which numbers of that
interval the codes mean. Adam's moments span many orders of magnitude inside one block, so evenly spaced codes
waste themselves on the large end: the *dynamic* maps spend them decade by decade instead, the *quantile* map where
the data is, the float maps binade by binade.

The maps are in `_codebook_maps`; `register_codebook` adds one from outside the library.

Source: 8-bit Optimizers via Block-wise Quantization, Sections 1.2, 1.3, 2.2 and Appendix F.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgauge._arguments import check_instance, is_integer
from narrowgauge._torch_private import uncompiled
from narrowgauge.formats._codebook_maps import MAPS, CodebookMap

_MAPS: dict[str, CodebookMap] = {found.name: found for found in MAPS}


@uncompiled  # compiled, a map may differ in the last bit
def codebook(name: str, signed: bool = True, bits: int = 8, *, data: Tensor | None = None) -> Tensor:
    """A codebook by name.

    Args:
        name: one of `codebook_names()`.
        signed: with negative values (a first moment) or without (a second moment, never negative).
        bits: code width, 2 to 8 where the definition allows it.
        data: for maps that are made from data (``"quantile"``): a float tensor of any shape to make it from.

    Returns:
        Its values: an ascending float32 tensor of at most 2^bits values in [-1, 1], 0 and 1 among them.

    Raises:
        ValueError: for an unknown name, a width that the map is not defined for, or data that it is not made from.
    """
    found = codebook_map(name)
    widths = found.signed_bits if signed else found.unsigned_bits
    if not is_integer(bits) or bits not in widths:
        sign = "with" if signed else "without"
        raise ValueError(f"bits must be {_listed(widths) or 'none'} for the map {name!r} {sign} sign, got {bits!r}")
    if data is None:
        return checked(found.build(signed, bits), bits)
    if found.build_from is None:
        raise ValueError(f"data must be None: the map {name!r} is not made from data")
    return checked(found.build_from(data, signed, bits), bits)


def codebook_map(name: str) -> CodebookMap:
    """The definition of a codebook.

    Raises:
        ValueError: for an unknown name; the message lists those that exist.
    """
    return _MAPS[known(name, "name")]


def known(name: str, argument: str = "codebook") -> str:
    """The name of a codebook, checked.

    Raises:
        ValueError: for an unknown name, calling it `argument`.
    """
    if name not in _MAPS:
        raise ValueError(f"{argument} must be one of {', '.join(map(repr, sorted(_MAPS)))}, got {name!r}")
    return name


def codebook_names() -> tuple[str, ...]:
    """The names of all codebooks, in alphabetical order."""
    return tuple(sorted(_MAPS))


def register_codebook(new: CodebookMap) -> None:
    """Make a codebook known by its name, in this process.

    Raises:
        ValueError: for a name that is taken, widths outside of 2 to 8, or a map that builds no codebook.
    """
    if not isinstance(new.name, str) or not new.name.strip():
        raise ValueError(f"name must be a word, got {new.name!r}")
    if new.name.casefold() in {name.casefold() for name in _MAPS}:
        raise ValueError(f"name must be new, got {new.name!r}, which is taken")
    both = {*new.signed_bits, *new.unsigned_bits}
    if not both or not both <= set(range(2, 9)):
        raise ValueError(
            f"bits of the map {new.name!r} must be some of 2 to 8, got {_listed(sorted(both)) or 'none'}"
        )
    for signed, widths in ((True, new.signed_bits), (False, new.unsigned_bits)):
        for bits in widths:
            checked(new.build(signed, bits), bits)
    _MAPS[new.name] = new


def checked(values: Tensor, bits: int = 8) -> Tensor:
    """The values, if they are a codebook.

    Zero must be a code, or a parameter without a gradient would drift. One must be a code, so that the element a
    block is scaled by comes back exactly.

    Raises:
        ValueError: for anything else.
    """
    check_instance("codebook", values, Tensor, "narrowgauge.formats.codebook('dynamic')")
    if values.dtype != torch.float32 or values.dim() != 1 or not 2 <= len(values) <= 1 << bits:
        got = f"{values.dtype} of shape {tuple(values.shape)}"
        raise ValueError(f"codebook must be a float32 tensor of 2 to {1 << bits} values, got {got}")
    host = values.detach().cpu()
    ordered = bool((host.diff() > 0).all()) and bool((host == 0).any())
    if not (ordered and host[-1] == 1 and host[0] >= -1):
        raise ValueError(
            "codebook must have ascending, distinct values in [-1, 1], 0 and 1 among them, "
            f"got values from {float(host[0]):g} to {float(host[-1]):g}"
        )
    return values


def _listed(widths: Sequence[int]) -> str:
    """2 to 8, or 2, 8."""
    if len(widths) > 2 and max(widths) - min(widths) == len(widths) - 1:
        return f"{min(widths)} to {max(widths)}"
    return ", ".join(map(str, widths))
