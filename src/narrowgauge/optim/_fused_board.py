"""What launches read of the host: a row of addresses a tensor, and a row of hyperparameters a group.

All of it for one device is one piece of memory there, with a twin on the host. Where something has changed, the
twin is sent by one copy, through pinned memory of torch's own allocator, which hands none out again before the
copies from it are done: nothing here waits, and nothing depends on how a driver treats other memory.

A step captured in a CUDA graph is replayed with the addresses that it was captured with, whatever steps have
been taken since. So it has a board of its own, sent from pinned memory of its own at every replay, and both are
kept for as long as there is an optimizer. That pinned memory is laid by beforehand, since none can be had during a
capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from narrowgauge.kernels._step._launch import COLUMNS, Step
from narrowgauge.kernels._step._layout import AT
from narrowgauge.kernels._step._tables import Cut, Tables
from narrowgauge.optim._fused_numbers import Options
from narrowgauge.optim._unchanged import identical

# Graphs that can be captured one after the other with no step between.
_GRAPHS = 4
_LINE = 16  # parts of a board begin at multiples of so many words: 128 bytes


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch: its kernels, and what they are given.

    Attributes:
        step: the kernels.
        rows: int64 (tensors, WIDTH); see `_layout`.
        programs, passes: int32: the tensor that each program works on, of the step and of passes that only read; on
            the device.
        codebooks: values and cells of each; on the device.
        members: the place of each row's entry in the list of entries.
        groups: the place of each row of hyperparameters in the list of groups.
        numbers: how many hyperparameters a group has.
        cut: where programs are added up for gauges; None without.
    """

    step: Step
    rows: npt.NDArray[np.int64]
    programs: Tensor
    passes: Tensor
    codebooks: Sequence[tuple[Tensor, Tensor]]
    members: npt.NDArray[np.int64]
    groups: tuple[int, ...]
    numbers: int
    cut: Cut | None = None


@dataclass(frozen=True, eq=False)
class Found:
    """What a launch's look at its gradients has found.

    Attributes:
        members: the place of each in the list of entries.
        flags: int32, 1 for those with inf or NaN; the step takes them down.
        squares: float64, sums of the squares of the others; None if not asked for.
    """

    members: npt.NDArray[np.int64]
    flags: Tensor
    squares: Tensor | None


class Board:
    """The launches on one device, and the memory that they read.

    Args:
        device: where it is.
        launches: the launches.
        staged: pinned memory to send it from each time, for a graph; otherwise new memory is taken each time.
    """

    def __init__(self, device: torch.device, launches: Sequence[Launch], staged: Tensor | None = None) -> None:
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
        self._options: list[Options] = []
        self._numbers: list[list[list[float]]] = []
        self._on_device: list[tuple[Tensor, Tensor]] = []
        self._spare: list[Tensor] = []

    def of_a_graph(self) -> Board:
        """A board like this one for a step that is being captured.

        Raises:
            RuntimeError: if no pinned memory is left.
        """
        if not self._spare:
            raise RuntimeError(
                f"step: got captured {_GRAPHS} times since the last one; take one before capturing more"
            )
        return Board(self.device, self.launches, self._spare.pop())

    def write(self, gradients: npt.NDArray[np.int64], options: list[Options]) -> None:
        """Have the device know what it is to do now.

        Args:
            gradients: their addresses, for the whole list of entries; another array where one has changed.
            options: the groups'; other objects where something may have changed.
        """
        changed, self._fresh = self._fresh, True  # until it has been sent: there may be no memory to send it from
        if self._staged is None and not self._spare:
            self._spare = list(self._memory(_GRAPHS).unbind())
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
            # A number of the device may have changed without a sign.
            target.copy_(number.detach().reshape(()))

    def _write_numbers(self, options: list[Options]) -> bool:
        """Write the host's numbers down, and remember which are the device's; whether any of the former changed."""
        given = [[options[group].numbers for group in launch.groups] for launch in self.launches]
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

    def look(self, inverse: Tensor) -> list[Found]:
        """Look at all gradients, which are going to be multiplied by `inverse`."""
        return [
            Found(launch.members, *launch.step.look(tables, inverse))
            for launch, tables in zip(self.launches, self.tables, strict=True)
        ]

    def add_up(self, verdict: Tensor) -> list[tuple[npt.NDArray[np.int64], Tensor]]:
        """The sums that rules ask for, before the step: of each launch that has some, members and a table.

        Args:
            verdict: float32 (2,); see `launch`.

        Returns:
            Tables float64 (tensors, terms), which a step that is `summed` reads again.
        """
        return [
            (launch.members, launch.step.add_up(tables, verdict))
            for launch, tables in zip(self.launches, self.tables, strict=True)
            if launch.step.terms
        ]

    def launch(self, verdict: Tensor | None = None, summed: bool = False) -> list[Tensor | None]:
        """Take the step.

        Args:
            verdict: float32 (2,), where gradients have a factor: that, and whether no tensor takes the step.
            summed: whether the sums that `add_up` gave stand, with what other ranks have.

        Returns:
            What the gauges of each launch say: float64 (tensors, 8), in the order of `UpdateStats`. A graph leaves
            it at the same place every time.
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
            launch.step(tables, stats, verdict, summed)
            found.append(stats)
        return found
