"""The sides of a step of CLIP: the linear layers of its blocks by a plan or as a peer's, in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from _clip_model import encoders
from torch import nn

from narrowgauge.cli._bench._linear import Layer
from narrowgauge.linear import SwapReport, swap_linears


def chosen(model: nn.Module, layer: Layer, rows: Sequence[int] | None, launched: bool = False) -> SwapReport | None:
    """The layers that are faster by a plan; the model stays as it was.

    Args:
        model: a CLIP.
        layer: the side.
        rows: input rows of each tower's layers; None without the filter.
        launched: whether the host's time counts; else the device's alone.
    """
    if layer.plan is None or rows is None:
        return None
    tokens = {
        name: count
        for name, module in model.named_modules()
        for encoder, count in zip(encoders(model), rows, strict=True)
        if module is encoder
    }
    report = swap_linears(model, layer.plan, tokens=tokens, launched=launched)
    report.undo()
    return report


@contextmanager
def swapped(model: nn.Module, layer: Layer, report: SwapReport | None = None) -> Iterator[int]:
    """The linear layers of the blocks computed another way, in place; how many they are.

    A plan is for those that the filter has swapped, if there is its report, and for all of them without.
    """
    if layer.plan is not None:
        modules = encoders(model) if report is None else map(model.get_submodule, report.swapped)
        reports = [swap_linears(module, layer.plan) for module in modules]
        try:
            yield sum(len(one.swapped) for one in reports)
        finally:
            for one in reports:
                one.undo()
        return
    changed: list[tuple[nn.Module, str, nn.Module]] = []
    if layer.peer is not None:
        for encoder in encoders(model):
            for parent in list(encoder.modules()):
                changed += [(parent, name, own) for name, own in parent.named_children() if type(own) is nn.Linear]
    try:
        for parent, name, own in changed:
            setattr(parent, name, layer.converted(own))
        yield len(changed)
    finally:
        for parent, name, own in changed:
            setattr(parent, name, own)
