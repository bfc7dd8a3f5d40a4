"""Does a loss spike follow an RMS spike, and how likely is that by chance?

A loss spike *follows* an RMS spike if it starts one to eight steps after it. Of N steps that were judged some C
lie one to eight steps after an RMS spike. A loss spike that knew nothing of them would start at one of those
with the probability C / N, which is the figure that the paper gives. If k of L loss spikes followed, the
probability that at least as many do by chance is that of drawing at least k of the C when L of the N steps are
drawn, all sets of L steps being equally likely:

    P(at least k) = Σ_{j ≥ k}  (C over j) (N - C over L - j) / (N over L)

the tail of the hypergeometric distribution, computed in whole numbers. RMS spikes are taken as they are. That
loss spikes start 10 steps apart at least is left out. It makes many matches by chance a little rarer still:
with 10 RMS spikes in 2000 steps, 4 of 4 have the probability 1.4e-6 among the sets that keep the distance, and
2.4e-6 among all.

Source: Wortsman et al. 2023, Section 3.4 and Appendix E (Figures 15 and 16); the formula is ours.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from narrowgauge.gauges._spikes import _whole


@dataclass(frozen=True)
class SpikeMatch:
    """Which loss spikes follow an RMS spike. Several runs can be added.

    Attributes:
        pairs: for each loss spike its step, and that of the RMS spike it follows or None.
        steps: how many steps were judged; 0 if not said.
        covered: how many of those lie within reach after an RMS spike.
    """

    pairs: tuple[tuple[int, int | None], ...]
    steps: int = 0
    covered: int = 0

    @classmethod
    def total(cls, matches: Sequence[SpikeMatch]) -> SpikeMatch:
        """Several runs taken together, as the paper takes those of several β2.

        Raises:
            ValueError: for an empty list.
        """
        if not matches:
            raise ValueError("matches: got an empty list, takes at least one")
        # One run without its steps leaves the sum without a meaning.
        steps = sum(m.steps for m in matches) if all(m.steps for m in matches) else 0
        return cls(tuple(pair for m in matches for pair in m.pairs), steps, sum(m.covered for m in matches))

    @property
    def loss_spikes(self) -> int:
        """How many loss spikes there are."""
        return len(self.pairs)

    @property
    def followed(self) -> int:
        """How many of them follow an RMS spike."""
        return sum(rms is not None for _, rms in self.pairs)

    @property
    def chance(self) -> float:
        """Probability that one loss spike follows an RMS spike by chance: the share of the steps within reach.

        NaN if it is not known how many steps were judged.
        """
        return self.covered / self.steps if self.steps else math.nan

    @property
    def probability(self) -> float:
        """Probability that at least as many of the loss spikes as did follow an RMS spike by chance.

        1 if none followed; NaN if it is not known how many steps were judged.
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
        least, most: by how many steps, from 0 on. With 0 the same step counts.
        judged: the steps at which a loss spike could have been found, such as ``range(1001, 20001)`` for 20,000
            steps less a warm-up of 1,000. Without it there are no probabilities.

    Returns:
        For each loss spike, in order, the RMS spike that it follows (the nearest before it, of several), and
        the probability of such a match by chance.

    Raises:
        ValueError: for least above most, steps that are no whole numbers, loss spikes that are given twice, or
            a loss spike that is not among the steps judged.

    Source: Wortsman et al. 2023, Appendix E.
    """
    _whole("least", least, 0)
    if _whole("most", most, 0) < least:
        raise ValueError(f"most: got {most}, takes least={least} or more")
    rms = sorted({_whole("rms_spikes", step, 1) for step in rms_spikes})
    losses = sorted(_whole("loss_spikes", step, 1) for step in loss_spikes)
    if len(set(losses)) < len(losses):
        raise ValueError("loss_spikes: got the same step twice, takes each spike once")
    pairs = []
    for step in losses:
        place = bisect_right(rms, step - least)
        before = rms[place - 1] if place else None
        pairs.append((step, before if before is not None and step - before <= most else None))
    if judged is None:
        return SpikeMatch(tuple(pairs))
    if not isinstance(judged, range) or not judged:
        raise ValueError(f"judged: got {judged!r}, takes a range with at least one step")
    for step in losses:
        if step not in judged:
            raise ValueError(f"loss_spikes: got {step}, takes steps of judged={judged}")
    covered = {at for step in rms for at in range(step + least, step + most + 1) if at in judged}
    return SpikeMatch(tuple(pairs), len(judged), len(covered))
