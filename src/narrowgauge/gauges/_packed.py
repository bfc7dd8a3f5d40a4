"""Arrays in records.

A map of 256 by 256 cells as JSON numbers is a megabyte of text, which takes longer to make and to read than all
else of its step. Packed it takes milliseconds, and a line reads it, in this language and others:

    numpy.frombuffer(zlib.decompress(base64.b64decode(value["zlib"])), value["type"]).reshape(value["shape"])
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TYPES = ("<u4", "<f4")


def packed(array: NDArray[Any]) -> dict[str, Any]:
    """An array of 32-bit numbers as JSON: its shape, numpy's name of its type, and its bytes, zlib's, as base64."""
    data = base64.b64encode(zlib.compress(array.tobytes(), 1)).decode("ascii")
    return {"shape": list(array.shape), "type": array.dtype.str, "zlib": data}


def unpacked(value: object, shape: tuple[int, ...]) -> NDArray[Any] | None:
    """The array of that shape that was packed; None of anything else, however large it would be."""
    if not isinstance(value, Mapping) or value.get("type") not in _TYPES:
        return None
    text, size = value.get("zlib"), 4 * int(np.prod(shape))
    if value.get("shape") != list(shape) or not isinstance(text, str):
        return None
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size + 1)
    except (ValueError, zlib.error):
        return None
    return np.frombuffer(data, value["type"]).reshape(shape) if len(data) == size else None
