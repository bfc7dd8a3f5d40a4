"""Swapping the linear layers of a model in place for layers with a plan.

A swapped layer stays the same object with the same parameters; only its class changes. So everything that refers to
it keeps working: optimizers, tied weights, modules that occur twice, hooks. Undoing restores the class. For a
subclass of `nn.Linear` with the same forward pass the new class derives from it too: the layer stays an instance.

All decisions are made before the first layer is swapped, so that an error, or an interrupted measurement, leaves
the model as it was.
"""

from __future__ import annotations

import fnmatch
import math
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from narrowgauge._arguments import Flag, Size, check
from narrowgauge._module_names import clean_name
from narrowgauge._text import warn
from narrowgauge.linear._attention import LowPrecisionMultiheadAttention
from narrowgauge.linear._module import (
    COMPUTED,
    LowPrecisionConv1D,
    LowPrecisionLinear,
    PlannedModule,
    is_computed,
    planned_class,
)
from narrowgauge.linear._plan import LinearPlan, as_plan
from narrowgauge.linear._tune import LayerKind, speedups

KEEP = ("lm_head",)
ADAPTERS = "*.lora_*"  # small, and what is trained
_DEFAULT = (*KEEP, ADAPTERS)
_LEAST = 16  # features
# In transformers models. They stay in high precision: their noise would be the loss's.
_HEADS = ("lm_head", "cls", "visual_projection", "text_projection", "classifier")
_NAMED, _MEASURED = "named in keep", "measured"
READ_BY_ATTENTION = "nn.MultiheadAttention reads its weight, not its output"
_OWN = {"plan", *vars(PlannedModule)} - set(dir(nn.Module))  # names that a plan adds to a layer
_READ_WITH_BIASES = "its attention reads its weight, not its output (qkv_bias_separate=True would call it)"


def output_heads(model: nn.Module) -> list[str]:
    """The names of a transformers model's output layers, for `swap_linears` to keep."""
    return [name for name, _ in model.named_children() if name in _HEADS]


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
            RuntimeError: if a layer's class has changed since, by a parametrization, `hold_activations` or
                `fully_shard`; then nothing is undone.
        """
        for one in self._undo:
            if is_held(one.layer):
                raise RuntimeError(
                    f"{one.name!r} must not hold its activations to be undone: first call undo() of what "
                    "hold_activations returned"
                )
            if type(one.layer) is not one.became:
                raise RuntimeError(
                    f"{one.name!r} must be a {one.became.__name__} to be undone, got a {type(one.layer).__name__}: "
                    "remove first what was applied after swapping"
                )
        for one in self._undo:
            one.layer.remove_plan()
            one.layer.__class__ = one.was  # type: ignore[assignment]
        self._undo.clear()

    def __str__(self) -> str:
        paths = sorted({one.layer.path for one in self._undo})
        where = f" ({'; '.join(paths)})" if paths else ""
        speeds = {
            name: f"{in_times(self.speedups[name])} nn.Linear" for name in self.swapped if name in self.speedups
        }
        lines = [str(self.plan), f"swapped: {len(self.swapped)}{where}"]
        lines += _columns({name: speeds.get(name, "") for name in self.swapped})
        return "\n".join([*lines, f"kept: {len(self.kept)}", *_columns(self.kept)])


def _columns(rows: Mapping[str, str]) -> list[str]:
    width = max(map(len, rows), default=0)
    return [f"  {name.ljust(width)}  {text}".rstrip() for name, text in rows.items()]


def in_times(speedup: float) -> str:
    """A speed-up: ``1.25x``."""
    # Rounded down, so that a slower layer never reads as 1.00.
    return f"{math.floor(speedup * 100) / 100:.2f}x"


def swap_linears(
    model: nn.Module,
    plan: LinearPlan | str,
    keep: Iterable[str] = _DEFAULT,
    min_features: int = _LEAST,
    *,
    tokens: int | Mapping[str, int] | None = None,
    launched: bool = True,
    subclasses: bool = False,
) -> SwapReport:
    """Let the linear layers of a model compute by a plan, in place.

    Layers are `nn.Linear` and transformers' `Conv1D`, and the projections of `nn.MultiheadAttention`, which becomes
    a `LowPrecisionMultiheadAttention`. Parameters, their names and shapes stay, so checkpoints load both ways. A
    subclass of `nn.Linear` that computes what `nn.Linear` does is swapped too, and stays an instance of its class.

    With `tokens`, layers that are slower than nn.Linear are kept, by the table of `narrowgauge.linear._tune` in the
    user's cache folder (``speedups.json``). A kind of layer that is missing there is measured, forward and backward
    on its device, which takes a moment and the memory of one such layer. It is measured eagerly, under the current
    autocast: call this where the training would call the model. In a process group all ranks must call it, and use
    the same figures. Without `tokens` nothing is measured.

    Args:
        model: the model, or a part of it.
        plan: a `LinearPlan`, or its name and format: ``"SWITCHBACK:e4m3"``.
        keep: layers to keep: a name, the last part of one, the name of a module around them, or a pattern with
            ``*``. What you give replaces the default, the output layer and peft's adapters, so name these too:
            ``keep=("lm_head", "*.lora_*", "k_proj")``. A name that fits no module raises a warning, except for
            those of the default.
        min_features: layers with fewer input or output features are kept.
        tokens: rows of the layers' input in a training step, batch times sequence; or rows by name, as in `keep`,
            the first that fits: ``{"visual": 65536, "text": 19712}``. A layer that fits no name is kept.
        launched: whether measured layers are launched one by one from Python, as in eager training, where that can
            take longer than the GPU's work. False if the model is compiled or replayed from a CUDA graph: then the
            GPU's time alone counts. On a CPU both are the same.
        subclasses: True to swap every subclass of `nn.Linear`, whatever its `forward` does: you know that it
            computes no more than `nn.Linear`. A layer with a `forward` of its own, not of its class, stays.

    Returns:
        The swapped layers, the kept ones and why; `undo()` restores all. A UserWarning says if no layer has a plan
        then, unless `keep` names all or all measured slower.

    Raises:
        ValueError: for a `plan` that is no `LinearPlan` and not the name of one, a `keep` that is one string,
            `tokens` that are not integers of at least 1, a model on the meta device with `tokens`, and
            `launched=False` without `tokens`.
    """
    plan = as_plan(plan)
    if isinstance(keep, str):
        raise ValueError(f"keep must be a list of names such as ('lm_head',), got {keep!r}")
    if not check("launched", launched, Flag) and tokens is None:
        raise ValueError("launched must be True without tokens, got False: no layer is measured")
    check("subclasses", subclasses, Flag)
    rows, patterns = _rows_by_name(tokens), tuple(keep)
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    given = (*(pattern for pattern in patterns if pattern not in _DEFAULT), *rows)
    unknown = [pattern for pattern in given if not any(matches(name, pattern) for name in names)]
    if unknown:
        warn(
            f"swap_linears: no module of the model is called {', '.join(map(repr, unknown))}; "
            "give a name, its last part, or a pattern with *"
        )
    report = SwapReport(plan)
    found = list(candidates(model, patterns, min_features, subclasses))
    slow = {} if tokens is None else _slow(found, rows, plan, report, launched)
    for one in found:
        reason = one.reason or slow.get(one.name)
        if reason is None and one.holder is not None and not isinstance(one.holder, PlannedModule):
            reason = READ_BY_ATTENTION
        if reason is not None:
            report.kept[one.name] = reason
            continue
        report.swapped.append(one.name)
        report._undo.append(_Swapped(one.name, one.module, type(one.module), one.becomes))
        one.module.__class__ = one.becomes
        one.module.set_plan(plan)
    has_plan = any(isinstance(one.module, PlannedModule) for one in found)
    others = [f"{name!r}: {why}" for name, why in report.kept.items() if not why.startswith((_NAMED, _MEASURED))]
    if not has_plan and (others or not found):
        first = others[0] if others else "it has none"
        warn(f"swap_linears: no linear layer of the model was swapped; {first}")
    report.kept |= _experts(model)
    return report


def swap_named(model: nn.Module, plans: Iterable[tuple[Iterable[str], LinearPlan]]) -> None:
    """Let named linear layers of a model compute by their plans, in place.

    A layer that has its plan already, and one whose plan has no multiply in eight bits, stays as it is.

    Args:
        model: the model.
        plans: names, or patterns with ``*``, and their plan. Of several that fit a layer the first counts.

    Raises:
        ValueError: for a name that fits no layer that multiplies by a weight, for a layer that has another plan,
            and for one that `swap_linears` would keep, with its reason; no layer is changed then.
    """
    found = list(candidates(model, (), _LEAST, False))
    chosen: dict[str, LinearPlan] = {}
    for patterns, plan in plans:
        for pattern in patterns:
            fits = [one.name for one in found if fnmatch.fnmatchcase(clean_name(one.name), pattern)]
            if not fits:
                raise ValueError(f"layers must name linear layers of the model, got {pattern!r}, which fits none")
            chosen = dict.fromkeys(fits, plan) | chosen
    swaps: dict[nn.Module, tuple[type[PlannedModule], LinearPlan]] = {}
    for one in found:
        wanted = chosen.get(one.name)
        is_planned = isinstance(one.module, PlannedModule)
        if wanted is None or (one.module.plan == wanted if is_planned else not wanted.formats):
            continue
        reason = one.reason
        is_called = one.holder is None or one.holder in swaps or isinstance(one.holder, PlannedModule)
        if reason is None and not is_called:
            reason = READ_BY_ATTENTION
        if reason is not None:
            raise ValueError(f"layers must name layers that can have a plan, got {one.name!r}: {reason}")
        swaps[one.module] = one.becomes, wanted
    for layer, (becomes, plan) in swaps.items():
        layer.__class__ = becomes
        cast(PlannedModule, layer).set_plan(plan)


def _rows_by_name(tokens: int | Mapping[str, int] | None) -> dict[str, int]:
    rows = {} if tokens is None else dict(tokens) if isinstance(tokens, Mapping) else {"*": tokens}
    if not all(map(Size.accepts, rows.values())) or (tokens is not None and not rows):
        raise ValueError(f"tokens must be an integer of at least 1, or such integers by name, got {tokens!r}")
    return rows


# Which modules of a model can be swapped, and why the others are kept


@dataclass(frozen=True, eq=False)
class Candidate:
    """A module that multiplies by a weight."""

    name: str
    module: Any
    becomes: type[PlannedModule]  # its class after swapping
    holder: nn.MultiheadAttention | None  # whose `out_proj` it is; without a plan that does not call it
    reason: str | None  # why it is kept; None if it can be swapped

    @property
    def weight(self) -> Tensor:
        """The parameter that it multiplies by."""
        weight: Tensor = self.module.get_parameter(self.becomes.WEIGHT)
        return weight

    @property
    def transposed(self) -> bool:
        """Whether the weight is (in_features, out_features)."""
        return self.becomes is LowPrecisionConv1D

    def kind(self, tokens: int, plan: LinearPlan, launched: bool = True) -> LayerKind:
        """What its speed depends on, under the autocast that is on."""
        bias = getattr(self.module, self.becomes.WEIGHT.replace("weight", "bias"))
        return LayerKind.of(self.weight, bias, tokens, plan, self.transposed, launched)


def candidates(
    model: nn.Module, keep: tuple[str, ...] = KEEP, min_features: int = 16, subclasses: bool = False
) -> Iterator[Candidate]:
    """All modules of a model that multiply by a weight; an attention comes before its layers."""
    names: dict[nn.Module, list[str]] = {}  # a module that occurs twice has two
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    modules = dict(model.named_modules())
    for name, module in modules.items():
        becomes = _becomes(module)
        if becomes is None:
            continue
        parent = modules.get(name.rpartition(".")[0]) if name else None
        holder = parent if isinstance(parent, nn.MultiheadAttention) else None
        reason = _why_kept(names[module], module, becomes, holder, keep, min_features, subclasses)
        if reason is None and _only_read(name, parent):
            reason = _READ_WITH_BIASES
        if reason is None and becomes is LowPrecisionLinear and holder is None:
            try:
                becomes = planned_class(cast(Hashable, type(module)))
            except TypeError as error:
                reason = f"is a {type(module).__name__}, from which no class can be derived: {error}"
        yield Candidate(name, module, becomes, holder, reason)


def former_class(layer: PlannedModule) -> type[nn.Module] | None:
    """The class that a layer with a plan would have without one; None if its forward pass is another than ours.

    A parametrized layer stays parametrized.
    """
    kind: Any = type(layer)
    ours: tuple[Any, ...] = LowPrecisionLinear, LowPrecisionMultiheadAttention, LowPrecisionConv1D
    sharded = any(base.__name__ == "FSDPModule" for base in kind.__mro__)
    if sharded or kind.forward not in [one.forward for one in ours]:
        return None
    former: Any = next(base for base in kind.__mro__ if not issubclass(base, PlannedModule))
    if isinstance(layer, LowPrecisionConv1D):
        former = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    if former is None or not nn.utils.parametrize.is_parametrized(layer):
        return cast(type[nn.Module] | None, former)
    own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(f"Parametrized{former.__name__}", (former,), own)


def restore(layer: PlannedModule) -> bool:
    """Make a layer with a plan what it was; False, and nothing done, if its forward pass is another than ours."""
    former = former_class(layer)
    if former is not None:
        layer.remove_plan()
        layer.__class__ = former  # type: ignore[assignment]
    return former is not None


def _experts(model: nn.Module) -> dict[str, str]:
    """The weights that a mixture of experts, as transformers has them, multiplies by without layers."""
    return {
        f"{name}.{weight}".removeprefix("."): f"is a parameter of a {type(module).__name__}, without a layer"
        for name, module in model.named_modules()
        if "expert" in type(module).__name__.lower()
        for weight, p in module.named_parameters(recurse=False)
        if p.dim() == 3
    }


def is_held(module: nn.Module) -> bool:
    """Whether `hold_activations` changed a module's class, and nothing since."""
    return "_was" in vars(type(module))


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern with ``*`` is a module's name, its last part, or the name of a module around it."""
    return (
        fnmatch.fnmatchcase(name, pattern)
        or name.startswith(f"{pattern}.")
        or name.endswith(f".{pattern}")
        or f".{pattern}." in name
    )


def _becomes(module: nn.Module) -> type[PlannedModule] | None:
    kind = type(module)
    if isinstance(module, PlannedModule):
        return type(module)
    # By name: transformers may not be installed.
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
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
    min_features: int, subclasses: bool,
) -> str | None:  # fmt: skip
    if isinstance(module, PlannedModule):
        return f"has a plan already: {module.plan.title}"
    for pattern in keep:
        if any(matches(name, pattern) for name in names):
            return f"{_NAMED}: {pattern!r}"
    if is_held(module):
        return "its activations are held: undo that, swap, and hold them again"
    if is_computed(module, becomes.WEIGHT):
        return COMPUTED
    weight = module._parameters.get(becomes.WEIGHT)
    if weight is not None and is_lazy(weight):
        return "has no weight yet: run the model once before"
    name = type(module).__name__
    if becomes is LowPrecisionMultiheadAttention and type(module) is not nn.MultiheadAttention:
        return f"is a {name}, which multiplies by in_proj_weight without a layer"
    if holder is not None and type(module) is not NonDynamicallyQuantizableLinear:
        return f"is a {name}"
    if becomes is LowPrecisionLinear and (own := _own_ways(type(module), subclasses)) is not None:
        return f"is a {name}, {own}"
    if "forward" in vars(module):
        return "has a forward of its own"
    if taken := sorted(_OWN.intersection(dir(module))):
        return f"has an attribute {taken[0]!r} of its own, which a layer with a plan has too"
    if becomes is LowPrecisionMultiheadAttention:
        if not module._qkv_same_embed_dim:
            return "has projections of different sizes (kdim, vdim)"
        if module.bias_k is not None or module.add_zero_attn:
            return "attends to keys that it adds (add_bias_kv, add_zero_attn)"
    if weight is None:
        return "has no weight"
    if not weight.is_floating_point():
        return "its weight is not of floats"
    smallest = min(weight.shape)
    return f"{smallest} features, fewer than {min_features}" if smallest < min_features else None


def _own_ways(kind: type[nn.Module], subclasses: bool) -> str | None:
    """What a subclass of `nn.Linear` does otherwise than `nn.Linear` when it is called; None for nothing."""
    # By name: FSDP2 is imported by those who use it.
    if any(base.__name__ == "FSDPModule" for base in kind.__mro__):
        return "wrapped by fully_shard already: swap before"
    for name in ("__torch_function__", "__getattribute__", "__getattr__", "__call__", "_call_impl"):
        if getattr(kind, name, None) is not getattr(nn.Linear, name, None):
            return f"whose class has a {name} of its own"
    if kind.forward is not nn.Linear.forward and not subclasses:
        return "whose class has a forward of its own (subclasses=True swaps it)"
    return None


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
            kinds[one.name] = one.kind(b, plan, launched)
    fast = speedups(kinds.values())
    for name, kind in kinds.items():
        if kind not in fast:
            slow[name] = f"not measured: out of memory at {kind.tokens} tokens"
            continue
        report.speedups[name] = fast[kind]
        if fast[kind] < 1:
            slow[name] = f"{_MEASURED} {in_times(fast[kind])} nn.Linear at {kind.tokens} tokens"
    return slow
