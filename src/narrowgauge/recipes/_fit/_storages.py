"""What every storage costs every parameter of a model, and a choice among them as a recipe."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from narrowgauge._text import alike as like_names
from narrowgauge._text import exact_patterns
from narrowgauge.optim._plan import slot_storages
from narrowgauge.recipes._bill import against
from narrowgauge.recipes._choices import Choice, Kept
from narrowgauge.recipes._fit._choose import (
    FREE,
    Candidates,
    Chosen,
    alike,
    bytes_of,
    frontier,
    total_noise,
    within,
)
from narrowgauge.recipes._fit._probe import Progress, Sample
from narrowgauge.recipes._fit._replay import NOTHING, Cost, Replay
from narrowgauge.recipes._fitted import FittedRecipe
from narrowgauge.storage import automatic_weights, weight_storage

# Weight storages by the recipe's dtype, the narrowest first. `expansion` takes the bytes of `split`, which loses
# less. Small parameters have the last two alone: their bytes are next to nothing, and gains that never move stop a
# training (docs/decisions/advice-by-edq.md).
WEIGHTS = {
    torch.bfloat16: ("plain", "stochastic", "split4", "split8", "split"),
    torch.float16: ("plain", "stochastic", "kahan", "master"),
    torch.float32: ("plain",),
}
# Storages of signed moments and of the others.
_STATES = (
    ("log4", "log4"), ("log4", "log8"), ("log8", "log8"), ("8bit", "8bit"), ("bf16", "bf16"), ("log8", "fp32"),
    ("fp32", "log8"), ("fp32", "fp32"),
)  # fmt: skip
# Measured, so that it can be seen, and never chosen: codes of one scale explode where a block's gradients come to
# differ, which a probe may not show, and `log8` takes as many bytes.
_NEVER_CHOSEN = "8bit"
_TIMED, _TIMED_ELEMENTS = 5, 1 << 22
# What is not measured counts as this much: it is narrowed where a limit cannot be met without, and widened last.
_LAST, _TRACE = Cost(0.0, math.inf, 0.0), Cost(0.0, 1e-300, 0.0)
_NEARLY = 1.05  # of the tolerance: a choice that is played together may cost so much


class Measured:
    """What every storage costs every parameter, and the choice among them.

    Args:
        free: the loss of the whole model that counts as none.

    Attributes:
        groups: of like parameters, with their frontiers.
        ways: the storages of weights and moments that were played.
        costs: by the name of a parameter, the cost of each way.
    """

    def __init__(
        self, replay: Replay, samples: Sequence[Sample], dtype: torch.dtype, block_size: int, free: float = FREE
    ) -> None:
        self._replay, self._dtype, self._block, self._free = replay, dtype, block_size, free
        self._samples = {sample.name: sample for sample in samples}
        self._lost: Mapping[str, tuple[float, float]] = {}
        self.groups: list[Candidates] = []
        self.ways: list[tuple[str, dict[str, str]]] = []
        self.costs: dict[str, list[Cost]] = {}

    def play(self, seconds: float, progress: Progress) -> None:
        """Play every weight storage with fp32 moments, and all storages of moments with exact weights."""
        slots = self._replay.slots
        pairs = [{s.name: signed if s.signed else other for s in slots} for signed, other in _STATES]
        states = [dict(items) for items in dict.fromkeys(tuple(pair.items()) for pair in pairs)]
        wide = states[-1]
        ways = [(weight, wide) for weight in WEIGHTS[self._dtype]]
        ways += [(self._replay.exact, narrow) for narrow in states[:-1]]
        self._replay.prepare(seconds, len(ways))
        measured: dict[str, list[Cost]] = {name: [] for name, one in self._samples.items() if not one.is_idle}
        self.ways, self.costs = ways, measured
        for number, (weight, state) in enumerate(ways):
            progress("replaying", number / len(ways))
            costs, lost = self._replay.costs(weight, state, counting=number == 0)  # of the narrowest weights
            for name, cost in costs.items():
                measured[name].append(cost)
            self._lost = self._lost or lost
        noise = {name: [cost.noise for cost in found] for name, found in measured.items()}
        parts: dict[Any, list[str]] = {}
        for like, names in like_names(list(self._samples)).items():
            for name in names:
                one = self._samples[name]
                parts.setdefault((like, self._replay.is_small(name), one.dtype, one.is_idle), []).append(name)
        moving, idle = (
            [names for (*_, is_idle), names in parts.items() if is_idle is each] for each in (False, True)
        )
        self.groups = [self._candidates(names, ways, measured) for names in alike(noise, moving)]
        self.groups += [self._unmeasured(tuple(names)) for names in idle]

    def _candidates(
        self, names: tuple[str, ...], ways: Sequence[tuple[str, dict[str, str]]],
        measured: Mapping[str, Sequence[Cost]],
    ) -> Candidates:  # fmt: skip
        """The frontier of like parameters, of all pairs of a weight storage and moments' storages."""
        count, elements = len(WEIGHTS[self._dtype]), sum(self._samples[name].elements for name in names)
        of = [self._together({name: measured[name][way] for name in names}) for way in range(len(ways))]
        of_states = [(ways[0][1], NOTHING), *zip((states for _, states in ways[count:]), of[count:], strict=True)]
        of_weights = list(zip(WEIGHTS[self._dtype], of[:count], strict=True))
        if self._samples[names[0]].dtype != self._dtype:  # a batch norm, which stays in fp32
            of_weights = [("plain", NOTHING)]
        if self._replay.is_small(names[0]):
            of_weights, of_states = of_weights[-2:], of_states[:1]
        options = [
            self._kept(names, weight, states, cost + of_moments)
            for weight, cost in of_weights
            for states, of_moments in of_states
            if _NEVER_CHOSEN not in states.values()
        ]
        free = self._free * elements / sum(sample.elements for sample in self._samples.values())
        return Candidates(names, elements, frontier(options, free), free)

    def _unmeasured(self, names: tuple[str, ...]) -> Candidates:
        """Like parameters without gradients in their samples: the storages of `adamw8bit-split8`.

        A limit may ask for narrower ones, or leave room for exact ones.
        """
        dtype, wide = self._samples[names[0]].dtype, {slot.name: "fp32" for slot in self._replay.slots}
        narrow = "plain" if dtype == torch.float32 else "stochastic"
        four = {slot.name: "log4" if slot.signed else "log8" for slot in self._replay.slots}
        ways = [
            (narrow, four, _LAST),
            (automatic_weights(dtype, strict=False), dict.fromkeys(wide, "log8"), _TRACE),
            (WEIGHTS[dtype][-1], wide, NOTHING),
        ]
        if self._replay.is_small(names[0]):
            ways = [(weight, wide, cost) for weight, _, cost in ways[1:]]
        found = [self._kept(names, weight, states, cost) for weight, states, cost in ways]
        return Candidates(names, sum(self._samples[name].elements for name in names), frontier(found))

    def _kept(self, names: Sequence[str], weight: str, states: Mapping[str, str], cost: Cost) -> Kept:
        return Kept(weight, states, self._bytes(names, weight, states), cost.noise, cost.loss)

    def _together(self, costs: Mapping[str, Cost]) -> Cost:
        """What like parameters cost together."""
        noise = total_noise([(self._samples[name].elements, cost.noise) for name, cost in costs.items()])
        return Cost(noise, sum(c.descent for c in costs.values()), sum(c.random for c in costs.values()))

    def _bytes(self, names: Sequence[str], weight: str, states: Mapping[str, str]) -> float:
        """Bytes a parameter: weight, gradient, low word and moments."""
        dtype = self._samples[names[0]].dtype
        each = 2 * dtype.itemsize + weight_storage(weight).bytes_added(dtype)
        moments = elements = 0
        for name in names:
            sample = self._samples[name]
            kept = slot_storages(self._replay.rule, {**self._replay.group, "states": states}).values()
            moments += sum(storage.nbytes(sample.shape, self._block) for storage in kept)
            elements += sample.elements
        return each + moments / elements

    def within(self, tolerance: float) -> Chosen:
        """The narrowest choice within a tolerance, by the replay of all chosen storages together.

        If that replay costs more than 1.05 of the tolerance, a choice for a lower one follows, up to three times.
        """
        asked = tolerance
        for _ in range(4):
            chosen = within(self.groups, asked)
            total = sum(cost.loss for cost in self.together(chosen).values())
            if total <= tolerance * _NEARLY:
                break
            asked *= tolerance / total
        return chosen

    def together(self, chosen: Chosen) -> dict[str, Cost]:
        """What each group costs, by its name, with all choices in one replay."""
        kept = {name: one.frontier[chosen[one.name]] for one in self.groups for name in one.names}
        weights = {name: each.weights for name, each in kept.items()}
        costs, _ = self._replay.costs(weights, {name: each.states for name, each in kept.items()})
        return {
            one.name: self._together({name: costs.get(name, NOTHING) for name in one.names}) for one in self.groups
        }

    def bytes_of(self, chosen: Chosen) -> float:
        """Bytes a parameter of a choice."""
        return bytes_of(self.groups, chosen) / sum(one.elements for one in self.groups)

    def untimed(self, chosen: Chosen, facts: Mapping[str, Any]) -> FittedRecipe:
        """The recipe of a choice, with what its storages cost one by one."""
        choices = []
        for one in self.groups:
            at, is_idle = chosen[one.name], self._samples[one.name].is_idle
            now, narrower = one.frontier[at], one.frontier[at - 1] if at and not is_idle else None
            wider = one.frontier[at + 1] if at + 1 < len(one.frontier) and not is_idle else None
            choices.append(
                Choice(
                    exact_patterns(one.names, list(self._samples)), len(one.names), one.elements, now, narrower,
                    wider, self._reason(one, now, narrower),
                    _mean_pair([self._lost[name] for name in one.names if name in self._lost]),
                )
            )  # fmt: skip
        most = max(choices, key=lambda choice: choice.elements).chosen
        title = f"fitted to {facts['parameters']:,} parameters: {facts['limit']}"
        return FittedRecipe(
            "fitted", title, self._dtype, most.weights, most.states, optimizer=self._replay.optimizer,
            choices=tuple(choices), facts={**facts, "bytes": self.bytes_of(chosen)},
        )  # fmt: skip

    def recipe(
        self, chosen: Chosen, facts: Mapping[str, Any], device: torch.device, progress: Progress
    ) -> FittedRecipe:
        """The recipe of a choice, played all together, and timed."""
        progress("playing the choice", 0.0)
        together, made, choices = self.together(chosen), self.untimed(chosen, facts), []
        for number, (one, choice) in enumerate(zip(self.groups, made.choices, strict=True)):
            progress("timing steps", number / len(self.groups))
            now = replace(choice.chosen, noise=together[one.name].noise, loss=together[one.name].loss)
            # The choice was played with all others, its neighbors alone: what the others add is added to theirs.
            added = now.loss - choice.chosen.loss
            beside = {"narrower": choice.narrower, "wider": choice.wider}
            ways = {n: replace(k, loss=max(0.0, k.loss + added)) for n, k in beside.items() if k is not None}
            timed: dict[str, Any] = self._timed(one, {"chosen": now, **ways}, device)
            choices.append(replace(choice, **timed, reason=self._reason(one, now, ways.get("narrower"))))
        noise = total_noise([(choice.elements, choice.chosen.noise) for choice in choices])
        loss = sum(choice.chosen.loss for choice in choices)
        if (most := facts.get("tolerance")) is not None:
            made = replace(made, title=f"fitted to {facts['parameters']:,} parameters: {against(loss, most)}")
        return replace(made, choices=tuple(choices), facts={**made.facts, "noise": noise, "loss": loss})

    def _reason(self, one: Candidates, now: Kept, narrower: Kept | None) -> str:
        if self._samples[one.name].is_idle:
            return "not measured: the probe's sample of it had no gradient"
        small = "too few elements for narrow numbers; " if self._replay.is_small(one.name) else ""
        if narrower is None:
            return f"{small}the narrowest, which may move the loss by {_nats(now.loss)}"
        kept = " ".join([narrower.weights, *(f"{slot}:{name}" for slot, name in narrower.states.items())])
        return f"{small}may move the loss by {_nats(now.loss)}, {kept} by {_nats(narrower.loss)}"

    def _timed(self, one: Candidates, ways: Mapping[str, Kept], device: torch.device) -> dict[str, Any]:
        """Ways to keep parameters, with the milliseconds of their step: the median of a few, taken in turns.

        Of a large group only a part is stepped, and the time is scaled up to the whole.
        """
        samples, part = [], 0
        for name in one.names:
            samples.append(self._samples[name])
            part += self._samples[name].elements
            if part >= _TIMED_ELEMENTS:
                break
        steps = {
            name: self._replay.stepper(samples, kept.weights, kept.states, device) for name, kept in ways.items()
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(_TIMED + 2):  # the first ones compile
            for name, step in steps.items():
                seconds = step()
                if number >= 2:
                    times[name].append(seconds)
        scale = 1000 * one.elements / part
        return {name: replace(kept, ms=scale * statistics.median(times[name])) for name, kept in ways.items()}


def _nats(loss: float) -> str:
    return "less than 0.000001" if loss < 1e-6 else f"{loss:.6f}".rstrip("0").rstrip(".")


def _mean_pair(pairs: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    return (statistics.fmean(a for a, _ in pairs), statistics.fmean(b for _, b in pairs)) if pairs else None
