"""Weights of planned layers as the codes that their multiplies read."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from narrowgauge._module_names import clean_name
from narrowgauge.linear._module import LowPrecisionConv1D, LowPrecisionLinear
from narrowgauge.linear._plan import MULTIPLIES, LinearPlan
from narrowgauge.storage import Float8Weight
from narrowgauge.storage._float8_weight import become, from_words


def to_float8_weights(model: nn.Module) -> dict[str, str]:
    """Make the weights of a model's float8 layers `Float8Weight` parameters, in place.

    They are the weights of each `LowPrecisionLinear` and `LowPrecisionConv1D` whose plan multiplies them in e4m3
    and in no other format of eight bits, unless another module has the same parameter. They stay the same objects,
    so an optimizer may have them already. Layers then read the codes and quantize no weight; a plan's scaling of
    the weight, by rows or tiles say, is replaced by the one scale that the weight has. The weights keep twelve
    significant bits.

    Args:
        model: the model, where it will be trained. Its weights may have any float dtype; to the outside they become
            bfloat16, which inputs and biases of their layers must be, too.

    Returns:
        Why each other weight of a planned layer was left as it is, by name; empty if none was.

    Raises:
        ValueError: if no weight can be one.
    """
    chosen, kept = list[Tensor](), dict[str, str]()
    for name, layer, p in _weights(model):
        reason = _reason(p, layer.plan, [m for m in model.modules() if _has(m, p) and m is not layer])
        if reason is None:
            chosen.append(p)
        else:
            kept[name] = reason
    converted = [p for p in chosen if not isinstance(p, Float8Weight)]
    if not chosen:
        why = next((f"; {name}: {reason}" for name, reason in kept.items()), "")
        raise ValueError(f"model must have a linear layer with a float8 plan and its own weight, got none{why}")
    for p in converted:
        become(p, Float8Weight.of(p))
    return kept


def to_plain_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Make a model's `Float8Weight` parameters plain ones in place: their twelve significant bits, in a dtype."""
    for p in model.parameters():
        if isinstance(p, Float8Weight):
            become(p, from_words(p.codes, p.low, p.scale).to(dtype))


def weight_formats(plan: LinearPlan) -> tuple[str, ...]:
    """The formats in which a plan multiplies weights in eight bits."""
    operands = (one for name in MULTIPLIES for one in plan.operands(name) or () if one.quantity == "weight")
    return tuple(dict.fromkeys(one.format for one in operands))


def _weights(model: nn.Module) -> Iterator[tuple[str, LowPrecisionLinear | LowPrecisionConv1D, Tensor]]:
    """(name, layer, weight) of the planned layers whose weight is a parameter of theirs."""
    for place, layer in model.named_modules():
        if isinstance(layer, LowPrecisionLinear | LowPrecisionConv1D):
            p = layer._parameters.get(layer.WEIGHT)
            if p is not None:
                yield clean_name(f"{place}.{layer.WEIGHT}" if place else layer.WEIGHT), layer, p


def _has(module: nn.Module, p: Tensor) -> bool:
    return any(p is one for one in module.parameters(recurse=False))


def _reason(p: Tensor, plan: LinearPlan, others: list[nn.Module]) -> str | None:
    """Why a layer's weight cannot be a `Float8Weight`; None if it can."""
    formats = weight_formats(plan)
    if formats != ("e4m3",):
        return f"its plan multiplies it in {' and '.join(formats) or 'high precision'}, not in e4m3"
    if hasattr(p, "to_local"):
        return "it is sharded"
    if others:
        return f"another module has it too, of class {type(others[0]).__name__}"
    return None
