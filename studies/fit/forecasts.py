"""How far a row's loss will be from that of fp32 training, forecast from the replays of a fit alone.

Rows that `fit` did not choose have a forecast too. The errors of a weight storage and of moments are independent,
so their costs are added. Storages that a fit does not consider, such as the paper's codes in 4 bits, are replayed
here.
"""

from __future__ import annotations

from collections.abc import Mapping

from narrowgauge.recipes._fit._replay import NOTHING, Cost, Replay
from narrowgauge.recipes._fit._storages import Measured

States = str | Mapping[str, str]
Kept = tuple[str, States]  # storages of weights and moments


class Forecasts:
    """Forecasts from one measurement, which `Measured.play` has made."""

    def __init__(self, measured: Measured, replay: Replay) -> None:
        self._measured, self._replay = measured, replay
        self._exact = (replay.exact, self._key("fp32"))
        self._found: dict[tuple[str, tuple[str, ...]], dict[str, Cost]] = {
            (weights, self._key(states)): {name: of[number] for name, of in measured.costs.items()}
            for number, (weights, states) in enumerate(measured.ways)
        }

    def _key(self, states: States) -> tuple[str, ...]:
        """A storage for each moment."""
        names = [slot.name for slot in self._replay.slots]
        return tuple(states if isinstance(states, str) else states[name] for name in names)

    def _one(self, weights: str, states: States) -> dict[str, Cost]:
        """What a weight storage with fp32 moments, or moments with exact weights, cost each parameter."""
        key = (weights, self._key(states))
        if key == self._exact:
            return dict.fromkeys(self._measured.costs, NOTHING)
        if key not in self._found:
            self._found[key] = self._replay.costs(weights, states)[0]
        return self._found[key]

    def of_groups(self, kept: Mapping[str, Kept]) -> dict[str, Cost]:
        """By the name of a group of like parameters, what its storages in `kept` cost."""
        found = {}
        for one in self._measured.groups:
            weights, states = kept[one.name]
            of_weights, of_states = self._one(weights, "fp32"), self._one(self._replay.exact, states)
            costs = [of_weights[name] + of_states[name] for name in one.names]
            found[one.name] = Cost(0.0, sum(c.descent for c in costs), sum(c.random for c in costs))
        return found

    def uniform(self, weights: str, states: States) -> dict[str, Cost]:
        """What each group costs if all parameters are kept alike."""
        return self.of_groups({one.name: (weights, states) for one in self._measured.groups})


def totals(costs: Mapping[str, Cost]) -> tuple[list[float], float]:
    """Sums over the groups of a model: [descent, random] with their signs, and how far the loss may move."""
    each = costs.values()
    return [sum(cost.descent for cost in each), sum(cost.random for cost in each)], sum(cost.loss for cost in each)
