"""Codebooks: at most 256 sorted numbers in [-1, 1] that stand for all the others.

A tensor divided by the largest magnitude of its block lies in [-1, 1]; a codebook says which numbers of that
interval the codes mean. Adam's moments span many orders of magnitude inside one block, so evenly spaced codes
waste themselves on the large end: the *dynamic* maps spend them decade by decade instead, the *quantile* map where
the data is, the float maps binade by binade.

Every module of this folder but this one and `_map` holds codebooks, each a `CodebookMap`, and is found by being
here: a new one is a new file (or, outside the library, a call of `register_codebook`).

Source: 8-bit Optimizers via Block-wise Quantization, Sections 1.2, 1.3, 2.2 and Appendix F.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence

from torch import Tensor

from narrowgauge._arguments import typed
from narrowgauge.formats._codebooks._map import CodebookMap, checked

__all__ = ["CodebookMap", "codebook", "codebook_map", "codebook_names", "register_codebook"]

_MAPS: dict[str, CodebookMap] = {}


@typed
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
        ValueError: for a name, a width or data that there is no codebook for.
    """
    found = codebook_map(name)
    widths = found.signed_bits if signed else found.unsigned_bits
    if not isinstance(bits, int) or bits not in widths:
        takes = _listed(widths) or "none"
        raise ValueError(
            f"bits: got {bits!r}, takes {takes} for the map {name!r} {'with' if signed else 'without'} sign"
        )
    if data is None:
        return checked(found.build(signed, bits), bits)
    if found.build_from is None:
        raise ValueError(f"data: the map {name!r} is not made from data")
    return checked(found.build_from(data, signed, bits), bits)


@typed
def codebook_map(name: str) -> CodebookMap:
    """The definition behind a name.

    Raises:
        ValueError: for an unknown name; the message lists those that exist.
    """
    if name not in _MAPS:
        raise ValueError(f"name: got {name!r}, takes one of {', '.join(map(repr, sorted(_MAPS)))}")
    return _MAPS[name]


def known(name: str) -> str:
    """A codebook's name, where an argument that is called `codebook` may be one.

    Raises:
        ValueError: if there is none.
    """
    if name not in _MAPS:
        raise ValueError(f"codebook: got {name!r}, takes one of {', '.join(map(repr, sorted(_MAPS)))}")
    return name


def codebook_names() -> tuple[str, ...]:
    """The names of all codebooks, in alphabetical order."""
    return tuple(sorted(_MAPS))


@typed
def register_codebook(new: CodebookMap) -> None:
    """Make a codebook known by its name, in this process.

    Raises:
        ValueError: for a name that is taken, widths outside of 2 to 8, or a map that builds no codebook.
    """
    if not isinstance(new.name, str) or not new.name.strip():
        raise ValueError(f"name: got {new.name!r}, takes a word")
    if new.name.casefold() in {name.casefold() for name in _MAPS}:
        raise ValueError(f"name: got {new.name!r}, which is taken; takes a new name")
    both = {*new.signed_bits, *new.unsigned_bits}
    if not both or not both <= set(range(2, 9)):
        raise ValueError(
            f"bits: got {_listed(sorted(both)) or 'none'} for the map {new.name!r}, takes some of 2 to 8"
        )
    for signed, widths in ((True, new.signed_bits), (False, new.unsigned_bits)):
        for bits in widths:
            checked(new.build(signed, bits), bits)
    _MAPS[new.name] = new


def _listed(widths: Sequence[int]) -> str:
    """2 to 8, or 2, 8."""
    if len(widths) > 2 and max(widths) - min(widths) == len(widths) - 1:
        return f"{min(widths)} to {max(widths)}"
    return ", ".join(map(str, widths))


def _find() -> None:
    for module in pkgutil.iter_modules(__path__):
        if module.name != "_map":
            for found in importlib.import_module(f"{__name__}.{module.name}").MAPS:
                if found.name in _MAPS:
                    raise ValueError(f"name: {found.name!r} is the name of two codebooks")
                _MAPS[found.name] = found


_find()
