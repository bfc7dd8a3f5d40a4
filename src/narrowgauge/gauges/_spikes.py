"""Spikes: when a loss jumps, and when RMS_t does.

AdamW divides by the root of a second moment that looks back 1 / (1 - β2) steps. When the gradient of a tensor grows
faster than that, the update is too long. RMS_t = sqrt(mean of g² / max(u, ε²)) shows by how much at the same step,
and the loss follows one to eight steps later. So an RMS spike of the embedding is a warning. The paper's
heuristics:

- A step *deviates* if its loss is above the running mean by 3.2 running standard deviations, or if its RMS_t is at
  least 2.3.
- The first 1000 steps are not judged: the learning rate is low there.
- All deviations within 10 steps from a first one are one spike, which starts at the first.
- A loss spike needs more than one deviation in its 10 steps. RMS_t is not noisy: one is enough.

What the paper leaves open is fixed as follows. The running mean and deviation are those of the `window` losses
before the step, without the step itself (one of 100 values cannot deviate from them by more than 9.95 deviations),
and nothing is judged before there are as many. After a lasting jump the window adapts within a share of 1 / (1 +
3.2²) of its length: 9 of 100 steps, so a jump is one spike. The 10 steps are counted from a spike's first
deviation, so RMS_t that stays high is a spike every 10 steps.

Everything is decided from the past, one value at a time. So `LossSpikes` and `RmsSpikes`, fed during training, find
what `find_spikes` and `find_rms_spikes` find of the same values. The first deviation of the loss starts a spike
only if a second one comes, up to 9 steps later.

Source: Wortsman et al. 2023, Section 3.4 and Appendix E.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from narrowgauge._arguments import Count, Positive, Size, check


@dataclass(frozen=True)
class Spike:
    """One event.

    Attributes:
        step: where it starts, its first deviation.
        seen: the step at which it is known. The same for RMS_t; up to ``merge - 1`` later for a loss.
        value: the loss or RMS_t at `step`.
        threshold: what that value was above.
    """

    step: int
    seen: int
    value: float
    threshold: float


class _Events:
    """Turns deviations at rising steps into spikes: at least `needs` of them in `merge` steps."""

    def __init__(self, warmup: int, merge: int, needs: int) -> None:
        self.warmup = check("warmup", warmup, Count)
        self.merge = check("merge", merge, Size)
        self.needs = check("needs", needs, Size)
        if needs > merge:
            raise ValueError(f"needs must be at most merge={merge}, the steps of a spike, got {needs}")
        self._last = 0  # the last step that was given
        self._until = 0  # steps before this one belong to a spike that is known
        self._pending: list[tuple[int, float, float]] = []

    def next_step(self, step: int | None) -> int:
        """The given step, or the one after the last."""
        step = self._last + 1 if step is None else operator.index(step)
        if step <= self._last:
            raise ValueError(f"step must rise, got {step} after {self._last}")
        self._last = step
        return step

    def deviation(self, step: int, value: float, threshold: float) -> Spike | None:
        """Add a step that deviates; the spike that it completes, if any."""
        if step <= self.warmup or step < self._until:
            return None
        self._pending = [at for at in self._pending if at[0] > step - self.merge] + [(step, value, threshold)]
        if len(self._pending) < self.needs:
            return None
        first, value, threshold = self._pending[0]
        self._until = first + self.merge
        self._pending.clear()
        return Spike(first, step, value, threshold)


class LossSpikes:
    """Loss spikes while training, one value at a time.

    A loss of NaN or plus infinity deviates. No loss that is not finite enters the running mean.

    Args:
        deviations: how many standard deviations above the mean a loss deviates, above 0.
        warmup: steps up to this one are not judged; their losses enter the running mean.
        merge: deviations within so many steps, the first included, are one spike.
        window: over how many losses before the step mean and standard deviation are taken, at least 2.
        needs: how many deviations make a spike. Where losses are given every k steps only, ``merge`` must be
            above ``k * (needs - 1)``, or no spike can be found.

    Raises:
        ValueError: for arguments out of these ranges.

    Source: Wortsman et al. 2023, Appendix E.
    """

    def __init__(
        self, deviations: float = 3.2, warmup: int = 1000, merge: int = 10, window: int = 100, needs: int = 2
    ) -> None:
        self.deviations = check("deviations", deviations, Positive)
        if check("window", window, Size) < 2:
            raise ValueError(f"window must be at least 2, got {window}")
        self.window = window
        self._events = _Events(warmup, merge, needs)
        self._past: deque[float] = deque(maxlen=window)

    def add(self, loss: float, step: int | None = None) -> Spike | None:
        """Add the loss of a step.

        Args:
            loss: the loss.
            step: counted from 1; by default the one after the last.

        Returns:
            The spike that this loss completes, or None.

        Raises:
            ValueError: for a step that is not after the last.
        """
        loss, step = float(loss), self._events.next_step(step)
        threshold = self._threshold() if len(self._past) == self.window else math.nan
        # NaN fails both comparisons: before the window is full nothing is judged, and a loss of NaN deviates.
        judged = not math.isnan(threshold)
        deviates = judged and (loss > threshold or not loss < math.inf)
        if math.isfinite(loss):
            self._past.append(loss)
        return self._events.deviation(step, loss, threshold) if deviates else None

    def _threshold(self) -> float:
        past = list(self._past)
        # fsum rounds once and dist scales its terms: a loss of 1e300 leaves no error once it is out of the window.
        mean = math.fsum(value / len(past) for value in past)
        return mean + self.deviations * (math.dist(past, [mean] * len(past)) / math.sqrt(len(past)))


class RmsSpikes:
    """Spikes of RMS_t of one tensor while training, one value at a time.

    Args:
        threshold: from which RMS_t on, above 0.
        warmup: steps up to this one are not judged.
        merge: values within so many steps, the first included, are one spike.

    Raises:
        ValueError: for arguments out of these ranges.

    Source: Wortsman et al. 2023, Appendix E.
    """

    def __init__(self, threshold: float = 2.3, warmup: int = 1000, merge: int = 10) -> None:
        self.threshold = check("threshold", threshold, Positive)
        self._events = _Events(warmup, merge, needs=1)

    def add(self, rms: float, step: int | None = None) -> Spike | None:
        """Add RMS_t of a step; NaN (a rule without second moment) is no spike, infinity is one.

        Returns:
            The spike that starts here, or None.

        Raises:
            ValueError: for a step that is not after the last.
        """
        rms, step = float(rms), self._events.next_step(step)
        return self._events.deviation(step, rms, self.threshold) if rms >= self.threshold else None


def find_spikes(
    losses: Sequence[float],
    deviations: float = 3.2,
    warmup: int = 1000,
    merge: int = 10,
    window: int = 100,
    needs: int = 2,
    steps: Sequence[int] | None = None,
) -> list[int]:
    """The steps at which loss spikes start.

    Args:
        losses: the losses of a run, in order.
        deviations, warmup, merge, window, needs: as in `LossSpikes`: `warmup` and `merge` count steps, `window`
            and `needs` count losses.
        steps: the step of each loss, rising, where not every step has one; 1, 2, 3, ... by default.

    Returns:
        Steps, rising, at least `merge` apart. Those of the first losses are what this function finds of them
        alone.

    Raises:
        ValueError: for steps that do not rise or are not as many, and as `LossSpikes`.

    Source: Wortsman et al. 2023, Appendix E.
    """
    watch = LossSpikes(deviations, warmup, merge, window, needs)
    found = (watch.add(loss, step) for step, loss in _with_steps("losses", losses, steps))
    return [spike.step for spike in found if spike is not None]


def find_rms_spikes(
    values: Sequence[float],
    threshold: float = 2.3,
    warmup: int = 1000,
    merge: int = 10,
    steps: Sequence[int] | None = None,
) -> list[int]:
    """The steps at which spikes of RMS_t start.

    Args:
        values: RMS_t of one tensor, in order.
        threshold, warmup, merge: as in `RmsSpikes`.
        steps: the step of each value, rising, where not every step has one; 1, 2, 3, ... by default.

    Returns:
        Steps, rising, at least `merge` apart.

    Raises:
        ValueError: for steps that do not rise or are not as many, and as `RmsSpikes`.

    Source: Wortsman et al. 2023, Appendix E.
    """
    watch = RmsSpikes(threshold, warmup, merge)
    found = (watch.add(value, step) for step, value in _with_steps("values", values, steps))
    return [spike.step for spike in found if spike is not None]


def _with_steps(
    name: str, values: Sequence[float], steps: Sequence[int] | None
) -> Iterator[tuple[int | None, float]]:
    if steps is None:
        return ((None, value) for value in values)
    if len(steps) != len(values):
        raise ValueError(f"steps must have one step for each of the {len(values)} {name}, got {len(steps)}")
    return zip(steps, values, strict=True)
