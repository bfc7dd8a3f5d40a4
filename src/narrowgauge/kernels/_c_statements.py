"""C statements that compute a graph for one element."""

from __future__ import annotations

from collections.abc import Iterable

from narrowgauge.kernels._graph import Node, walk

_INPUTS = {"weight": "w[i]", "grad": "g[i]"}
_EXPRESSIONS = {
    "mul": "{0} * {1}", "add": "{0} + {1}", "sub": "{0} - {1}", "div": "{0} / {1}", "neg": "-{0}",
    "abs": "{fabs}({0})", "sqrt": "{sqrt}({0})", "reciprocal": "1 / {0}",
    "sign": "({c})(({0} > 0) - ({0} < 0))",
    # As torch has them: NaN where either is.
    "max": "{1} > {0} || {1} != {1} ? {1} : {0}", "min": "{1} < {0} || {1} != {1} ? {1} : {0}",
    "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}", "eq": "{0} == {1}",
    "ne": "{0} != {1}", "and": "({0} != 0) & ({1} != 0)", "or": "({0} != 0) | ({1} != 0)", "not": "!{0}",
    "where": "{0} ? {1} : {2}", "scaled": "{0} * {1}", "wide": "(double){0}", "narrow": "(float){0}",
}  # fmt: skip
_TESTS = ("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not")


def statements(roots: Iterable[Node], names: dict[Node, str]) -> list[str]:
    """C statements that compute the nodes of graphs for element i.

    Args:
        roots: the graphs.
        names: what is known already, scalars among it; grows by the rest.
    """
    lines = []
    for node in walk(roots):
        if node.scalar or node in names:
            continue
        if node.op == "input":
            names[node] = _INPUTS.get(node.args[0], f"x_{node.args[0]}[i]")
            continue
        c = "int" if node.op in _TESTS else "double" if node.double else "float"
        math = {"sqrt": "sqrt" if node.double else "sqrtf", "fabs": "fabs" if node.double else "fabsf", "c": c}
        expression = _EXPRESSIONS[node.op].format(*(names[arg] for arg in node.args), **math)
        names[node] = f"t{len(names)}"
        lines.append(f"const {c} {names[node]} = {expression};")
    return lines
