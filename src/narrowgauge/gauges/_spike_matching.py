"""Does a loss spike follow an RMS spike, and how likely is that by chance?

A loss spike *follows* an RMS spike if it starts one to eight steps after it. Of N judged steps, C are one to eight
steps after an RMS spike. A loss spike at a random step is among those with probability C / N, the paper's figure.
If k of L loss spikes followed, the probability of at least as many by chance is that of drawing at least k of the C
when L of the N steps are drawn, all sets of L steps being equally likely:

    P(at least k) = Σ_{j ≥ k}  (C over j) (N - C over L - j) / (N over L)

the tail of the hypergeometric distribution, computed in integers. That loss spikes start at least 10 steps apart is
left out. It makes many matches by chance a little rarer still: with 10 RMS spikes in 2000 steps, 4 of 4 have the
probability 1.4e-6 among the sets with that distance, and 2.4e-6 among all.

The paper found that loss spikes follow RMS spikes of the embedding, and that those of a layer in the middle predict
nothing (Figure 20). So in a recorded run a loss spike is matched with RMS spikes of embeddings; with those of all
tensors if no embedding's RMS_t is recorded.

Source: Wortsman et al. 2023 (SwitchBack), Section 3.4 and Appendix E (Figures 15 and 16); the formula is ours.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from narrowgauge._arguments import Count, check
from narrowgauge.gauges._history import History
from narrowgauge.gauges._spikes import LossSpikes, RmsSpikes, find_rms_spikes, find_spikes

RMS_THRESHOLD = RmsSpikes().threshold
LOSS_DEVIATIONS, LOSS_WINDOW = LossSpikes().deviations, LossSpikes().window
MERGE = 10  # steps of a loss spike
REACH = 8  # steps after an RMS spike in which a loss spike follows it


@dataclass(frozen=True)
class SpikeMatch:
    """Which loss spikes follow an RMS spike. Several runs can be added.

    Attributes:
        pairs: for each loss spike its step, and that of the RMS spike it follows or None.
        steps: number of judged steps; 0 if not known.
        covered: how many of those are within reach after an RMS spike.
    """

    pairs: tuple[tuple[int, int | None], ...]
    steps: int = 0
    covered: int = 0

    @classmethod
    def total(cls, matches: Sequence[SpikeMatch]) -> SpikeMatch:
        """The sum of several runs, as the paper adds those of several β2.

        Raises:
            ValueError: for an empty list.
        """
        if not matches:
            raise ValueError("matches must not be empty")
        # If one run's steps are not known, their sum is not known.
        steps = sum(m.steps for m in matches) if all(m.steps for m in matches) else 0
        return cls(tuple(pair for m in matches for pair in m.pairs), steps, sum(m.covered for m in matches))

    @property
    def loss_spikes(self) -> int:
        """Number of loss spikes."""
        return len(self.pairs)

    @property
    def followed(self) -> int:
        """How many of them follow an RMS spike."""
        return sum(rms is not None for _, rms in self.pairs)

    @property
    def chance(self) -> float:
        """Probability that one loss spike follows an RMS spike by chance: the share of the steps within reach.

        NaN if `steps` is 0.
        """
        return self.covered / self.steps if self.steps else math.nan

    @property
    def probability(self) -> float:
        """Probability that by chance at least as many loss spikes follow an RMS spike as did.

        1 if none followed; NaN if `steps` is 0.
        """
        if not self.steps:
            return math.nan
        others, drawn = self.steps - self.covered, self.loss_spikes
        ways = sum(
            math.comb(self.covered, j) * math.comb(others, drawn - j) for j in range(self.followed, drawn + 1)
        )
        return float(Fraction(ways, math.comb(self.steps, drawn)))


def match_spikes(
    rms_spikes: Sequence[int],
    loss_spikes: Sequence[int],
    least: int = 1,
    most: int = 8,
    judged: range | None = None,
) -> SpikeMatch:
    """Which loss spikes follow which RMS spikes.

    Args:
        rms_spikes: steps of `find_rms_spikes`, in any order.
        loss_spikes: steps of `find_spikes`.
        least, most: range of the distance in steps, at least 0. With 0 the same step counts.
        judged: the steps at which a loss spike could have been found, such as ``range(1001, 20001)`` for 20,000
            steps less a warm-up of 1,000. Without it there are no probabilities.

    Returns:
        For each loss spike, in order, the RMS spike that it follows, the nearest one before it; and the probability
        of such a match by chance.

    Raises:
        TypeError: for steps that are no integers.
        ValueError: for `least` above `most`, loss spikes given twice, or a loss spike that is not in `judged`.

    Source: Wortsman et al. 2023, Appendix E.
    """
    if check("most", most, Count) < check("least", least, Count):
        raise ValueError(f"most must be at least least={least}, got {most}")
    rms, losses = sorted(set(map(operator.index, rms_spikes))), sorted(map(operator.index, loss_spikes))
    if len(set(losses)) < len(losses):
        raise ValueError("loss_spikes must be different steps")
    pairs = []
    for step in losses:
        place = bisect_right(rms, step - least)
        before = rms[place - 1] if place else None
        pairs.append((step, before if before is not None and step - before <= most else None))
    if judged is None:
        return SpikeMatch(tuple(pairs))
    outside = [step for step in losses if step not in judged]
    if outside:
        raise ValueError(f"loss_spikes must be in judged={judged}, got {outside[0]}")
    covered = {near for step in rms for near in range(step + least, step + most + 1) if near in judged}
    return SpikeMatch(tuple(pairs), len(judged), len(covered))


@dataclass(frozen=True)
class Precursors:
    """The spikes of a recorded run.

    Attributes:
        loss: steps at which loss spikes start.
        rms: by parameter, steps at which RMS spikes start.
        matched: for a loss spike that follows an RMS spike, that spike's tensor and step.
        within: for any other loss spike in whose 10 steps an RMS spike starts, the first one's tensor and step.
        chance: the probability that at least as many follow by chance; None if none did.
        judged: the steps at which a loss spike could have been found; None if there are none yet.
    """

    loss: list[int]
    rms: dict[str, list[int]]
    matched: dict[int, tuple[str, int]]
    within: dict[int, tuple[str, int]]
    chance: float | None
    judged: range | None


def find_precursors(history: History) -> Precursors:
    """The spikes of the records so far; computed once as long as no record is added."""
    if "precursors" not in history.memo:
        history.memo["precursors"] = _find(history)
    found: Precursors = history.memo["precursors"]
    return found


def _find(history: History) -> Precursors:
    warmup, series = history.settled - 1, history.loss
    loss = find_spikes(series.values.tolist(), warmup=warmup, steps=series.steps.tolist())
    rms = {}
    for name in history.names("update"):
        values = history.series("update", "rms", name)
        if len(values.steps):
            rms[name] = find_rms_spikes(values.values.tolist(), warmup=warmup, steps=values.steps.tolist())
    predictors = [name for name in rms if history.is_embedding(name)] or list(rms)
    at = {step: name for name in reversed(predictors) for step in rms[name]}
    judged = None
    if len(series.steps) > LOSS_WINDOW:
        judged = range(max(warmup + 1, int(series.steps[LOSS_WINDOW])), int(series.steps[-1]) + 1) or None
    match = match_spikes(list(at), loss, most=REACH, judged=judged)
    matched = {step: (at[before], before) for step, before in match.pairs if before is not None}
    # Of any tensor: what a batch does to loss and gradients at once is no question of what comes first.
    every = {step: name for name in reversed([*predictors, *rms]) for step in rms[name]}
    within = {}
    for step in loss:
        during = [at for at in range(step, step + MERGE) if at in every]
        if during and step not in matched:
            within[step] = every[during[0]], during[0]
    return Precursors(loss, rms, matched, within, match.probability if matched and judged else None, judged)
