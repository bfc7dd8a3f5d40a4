"""What launches read: a row of addresses for each tensor, and a row of hyperparameters for each group.

All of it for one device is one piece of memory there, with a twin on the host. Where something has changed, one
copy sends the twin, through pinned memory of torch's own allocator, which is not handed out again before the copies
from it are done. So nothing here waits.

A step captured in a CUDA graph is replayed with the addresses that it was captured with, whatever steps have been
taken since. So it has tables of its own, sent from pinned memory of their own at every replay; both are kept as
long as the graph. That pinned memory is allocated before, since a capture cannot allocate any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from narrowgauge.kernels._step._compile import compile_together
from narrowgauge.kernels._step._launch import COLUMNS, Cut, Tables, TritonKernels
from narrowgauge.kernels._step._layout import AT
from narrowgauge.optim._changes import identical
from narrowgauge.optim._sharding import TERMS, Rows
from narrowgauge.optim._tracing import Hyperparameters
from narrowgauge.optim._verdict import GradientReport

# How many graphs can be captured with no step between them.
_GRAPHS = 4
_LINE = 16  # parts begin at multiples of this many 8-byte words: 128 bytes


@dataclass(frozen=True, eq=False)
class ListLaunch:
    """One launch: its kernels, and what they are given.

    Attributes:
        step: the kernels.
        rows: int64 (tensors, WIDTH); see `_layout`.
        programs, passes: int32: the tensor that each program works on, of the step and of passes that only read; on
            the device.
        codebooks: values and cells of each; on the device.
        members: the position of each row's step in the list of steps.
        indices: of the parameters.
        groups: the position of each row of hyperparameters in the list of groups.
        numbers: how many hyperparameters a group has.
        cut: where programs are added up for gauges; None without.
    """

    step: TritonKernels
    rows: npt.NDArray[np.int64]
    programs: Tensor
    passes: Tensor
    codebooks: Sequence[tuple[Tensor, Tensor]]
    members: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]
    groups: tuple[int, ...]
    numbers: int
    cut: Cut | None = None


class LaunchTables:
    """The launches on one device, and the memory that they read.

    A graph sends it from `staged`, pinned memory of its own; otherwise new pinned memory is taken each time.
    """

    def __init__(self, device: torch.device, launches: Sequence[ListLaunch], staged: Tensor | None = None) -> None:
        self.device = device
        self.launches = launches
        self._staged = staged
        shapes: list[tuple[int, ...]] = []
        for launch in launches:
            shapes += [launch.rows.shape, (len(launch.groups), max(1, launch.numbers))]
        ends = np.cumsum([0, *(-(-shape[0] * shape[1] // _LINE) * _LINE for shape in shapes)]).tolist()
        self._host = np.zeros(ends[-1], dtype=np.int64)
        self._there = torch.empty(ends[-1], dtype=torch.int64, device=device)
        parts = [slice(at, at + n * m) for at, (n, m) in zip(ends, shapes, strict=False)]
        self._rows = [self._host[part].reshape(shape) for part, shape in zip(parts[::2], shapes[::2], strict=True)]
        self._hyper = [
            self._host[part].view(np.float64).reshape(shape)
            for part, shape in zip(parts[1::2], shapes[1::2], strict=True)
        ]
        self.tables = [
            Tables(
                self._there[rows].view(launch.rows.shape),
                launch.programs,
                launch.passes,
                self._there[hyper].view(torch.float64).view(len(launch.groups), -1),
                launch.codebooks,
                launch.cut,
            )
            for launch, rows, hyper in zip(launches, parts[::2], parts[1::2], strict=True)
        ]
        for mine, launch in zip(self._rows, launches, strict=True):
            mine[:] = launch.rows
        self._fresh = True
        self._gradients: npt.NDArray[np.int64] | None = None
        self._options: list[Hyperparameters] = []
        self._numbers: list[list[list[float]]] = []
        self._on_device: list[tuple[Tensor, Tensor]] = []
        self._spare: list[Tensor] = []
        self._compiled = False

    def of_a_graph(self) -> LaunchTables:
        """Tables like these for a step that is being captured."""
        if not self._spare:
            raise RuntimeError(
                f"step: captured {_GRAPHS} times with no step between; take one before capturing more"
            )
        return LaunchTables(self.device, self.launches, self._spare.pop())

    def write(self, gradients: npt.NDArray[np.int64], options: list[Hyperparameters]) -> None:
        """Upload what changed: gradients' addresses if that is another array, hyperparameters of other objects."""
        changed, self._fresh = self._fresh, True  # stays True if sending fails, for want of memory
        if self._staged is None and len(self._spare) < _GRAPHS:
            self._spare += self._memory(_GRAPHS - len(self._spare)).unbind()
        if gradients is not self._gradients:
            for launch, rows in zip(self.launches, self._rows, strict=True):
                rows[:, AT["grad"]] = gradients[launch.members]
            self._gradients, changed = gradients, True
        if not identical(options, self._options):
            changed |= self._write_numbers(options)
        if changed:
            self._send()
        self._fresh = False
        for target, number in self._on_device:
            # A number on the device may have changed unseen.
            target.copy_(number.detach().reshape(()))

    def _write_numbers(self, options: list[Hyperparameters]) -> bool:
        """Write the host's numbers down, and remember which are the device's; whether any of the former changed."""
        given = [[options[group].values for group in launch.groups] for launch in self.launches]
        host = [[[0.0 if isinstance(x, Tensor) else x for x in row or (0.0,)] for row in rows] for rows in given]
        self._options = options
        self._on_device = [
            (tables.hyper[i, j], number)
            for tables, rows in zip(self.tables, given, strict=True)
            for i, row in enumerate(rows)
            for j, number in enumerate(row)
            if isinstance(number, Tensor)
        ]
        if host == self._numbers:
            return False
        for hyper, rows in zip(self._hyper, host, strict=True):
            hyper[:] = rows
        self._numbers = host
        return True

    def _send(self) -> None:
        staged = self._staged if self._staged is not None else self._memory(1)[0]
        staged.numpy()[:] = self._host
        self._there.copy_(staged, non_blocking=True)

    def _memory(self, count: int) -> Tensor:
        """Memory of the host to send from, so many times as long as what is sent."""
        return torch.empty(count, len(self._host), dtype=torch.int64, pin_memory=self.device.type != "cpu")

    def inspect(self, inverse: Tensor) -> list[GradientReport]:
        """Inspect all gradients, which will be multiplied by `inverse`."""
        return [
            GradientReport(launch.indices, *launch.step.look(tables, inverse))
            for launch, tables in zip(self.launches, self.tables, strict=True)
        ]

    def terms(self, verdict: Tensor) -> list[Rows]:
        """The sums that rules ask for, before the step; a step that is `summed` reads their tables again."""
        return [
            (launch.indices.tolist(), TERMS, launch.step.add_up(tables, verdict))
            for launch, tables in zip(self.launches, self.tables, strict=True)
            if launch.step.terms
        ]

    def launch(self, verdict: Tensor | None = None, summed: bool = False) -> list[Tensor | None]:
        """Take the step.

        Args:
            verdict: float32 (2,), where gradients have a factor: that, and whether no tensor takes the step.
            summed: whether the sums that `terms` gave hold, with what other ranks have.

        Returns:
            What each launch has measured: float64 (tensors, 8), by a graph at the same address every time.
        """
        found: list[Tensor | None] = []
        for launch, tables in zip(self.launches, self.tables, strict=True):
            stats = None
            if launch.step.layout.gauges:
                shape = (len(launch.rows), COLUMNS)
                if self._staged is not None:
                    stats = tables.buffer("stats", torch.float64, shape[0] * shape[1]).view(shape)
                else:
                    stats = torch.empty(shape, dtype=torch.float64, device=self.device)
            found.append(stats)
        parts = list(zip(self.launches, self.tables, found, strict=True))
        if not self._compiled:
            self._compiled = True
            wanted = [each.step.uncompiled(tables, stats, verdict, summed) for each, tables, stats in parts]
            with torch.cuda.device_of(self._there):  # type: ignore[no-untyped-call]
                compile_together(list(chain.from_iterable(wanted)))
        for launch, tables, stats in parts:
            launch.step(tables, stats, verdict, summed)
        return found
