"""The point between the two halves of a step: all gradients have been looked at, and nothing has moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.optim._gradient_factor import GradientFactor
from narrowgauge.optim._shards import TERMS
from narrowgauge.optim._step_one import own_sums
from narrowgauge.rules import has_terms

if TYPE_CHECKING:
    from narrowgauge.optim._fused_board import Found
    from narrowgauge.optim._fused_gpu import AddUp
    from narrowgauge.optim._optimizer import NarrowOptimizer
    from narrowgauge.optim._shard_sums import Rows

Turn = tuple[dict[str, Any], Tensor, Tensor]  # a parameter's: its group, itself, its gradient


class Judged:
    """A step's factor, as kernels for lists ask for it, and what ranks that share parameters must agree on.

    Args:
        optimizer: whose step it is.
        factor: the factor.
        apart: gives, by place, the parameters that no kernel for lists takes.
        places: of the parameters that these kernels are given.
        ps: all parameters.

    Attributes:
        summed: by place, the sums that rules ask for, of parameters that are stepped one by one and shared.
    """

    def __init__(
        self,
        optimizer: NarrowOptimizer,
        factor: GradientFactor,
        apart: Callable[[], Mapping[int, Turn]],
        places: Sequence[int],
        ps: Sequence[Tensor],
    ) -> None:
        self._optimizer, self._factor, self._apart, self._places, self._ps = optimizer, factor, apart, places, ps
        self.inverse_on, self.on = factor.inverse_on, factor.on
        self.summed: dict[int, dict[str, Tensor]] = {}

    def __call__(self, found: list[Found], add_up: AddUp) -> bool:
        factor, turns = self._factor, self._apart()
        factor.look({place: turn[2] for place, turn in turns.items()})
        if factor.shards is None:
            factor.judge(found, self._places, len(self._ps))
            return False
        with_sums = self._optimizer._sums_terms()
        early = with_sums and not factor.sums_wait
        sums = self._sums(factor, turns, add_up) if early else None
        factor.judge(found, self._places, len(self._ps), sums)
        if not factor.held_by_others:
            self._refuse(found)
        if with_sums and not early:
            factor.shards.add_up(self._sums(factor, turns, add_up), True)
        return with_sums

    def _sums(self, factor: GradientFactor, turns: Mapping[int, Turn], add_up: AddUp) -> list[Rows]:
        """The sums of what lies here, as rows for ranks to add up; those of single parameters are in `summed`."""
        assert factor.shards is not None
        rows: list[Rows] = [
            ([self._places[number] for number in members.tolist()], TERMS, table)
            for members, table in add_up(factor.verdict)
        ]
        for place, turn in turns.items():
            if place in factor.shards.places and has_terms(self._optimizer._plans[turn[1]].rule):
                sums = own_sums(self._optimizer, *turn, factor, place)
                table = torch.stack(list(sums.values()))[None]
                self.summed[place] = dict(zip(sums, table[0].unbind(), strict=True))
                rows.append(([place], TERMS, table))
        return rows

    def _refuse(self, found: list[Found]) -> None:
        optimizer, ps = self._optimizer, self._ps
        groups = optimizer.param_groups
        raises = chain.from_iterable([[g["nonfinite"] == "raise"] * len(g["params"]) for g in groups])
        raising = {place for place, one in enumerate(raises) if one}
        if raising:
            self._factor.refuse(found, self._places, raising, lambda place: optimizer._plan(ps[place]).name)
