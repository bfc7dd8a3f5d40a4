# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""What a step that somebody else took did to hundreds of weights, as sums.

They are made of weights before and after, gradients and moments. The specification is
`narrowgauge.gauges._measured_steps`, whose graphs of an equation these kernels are written from. In eager torch it
takes a dozen operations a parameter to bring samples together, and forty passes over them in double precision; here
it is one launch before the step, which keeps a sample of the weights, and one after it.

A program takes one row of `ROW` elements of one tensor and leaves a row of sums, in float64; these are added in an
order that does not depend on timing. Arithmetic is in double precision throughout: it is what the specification
has, and only a sample of the elements is looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.kernels._graph import Node, walk
from narrowgauge.kernels._launches import CachedKernel, module_of
from narrowgauge.kernels._magnitudes import KINDS, ROW, added, bits_at, launch, taken
from narrowgauge.kernels._step._expressions import lines
from narrowgauge.kernels._tables import sent

_ROW = tl.constexpr(ROW)
# Of a tensor: elements; its first program; every how many rows, from which; then address and dtype of each input.
_HEAD = 4
# What is summed, by column: of the change if it is looked at, and of the ratio.
_CHANGE = ("squares", "dot", "dot", "nonzero", "lost", "lost")
_RATIO = ("ratio", "inside")


@triton.jit
def _element(place, column: tl.constexpr, at, here):
    """Elements of one of a tensor's inputs."""
    bits = bits_at(tl.load(place + column), tl.load(place + column + 1), at, here)
    return bits.to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _gather(places, owners, out, WIDTH: tl.constexpr):
    """The rows of samples one after the other, zeros behind each tensor's end."""
    program = tl.program_id(0)
    place = places + tl.load(owners + program) * WIDTH
    row = tl.load(place + 3) + tl.load(place + 2) * (program - tl.load(place + 1))
    inside = tl.arange(0, _ROW)
    at = row * _ROW + inside
    bits = bits_at(tl.load(place + 4), tl.load(place + 5), at, at < tl.load(place))
    tl.store(out + program.to(tl.int64) * _ROW + inside, bits)


_GATHER = CachedKernel(_gather)


def gathered(vectors: Sequence[Tensor], samples: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Copies of samples of vectors.

    Args:
        vectors: contiguous, of `_magnitudes.DTYPES`, on one GPU.
        samples: for each every how many rows of `ROW` elements one is taken, and from which; of those rows that are
            whole, if it is not every one.

    Returns:
        For each its rows, float32, filled up with zeros: views of one tensor.
    """
    rows, places, owners = _placed({"": vectors}, (), samples)
    out = torch.empty(sum(rows) * ROW, dtype=torch.float32, device=vectors[0].device)
    launch(_GATHER, (places, owners, out.view(torch.int32)), {"WIDTH": places.shape[1]})
    return list(out.split([count * ROW for count in rows]))


def measured(
    delta: Node | None,
    ratio: Node | None,
    names: tuple[str, ...],
    numbers: Tensor,
    inputs: Mapping[str, Sequence[Tensor]],
    kept: Sequence[str],
    samples: Sequence[tuple[int, int]],
    negated: bool = False,
) -> Tensor:
    """Sums over samples of tensors.

    Args:
        delta: the intended update; None where it is not known.
        ratio: what is summed beside; None where there is nothing.
        names: of the numbers in both graphs.
        numbers: float64 (tensors, names), or (1, names) where all have the same.
        inputs: by name the vectors of all tensors: ``"grad"``, what the graphs read, and the weights ``"weight"``
            before the step and ``"after"`` it where the change is looked at. Contiguous, of `_magnitudes.DTYPES`,
            on one GPU.
        kept: names of inputs that are what `gathered` made of the same samples.
        samples: as for `gathered`.
        negated: whether to take the gradient with the other sign.

    Returns:
        Float64 (tensors, 8): the squares of the update, its dot product with the change twice, how many updates
        are not zero, how many of those changed nothing twice, the sum of the ratio and its elements, zeros without
        one. Without `delta` the squares of the change, NaN, and for updates that are not zero gradients.
        (tensors, 2), the last two, where the change is not looked at.
    """
    rows, places, owners = _placed(inputs, kept, samples)
    launches = _measure_of(delta, ratio, names, tuple(inputs), tuple(kept), negated)
    found = torch.empty(sum(rows), len(_columns(inputs)), dtype=torch.float64, device=places.device)
    stride = numbers.shape[1] if numbers.shape[0] > 1 else 0
    launch(launches, (places, owners, numbers, found, stride), {"WIDTH": places.shape[1]})
    return added(found, rows, largest=False)


def _columns(inputs: Container[str]) -> tuple[str, ...]:
    return (*_CHANGE, *_RATIO) if "after" in inputs else _RATIO


def _placed(
    inputs: Mapping[str, Sequence[Tensor]], kept: Sequence[str], samples: Sequence[tuple[int, int]]
) -> tuple[list[int], Tensor, Tensor]:
    """How many rows each tensor has; the table of places; to which tensor each program belongs, int32."""
    whole = next(vectors for name, vectors in inputs.items() if name not in kept)
    of = [taken(vector.numel(), *sample) for vector, sample in zip(whole, samples, strict=True)]
    rows = [count for _, _, count in of]
    firsts = (np.cumsum(rows) - rows).tolist()
    heads = [
        (vector.numel(), first, share, start)
        for vector, first, (share, start, _) in zip(whole, firsts, of, strict=True)
    ]
    columns = [[(x.data_ptr(), KINDS[x.dtype]) for x in vectors] for vectors in inputs.values()]
    table = np.array([sum(parts, head) for head, *parts in zip(heads, *columns, strict=True)], dtype=np.int64)
    owners = np.repeat(np.arange(len(rows), dtype=np.int32), rows)
    device = whole[0].device
    return rows, sent(table, device), sent(owners, device)


@functools.lru_cache(maxsize=64)
def _measure_of(
    delta: Node | None, ratio: Node | None, names: tuple[str, ...], inputs: tuple[str, ...], kept: tuple[str, ...],
    negated: bool,
) -> CachedKernel:  # fmt: skip
    source = _source(delta, ratio, names, inputs, kept, negated)
    space = {"triton": triton, "tl": tl, "element": _element, "ROW": _ROW}
    return CachedKernel(module_of(source, "measure", space, __name__)["measure"])


def _source(
    delta: Node | None, ratio: Node | None, names: tuple[str, ...], inputs: tuple[str, ...], kept: tuple[str, ...],
    negated: bool,
) -> str:  # fmt: skip
    """The text of the kernel `measure`."""
    roots = [root for root in (delta, ratio) if root is not None]
    reads = [
        f"{name}_in = element(place, {_HEAD + 2 * number}, "
        + ("sampled * ROW + inside, here)" if name in kept else "at, here)")
        for number, name in enumerate(inputs)
    ]
    if negated:
        reads.append("grad_in = -grad_in")
    known = {Node("input", (name,)): f"{name}_in" for name in inputs}
    met = {node.args[0] for node in walk(roots) if node.op == "number"}
    for number, name in enumerate(names):
        if name in met:
            reads.append(f"n{number} = tl.load(numbers + vector * stride + {number})")
        known[Node("number", (name,), True)] = f"n{number}"
    made, called = lines(roots, known, "x", double=True)
    columns = _columns(inputs)
    end = (
        {"ratio": f"tl.where(here, {called[ratio]}, 0.0)", "inside": "here.to(tl.float64)"}
        if ratio is not None
        else {}
    )
    if "after" in inputs:
        moved = called[delta] if delta is not None else "grad_in"
        made += [
            "change = tl.where(here, after_in - weight_in, 0.0)",
            f"moved = tl.where(here, {moved}, 0.0)",
            "nonzero = tl.abs(moved) > 0",
            "lost = nonzero & ((tl.abs(change) > 0) == 0)",
        ]
        end |= {"nonzero": "nonzero.to(tl.float64)", "lost": "lost.to(tl.float64)", "squares": "change * change"}
        if delta is not None:
            end |= {"squares": "moved * moved", "dot": "moved * change"}
    made += [f"{name}_sum = tl.sum({value}, 0)" for name, value in end.items()]
    for place, name in enumerate(columns):
        none = 'float("nan")' if name == "dot" else "0.0"
        made.append(f"tl.store(row + {place}, {f'{name}_sum' if name in end else none})")
    body = "\n".join(f"    {line}" for line in [*reads, *made])
    return f"""
@triton.jit
def measure(places, owners, numbers, rows, stride, WIDTH: tl.constexpr):
    program = tl.program_id(0)
    vector = tl.load(owners + program)
    place = places + vector * WIDTH
    sampled = program - tl.load(place + 1)
    inside = tl.arange(0, ROW)
    at = (tl.load(place + 3) + tl.load(place + 2) * sampled) * ROW + inside
    here = at < tl.load(place)
    row = rows + program.to(tl.int64) * {len(columns)}
{body}
"""
