"""The choice of storages: for each group of like parameters the bytes that are worth their noise.

The noise of a parameter's weight storage and of its moments' are measured one by one. They are independent, so the
squares of their shares add up. Of all pairs only those on the frontier are left: no other is narrower and quieter.

With a tolerance each group takes the narrowest pair within it. With a number of bytes, the choice minimizes the
mean square of the shares over all elements, by one price λ of a byte for all groups: each takes the pair with the
least share² + λ·bytes. The price falls until the bytes are spent, and what is left buys the best single exchanges.
Shares below `FREE` count as `FREE`, as nobody could tell them from none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from narrowgauge.recipes._choices import Kept

FAR = 4.0
FREE = 0.01  # a ten-thousandth of the variance of the gradient's noise
_LESS = 0.9
_NEVER = 1e6  # a share that is not finite


class TooFewBytesError(Exception):
    """The narrowest choice takes more bytes a parameter than there are: `least`."""

    def __init__(self, least: float) -> None:
        super().__init__(f"{least:.4f} bytes a parameter")
        self.least = least


@dataclass(frozen=True)
class Candidates:
    """Parameters that are kept alike, and their frontier: ways to keep them, from the fewest bytes to the most."""

    names: tuple[str, ...]
    elements: int
    frontier: tuple[Kept, ...]

    @property
    def name(self) -> str:
        """The first one's."""
        return self.names[0]


def frontier(options: Sequence[Kept]) -> tuple[Kept, ...]:
    """Those of the options that are quieter than all narrower ones, by a tenth at least, the narrowest first."""
    found: list[Kept] = []
    for option in sorted(options, key=lambda kept: (kept.bytes, kept.noise)):
        if not found or (option.noise < _LESS * found[-1].noise and found[-1].noise > FREE):
            found.append(option)
    return tuple(found)


def alike(measured: Mapping[str, Sequence[float]], like: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Groups of like parameters, without those that differ from the others.

    A parameter is in a group of its own if one of its shares is more than `FAR` times, or less than one `FAR`-th,
    the median of the like ones; shares below `FREE` count as that.

    Args:
        measured: by name the share of each way to keep it, in one order.
        like: names of parameters that are alike by name.
    """
    found = []
    for names in like:
        shares = np.maximum(FREE, np.minimum([measured[name] for name in names], _NEVER))
        ratio = shares / np.median(shares, axis=0)
        far = ((ratio > FAR) | (ratio < 1 / FAR)).any(axis=1)
        together = tuple(name for name, apart in zip(names, far, strict=True) if not apart)
        found += [together] if together else []
        found += [(name,) for name, apart in zip(names, far, strict=True) if apart]
    return found


def within(parameters: Sequence[Candidates], tolerance: float) -> dict[str, int]:
    """By name the place on the frontier of the narrowest way within a tolerance, or of the quietest of all."""
    return {
        one.name: next((i for i, kept in enumerate(one.frontier) if kept.noise <= tolerance), len(one.frontier) - 1)
        for one in parameters
    }


def for_bytes(parameters: Sequence[Candidates], each: float) -> dict[str, int]:
    """The quietest choice of at most so many bytes a parameter.

    Raises:
        TooFewBytesError: if the narrowest choice takes more.
    """
    elements = sum(one.elements for one in parameters)
    budget = each * elements + 1e-6 * elements

    def spent(chosen: Mapping[str, int]) -> float:
        return sum(one.elements * one.frontier[chosen[one.name]].bytes for one in parameters)

    least = spent({one.name: 0 for one in parameters}) / elements
    if least > each * (1 + 1e-6):
        raise TooFewBytesError(least)
    low, high = 0.0, 4.0 * _NEVER**2
    chosen = _at_price(parameters, low)
    if spent(chosen) > budget:
        for _ in range(200):
            price = math.sqrt(max(low, 1e-12) * high)
            if spent(_at_price(parameters, price)) > budget:
                low = price
            else:
                high = price
        chosen = _at_price(parameters, high)
    return _spend(parameters, chosen, budget - spent(chosen))


def _at_price(parameters: Sequence[Candidates], price: float) -> dict[str, int]:
    return {
        one.name: min(range(len(one.frontier)), key=lambda i: cost(one.frontier[i]) + price * one.frontier[i].bytes)
        for one in parameters
    }


def _spend(parameters: Sequence[Candidates], chosen: dict[str, int], left: float) -> dict[str, int]:
    """Take the best exchanges that the bytes that are left allow."""
    while True:
        best: tuple[float, str, int, float] | None = None
        for one in parameters:
            now = one.frontier[chosen[one.name]]
            for i in range(chosen[one.name] + 1, len(one.frontier)):
                more = one.elements * (one.frontier[i].bytes - now.bytes)
                gain = one.elements * (cost(now) - cost(one.frontier[i]))
                if more <= left and gain > 0 and (best is None or gain / more > best[0]):
                    best = gain / more, one.name, i, more
        if best is None:
            return chosen
        chosen[best[1]], left = best[2], left - best[3]


def cost(kept: Kept) -> float:
    """The share of noise, squared; see the module."""
    return max(FREE, min(kept.noise, _NEVER)) ** 2


def total_noise(parts: Sequence[tuple[int, float]]) -> float:
    """The share of noise of all parameters together, of their (elements, share)."""
    elements = sum(count for count, _ in parts)
    return math.sqrt(sum(count * share**2 for count, share in parts) / max(1, elements))
