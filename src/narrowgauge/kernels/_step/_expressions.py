"""A graph of operations as lines of a kernel: one line a node, in float32 for elements, in double for numbers.

Also the text of the small kernel of the scalars, one program a tensor: it works out the rule's scalars from its
hyperparameters and the count of steps, which the device alone knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from narrowgauge.kernels._graph import Node, walk
from narrowgauge.kernels._step._layout import AT, WIDTH

_PAGE = 1024  # partial sums that are added up at a time

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
    "pow": "tl.exp2({1} * tl.log2({0}))", "log": "tl.log({0})",
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


def numbers_source(
    scalars: Mapping[str, Node],
    hyper: Sequence[str],
    terms: Sequence[str],
    met: Sequence[Node],
    factor: str | None = None,
    summed: bool = False,
    scaled: bool = False,
) -> str:
    """The kernel `numbers`: counts a step, and works out the numbers that elements meet.

    With ``ADVANCE`` it takes the count on; with ``PEEK`` it works with the next count and leaves the present one.

    Args:
        scalars, hyper, factor: as `TritonKernels` takes them. `verdict` holds the factor, float32 (2,); after it,
            whether no tensor takes this step.
        terms: names of the sums.
        met: what to work out.
        summed: whether `partials` are sums of whole tensors already, float64 (tensors, terms).
        scaled: whether weights have scales. The next one, by the largest code, is written in the scale's place,
            and 0 in the largest code's, behind it; behind the numbers are the old one and the new one's inverse.
    """
    known = {Node("number", (name,), True): f"h{i}" for i, name in enumerate(hyper)}
    known[Node("number", ("step",), True)] = "step"
    first, names = lines(scalars.values(), known, "s", double=True)
    inner = {Node("number", (name,), True): names[node] for name, node in scalars.items()}
    inner |= {Node("number", (name,), True): f"sum{i}" for i, name in enumerate(terms)}
    inner[Node("number", ("elements",), True)] = "elements"
    if factor is not None:
        inner[Node("number", (factor,), True)] = "tl.load(verdict).to(tl.float64)"
    second, names = lines(met, inner, "t", double=True)
    read = [f"h{i} = tl.load(hyper + tl.load(row + {AT['hyper']}) * {len(hyper)} + {i})" for i in range(len(hyper))]
    stored = [f"({names[node]}).to(tl.float32)" for node in met] + ["scale", "inverse_of(new_scale)"] * scaled
    written = [f"tl.store(uniforms + {len(stored)} * tensor + {i}, {value})" for i, value in enumerate(stored)]
    sums = _added_up(terms)
    if summed:
        sums = [f"sum{i} = tl.load(partials + {len(terms)} * tensor + {i})" for i in range(len(terms))]
    return f"""
@triton.jit
def numbers(
    table, hyper, uniforms, steps, flags, partials, {"verdict, " if factor else ""}
    ADVANCE: tl.constexpr, SKIP: tl.constexpr, PEEK: tl.constexpr
):
    tensor = tl.program_id(0)
    row = table + tensor * {WIDTH}
    counter = tl.load(row + {AT["count"]}).to(tl.pointer_type(tl.float32))
    count = tl.load(counter)
    if ADVANCE:
{indented(_held() if factor else _flagged(), 8)}
        tl.store(counter, count + taken.to(tl.float32))
        count = count + 1.0
        tl.store(steps + tensor, count.to(tl.int32) * taken)
    if PEEK:
        count = count + 1.0
    step = count.to(tl.float64)
    elements = tl.load(row + {AT["elements"]}).to(tl.float64)
{indented([*sums, *read, *first, *second, *(_scales() if scaled else []), *written], 4)}
"""


def totals_source(terms: Sequence[str]) -> str:
    """The kernel `totals`: adds up each tensor's programs, for ranks to add up what each of them has."""
    stored = [f"tl.store(totals + {len(terms)} * tensor + {i}, sum{i})" for i in range(len(terms))]
    return f"""
@triton.jit
def totals(table, partials, totals):
    tensor = tl.program_id(0)
    row = table + tensor * {WIDTH}
{indented([*_added_up(terms), *stored], 4)}
"""


def _scales() -> list[str]:
    """Sets `scale` and `new_scale`, which is kept if the tensor takes the step."""
    return [
        f"scale_at = tl.load(row + {AT['scale']}).to(tl.pointer_type(tl.float32))",
        "scale = tl.load(scale_at)",
        "new_scale = next_scale(tl.load(scale_at + 1).to(tl.int32), scale)",
        "if ADVANCE:",
        "    tl.store(scale_at, new_scale, mask=taken > 0)",
        "    tl.store(scale_at + 1, 0.0, mask=taken > 0)",
    ]


def _flagged() -> list[str]:
    """Sets `taken`: whether a tensor takes the step. A flagged one does not; flags are cleared."""
    return [
        "taken = tl.full([], 1, tl.int32)",
        "if SKIP:",
        "    taken = 1 - tl.load(flags + tensor)",
        "    tl.store(flags + tensor, 0)",
        *_refused("1 - taken"),
    ]


def _held() -> list[str]:
    """The same where a verdict may hold every tensor: then none counts as refused."""
    return [
        "taken = (tl.load(verdict + 1) == 0).to(tl.int32)",
        "bad = tl.load(flags + tensor)",
        "tl.store(flags + tensor, 0)",
        "if SKIP:",
        *_refused("bad * taken"),
        "    taken = taken * (1 - bad)",
    ]


def _refused(count: str) -> list[str]:
    return [
        f"    refused = tl.load(row + {AT['skipped']}).to(tl.pointer_type(tl.int64))",
        f"    tl.store(refused, tl.load(refused) + ({count}).to(tl.int64))",
    ]


def _added_up(terms: Sequence[str]) -> list[str]:
    """Partial sums of a tensor's programs, always in the same order."""
    if not terms:
        return []
    made = [
        f"first = tl.load(row + {AT['pass_first']})",
        f"count = tl.load(row + {AT['passes']})",
        f"place = tl.arange(0, {_PAGE})",
        *(f"total{i} = tl.zeros([{_PAGE}], tl.float64)" for i in range(len(terms))),
        "done = count * 0",
        "while done < count:",
    ]
    for i in range(len(terms)):
        at = f"partials + (first + done + place) * {len(terms)} + {i}"
        made.append(f"    total{i} += tl.load({at}, mask=done + place < count, other=0.0)")
    return [*made, f"    done += {_PAGE}", *(f"sum{i} = tl.sum(total{i}, 0)" for i in range(len(terms)))]


def indented(text: Sequence[str], by: int) -> str:
    return "\n".join(" " * by + line for line in text)
