"""The text of the small kernel of the scalars, one program a tensor.

It works out the rule's scalars from its hyperparameters and the count of steps, which the device alone knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from narrowgauge.kernels._graph import Node
from narrowgauge.kernels._step._expressions import lines
from narrowgauge.kernels._step._layout import AT, WIDTH

_PAGE = 1024  # partial sums that are added up at a time


def numbers_source(
    scalars: Mapping[str, Node],
    hyper: Sequence[str],
    terms: Sequence[str],
    met: Sequence[Node],
    factor: str | None = None,
    summed: bool = False,
) -> str:
    """The kernel `numbers`: counts a step, and works out the numbers that elements meet.

    With ``ADVANCE`` it takes the count on; with ``PEEK`` it works with the next count and leaves the present one.

    Args:
        scalars, hyper, factor: as `TritonKernels` takes them. `verdict` holds the factor, float32 (2,); after it,
            whether no tensor takes this step.
        terms: names of the sums.
        met: what to work out.
        summed: whether `partials` are sums of whole tensors already, float64 (tensors, terms).
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
    written = [
        f"tl.store(uniforms + {len(met)} * tensor + {i}, ({names[node]}).to(tl.float32))"
        for i, node in enumerate(met)
    ]
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
{indented([*sums, *read, *first, *second, *written], 4)}
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
