"""Linear layers of a model, swapped in place for those with a plan.

A layer that is swapped stays the same object with the same parameters and becomes of another class. So
everything that holds on to it goes on working: optimizers, tied weights, modules that stand in two places,
hooks. Undoing gives the class back.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from narrowgauge.linear._module import LowPrecisionConv1D, LowPrecisionLinear, forget_plan, planned
from narrowgauge.linear._plan import LinearPlan


@dataclass
class SwapReport:
    """What `swap_linears` did.

    Attributes:
        plan: the plan of the swapped layers.
        swapped: their names.
        kept: why each other linear layer stayed as it was, by name.
    """

    plan: LinearPlan
    swapped: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    _undo: list[tuple[LowPrecisionLinear | LowPrecisionConv1D, type[nn.Module]]] = field(
        default_factory=list, repr=False
    )

    def undo(self) -> None:
        """Make the layers again what they were; their parameters stay as they have been trained."""
        for layer, kind in self._undo:
            forget_plan(layer)
            layer.__class__ = kind  # type: ignore[assignment]
        self._undo.clear()

    def __str__(self) -> str:
        paths = sorted({module.path for module, _ in self._undo})
        where = f" ({'; '.join(paths)})" if paths else ""
        lines = [str(self.plan), f"swapped: {len(self.swapped)}{where}", *(f"  {name}" for name in self.swapped)]
        width = max(map(len, self.kept), default=0)
        lines.append(f"kept: {len(self.kept)}")
        lines.extend(f"  {name.ljust(width)}  {reason}" for name, reason in self.kept.items())
        return "\n".join(lines)


def swap_linears(
    model: nn.Module, plan: LinearPlan, keep: Iterable[str] = ("lm_head",), min_features: int = 16
) -> SwapReport:
    """Let the linear layers of a model compute by a plan, in place.

    Layers are `nn.Linear` and transformers' `Conv1D`. Parameters, their names and shapes stay, so checkpoints
    go both ways.

    Args:
        model: the model, or a part of it.
        plan: a `LinearPlan`.
        keep: layers to leave: a name, the last part of one, the name of a module around them, or a pattern with
            ``*``.
        min_features: layers with fewer input or output features are left.

    Returns:
        What was swapped, what was kept and why; `undo()` takes it back.

    Raises:
        ValueError: for what is no plan, a `keep` that is one string, or a `min_features` below 1.
    """
    if not isinstance(plan, LinearPlan):
        raise ValueError(f"plan: got {plan!r}, takes a LinearPlan such as narrowgauge.linear.SWITCHBACK")
    if isinstance(keep, str):
        raise ValueError(f"keep: got {keep!r}, takes a list of names such as ({keep!r},)")
    if isinstance(min_features, bool) or not isinstance(min_features, int) or min_features < 1:
        raise ValueError(f"min_features: got {min_features!r}, takes an integer of at least 1")
    report, patterns = SwapReport(plan), tuple(keep)
    # named_modules names a module that stands in two places once, by the first.
    parents = {f"{name}.": module for name, module in model.named_modules()}
    for name, module in model.named_modules():
        if not (isinstance(module, nn.Linear) or _is_conv1d(module) or planned(module)):
            continue
        parent = parents.get(name.rpartition(".")[0] + ".")
        reason = _why_kept(name, module, parent, patterns, min_features)
        if reason is not None:
            report.kept[name] = reason
            continue
        report.swapped.append(name)
        kind, swapped = type(module), cast(Any, module)
        swapped.__class__ = LowPrecisionConv1D if _is_conv1d(module) else LowPrecisionLinear
        swapped.set_plan(plan)
        report._undo.append((swapped, kind))
    return report


def _why_kept(
    name: str, module: nn.Module, parent: nn.Module | None, patterns: tuple[str, ...], min_features: int
) -> str | None:
    if planned(module):
        return f"has a plan already: {module.plan.title}"  # type: ignore[union-attr]
    for pattern in patterns:
        if _matches(name, pattern):
            return f"named in keep: {pattern!r}"
    checks: tuple[tuple[Callable[[], bool], str], ...] = (
        (lambda: nn.utils.parametrize.is_parametrized(module), "is parametrized: its weight is computed anew"),
        (
            lambda: isinstance(parent, nn.MultiheadAttention),
            "nn.MultiheadAttention reads its weight, not its output",
        ),
        (lambda: type(module) is not nn.Linear and not _is_conv1d(module), f"is a {type(module).__name__}"),
        (lambda: "forward" in vars(module), "has a forward of its own"),
        (lambda: not module.get_parameter("weight").is_floating_point(), "its weight is not of floats"),
    )
    for applies, reason in checks:
        if applies():
            return reason
    smallest = min(module.get_parameter("weight").shape)
    return f"{smallest} features, fewer than {min_features}" if smallest < min_features else None


def _matches(name: str, pattern: str) -> bool:
    return (
        fnmatch.fnmatchcase(name, pattern)
        or name.startswith(f"{pattern}.")
        or name.endswith(f".{pattern}")
        or f".{pattern}." in name
    )


def _is_conv1d(module: nn.Module) -> bool:
    # Known by where it comes from, so that transformers need not be there.
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
