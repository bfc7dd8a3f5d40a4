"""Sizes of memory as people write them."""

from __future__ import annotations

import re

_UNITS = {"b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", 1)
    for ending, base in (("b", 1000), ("ib", 1024))
}


def parse_bytes(name: str, value: int | str) -> int:
    """Bytes from a number, or from a text with a unit: 80GB is 80 * 10^9, 80GiB is 80 * 2^30.

    A text without one is refused: who writes 80 does not mean bytes.

    Raises:
        ValueError: for what is none, or not above 0.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", value.strip().lower()) if isinstance(value, str) else None
    if found is None or found[2] not in _UNITS or float(found[1]) * _UNITS[found[2]] < 1:
        raise ValueError(f"{name}: got {value!r}, takes a number with its unit, such as '80GB' or '80GiB'")
    return int(float(found[1]) * _UNITS[found[2]])
