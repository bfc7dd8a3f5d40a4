"""Elementwise operations as a graph, recorded from torch, from which kernels are written.

A rule is written once, in Python on torch tensors. It runs once on tiny tensors, and a recorder writes down every
operation that torch dispatches: what it does to an element, and which numbers it needs. A kernel in any language is
a walk over that graph.

Numbers are not elements. What depends on numbers alone is worked out once, in double precision, and rounded to
float32 where it meets an element.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# What torch calls an operation, and what it is called here.
_NAMES = {
    "mul": "mul", "add": "add", "sub": "sub", "div": "div", "neg": "neg", "sqrt": "sqrt", "abs": "abs",
    "sign": "sign", "maximum": "max", "minimum": "min", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "eq": "eq",
    "ne": "ne", "bitwise_and": "and", "logical_and": "and", "bitwise_or": "or", "logical_or": "or",
    "bitwise_not": "not", "logical_not": "not", "where": "where", "reciprocal": "reciprocal", "pow": "pow",
    "log": "log",
}  # fmt: skip


@dataclass(frozen=True)
class Node:
    """An operation on nodes and constants.

    ``"input"`` and ``"number"`` have a name, ``"constant"`` a value, ``"wide"`` and ``"narrow"`` change the
    precision, ``"scaled"`` is a product that is rounded by itself; all else is arithmetic.
    """

    op: str
    args: tuple[Any, ...]  # nodes, or the name or value
    scalar: bool = False  # one number a parameter, in double precision; otherwise one an element
    double: bool = False  # an element in double precision, as terms of sums are
    _hash: int = field(default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Graphs share nodes: without this a hash would walk all paths.
        object.__setattr__(self, "_hash", hash((self.op, self.args, self.scalar, self.double)))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class Equation:
    """What a rule computes for one element."""

    terms: Mapping[str, Node]  # what to sum over the parameter before the rest, by name; empty for most rules
    delta: Node  # the update
    moments: Mapping[str, Node]  # the new ones
    effects: Mapping[str, Node]  # what a unit of each moment will still add to the weight; for those that have it
    ratio: Node | None  # the gradient's square over the second moment (`squared_ratio`), for gauges

    @property
    def roots(self) -> tuple[Node, ...]:
        """All that the step computes for each element once the sums are known."""
        return (self.delta, *self.moments.values(), *self.effects.values())


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what torch dispatches while it is entered, as nodes of the tensors that come out.

    Inputs are tensors of a shape, and of a dtype if `element` makes them. What is not elementwise, or not known
    here, raises NotImplementedError.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shape, self._dtype = shape, dtype
        self._nodes: dict[int, Node] = {}
        self._alive: list[Tensor] = []  # an identity is that of one tensor only as long as it lives

    def element(self, name: str) -> Tensor:
        """A tensor that stands for an input of that name."""
        return self._keep(torch.full(self._shape, 0.5, dtype=self._dtype), Node("input", (name,)))

    def scaled(self, name: str, number: str) -> Tensor:
        """A float32 tensor that stands for an input times a number, rounded before any other use.

        `_algebra` never moves that number: results are, bit for bit, those of the product.
        """
        args = Node("input", (name,)), Node("number", (number,), scalar=True)
        return self._keep(torch.full(self._shape, 0.5), Node("scaled", args))

    def number(self, name: str) -> Tensor:
        """A tensor that stands for a number of that name."""
        return self._keep(torch.tensor(0.5, dtype=torch.float64), Node("number", (name,), scalar=True))

    def node(self, x: Any) -> Node:
        """What a tensor or number is."""
        if not isinstance(x, Tensor):
            return Node("constant", (float(x),), scalar=True)
        if id(x) in self._nodes:
            return self._nodes[id(x)]
        if not x.dim():
            return Node("constant", (float(x),), scalar=True)
        raise NotImplementedError("tensors of its own have no kernel")

    def _keep(self, tensor: Tensor, node: Node) -> Tensor:
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in ("scalar_tensor", "detach", "alias", "lift_fresh"):
            return out if name == "scalar_tensor" else self._keep(out, self.node(args[0]))
        if name == "_local_scalar_dense":
            raise NotImplementedError("it decides in Python by a number, as with `if`: it has no kernel")
        if not isinstance(out, Tensor) or out.shape not in ((), self._shape):
            raise NotImplementedError(f"{name} is not elementwise: it has no kernel")
        return self._keep(out, self._made(name, out, args, kwargs))

    def _made(self, name: str, out: Tensor, args: Any, kwargs: Any) -> Node:
        scalar, double = not out.dim(), bool(out.dim()) and out.dtype is torch.float64
        if name in ("zeros_like", "ones_like", "full_like", "empty_like"):
            raise NotImplementedError(f"{name} has no kernel: write a number, or x * 0")
        if name != "_to_copy" and (unknown := kwargs.keys() - {"alpha", "min", "max"}):
            raise NotImplementedError(f"{name} with {', '.join(sorted(unknown))} has no kernel")

        def make(op: str, *operands: Any) -> Node:
            nodes = tuple(x if isinstance(x, Node) else self.node(x) for x in operands)
            return Node(op, nodes, scalar, double)

        if name == "_to_copy":
            if out.dtype not in (torch.float32, torch.float64, args[0].dtype):
                raise NotImplementedError(f"a conversion to {out.dtype} has no kernel")
            node = self.node(args[0])
            if scalar or node.double == double:
                return node
            return make("wide" if double else "narrow", node)
        if name in ("clamp", "clamp_min", "clamp_max"):
            least, most = (*args[1:], None, None)[:2] if name == "clamp" else (None, None)
            least = args[1] if name == "clamp_min" else kwargs.get("min", least)
            most = args[1] if name == "clamp_max" else kwargs.get("max", most)
            node = args[0] if least is None else make("max", args[0], least)
            return node if most is None else make("min", node, most)
        if name == "square" or (name == "pow" and not isinstance(args[1], Tensor) and args[1] == 2):
            return make("mul", args[0], args[0])
        if name == "rsub":
            if len(args) > 2 or kwargs:
                raise NotImplementedError("rsub with alpha has no kernel")
            return make("sub", args[1], args[0])
        if name in ("add", "sub") and kwargs.get("alpha", 1) != 1:
            return make(name, args[0], make("mul", args[1], kwargs["alpha"]))
        if name not in _NAMES or (name in ("pow", "log") and not scalar):
            raise NotImplementedError(f"{name} has no kernel: it is not known here")
        if name in ("bitwise_and", "bitwise_or", "bitwise_not") and out.dtype != torch.bool:
            raise NotImplementedError(f"{name} of integers has no kernel")
        if out.dtype == torch.bool and name in ("add", "mul"):
            return make("or" if name == "add" else "and", *args)  # torch's sum of two booleans is a boolean
        return make(_NAMES[name], *args)


def walk(roots: Iterable[Node], known: Container[Node] = ()) -> list[Node]:
    """Every node once, its operands before it; operands of known nodes are left out."""
    seen: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node not in seen:
            for arg in () if node in known else node.args:
                if isinstance(arg, Node):
                    visit(arg)
            seen[node] = None

    for root in roots:
        visit(root)
    return list(seen)


def uniforms(roots: Iterable[Node]) -> tuple[Node, ...]:
    """The scalar nodes that are roots, or operands of an element's node: each one number a parameter."""
    roots = tuple(roots)
    met: dict[Node, None] = {root: None for root in roots if root.scalar}
    for node in walk(roots):
        if not node.scalar:
            met |= {arg: None for arg in node.args if isinstance(arg, Node) and arg.scalar}
    return tuple(met)


@functools.lru_cache(maxsize=256)
def evaluator(nodes: tuple[Node, ...]) -> Callable[[Mapping[str, float]], list[float]]:
    """A function from the rule's scalars by name to the values of scalar nodes, in double precision on the host."""
    names: dict[Node, str] = {}
    lines = []
    for number, node in enumerate(walk(nodes)):
        names[node] = f"x{number}"
        if node.op == "number":
            value = f"float(numbers[{node.args[0]!r}])"
        elif node.op == "constant":
            value = f"float({str(node.args[0])!r})"
        else:
            value = _HOST[node.op].format(*(names[arg] for arg in node.args))
        lines.append(f"    {names[node]} = {value}\n")
    text = f"def evaluate(numbers):\n{''.join(lines)}    return [{', '.join(names[node] for node in nodes)}]\n"
    space: dict[str, Any] = {"divide": _divide, "power": _power, "math": math}
    exec(compile(text, "<narrowgauge scalars>", "exec"), space)
    found: Callable[[Mapping[str, float]], list[float]] = space["evaluate"]
    return found


def _divide(a: float, b: float) -> float:
    """a / 0 as floats have it."""
    return math.nan if not a or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1.0, b)


def _power(a: float, b: float) -> float:
    """a ** b as floats have it: inf where it is too large, NaN for a root of a negative number."""
    try:
        return math.pow(a, b)
    except (OverflowError, ValueError):
        if a < 0 and b % 1:
            return math.nan
        return math.copysign(math.inf, a) if b % 2 == 1 else math.inf


_HOST = {
    "mul": "{0} * {1}", "add": "{0} + {1}", "sub": "{0} - {1}", "neg": "-{0}", "abs": "abs({0})",
    "div": "{0} / {1} if {1} else divide({0}, {1})", "reciprocal": "1.0 / {0} if {0} else divide(1.0, {0})",
    "sqrt": "math.sqrt({0}) if {0} >= 0 else math.nan", "sign": "float(({0} > 0) - ({0} < 0))",
    # As torch has them: NaN where either is.
    "max": "{1} if {1} > {0} or {1} != {1} else {0}", "min": "{1} if {1} < {0} or {1} != {1} else {0}",
    "lt": "float({0} < {1})", "le": "float({0} <= {1})", "gt": "float({0} > {1})", "ge": "float({0} >= {1})",
    "eq": "float({0} == {1})", "ne": "float({0} != {1})", "and": "float(bool({0}) and bool({1}))",
    "or": "float(bool({0}) or bool({1}))", "not": "float(not {0})", "where": "{1} if {0} else {2}",
    "pow": "{0} ** {1} if 0 < {0} <= 1 and {1} >= 0 else power({0}, {1})",
    "log": "math.log({0}) if {0} > 0 else math.nan if {0} else -math.inf",
}  # fmt: skip
