"""Swapping the linear layers of a model in place for layers with a plan.

A swapped layer stays the same object with the same parameters; only its class changes. So everything that refers to
it keeps working: optimizers, tied weights, modules that occur twice, hooks. Undoing restores the class.

All decisions are made before the first layer is swapped, so that an error, or an interrupted measurement, leaves
the model as it was.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from torch import nn

from narrowgauge._arguments import Flag, Size, check, check_instance
from narrowgauge.linear._candidates import READ_BY_ATTENTION, Candidate, candidates, matches
from narrowgauge.linear._module import PlannedModule, remove_plan
from narrowgauge.linear._plan import LinearPlan
from narrowgauge.linear._tune import LayerKind, speedups

_KEEP = ("lm_head",)


class _Swapped(NamedTuple):
    """A layer, its former class and its new class."""

    name: str
    layer: PlannedModule
    was: type[nn.Module]
    became: type[PlannedModule]


@dataclass
class SwapReport:
    """The result of `swap_linears`.

    Attributes:
        plan: the plan of the swapped layers.
        swapped: their names.
        kept: why each other linear layer was kept, by name.
        speedups: measured speeds of layers as multiples of nn.Linear's, by name; empty without `tokens`.
    """

    plan: LinearPlan
    swapped: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    speedups: dict[str, float] = field(default_factory=dict)
    _undo: list[_Swapped] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Restore the layers' classes; their parameters stay as trained.

        Raises:
            RuntimeError: if a layer's class has changed since, by a parametrization or `fully_shard`; then nothing
                is undone.
        """
        for one in self._undo:
            if type(one.layer) is not one.became:
                raise RuntimeError(
                    f"{one.name!r} must be a {one.became.__name__} to be undone, got a {type(one.layer).__name__}: "
                    "remove first what was applied after swapping"
                )
        for one in self._undo:
            remove_plan(one.layer)
            one.layer.__class__ = one.was  # type: ignore[assignment]
        self._undo.clear()

    def __str__(self) -> str:
        paths = sorted({one.layer.path for one in self._undo})
        where = f" ({'; '.join(paths)})" if paths else ""
        lines = [str(self.plan), f"swapped: {len(self.swapped)}{where}"]
        width = max(map(len, self.swapped), default=0)
        for name in self.swapped:
            speed = f"{_times(self.speedups[name])} nn.Linear" if name in self.speedups else ""
            lines.append(f"  {name.ljust(width)}  {speed}".rstrip())
        width = max(map(len, self.kept), default=0)
        lines.append(f"kept: {len(self.kept)}")
        lines.extend(f"  {name.ljust(width)}  {reason}" for name, reason in self.kept.items())
        return "\n".join(lines)


def swap_linears(
    model: nn.Module,
    plan: LinearPlan,
    keep: Iterable[str] = _KEEP,
    min_features: int = 16,
    *,
    tokens: int | Mapping[str, int] | None = None,
    launched: bool = True,
) -> SwapReport:
    """Let the linear layers of a model compute by a plan, in place.

    Layers are `nn.Linear` and transformers' `Conv1D`, and the projections of `nn.MultiheadAttention`, which becomes
    a `LowPrecisionMultiheadAttention`. Parameters, their names and shapes stay, so checkpoints load both ways.

    With `tokens`, layers that are slower than nn.Linear are kept, by the table of `narrowgauge.linear._tune` in the
    user's cache folder (``speedups.json``). A kind of layer that is missing there is measured, forward and backward
    on its device, which takes a moment and the memory of one such layer. It is measured eagerly, under the current
    autocast: call this where the training would call the model. In a process group all ranks must call it, and use
    the same figures. Without `tokens` nothing is measured.

    Args:
        model: the model, or a part of it.
        plan: a `LinearPlan`.
        keep: layers to keep: a name, the last part of one, the name of a module around them, or a pattern with
            ``*``. A name that fits no module raises a warning, except for the default.
        min_features: layers with fewer input or output features are kept.
        tokens: rows of the layers' input in a training step, batch times sequence; or rows by name, as in `keep`,
            the first that fits: ``{"visual": 65536, "text": 19712}``. A layer that fits no name is kept.
        launched: whether measured layers are launched one by one from Python, as in eager training, where that can
            take longer than the GPU's work. False if the model is compiled or replayed from a CUDA graph: then the
            GPU's time alone counts. On a CPU both are the same.

    Returns:
        The swapped layers, the kept ones and why; `undo()` restores all.

    Raises:
        ValueError: for a `model` that is no module, a `plan` that is no `LinearPlan`, a `keep` that is one string
            or contains other than strings, `tokens` or `min_features` that are not integers of at least 1, a model
            on the meta device with `tokens`, and for `launched=False` without `tokens`.
    """
    check_instance("plan", plan, LinearPlan, "narrowgauge.linear.SWITCHBACK")
    check_instance("model", model, nn.Module)
    patterns = () if isinstance(keep, str) else tuple(keep)
    if isinstance(keep, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"keep must be a list of names such as ('lm_head',), got {keep!r}")
    check("min_features", min_features, Size)
    if not check("launched", launched, Flag) and tokens is None:
        raise ValueError("launched must be True without tokens, got False: no layer is measured")
    rows = _rows_by_name(tokens)
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    given = (*(patterns if keep is not _KEEP else ()), *rows)
    unknown = [pattern for pattern in given if not any(matches(name, pattern) for name in names)]
    if unknown:
        listed = ", ".join(map(repr, unknown))
        warnings.warn(
            f"swap_linears: no module of the model is called {listed}; "
            "give a name, its last part, or a pattern with *",
            stacklevel=2,
        )
    report = SwapReport(plan)
    found = list(candidates(model, patterns, min_features))
    slow = {} if tokens is None else _slow(found, rows, plan, report, launched)
    for one in found:
        reason = one.reason or slow.get(one.name)
        if reason is None and one.holder is not None and not isinstance(one.holder, PlannedModule):
            reason = READ_BY_ATTENTION
        if reason is not None:
            report.kept[one.name] = reason
            continue
        report.swapped.append(one.name)
        kind, swapped = type(one.module), cast(Any, one.module)
        swapped.__class__ = one.becomes
        swapped.set_plan(plan)
        report._undo.append(_Swapped(one.name, swapped, kind, one.becomes))
    return report


def _slow(
    found: list[Candidate], rows: dict[str, int], plan: LinearPlan, report: SwapReport, launched: bool
) -> dict[str, str]:
    """Why layers are kept for their speed, by name; adds the speeds to the report."""
    slow: dict[str, str] = {}
    kinds: dict[str, LayerKind] = {}
    for one in found:
        if one.reason is not None:
            continue
        if one.weight.is_meta:
            raise ValueError(
                f"tokens must be None for a model on the meta device, got {next(iter(rows.values()))} and "
                f"{one.name!r} there: measuring needs the device of the training"
            )
        b = next((b for pattern, b in rows.items() if matches(one.name, pattern)), None)
        if b is None:
            slow[one.name] = "not measured: tokens has no name that fits"
        else:
            kinds[one.name] = LayerKind.of(one.weight, one.bias, b, plan, one.turned, launched)
    fast = speedups(kinds.values())
    for name, kind in kinds.items():
        if kind not in fast:
            slow[name] = f"not measured: out of memory at {kind.tokens} tokens"
            continue
        report.speedups[name] = fast[kind]
        if fast[kind] < 1:
            slow[name] = f"measured {_times(fast[kind])} nn.Linear at {kind.tokens} tokens"
    return slow


def _rows_by_name(tokens: int | Mapping[str, int] | None) -> dict[str, int]:
    rows = {} if tokens is None else dict(tokens) if isinstance(tokens, Mapping) else {"*": tokens}
    bad = [b for name, b in rows.items() if not (isinstance(name, str) and Size.accepts(b))]
    if bad or (tokens is not None and not rows):
        raise ValueError(f"tokens must be an integer of at least 1, or such integers by name, got {tokens!r}")
    return rows


def _times(speedup: float) -> str:
    # Rounded down, so that a slower layer never reads as 1.00.
    return f"{math.floor(speedup * 100) / 100:.2f}x"
