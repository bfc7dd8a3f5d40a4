"""`describe()`: what the optimizer does with each parameter, as values, and in all, as text.

The text begins with totals: the bytes that the optimizer keeps, beside those of AdamW in fp32 (two moments, and a
master copy of parameters in half precision). In the table below them like parameters are one row.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from narrowgauge._text import listed, patterns
from narrowgauge.optim._plan import ParamPlan

_WIDTH = 110
_UNITS = ("bytes", "kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class Row:
    """One parameter: its name, shape and dtype, rule, storages, bytes the optimizer adds, path taken, and why.

    `bytes` and `elements` are those of this rank.
    """

    parameter: str
    shape: tuple[int, ...]
    dtype: str
    rule: str
    weights: str
    states: str
    bytes: int
    path: str
    skipped: int
    why: str
    elements: int

    @property
    def like(self) -> tuple[str, ...]:
        """What is the same in parameters that the text shows in one row."""
        return self.dtype, self.rule, self.weights, self.states, self.path, self.why


@dataclass(frozen=True)
class Description:
    """What an optimizer does with its parameters: a row for each, and a summary of them when it is printed.

    `frozen` parameters, which require no gradient and have no state, have no row.
    """

    rows: tuple[Row, ...]
    frozen: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of moments and low words for all parameters, once each has been stepped; counters not included."""
        return sum(row.bytes for row in self.rows)

    def __str__(self) -> str:
        groups: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row.like, []).append(row)
        frozen = [f"frozen: {_tensors(self.frozen)}"] if self.frozen else []
        if not groups:
            return "\n".join(["no parameters", *frozen])
        return "\n".join([*_totals(self.rows), *frozen, "", *_table(list(groups.values()))])


def _totals(rows: tuple[Row, ...]) -> list[str]:
    """What the optimizer keeps, beside AdamW in fp32, and how many tensors go on which path."""
    elements, kept = sum(row.elements for row in rows), sum(row.bytes for row in rows)
    full = sum(row.elements * (8 if row.dtype == "float32" else 12) for row in rows)
    master = " with fp32 master weights" if any(row.dtype != "float32" for row in rows) else ""
    lines = [
        f"{elements:,} parameters in {_tensors(len(rows))}",
        f"the optimizer keeps {_size(kept)}, {_each(kept, elements)} bytes a parameter, beside weight and gradient",
        f"AdamW in fp32{master} keeps {_size(full)}, {_each(full, elements)} bytes a parameter",
    ]
    paths: dict[str, int] = {}
    for row in rows:
        paths[row.path] = paths.get(row.path, 0) + 1
    lines += [f"stepped by {path}: {_tensors(count)}" for path, count in paths.items()]
    if skipped := sum(row.skipped for row in rows):
        lines.append(f"skipped for a gradient that was not finite: {_tensors(skipped, 'step')}; see `skipped`")
    return lines


def _table(groups: list[list[Row]]) -> list[str]:
    """A row for each group of like parameters. Their names and what differs from the request are below it."""
    cells = []
    for rows in groups:
        elements, kept, first = sum(r.elements for r in rows), sum(r.bytes for r in rows), rows[0]
        cells.append(
            (f"{len(rows):,}", f"{elements:,}", _each(kept, elements), first.dtype, first.rule, first.weights,
             first.states, first.path)
        )  # fmt: skip
    head = ("tensors", "elements", "bytes each", "dtype", "rule", "weights", "states", "path")
    top, dashes, *lines = as_text(head, cells).split("\n")
    found = [top, dashes]
    for line, rows in zip(lines, groups, strict=True):
        found.append(line)
        for text in (listed(patterns([row.parameter for row in rows]), most=2), rows[0].why):
            found += textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return found


def _tensors(count: int, what: str = "tensor") -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def _each(size: int, elements: int) -> str:
    return f"{size / max(elements, 1):.2f}"


def _size(nbytes: int) -> str:
    """Bytes in the unit that leaves up to three digits before the point."""
    size, unit = float(nbytes), 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"


def as_text(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Lines of a table with columns as wide as their longest cell."""
    cells = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    first, *rest = ("  ".join(map(str.ljust, line, widths)) for line in cells)
    return "\n".join([first.rstrip(), "-" * len(first), *map(str.rstrip, rest)])


def describe(
    plans: Iterable[tuple[Tensor, ParamPlan]],
    skipped: Mapping[str, int],
    paths: Mapping[Tensor, tuple[str, str]],
    when: str = "",
    frozen: Collection[Tensor] = (),
) -> Description:
    """The table of parameters and their plans.

    Args:
        plans: parameters and their plans.
        skipped: refused steps by name.
        paths: by parameter, what steps it, and why nothing faster does.
        when: what to say after the path of when it is taken.
        frozen: those of the parameters that are not stepped.
    """
    rows = [
        Row(
            parameter=plan.name,
            shape=tuple(p.shape),
            dtype=str(p.dtype).removeprefix("torch."),
            rule=plan.rule.name,
            weights=plan.weight.name,
            states=" ".join(f"{s.slot.name}:{s.storage.name}" for s in plan.slots),
            bytes=plan.nbytes(p),
            path=f"{paths[p][0]}, {'strict' if plan.strict else 'fp32'}{when}",
            skipped=skipped.get(plan.name, 0),
            why="; ".join(filter(None, (plan.why, paths[p][1]))),
            elements=p.numel() if plan.shard is None else plan.shard.here,
        )
        for p, plan in plans
        if p not in frozen
    ]
    return Description(tuple(rows), len(frozen))
