"""The choice of storages: for each group of like parameters, bytes that are worth the loss that they save.

The costs of weight storages and of the moments' storages are measured separately. Their errors are independent, so
the costs of a pair are added. Only the pairs on the frontier are left: each costs at least a tenth less loss than
every narrower one.

One price λ, in nats a byte, holds for all groups: each takes the pair with the least loss + λ·bytes. A tolerance is
met with the highest λ at which the loss keeps within it, a number of bytes with the lowest λ at which the bytes do.
What the limit still leaves is used by changing single groups, the best exchange of loss for bytes first.

With a tolerance no bytes are spent on a loss that is too little to be measured in a training: one below `FREE`, or
below a twentieth of a smaller tolerance, counts as that much. A group's part of it is its share of the elements.
With a limit of bytes or memory every loss counts, because bytes within the limit are there to be used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from narrowgauge.recipes._choices import Kept

FREE, _FREE_SHARE = 1e-4, 0.05  # nats, of a whole model; at most this share of a tolerance
_FAR, _NOISE = 4.0, 0.01
_LESS = 0.9
_NEVER = 1e6  # a loss that is not finite
Chosen = dict[str, int]  # by the name of a group, the place on its frontier


class TooFewBytesError(Exception):
    """The narrowest choice takes more bytes a parameter than the limit; `least` is how many it takes."""

    def __init__(self, least: float) -> None:
        super().__init__(f"{least:.4f} bytes a parameter")
        self.least = least


@dataclass(frozen=True)
class Candidates:
    """Parameters that are kept alike, and their frontier: ways to keep them, from the fewest bytes to the most.

    A loss below `free` counts as `free`.
    """

    names: tuple[str, ...]
    elements: int
    frontier: tuple[Kept, ...]
    free: float = 0.0

    @property
    def name(self) -> str:
        """The name of the first parameter."""
        return self.names[0]

    def loss(self, place: int) -> float:
        """The loss that a way costs, in nats, within `free` and a million."""
        return max(self.free, min(self.frontier[place].loss, _NEVER))

    def bytes(self, place: int) -> float:
        """The bytes that all parameters of the group take in a way."""
        return self.elements * self.frontier[place].bytes


def free_of(tolerance: float) -> float:
    """The loss of a whole model that counts as none where a tolerance is the limit."""
    return min(FREE, _FREE_SHARE * tolerance)


def frontier(options: Sequence[Kept], free: float = 0.0) -> tuple[Kept, ...]:
    """The options that cost at least a tenth less than every narrower one, the narrowest first.

    Options that are wider than one whose loss is at most `free` are left out.
    """
    found: list[Kept] = []
    for option in sorted(options, key=lambda kept: (kept.bytes, kept.loss)):
        if not found or (option.loss < _LESS * found[-1].loss and found[-1].loss > free):
            found.append(option)
    return tuple(found)


def alike(noise: Mapping[str, Sequence[float]], like: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Groups of like parameters; a parameter that differs from the others is a group of its own.

    It differs if the noise of one way to keep it is more than `_FAR` times the median of the like parameters, or
    less than one `_FAR`-th of it. Noise below a hundredth counts as a hundredth.

    Args:
        noise: by the name of a parameter, the noise of each way to keep it, in one order of ways.
        like: names of parameters that are alike by name.
    """
    found = []
    for names in like:
        shares = np.maximum(_NOISE, np.minimum([noise[name] for name in names], _NEVER))
        ratio = shares / np.median(shares, axis=0)
        far = ((ratio > _FAR) | (ratio < 1 / _FAR)).any(axis=1)
        together = tuple(name for name, apart in zip(names, far, strict=True) if not apart)
        found += [together] if together else []
        found += [(name,) for name, apart in zip(names, far, strict=True) if apart]
    return found


def within(groups: Sequence[Candidates], tolerance: float) -> Chosen:
    """The narrowest choice whose loss is within the tolerance; if there is none, the one with the least loss."""

    def fits(chosen: Chosen) -> bool:
        return loss_of(groups, chosen) <= tolerance

    chosen = _at(groups, 0.0)
    if not fits(chosen):
        return chosen
    chosen = _at(groups, _price(lambda price: not fits(_at(groups, price)))[0])
    return _exchanged(groups, chosen, lambda other: fits(other), narrower=True)


def for_bytes(groups: Sequence[Candidates], each: float) -> Chosen:
    """The choice of at most so many bytes a parameter that costs least.

    Raises:
        TooFewBytesError: if the narrowest choice takes more.
    """
    elements = sum(one.elements for one in groups)
    budget = each * elements * (1 + 1e-6)

    def fits(chosen: Chosen) -> bool:
        return bytes_of(groups, chosen) <= budget

    least = bytes_of(groups, {one.name: 0 for one in groups})
    if least > budget:
        raise TooFewBytesError(least / elements)
    chosen = _at(groups, 0.0)
    if not fits(chosen):
        chosen = _at(groups, _price(lambda price: fits(_at(groups, price)))[1])
    return _exchanged(groups, chosen, fits, narrower=False)


def bytes_of(groups: Sequence[Candidates], chosen: Chosen) -> float:
    """Bytes of a choice, in all."""
    return sum(one.bytes(chosen[one.name]) for one in groups)


def loss_of(groups: Sequence[Candidates], chosen: Chosen) -> float:
    """The loss that a choice adds, in nats, beyond each group's `free`."""
    return sum(one.loss(chosen[one.name]) - one.free for one in groups)


def _at(groups: Sequence[Candidates], price: float) -> Chosen:
    """The way that each group takes at a price, in nats a byte."""
    return {
        one.name: min(range(len(one.frontier)), key=lambda i: (one.loss(i) + price * one.bytes(i), one.bytes(i)))
        for one in groups
    }


def _price(too_high: Callable[[float], bool]) -> tuple[float, float]:
    """The highest price that is not too high, and the lowest that is, by bisection."""
    low, high = 0.0, _NEVER
    if not too_high(high):
        return high, high
    for _ in range(100):
        price = math.sqrt(max(low, 1e-20) * high)
        low, high = (low, price) if too_high(price) else (price, high)
    return low, high


def _exchanged(
    groups: Sequence[Candidates], chosen: Chosen, fits: Callable[[Chosen], bool], *, narrower: bool
) -> Chosen:
    """Change single groups while that fits, the best exchange of loss for bytes first.

    Args:
        narrower: whether groups become narrower, for a tolerance; otherwise they become wider, for bytes.
    """
    while True:
        best: tuple[float, Chosen] | None = None
        for one in groups:
            now = chosen[one.name]
            for i in range(now) if narrower else range(now + 1, len(one.frontier)):
                gain = abs(one.bytes(now) - one.bytes(i)) if narrower else one.loss(now) - one.loss(i)
                paid = abs(one.loss(now) - one.loss(i)) if narrower else one.bytes(i) - one.bytes(now)
                worth = gain / max(paid, 1e-12)
                if gain > 0 and (best is None or worth > best[0]) and fits(other := {**chosen, one.name: i}):
                    best = worth, other
        if best is None:
            return chosen
        chosen = best[1]


def total_noise(parts: Sequence[tuple[int, float]]) -> float:
    """The noise of all parameters together: the root mean square over the elements of (elements, noise) pairs."""
    elements = sum(count for count, _ in parts)
    return math.sqrt(sum(count * share**2 for count, share in parts) / max(1, elements))
