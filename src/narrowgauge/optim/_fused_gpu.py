"""Many parameters' steps by kernels: what `update` computes for one, for a whole list at once.

Parameters that are kept in the same way make one launch. What differs between them is in a table on the device,
which is written anew only when something in it has changed; hyperparameters that change at every step are a few
numbers of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from narrowgauge.optim._fused_board import Board, Found, Launch
from narrowgauge.optim._fused_entry import Entry, why_not
from narrowgauge.optim._fused_kinds import FactorMode, GaugesMode, Kind, capturing, kind_of, launch_of
from narrowgauge.optim._fused_numbers import Group, Options
from narrowgauge.optim._plan import ParameterPlan
from narrowgauge.optim._unchanged import Seen, identical

# Gives for a verdict (of a device) the places, in the list, and sums of those whose rules ask for some.
AddUp = Callable[[Callable[[torch.device], Tensor]], list[tuple[npt.NDArray[np.int64], Tensor]]]


class Judge(Protocol):
    """What decides, between two halves of a step, what gradients are multiplied by."""

    def inverse_on(self, device: torch.device) -> Tensor:
        """What gradients are multiplied by in any case: float32, 0-d."""

    def __call__(self, found: list[Found], add_up: AddUp) -> bool:
        """Decide, all gradients having been looked at; whether sums were asked for, and made whole."""

    def on(self, device: torch.device) -> Tensor:
        """float32 (2,): the factor, and whether the step is held; once it is decided."""


class FusedSteps:
    """Steps of lists of parameters; remembers what it has told the device.

    The usual step finds everything where it was. That is looked at; numbers that changed are told, and gradients
    that lie elsewhere now. Anything else has the tables made anew.

    Args:
        gauges: whether steps are measured: all that they do, or a sample.
        factor: what gradients are multiplied by: ``""`` for nothing, ``"given"`` for a number that is known,
            ``"norm"`` for one that depends on the norm of all.

    Attributes:
        left: why, by its place in the last list, what has no kernel has none.
        stats: what the last step measured: names of parameters, and rows for `StepStats`.
    """

    def __init__(self, gauges: GaugesMode = False, factor: FactorMode = "") -> None:
        self._factor: FactorMode = factor
        self.left: dict[int, str] = {}
        self.stats: list[tuple[list[str], Tensor]] = []
        self._gauges = gauges
        self._names: list[list[str]] = []
        self._seen: Seen | None = None
        self._plans: list[ParameterPlan] = []
        self._owners: list[Mapping[str, Any]] = []
        self._groups: list[Group] = []
        self._kinds: list[tuple[Any, ...]] = []
        self._moving: list[Tensor] = []
        self._boards: list[Board] = []
        self._captured: list[Board] = []

    def __call__(self, entries: Sequence[Entry], judge: Judge | None = None) -> list[Entry]:
        """Take one step with every parameter that has a kernel; states and parameters are written in place.

        Args:
            entries: the parameters.
            judge: where gradients have a factor.

        Returns:
            Those that have none (see `why_not`), untouched.

        Raises:
            RuntimeError: inside a CUDA graph, if it is not the step before it over again.
        """
        same = identical([e.plan for e in entries], self._plans)
        same = same and identical([e.group for e in entries], self._owners)
        columns = [e.p for e in entries], [e.grad for e in entries], [e.state for e in entries]
        if not (same and self.again(*columns, judge)):
            self._look(entries)
            self._take([group.options() for group in self._groups], judge)
        return [entries[number] for number in self.left]

    def again(
        self,
        ps: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        judge: Judge | None = None,
    ) -> bool:
        """Take a step with the same parameters, plans and groups as the last one, if all else is as it was then.

        Returns:
            False, with nothing done, if more has changed than numbers and the places of gradients.
        """
        if self._seen is None or not self._seen.holds(ps, grads, states):
            return False
        options = [group.options() for group in self._groups]
        if [(option.names, option.others) for option in options] != self._kinds:
            return False
        self._take(options, judge)
        return True

    def _take(self, options: list[Options], judge: Judge | None) -> None:
        boards = self._boards
        if any(capturing(board.device) for board in boards):
            # Replayed with these addresses whatever comes after; kept, since a graph keeps nothing alive.
            boards = [board.of_a_graph() for board in boards]
            self._captured += boards
        for board in boards:
            assert self._seen is not None
            assert self._seen.gradients is not None
            board.write(self._seen.gradients, options)
        found: list[Tensor | None] = []
        summed = False
        if judge is not None:

            def add_up(verdict: Callable[[torch.device], Tensor]) -> list[tuple[npt.NDArray[np.int64], Tensor]]:
                return [sums for board in boards for sums in board.add_up(verdict(board.device))]

            seen = [seen for board in boards for seen in board.look(judge.inverse_on(board.device))]
            summed = judge(seen, add_up)
        for board in boards:
            found += board.launch(judge.on(board.device) if judge is not None else None, summed)
        self.stats = [(names, rows) for names, rows in zip(self._names, found, strict=True) if rows is not None]
        # Autograd cannot see what kernels write.
        increment_version(self._moving)

    def _look(self, entries: Sequence[Entry]) -> None:
        """Make all launches anew."""
        self._seen, self.left = None, {}
        self._plans, self._owners = [e.plan for e in entries], [e.group for e in entries]
        self._groups = [Group(group) for group in {id(group): group for group in self._owners}.values()]
        options = {id(group.group): group.options() for group in self._groups}
        self._kinds = [(option.names, option.others) for option in options.values()]
        kinds: dict[Kind, dict[int, Entry]] = {}
        for number, entry in enumerate(entries):
            why = why_not(entry)
            if why is None:
                kinds.setdefault(kind_of(entry, options[id(entry.group)], self._gauges, self._factor), {})[
                    number
                ] = entry
            else:
                self.left[number] = why
        launches: dict[torch.device, list[Launch]] = {}
        for kind, same in kinds.items():
            try:
                made = launch_of(kind, same, list(options))
            except NotImplementedError as error:  # the rule is not elementwise, or does what has no kernel
                self.left |= dict.fromkeys(same, str(error))
            else:
                launches.setdefault(kind.device, []).append(made)
        self._boards = [Board(device, some) for device, some in launches.items()]
        every = [launch for board in self._boards for launch in board.launches]
        self._names = [[self._plans[place].name for place in launch.members] for launch in every]
        moving = [entry.p for number, entry in enumerate(entries) if number not in self.left]
        self._moving = [p for p in moving if not p.is_inference()]
        self._seen = Seen([e.p for e in entries], [e.grad for e in entries], [e.state for e in entries])
