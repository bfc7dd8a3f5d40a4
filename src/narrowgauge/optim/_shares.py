"""What an optimizer knows of parameters that ranks share: whether there are any, and what ranks add up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from narrowgauge.optim._options import LIMIT
from narrowgauge.optim._shard_words import wrapped
from narrowgauge.optim._shards import any_shared, is_shared
from narrowgauge.rules import has_terms

if TYPE_CHECKING:
    from narrowgauge.optim._optimizer import NarrowOptimizer
    from narrowgauge.optim._shard_sums import ShardSums


class Shares(torch.optim.Optimizer):
    """An optimizer of parameters that may be shared; see `_shards`."""

    _plans: dict[Tensor, Any]
    _known_shares: tuple[Any, int, bool, ShardSums | None] = (None, 0, False, None)

    def _look_at_shares(self) -> tuple[Any, int, bool, ShardSums | None]:
        known, plans = self._known_shares, self._plans
        # Another dict where one parameter is planned otherwise, a longer one where one was added.
        if known[0] is not plans or known[1] != len(plans):
            ps = [p for group in self.param_groups for p in group["params"]]
            sums = None
            if shares := any_shared(ps):
                from narrowgauge.optim._shard_sums import ShardSums

                sums = ShardSums(ps)
            known = self._known_shares = plans, len(plans), shares, sums
        return known

    @property
    def _shares(self) -> bool:
        """Whether a parameter is a DTensor."""
        return self._look_at_shares()[2]

    def all_shard_sums(self) -> ShardSums | None:
        """What ranks add up where a step asks for it; None where no parameter is shared."""
        return self._look_at_shares()[3]

    def _shard_sums(self) -> ShardSums | None:
        """What the ranks of this step add up; None where they have nothing to agree on.

        What decides is what all ranks know: options, and not what was found.
        """
        *_, shares, sums = self._look_at_shares()
        if not shares or sums is None or not sums.places:
            return None
        asked = cast("NarrowOptimizer", self)._unscaling is not None or self._sums_terms()
        asked = asked or any(
            group["nonfinite"] != "propagate" or group[LIMIT] is not None or group["percentile_clipping"] < 100
            for group in self.param_groups
        )
        return sums if asked else None

    @contextmanager
    def _shown_shared(self) -> Iterator[None]:
        """Have `state_dict` show states of shared parameters as DTensors, before other hooks see it."""
        if not self._shares:
            yield
            return
        handle = self.register_state_dict_post_hook(lambda _, found: self._wrap_shared(found), prepend=True)
        try:
            yield
        finally:
            handle.remove()

    def _wrap_shared(self, state_dict: dict[str, Any]) -> None:
        """Show the states of shared parameters as what they are: parts of a whole."""
        states = state_dict["state"]
        for group, packed in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for p, identity in zip(group["params"], packed["params"], strict=True):
                if identity in states and is_shared(p):
                    states[identity] = wrapped(p, self._plans[p], states[identity])

    def _sums_terms(self) -> bool:
        """Whether a rule asks for sums over parameters."""
        return any(has_terms(cast("NarrowOptimizer", self).rule_for(group)) for group in self.param_groups)
