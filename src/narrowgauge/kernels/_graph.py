"""Elementwise operations as a graph, recorded from torch, from which kernels are written.

What is Python on torch tensors stays in that form alone. Run once on tiny tensors while every operation that torch
dispatches is written down, it shows what it does to an element, and which numbers it needs besides. A kernel in any
language is a walk over that graph.

Numbers are apart from elements. What depends on them alone is worked out once, in double precision, and rounded to
float32 where it meets an element.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterable, Mapping
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
}  # fmt: skip


@dataclass(frozen=True)
class Node:
    """An operation on nodes and constants.

    Attributes:
        op: ``"input"`` and ``"number"`` have a name, ``"constant"`` a value, ``"wide"`` and ``"narrow"`` change the
            precision, ``"scaled"`` is a product that is rounded by itself; all else is arithmetic.
        args: nodes, or the name or value.
        scalar: one number a parameter, in double precision; otherwise one an element.
        double: an element in double precision, as terms of sums are.
    """

    op: str
    args: tuple[Any, ...]
    scalar: bool = False
    double: bool = False
    _hash: int = field(default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Graphs share nodes: without this a hash would walk all paths.
        object.__setattr__(self, "_hash", hash((self.op, self.args, self.scalar, self.double)))

    def __hash__(self) -> int:
        return self._hash


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what torch dispatches while it is entered, as nodes of the tensors that come out.

    Args:
        shape: of the tensors that stand for inputs.
        dtype: of those that `element` makes.

    Raises:
        NotImplementedError: for what is not elementwise, or not known here.
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
        """A float32 one that stands for an input times a number, rounded before anything else is done with it.

        Nothing takes the number elsewhere: what is worked out is, bit for bit, what it is of the product.
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
        if not isinstance(out, Tensor) or out.shape not in ((), self._shape):
            raise NotImplementedError(f"{name} is not elementwise: it has no kernel")
        return self._keep(out, self._made(name, out, args, kwargs))

    def _made(self, name: str, out: Tensor, args: Any, kwargs: Any) -> Node:
        scalar, double = not out.dim(), bool(out.dim()) and out.dtype is torch.float64

        def make(op: str, *operands: Any) -> Node:
            nodes = tuple(x if isinstance(x, Node) else self.node(x) for x in operands)
            return Node(op, nodes, scalar, double)

        if name == "_to_copy":
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
            return make("sub", args[1], args[0])
        if name in ("add", "sub") and kwargs.get("alpha", 1) != 1:
            return make(name, args[0], make("mul", args[1], kwargs["alpha"]))
        if name not in _NAMES:
            raise NotImplementedError(f"{name} has no kernel: it is not known here")
        return make(_NAMES[name], *args)


def walk(roots: Iterable[Node], known: Container[Node] = ()) -> list[Node]:
    """Every node once, what it is made of before it; what known nodes are made of is left out."""
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
    """The scalar nodes that elements of these graphs meet, roots among them: one number a parameter each."""
    roots = tuple(roots)
    met: dict[Node, None] = {root: None for root in roots if root.scalar}
    for node in walk(roots):
        if not node.scalar:
            met |= {arg: None for arg in node.args if isinstance(arg, Node) and arg.scalar}
    return tuple(met)


def evaluate(nodes: Iterable[Node], numbers: Mapping[str, float]) -> list[float]:
    """Scalar nodes in double precision on the host.

    Args:
        nodes: scalar ones.
        numbers: the rule's scalars by name.
    """
    nodes = tuple(nodes)
    known: dict[Node, float] = {}
    for node in _order(nodes):
        if node.op == "number":
            known[node] = float(numbers[node.args[0]])
        elif node.op == "constant":
            known[node] = node.args[0]
        else:
            known[node] = _HOST[node.op](*(known[arg] for arg in node.args))
    return [known[node] for node in nodes]


@functools.lru_cache(maxsize=256)
def _order(nodes: tuple[Node, ...]) -> list[Node]:
    return walk(nodes)


def _divide(a: float, b: float) -> float:
    if b:
        return a / b
    return math.nan if not a or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1.0, b)


_HOST: dict[str, Any] = {
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "div": _divide,
    "neg": lambda a: -a,
    "sqrt": lambda a: math.sqrt(a) if a >= 0 else math.nan,
    "abs": abs,
    "sign": lambda a: float((a > 0) - (a < 0)),
    "max": lambda a, b: b if b > a or math.isnan(b) else a,
    "min": lambda a, b: b if b < a or math.isnan(b) else a,
    "lt": lambda a, b: float(a < b),
    "le": lambda a, b: float(a <= b),
    "gt": lambda a, b: float(a > b),
    "ge": lambda a, b: float(a >= b),
    "eq": lambda a, b: float(a == b),
    "ne": lambda a, b: float(a != b),
    "and": lambda a, b: float(bool(a) and bool(b)),
    "or": lambda a, b: float(bool(a) or bool(b)),
    "not": lambda a: float(not a),
    "where": lambda test, a, b: a if test else b,
    "reciprocal": lambda a: _divide(1.0, a),
    "pow": lambda a, b: a**b,
}
