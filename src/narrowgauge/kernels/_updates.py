# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""What a step of another optimizer did to hundreds of weights, as sums.

The sums are made of weights before and after the step, gradients and moments. The specification is
`narrowgauge.gauges._watch._update_stats`, and these kernels are written from its graphs: in place of some fifty
operations a parameter one launch before the step, which copies a sample of the weights, and one after it.

A program reads one row of `ROW` elements of one tensor and writes a row of sums in float64; these are added in an
order that does not depend on timing. Arithmetic is in double precision, as in the specification: only a sample of
the elements is measured.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.kernels._graph import Node, walk
from narrowgauge.kernels._launches import CachedKernel, module_of
from narrowgauge.kernels._magnitudes import HEAD, ROW, add_rows, bits_at, launch, sampled_rows, tensor_table
from narrowgauge.kernels._step._expressions import lines

_ROW = tl.constexpr(ROW)
_INPUT = tl.constexpr(HEAD)
# Columns of the sums: those of the change, if it is measured, and those of the ratio.
_CHANGE = ("squares", "dot", "dot", "nonzero", "lost", "lost")
_RATIO = ("ratio", "inside")


@triton.jit
def _element(entry, column: tl.constexpr, at, here):
    """Elements of one of a tensor's inputs."""
    bits = bits_at(tl.load(entry + column), tl.load(entry + column + 1), at, here)
    return bits.to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _gather(table, owners, out, WIDTH: tl.constexpr):
    """The rows of samples one after the other, each tensor padded with zeros."""
    program = tl.program_id(0)
    entry = table + tl.load(owners + program) * WIDTH
    row = tl.load(entry + 3) + tl.load(entry + 2) * (program - tl.load(entry + 1))
    inside = tl.arange(0, _ROW)
    at = row * _ROW + inside
    bits = bits_at(tl.load(entry + _INPUT), tl.load(entry + _INPUT + 1), at, at < tl.load(entry))
    tl.store(out + program.to(tl.int64) * _ROW + inside, bits)


_GATHER = CachedKernel(_gather)


def gather(vectors: Sequence[Tensor], samples: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Copies of samples, which `_magnitudes.count` defines: of each vector its rows, float32, padded with zeros."""
    rows, table, owners = _table([vectors], samples)
    out = torch.empty(sum(rows) * ROW, dtype=torch.float32, device=vectors[0].device)
    launch(_GATHER, (table, owners, out.view(torch.int32)), {"WIDTH": table.shape[1]})
    return list(out.split([count * ROW for count in rows]))


def measure(
    delta: Node | None,
    ratio: Node | None,
    names: tuple[str, ...],
    numbers: Tensor,
    inputs: Mapping[str, Sequence[Tensor]],
    copies: Sequence[str],
    samples: Sequence[tuple[int, int]],
    negated: bool = False,
) -> Tensor:
    """Sums over samples of tensors.

    Args:
        delta: the graph of the intended update; None if it is not known.
        ratio: the graph of g^2 / max(v_hat, eps^2); None without a second moment.
        names: of the numbers in both graphs.
        numbers: float64 (tensors, names), or (1, names) if all have the same.
        inputs: by name the vectors of all tensors: ``"grad"``, what the graphs read, and the weights ``"weight"``
            before the step and ``"after"`` it if the change is measured. Contiguous, of `_magnitudes.DTYPES`, on
            one GPU. The first of them is no copy.
        copies: names of inputs that `gather` made of the same samples.
        samples: as for `gather`.
        negated: whether to change the gradient's sign.

    Returns:
        Float64 (tensors, 8), as `narrowgauge._update_sums` has them; the change is both stored and visible. Without
        `delta` the squares of the change, NaN for the dot products, and counts of nonzero gradients in place of
        updates. (tensors, 2), the last two, if the change is not measured.
    """
    rows, table, owners = _table(list(inputs.values()), samples)
    kernel = _measure_of(delta, ratio, names, tuple(inputs), tuple(copies), negated)
    found = torch.empty(sum(rows), len(_columns(inputs)), dtype=torch.float64, device=table.device)
    stride = numbers.shape[1] if numbers.shape[0] > 1 else 0
    launch(kernel, (table, owners, numbers, found, stride), {"WIDTH": table.shape[1]})
    return add_rows(found, rows, largest=False)


def _columns(inputs: Container[str]) -> tuple[str, ...]:
    return (*_CHANGE, *_RATIO) if "after" in inputs else _RATIO


def _table(
    inputs: Sequence[Sequence[Tensor]], samples: Sequence[tuple[int, int]]
) -> tuple[list[int], Tensor, Tensor]:
    """How many rows each tensor has, one program each; and `tensor_table`."""
    found = [sampled_rows(x.numel(), *sample) for x, sample in zip(inputs[0], samples, strict=True)]
    rows = [count for _, _, count in found]
    return rows, *tensor_table(inputs, rows, found)


@functools.lru_cache(maxsize=64)
def _measure_of(
    delta: Node | None, ratio: Node | None, names: tuple[str, ...], inputs: tuple[str, ...],
    copies: tuple[str, ...], negated: bool,
) -> CachedKernel:  # fmt: skip
    source = _source(delta, ratio, names, inputs, copies, negated)
    space = {"triton": triton, "tl": tl, "element": _element, "ROW": _ROW}
    return CachedKernel(module_of(source, "measure", space, __name__)["measure"])


def _source(
    delta: Node | None, ratio: Node | None, names: tuple[str, ...], inputs: tuple[str, ...],
    copies: tuple[str, ...], negated: bool,
) -> str:  # fmt: skip
    """The text of the kernel `measure`."""
    roots = [root for root in (delta, ratio) if root is not None]
    reads = [
        f"{name}_in = element(entry, {HEAD + 2 * number}, "
        + ("sampled * ROW + inside, here)" if name in copies else "at, here)")
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
def measure(table, owners, numbers, rows, stride, WIDTH: tl.constexpr):
    program = tl.program_id(0)
    vector = tl.load(owners + program)
    entry = table + vector * WIDTH
    sampled = program - tl.load(entry + 1)
    inside = tl.arange(0, ROW)
    at = (tl.load(entry + 3) + tl.load(entry + 2) * sampled) * ROW + inside
    here = at < tl.load(entry)
    row = rows + program.to(tl.int64) * {len(columns)}
{body}
"""
