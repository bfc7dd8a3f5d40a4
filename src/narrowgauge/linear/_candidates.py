"""Which modules of a model can be swapped, and why the others are kept."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from narrowgauge.linear._attention import LowPrecisionMultiheadAttention
from narrowgauge.linear._module import LowPrecisionConv1D, LowPrecisionLinear, PlannedModule

READ_BY_ATTENTION = "nn.MultiheadAttention reads its weight, not its output"
READ_WITH_BIASES = "its attention reads its weight, not its output (qkv_bias_separate=True would call it)"


@dataclass(frozen=True, eq=False)
class Candidate:
    """A module that multiplies by a weight.

    Attributes:
        name: in the model.
        module: the module.
        becomes: its class after swapping.
        holder: the `nn.MultiheadAttention` whose `out_proj` it is: without a plan that does not call it.
        reason: why it is kept; None if it can be swapped.
    """

    name: str
    module: nn.Module
    becomes: type[PlannedModule]
    holder: nn.MultiheadAttention | None
    reason: str | None

    @property
    def turned(self) -> bool:
        """Whether its weight is (in_features, out_features)."""
        return self.becomes is LowPrecisionConv1D

    @property
    def weight(self) -> Tensor:
        return self.module.get_parameter(self.becomes.WEIGHT)

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = getattr(self.module, self.becomes.WEIGHT.replace("weight", "bias"))
        return bias


def candidates(model: nn.Module, keep: tuple[str, ...], min_features: int) -> Iterator[Candidate]:
    """All modules of a model that multiply by a weight; an attention comes before its layers.

    Args:
        model: the model.
        keep: names and patterns of layers to keep.
        min_features: layers with fewer input or output features are kept.
    """
    # named_modules gives a module that occurs twice only its first name.
    modules = {f"{name}.": module for name, module in model.named_modules()}
    names = _names(model)
    for name, module in model.named_modules():
        becomes = _becomes(module)
        if becomes is None:
            continue
        parent = modules.get(name.rpartition(".")[0] + ".") if name else None
        holder = parent if isinstance(parent, nn.MultiheadAttention) else None
        reason = _why_kept(names[module], module, becomes, holder, keep, min_features)
        if reason is None and _only_read(name, parent):
            reason = READ_WITH_BIASES
        yield Candidate(name, module, becomes, holder, reason)


def _names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every module of a model with all of its names."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern with ``*`` is a module's name, its last part, or the name of a module around it."""
    return (
        fnmatch.fnmatchcase(name, pattern)
        or name.startswith(f"{pattern}.")
        or name.endswith(f".{pattern}")
        or f".{pattern}." in name
    )


def _becomes(module: nn.Module) -> type[PlannedModule] | None:
    if isinstance(module, PlannedModule):
        return type(module)
    if _is_conv1d(module):
        return LowPrecisionConv1D
    if isinstance(module, nn.Linear):
        return LowPrecisionLinear
    # Attentions like nn.MultiheadAttention, such as open_clip's own.
    packed = isinstance(getattr(module, "in_proj_weight", None), nn.Parameter)
    return LowPrecisionMultiheadAttention if packed or isinstance(module, nn.MultiheadAttention) else None


def _only_read(name: str, parent: nn.Module | None) -> bool:
    """Whether a layer's weight is read without calling it: with the biases of timm's BEiT, EVA, Swin V2."""
    biases = isinstance(getattr(parent, "q_bias", None), nn.Parameter)
    return name.rpartition(".")[2] == "qkv" and biases and not getattr(parent, "qkv_bias_separate", False)


def _why_kept(
    names: list[str], module: Any, becomes: type[PlannedModule], holder: nn.Module | None, keep: tuple[str, ...],
    min_features: int,
) -> str | None:  # fmt: skip
    if isinstance(module, PlannedModule):
        return f"has a plan already: {module.plan.title}"
    for pattern in keep:
        if any(matches(name, pattern) for name in names):
            return f"named in keep: {pattern!r}"
    # With torch's older hooks (weight norm, pruning) the weight is an attribute, not a parameter.
    weight = module._parameters.get(becomes.WEIGHT)
    if nn.utils.parametrize.is_parametrized(module) or (
        weight is None and isinstance(getattr(module, becomes.WEIGHT, None), Tensor)
    ):
        return "is parametrized: its weight is computed anew"
    kinds: dict[type[PlannedModule], Any] = {
        LowPrecisionConv1D: type(module),  # checked by name
        LowPrecisionMultiheadAttention: nn.MultiheadAttention,
        LowPrecisionLinear: nn.Linear if holder is None else NonDynamicallyQuantizableLinear,
    }
    if type(module) is not kinds[becomes]:
        own = "" if isinstance(module, nn.Linear) else ", which multiplies by in_proj_weight without a layer"
        return f"is a {type(module).__name__}{own}"
    if "forward" in vars(module):
        return "has a forward of its own"
    if becomes is LowPrecisionMultiheadAttention:
        if not module._qkv_same_embed_dim:
            return "has projections of different sizes (kdim, vdim)"
        if module.bias_k is not None or module.add_zero_attn:
            return "attends to keys that it adds (add_bias_kv, add_zero_attn)"
    if not weight.is_floating_point():
        return "its weight is not of floats"
    smallest = min(weight.shape)
    return f"{smallest} features, fewer than {min_features}" if smallest < min_features else None


def _is_conv1d(module: nn.Module) -> bool:
    # By name: transformers may not be installed.
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
