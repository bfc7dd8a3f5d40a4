"""A large parameter's step in eager torch, in pieces that fit in a processor's caches.

Eager torch makes some thirty tensors of a parameter's size for a step. Where no compiled function takes the step
(without a C compiler, or for what it does not know) a large parameter is stepped piece by piece: the same
operations on the same numbers, which need not go to memory and back in between, nor be there all at once. Only
rules that make every element of that element alone can be divided, and only into runs of whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from narrowgauge.optim._equation import equation, scalar_graph
from narrowgauge.optim._fused_numbers import Options
from narrowgauge.optim._plan import ParameterPlan

ELEMENTS = 1 << 18  # of a piece, more or less
_GRAIN = 8  # elements that one block of random numbers serves


class Piece(NamedTuple):
    """A run of a flat parameter, with its gradient and its state, which are views: what is written there stays.

    Attributes:
        first: its first element.
    """

    p: Tensor
    grad: Tensor
    state: Mapping[str, Tensor]
    first: int


def by_element(plan: ParameterPlan, group: Mapping[str, Any]) -> bool:
    """Whether a rule makes every element's moments and update of that element alone."""
    options, names = Options.of(group), tuple(slot.slot.name for slot in plan.slots)
    try:
        # Rules are values, and have hashes.
        scalars = scalar_graph(plan.rule, options.names, options.others)  # type: ignore[arg-type]
        return not equation(plan.rule, names, tuple(scalars)).terms  # type: ignore[arg-type]
    except NotImplementedError:
        return False


def pieces_of(
    plan: ParameterPlan, p: Tensor, grad: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]
) -> Iterator[Piece]:
    """The pieces in which a step can be taken: the parameter as it is where it is small or cannot be divided."""
    n = p.numel()
    each = math.lcm(_GRAIN, *(slot.block_size for slot in plan.slots))
    size = max(1, ELEMENTS // each) * each
    words = _words(plan, n, state) if p.is_cpu and n > size and p.is_contiguous() else None
    if words is None or not by_element(plan, group):
        yield Piece(p, grad, state, 0)
        return
    flat, slope = p.view(-1), grad.reshape(-1)
    for first in range(0, n, size):
        end = min(n, first + size)
        cut = {key: word[first // an_item : -(-end // an_item)] for key, (word, an_item) in words.items()}
        yield Piece(flat[first:end], slope[first:end], {**state, **cut}, first)


def _words(plan: ParameterPlan, n: int, state: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, int]] | None:
    """Flat words of a state with the elements that an item is of, by key; None if one is not as it should be."""
    blocks = {key: slot.block_size for slot in plan.slots for key in slot.keyed(slot.words(state))}
    low = [plan.weight_key] if plan.weight_key is not None else []
    found = {}
    for key in (*blocks, *low):
        word, block = state[key], blocks.get(key, 1)
        # An item for an element, for two, or for a block.
        an_item = (
            1 if word.numel() == n else {-(-n // 2): 2, -(-n // block): block}.get(len(word) if word.dim() else -1)
        )
        if an_item is None or not word.is_contiguous():
            return None
        found[key] = word.view(-1) if an_item == 1 else word, an_item
    return found
