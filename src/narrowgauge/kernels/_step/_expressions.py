"""A graph of operations as lines of a kernel: one line a node, in float32 for elements, in double for numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from narrowgauge.kernels._graph import Node, walk

_ELEMENT = {
    "mul": "{0} * {1}", "add": "{0} + {1}", "sub": "{0} - {1}", "neg": "-{0}", "abs": "tl.abs({0})",
    "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}", "eq": "{0} == {1}",
    "ne": "{0} != {1}", "and": "{0} & {1}", "or": "{0} | {1}", "not": "({0}) == 0",
    "max": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "min": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))", "where": "tl.where({0}, {1}, {2})",
    "scaled": "{0} * {1}", "wide": "{0}.to(tl.float64)", "narrow": "{0}.to(tl.float32)",
}  # fmt: skip
_FLOAT = {"div": "{0} * reciprocal({1})", "sqrt": "root({0})", "reciprocal": "reciprocal({0})"}
# A sum with a product, of elements, is rounded once: the first one if both terms are products.
_FUSED = {
    "add": ("tl.fma({0}, {1}, {2})", "tl.fma({0}, {1}, {2})"),
    "sub": ("tl.fma({0}, {1}, -{2})", "tl.fma(-{0}, {1}, {2})"),
}
_DOUBLE = {
    "div": "{0} / {1}", "sqrt": "tl.sqrt({0})", "reciprocal": "1.0 / {0}",
    # Negative bases have no logarithm, and no rule raises one.
    "pow": "tl.exp2({1} * tl.log2({0}))",
}  # fmt: skip


def lines(
    roots: Iterable[Node], known: Mapping[Node, str], prefix: str, double: bool = False
) -> tuple[list[str], dict[Node, str]]:
    """Assignments that compute nodes, and what every node is called.

    Args:
        roots: what is wanted.
        known: names of nodes that are there already: inputs and numbers.
        prefix: of the names that are made.
        double: whether these are numbers, all in double precision.
    """
    names = dict(known)
    written = {node: _written(node, known) for node in walk(roots, known) if node not in known}
    # A product is not worked out for sums that it is fused into.
    wanted = set(roots)
    for node, (_, args) in reversed(written.items()):
        wanted.update(args if node in wanted else ())
    made: list[str] = []
    for node, (template, args) in written.items():
        if node not in wanted:
            continue
        if node.op == "constant":
            names[node] = _literal(node.args[0], double)
            continue
        names[node] = f"{prefix}{len(made)}"
        made.append(f"{names[node]} = " + template.format(*_operands(node, args, names, double)))
    return made, names


def _written(node: Node, known: Mapping[Node, str]) -> tuple[str, tuple[Node, ...]]:
    """How a node is written, and the nodes that this takes."""
    if node.op == "constant":
        return "", ()
    if node.op in ("input", "number"):
        raise KeyError(f"{node.args[0]} is not among {sorted(known.values())}")
    wide = node.scalar or node.double
    template = {**_ELEMENT, **(_DOUBLE if wide else _FLOAT)}.get(node.op)
    if template is None:
        raise NotImplementedError(f"{node.op} has no kernel")
    if wide:
        return template, node.args
    if node.op == "div" and node.args[0] == Node("constant", (1.0,), True):
        return "reciprocal({0})", node.args[1:]
    if node.op in _FUSED:
        for place, (arg, template_fused) in enumerate(zip(node.args, _FUSED[node.op], strict=True)):
            if arg.op == "mul" and arg not in known and not arg.scalar:
                return template_fused, (*arg.args, node.args[1 - place])
    return template, node.args


def _operands(node: Node, args: Iterable[Node], names: Mapping[Node, str], double: bool) -> list[str]:
    """Names of operands; numbers that are tests came as 0 or 1."""
    tests = {"where": 1, "and": 2, "or": 2, "not": 1}.get(node.op, 0)
    return [
        f"({names[arg]} != 0)" if i < tests and arg.scalar and not double else f"({names[arg]})"
        for i, arg in enumerate(args)
    ]


def _literal(value: float, double: bool) -> str:
    text = f'float("{value}")' if math.isinf(value) or math.isnan(value) else repr(value)
    return f"tl.full([], {text}, tl.float64)" if double else text
