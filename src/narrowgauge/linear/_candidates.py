"""Which modules of a model can compute by a plan, and why each other one stays as it is."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from narrowgauge.linear._attention import LowPrecisionMultiheadAttention
from narrowgauge.linear._module import LowPrecisionConv1D, LowPrecisionLinear, Planned

READ_BY_ATTENTION = "nn.MultiheadAttention reads its weight, not its output"
READ_WITH_BIASES = "its attention reads its weight, not its output (qkv_bias_separate=True would call it)"


@dataclass(frozen=True, eq=False)
class Candidate:
    """A module that multiplies by a weight.

    Attributes:
        name: in the model.
        module: itself.
        becomes: the class that computes by a plan what it computes.
        holder: the `nn.MultiheadAttention` whose `out_proj` it is: one without a plan does not call it.
        reason: why it stays as it is, None if nothing speaks against swapping.
    """

    name: str
    module: nn.Module
    becomes: type[Planned]
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
        keep: names and patterns of what is to stay.
        min_features: of its input and its output that a layer must have.
    """
    # named_modules names a module that stands in two places once, by the first.
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
    """Every module of a model with its names: more than one where it stands in more than one place."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern is a module's name, its last part, a name of a module around it, or fits by its ``*``."""
    return (
        fnmatch.fnmatchcase(name, pattern)
        or name.startswith(f"{pattern}.")
        or name.endswith(f".{pattern}")
        or f".{pattern}." in name
    )


def _becomes(module: nn.Module) -> type[Planned] | None:
    if isinstance(module, Planned):
        return type(module)
    if _is_conv1d(module):
        return LowPrecisionConv1D
    if isinstance(module, nn.Linear):
        return LowPrecisionLinear
    # Attentions like nn.MultiheadAttention, open_clip's own among them.
    packed = isinstance(getattr(module, "in_proj_weight", None), nn.Parameter)
    return LowPrecisionMultiheadAttention if packed or isinstance(module, nn.MultiheadAttention) else None


def _only_read(name: str, parent: nn.Module | None) -> bool:
    """Whether a layer's weight is read and it is not called: with the biases of timm's BEiT, EVA and Swin V2."""
    biases = isinstance(getattr(parent, "q_bias", None), nn.Parameter)
    return name.rpartition(".")[2] == "qkv" and biases and not getattr(parent, "qkv_bias_separate", False)


def _why_kept(
    names: list[str], module: Any, becomes: type[Planned], holder: nn.Module | None, keep: tuple[str, ...],
    min_features: int,
) -> str | None:  # fmt: skip
    if isinstance(module, Planned):
        return f"has a plan already: {module.plan.title}"
    for pattern in keep:
        if any(matches(name, pattern) for name in names):
            return f"named in keep: {pattern!r}"
    # With the older hooks of torch (weight norm, pruning) the weight is an attribute that is no parameter.
    weight = module._parameters.get(becomes.WEIGHT)
    if nn.utils.parametrize.is_parametrized(module) or (
        weight is None and isinstance(getattr(module, becomes.WEIGHT, None), Tensor)
    ):
        return "is parametrized: its weight is computed anew"
    kinds: dict[type[Planned], Any] = {
        LowPrecisionConv1D: type(module),  # known by its name
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
    # Known by where it comes from, so that transformers need not be there.
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
