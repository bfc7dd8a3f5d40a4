"""The same graph with less to do for an element: numbers are gathered, divisions shared.

An equation as people write it multiplies and divides an element by several numbers on its way. Each node is read as
a number times the rest of it, c x. Products and quotients pass their numbers on, a sum multiplies them into its
terms, where a fused multiply-add has them for nothing, and where an element is needed at last they are one factor,
worked out once, in double precision. Quotients of one divisor share its reciprocal.

Results in float32 differ by an ulp or two for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from narrowgauge.kernels._graph import Node, walk

_ONE = Node("constant", (1.0,), True)
# A number and what it multiplies.
_Scaled = tuple[Node, Node]


def simplified(roots: Mapping[Any, Node], besides: Mapping[Any, Node] | None = None) -> dict[Any, Node]:
    """Graphs that compute the same with fewer operations an element.

    Args:
        roots: the graphs.
        besides: more graphs; they share what they can and never change those of `roots`.
    """
    work = _Work(roots)
    every = {**roots, **(besides or {})}
    return {key: root if root.scalar else work.whole(work.scaled(root)) for key, root in every.items()}


class _Work:
    def __init__(self, roots: Mapping[Any, Node]) -> None:
        every = walk(roots.values())
        self._uses = Counter(arg for node in every for arg in node.args if isinstance(arg, Node))
        self._uses.update(roots.values())
        self._scaled: dict[Node, _Scaled] = {}
        # Terms of sums that a number may enter.
        self._terms: dict[Node, list[tuple[Node, Node | None]]] = {}
        self._often: set[Node] = set()
        # Divisors that differ by a number alone are shared.
        quotients = [node for node in every if node.op == "div" and not (node.scalar or node.args[1].scalar)]
        divisors = [self.scaled(node.args[1])[1] for node in quotients]
        self._often = {divisor for divisor, count in Counter(divisors).items() if count > 1}
        self._scaled, self._terms = {}, {}

    def scaled(self, node: Node) -> _Scaled:
        """A node of elements as c x; what is in double precision stays as it is."""
        if node not in self._scaled:
            self._scaled[node] = self._taken_apart(node)
        return self._scaled[node]

    def _taken_apart(self, node: Node) -> _Scaled:
        op, args = node.op, node.args
        if op == "input":
            return _ONE, node
        if not node.double:
            if op == "neg":
                c, x = self.scaled(args[0])
                return _number("neg", c), x
            if op == "mul":
                return self._product(*args)
            if op == "div":
                return self._quotient(*args)
            if op in ("add", "sub"):
                return self._sum(node)
        made = (self.whole(self.scaled(x)) if isinstance(x, Node) and not x.scalar else x for x in args)
        return _ONE, Node(op, tuple(made), node.scalar, node.double)

    def _product(self, a: Node, b: Node) -> _Scaled:
        if a.scalar or b.scalar:
            number, element = (a, b) if a.scalar else (b, a)
            c, x = self.scaled(element)
            return _times(number, c), x
        (c, x), (d, y) = self.scaled(a), self.scaled(b)
        return _times(c, d), Node("mul", (x, y))

    def _quotient(self, a: Node, b: Node) -> _Scaled:
        if b.scalar:
            c, x = self.scaled(a)
            return _over(c, b), x
        d, y = self.scaled(b)
        if a.scalar:
            return _over(a, d), Node("div", (_ONE, y))
        c, x = self.scaled(a)
        if y in self._often:
            return _over(c, d), Node("mul", (x, Node("div", (_ONE, y))))
        return _over(c, d), Node("div", (x, y))

    def _sum(self, node: Node) -> _Scaled:
        terms: list[tuple[Node, Node | None]] = [
            (arg, None) if arg.scalar else self.scaled(arg) for arg in node.args
        ]
        made = Node(node.op, tuple(self._term(term) for term in terms))
        # To multiply both terms by one number more costs nothing where they have one already.
        alone = self._uses[node] == 1 and all(arg.scalar or self._uses[arg] == 1 for arg in node.args)
        if alone and all(x is None or c != _ONE for c, x in terms):
            self._terms[made] = terms
        return _ONE, made

    def _term(self, term: tuple[Node, Node | None]) -> Node:
        c, x = term
        return c if x is None else self.whole((c, x))

    def whole(self, scaled: _Scaled) -> Node:
        """c x as a node; into a sum that is used once, the number goes on to both terms."""
        c, x = scaled
        if c == _ONE:
            return x
        if x in self._terms:
            return Node(x.op, tuple(self._term((_times(c, d), y)) for d, y in self._terms[x]))
        if x.op == "mul" and not x.args[0].scalar:
            # First with the number: a square alone could overflow.
            return Node("mul", (Node("mul", (c, x.args[0])), x.args[1]))
        return Node("mul", (c, x))


def _number(op: str, *args: Node) -> Node:
    return Node(op, args, True)


def _times(a: Node, b: Node) -> Node:
    if a == _ONE:
        return b
    return a if b == _ONE else _number("mul", a, b)


def _over(a: Node, b: Node) -> Node:
    return a if b == _ONE else _number("div", a, b)
