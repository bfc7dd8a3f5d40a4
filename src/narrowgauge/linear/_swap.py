"""Linear layers of a model, swapped in place for those with a plan.

A layer that is swapped stays the same object with the same parameters and becomes of another class. So
everything that holds on to it goes on working: optimizers, tied weights, modules that stand in two places,
hooks. Undoing gives the class back.

Which layers are swapped is decided for the whole model before the first one is, so that an error, or a measurement
that is cut short, leaves the model as it was.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from torch import nn

from narrowgauge._arguments import typed
from narrowgauge.linear._by_step import shown, time_step
from narrowgauge.linear._candidates import READ_BY_ATTENTION, Candidate, candidates, matches
from narrowgauge.linear._module import Planned, forget_plan
from narrowgauge.linear._plan import LinearPlan
from narrowgauge.linear._speeds import LayerKind, of_all_ranks, speedups

_KEEP = ("lm_head",)
# Called, they do nothing yet.
_LAZY = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


class _Swapped(NamedTuple):
    """A layer, what it was, and what it became."""

    name: str
    layer: Planned
    was: type[nn.Module]
    became: type[Planned]


@dataclass
class SwapReport:
    """What `swap_linears` did.

    Attributes:
        plan: the plan of the swapped layers.
        swapped: their names.
        kept: why each other linear layer stayed as it was, by name.
        speedups: how many times as fast as nn.Linear layers were measured, by name; empty where nothing was asked.
        step_seconds: of the training step that was given, with the layers swapped and without; None where none was,
            or no layer was left to be swapped.
    """

    plan: LinearPlan
    swapped: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    speedups: dict[str, float] = field(default_factory=dict)
    step_seconds: tuple[float, float] | None = None
    _undo: list[_Swapped] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Make the layers again what they were; their parameters stay as they have been trained.

        Raises:
            RuntimeError: where a layer's class has been changed since, by a parametrization or `fully_shard`; then
                nothing is undone. What they put into the class would be lost.
        """
        for one in self._undo:
            if type(one.layer) is not one.became:
                raise RuntimeError(
                    f"undo: got {one.name!r}, which has become a {type(one.layer).__name__} since, "
                    f"takes a {one.became.__name__}: take off first what was put on after swapping"
                )
        self._turn(False)
        self._undo.clear()

    def _turn(self, on: bool) -> None:
        """Have the layers compute by the plan, or as they did; they may do so already.

        One whose class has been changed otherwise keeps that, and what was put into it.
        """
        for one in self._undo:
            if on and type(one.layer) in (one.was, one.became):
                one.layer.__class__ = one.became
                one.layer.set_plan(self.plan)
            elif not on and type(one.layer) is one.became:
                forget_plan(one.layer)
                one.layer.__class__ = one.was  # type: ignore[assignment]

    def _turn_all(self, on: bool) -> None:
        """As `_turn`.

        Raises:
            RuntimeError: where a layer's class has been changed otherwise; then none is turned.
        """
        for one in self._undo:
            kind = type(one.layer)
            if kind not in (one.was, one.became):
                raise RuntimeError(
                    f"step: got one that makes {one.name!r} a {kind.__name__}, takes one that leaves the classes "
                    "of layers: apply parametrizations and fully_shard before"
                )
        self._turn(on)

    def __str__(self) -> str:
        paths = sorted({one.layer.path for one in self._undo})
        where = f" ({'; '.join(paths)})" if paths else ""
        lines = [str(self.plan)]
        if self.step_seconds is not None:
            lines.append(f"step: {shown(self.step_seconds)}")
        lines.append(f"swapped: {len(self.swapped)}{where}")
        width = max(map(len, self.swapped), default=0)
        for name in self.swapped:
            told = f"{_times(self.speedups[name])} nn.Linear" if name in self.speedups else ""
            lines.append(f"  {name.ljust(width)}  {told}".rstrip())
        width = max(map(len, self.kept), default=0)
        lines.append(f"kept: {len(self.kept)}")
        lines.extend(f"  {name.ljust(width)}  {reason}" for name, reason in self.kept.items())
        return "\n".join(lines)


@typed
def swap_linears(
    model: nn.Module,
    plan: LinearPlan,
    keep: Iterable[str] = _KEEP,
    min_features: int = 16,
    *,
    tokens: int | Mapping[str, int] | None = None,
    launched: bool = True,
    step: Callable[[], Any] | None = None,
) -> SwapReport:
    """Let the linear layers of a model compute by a plan, in place.

    Layers are `nn.Linear` and transformers' `Conv1D`, and the projections of `nn.MultiheadAttention`, which becomes
    a `LowPrecisionMultiheadAttention`. Parameters, their names and shapes stay, so checkpoints go both ways.

    With `tokens`, each kind of layer is measured beside nn.Linear, forward and backward on the device where it is,
    and layers that are slower are kept. A measurement takes a moment and the memory of one such layer, and is kept
    in the user's cache folder (``speedups.json``) for all later processes. It is made eagerly, under the autocast
    that is on: call this where the training would call the model. In a process group all ranks have to call it, and
    act on the same figures. Without `tokens` nothing is measured.

    With `step`, the training step itself has the last word: it is timed with the layers that are to be swapped and
    without, in turns, and unless it is faster with them in nearly all rounds, all of them stay as they are. That
    is 48 steps, the same number on all ranks of a process group, which have to make the call and decide alike, by
    the slowest. The step does all that it does: it moves weights and states, draws random numbers and takes batches
    if it is written so, and nothing of that is taken back. So give one that clears gradients and moves no weights
    (the optimizer with a learning rate of 0, or without it), or load a checkpoint after.

    Args:
        model: the model, or a part of it.
        plan: a `LinearPlan`.
        keep: layers to leave: a name, the last part of one, the name of a module around them, or a pattern with
            ``*``. A name that the model has not is warned of, but for the default.
        min_features: layers with fewer input or output features are left.
        tokens: rows that the layers get in a training step, batch times sequence; or rows by name, as in `keep`,
            the first that fits: ``{"visual": 65536, "text": 19712}``. A layer that none fits is kept.
        launched: whether measured layers are launched one by one from Python, as in eager training, where that can
            take longer than the GPU's work. False where the model is compiled or replayed from a CUDA graph, and
            the GPU's time alone counts. On a CPU both are the same. A `step` is timed as it runs, with either.
        step: takes one training step as the training will, forward and backward pass at least. What it compiles it
            compiles for both sides, and versions of both count against ``torch._dynamo.config.recompile_limit``
            from then on. Leave it out where steps are replayed from a CUDA graph: what has been captured before
            does not change with the layers, and what a step takes from Python says nothing of it.

    Returns:
        What was swapped, what was kept and why; `undo()` takes it back.

    Raises:
        ValueError: for what is no model or no plan, a `keep` that is one string or has what is no name, a
            `min_features` below 1, `tokens` that are no integers of at least 1, a model on the meta device with
            `tokens`, a `launched` that is no bool, or False without `tokens`, or a `step` that cannot be called.
        RuntimeError: for a `step` that changes the class of a layer, as a parametrization and `fully_shard` do.
        Exception: what `step` raises; then no layer is swapped.
    """
    if not isinstance(plan, LinearPlan):
        raise ValueError(f"plan: got {plan!r}, takes a LinearPlan such as narrowgauge.linear.SWITCHBACK")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: got {type(model).__name__}, takes a torch.nn.Module")
    if isinstance(keep, str):
        raise ValueError(f"keep: got {keep!r}, takes a list of names such as ({keep!r},)")
    if not _is_count(min_features):
        raise ValueError(f"min_features: got {min_features!r}, takes an integer of at least 1")
    if not (step is None or callable(step)) or isinstance(step, nn.Module):
        raise ValueError(f"step: got {type(step).__name__}, takes a function without arguments, one training step")
    if any(is_one(step) for is_one in _LAZY):
        raise ValueError("step: got a generator or coroutine function, which takes no step when it is called")
    if not isinstance(launched, bool):
        raise ValueError(f"launched: got {launched!r}, takes True or False")
    if tokens is None and not launched:
        raise ValueError("launched: got False without tokens, takes it with them: else no layer is measured")
    rows = _rows_by_name(tokens)
    patterns = tuple(keep) if isinstance(keep, Iterable) else (keep,)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"keep: got {keep!r}, takes a list of names such as ('lm_head',)")
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    unknown = [
        p for p in (*(patterns if keep is not _KEEP else ()), *rows) if not any(matches(n, p) for n in names)
    ]
    if unknown:
        listed = ", ".join(map(repr, unknown))
        warnings.warn(
            f"swap_linears: no module of the model is called {listed}; "
            "give a name, its last part, or a pattern with *",
            stacklevel=3,  # `typed` stands between
        )
    report = SwapReport(plan)
    found = list(candidates(model, patterns, min_features))
    slow = {} if tokens is None else _slow(found, rows, plan, report, launched)
    for one in found:
        reason = one.reason or slow.get(one.name)
        if reason is None and one.holder is not None and not isinstance(one.holder, Planned):
            reason = READ_BY_ATTENTION
        if reason is not None:
            report.kept[one.name] = reason
            continue
        report.swapped.append(one.name)
        kind, swapped = type(one.module), cast(Any, one.module)
        swapped.__class__ = one.becomes
        swapped.set_plan(plan)
        report._undo.append(_Swapped(one.name, swapped, kind, one.becomes))
    if step is not None and any(of_all_ranks(bool(report.swapped))):
        _decide(step, model, report)
    return report


def _decide(step: Callable[[], Any], model: nn.Module, report: SwapReport) -> None:
    """Leave layers swapped if the step is faster with them."""
    try:
        times = time_step(step, report._turn_all, {parameter.device for parameter in model.parameters()})
        report._turn_all(times.faster)  # anew: moving averages begin with the training
    except BaseException:
        report._turn(False)
        raise
    report.step_seconds = times.medians
    if not times.faster:
        report.kept |= dict.fromkeys(report.swapped, f"the step measured {times}")
        report.swapped.clear()
        report._undo.clear()


def _slow(
    found: list[Candidate], rows: dict[str, int], plan: LinearPlan, report: SwapReport, launched: bool
) -> dict[str, str]:
    """Why layers are kept for their speed, by name; the report gets the speeds."""
    slow: dict[str, str] = {}
    kinds: dict[str, LayerKind] = {}
    for one in found:
        if one.reason is not None:
            continue
        if one.weight.is_meta:
            raise ValueError(
                f"tokens: got {next(iter(rows.values()))} for a model whose {one.name!r} is on the meta device, "
                "takes None there: measuring needs the device of the training"
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


def _rows_by_name(tokens: Any) -> dict[str, int]:
    rows = {} if tokens is None else dict(tokens) if isinstance(tokens, Mapping) else {"*": tokens}
    bad = [b for name, b in rows.items() if not (isinstance(name, str) and _is_count(b))]
    if bad or (tokens is not None and not rows):
        raise ValueError(f"tokens: got {tokens!r}, takes an integer of at least 1, or such integers by name")
    return rows


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 1


def _times(speedup: float) -> str:
    # Rounded down, so that what is slower never reads as 1.00.
    return f"{math.floor(speedup * 100) / 100:.2f}x"
