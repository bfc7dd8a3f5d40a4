"""`describe()`: what the optimizer does with each parameter, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from narrowgauge.optim._plan import ParamPlan


@dataclass(frozen=True)
class Row:
    """One parameter: its name, shape and dtype, rule, storages, bytes the optimizer adds, path taken, and why."""

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


@dataclass(frozen=True)
class Description:
    """A table of rows that prints as text."""

    rows: tuple[Row, ...]

    @property
    def bytes(self) -> int:
        """Bytes of moments and low words for all parameters, once each has been stepped; counters not included."""
        return sum(row.bytes for row in self.rows)

    def __str__(self) -> str:
        rows = []
        for row in self.rows:
            shape = "x".join(map(str, row.shape)) or "scalar"
            rows.append(tuple(str(x) for x in {**vars(row), "shape": shape, "bytes": f"{row.bytes:,}"}.values()))
        return as_text(tuple(Row.__annotations__), rows)


def as_text(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Lines of a table with columns as wide as what is in them."""
    cells = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    first, *rest = ("  ".join(map(str.ljust, line, widths)) for line in cells)
    return "\n".join([first.rstrip(), "-" * len(first), *map(str.rstrip, rest)])


def describe(
    plans: Iterable[tuple[Tensor, ParamPlan]],
    skipped: Mapping[str, int],
    paths: Mapping[Tensor, tuple[str, str]],
    when: str = "",
) -> Description:
    """The table of parameters and their plans.

    Args:
        plans: parameters and their plans.
        skipped: refused steps by name.
        paths: by parameter, what steps it, and why nothing faster does.
        when: what to say after the path of when it is taken.
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
        )
        for p, plan in plans
    ]
    return Description(tuple(rows))
