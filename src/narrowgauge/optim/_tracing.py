"""A rule's equation as a graph of operations, for kernels.

Rules are Python on torch tensors, and that is their only form: no rule is written twice, and one that somebody adds
is as fast as ours. The scalars of a rule, the sums of its terms among them, are the numbers of the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from narrowgauge.kernels._algebra import simplified
from narrowgauge.kernels._graph import Equation, Node, Recorder
from narrowgauge.optim._changes import LISTS
from narrowgauge.optim._eager import Fp32Arithmetic
from narrowgauge.optim._plan import ParamPlan
from narrowgauge.rules import Rule, squared_ratio

# The name of the number that multiplies every gradient of a step. No rule knows of it.
FACTOR = "grad_factor"
_BY_SHAPE = "what it does depends on the shape: it has no kernel"


@functools.lru_cache(maxsize=256)
def equation(rule: Rule, slots: tuple[str, ...], numbers: tuple[str, ...]) -> Equation:
    """The equation of a rule; NotImplementedError if it does something that is not elementwise, or not known here.

    `numbers` are names of scalars; where `FACTOR` is one, the gradient is multiplied by it.
    """
    try:
        found, *others = (
            _recorded(Recorder(shape), rule, slots, numbers) for shape in ((2, 3), (5,), (1, 4, 2, 3))
        )
    except NotImplementedError:
        raise
    except Exception as error:  # a rule is anybody's, and may not expect such tensors
        raise NotImplementedError(f"recording it failed: {error}") from error
    if any(other != found for other in others):  # it has asked in another way than `_AnyShape` knows
        raise NotImplementedError(_BY_SHAPE)
    return found


class _AnyShape(TorchFunctionMode):
    """Refuses an equation that asks a tensor for its shape: what is recorded would hold for one shape only.

    Attributes:
        asked: whether it has asked; a rule may catch the error.
    """

    ASKS: ClassVar[frozenset[Any]] = frozenset({
        *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "nbytes")),
        Tensor.dim, Tensor.ndimension, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.stride,
        Tensor.__len__, Tensor.__iter__, Tensor.is_contiguous, torch.numel,
    })  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.asked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.ASKS:
            self.asked = True
            raise NotImplementedError(_BY_SHAPE)
        return func(*args, **(kwargs or {}))


def _recorded(record: Recorder, rule: Rule, slots: tuple[str, ...], numbers: tuple[str, ...]) -> Equation:
    weight = record.element("weight")
    # A product of its own. Moved into the numbers of a square, the factor would be squared: one of 1e-20, for
    # exploding gradients, would become 0. v would stay 0 then, and m would not.
    grad = record.scaled("grad", FACTOR) if FACTOR in numbers else record.element("grad")
    moments = {name: record.element(name) for name in slots}
    s = {name: record.number(name) for name in numbers}
    arithmetic = Fp32Arithmetic()
    with torch.no_grad(), record, (shapes := _AnyShape()):
        terms = rule.terms(arithmetic, weight, grad, moments, s)
        s |= {name: record.number(name) for name in (*terms, *(("elements",) if terms else ()))}
        delta, new = rule.update(arithmetic, weight, grad, moments, s)
        effects = rule.remaining_effect(arithmetic, weight, new, s)
        always = {slot.name for slot in rule.moments if slot.option is None}
        if not always & moments.keys() <= new.keys():  # what is left out would be memory that nothing wrote
            raise NotImplementedError(f"it returns the moments {', '.join(new)}: it has no kernel")
        ratio = squared_ratio(rule, arithmetic, weight, grad, moments, s)
    if shapes.asked:
        raise NotImplementedError(_BY_SHAPE)
    made: dict[Any, Any] = {("", "delta"): delta}
    made |= {("moments", name): value for name, value in new.items()}
    made |= {("effects", name): value for name, value in effects.items()}
    gauged = {"ratio": record.node(ratio)} if ratio is not None else {}
    step = simplified({key: record.node(value) for key, value in made.items()}, gauged)
    return Equation(
        simplified({name: record.node(value) for name, value in terms.items()}),
        step["", "delta"],
        {name: step["moments", name] for name in new},
        {name: step["effects", name] for name in effects},
        step.get("ratio"),
    )


@functools.lru_cache(maxsize=256)
def scalar_graph(rule: Rule, traced: tuple[str, ...], static: tuple[tuple[str, Static], ...]) -> dict[str, Node]:
    """A rule's scalars as graphs of its hyperparameters and of ``"step"``.

    `traced` has names of the hyperparameters that are numbers; the parts of a tuple are ``name.0`` and so on. A
    rule that decides by a number what to compute raises NotImplementedError.
    """
    record = Recorder(())
    group: dict[str, Any] = {name: constant.value for name, constant in static}
    for name in traced:
        key, dot, _ = name.partition(".")
        group[key] = (*group.get(key, ()), record.number(name)) if dot else record.number(name)
    step = record.number("step")
    with torch.no_grad(), record:
        scalars = rule.scalars(group, step)
    return {name: record.node(value) for name, value in scalars.items()}


class Static:
    """A hyperparameter, of any type but a number, that decides what is computed; it may be a mapping without
    hash.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self._text = repr(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._text == other._text and self.value == other.value

    def __hash__(self) -> int:
        return hash(self._text)


@dataclass(frozen=True)
class Hyperparameters:
    """A group's hyperparameters.

    Attributes:
        traced: names of those that are numbers, and may change from step to step without another kernel.
        values: their values: floats, or tensors on a GPU.
        static: all others, which decide what is computed.
    """

    traced: tuple[str, ...]
    values: tuple[Any, ...]
    static: tuple[tuple[str, Static], ...]

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Hyperparameters:
        traced: dict[str, Any] = {}
        static: list[tuple[str, Static]] = []
        for name, value in sorted(group.items()):  # groups alike, in whatever order they were given, share a launch
            if name in LISTS:
                continue
            if isinstance(value, tuple | list) and value and all(map(_is_number, value)):
                traced |= {f"{name}.{i}": _number(x) for i, x in enumerate(value)}
            elif _is_number(value):
                traced[name] = _number(value)
            else:
                static.append((name, Static(value)))
        return cls(tuple(traced), tuple(traced.values()), tuple(static))


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> Any:
    """A float, or the tensor that holds it on a GPU."""
    if not isinstance(value, Tensor):
        return float(value)
    return value.item() if value.device.type == "cpu" else value


def untraceable(plan: ParamPlan, group: Mapping[str, Any]) -> str | None:
    """Why a rule cannot be written as a kernel, or None."""
    try:
        _equation_of(plan, group)
    except NotImplementedError as error:
        return str(error)
    return None


def elementwise(plan: ParamPlan, group: Mapping[str, Any]) -> bool:
    """Whether a rule makes every element's moments and update of that element alone, and storages keep them so."""
    if any(slot.storage.whole for slot in plan.slots):
        return False
    try:
        return not _equation_of(plan, group).terms
    except NotImplementedError:
        return False


def _equation_of(plan: ParamPlan, group: Mapping[str, Any]) -> Equation:
    given, slots = Hyperparameters.of(group), tuple(slot.slot.name for slot in plan.slots)
    # Rules are values, and have hashes.
    scalars = scalar_graph(plan.rule, given.traced, given.static)
    return equation(plan.rule, slots, tuple(scalars))
