"""The sides of a step: one model whose linear layers are computed one way or another, in place.

So every side steps the same parameters, and sides can take turns within a process that has memory for one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from narrowgauge.cli._bench._linear import Layer
from narrowgauge.linear import swap_linears


@contextmanager
def swapped(
    parts: Iterable[nn.Module], layer: Layer, made: dict[nn.Module, nn.Module] | None = None
) -> Iterator[int]:
    """The linear layers of parts of a model computed another way, in place; how many they are.

    Args:
        parts: blocks, or linear layers alone for a plan.
        layer: the way.
        made: a peer's layers by the `nn.Linear` that each stands for: those there are used again, others added.
    """
    if layer.plan is not None:
        reports = [swap_linears(part, layer.plan) for part in parts]
        try:
            yield sum(len(one.swapped) for one in reports)
        finally:
            for one in reports:
                one.undo()
        return
    made = {} if made is None else made
    changed: list[tuple[nn.Module, str, nn.Module]] = []
    if layer.peer is not None:
        for part in parts:
            for parent in list(part.modules()):
                changed += [(parent, name, own) for name, own in parent.named_children() if type(own) is nn.Linear]
    try:
        for parent, name, own in changed:
            if own not in made:
                made[own] = layer.converted(own)
            setattr(parent, name, made[own])
        yield len(changed)
    finally:
        for parent, name, own in changed:
            setattr(parent, name, own)


def compiled_graphs() -> int:
    """How many graphs have been compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
