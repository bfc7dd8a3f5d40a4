"""Spikes: when a loss jumps, when RMS_t does, and whether the one follows the other.

AdamW divides by the root of a second moment that looks back 1 / (1 - β2) steps. When the gradient of a tensor
grows faster than that, the update is too long, RMS_t = sqrt(mean of g² / max(u, ε²)) says by how much at the
same step, and one to eight steps later the loss follows. So an RMS spike of the embedding is a warning, and
here are the paper's heuristics for both kinds of events:

- A step *deviates* if its loss lies above the running mean by 3.2 running standard deviations, or if its RMS_t
  is 2.3 or more.
- The first 1000 steps are not judged: the learning rate is low there.
- All deviations within 10 steps from a first one are one spike, which starts at the first.
- A loss spike needs more than one deviation in its 10 steps. RMS_t is not noisy: there one is enough.

What the paper leaves open is fixed like this. The running mean and deviation are those of the `window` losses
before the step, itself not among them (a value cannot deviate from 100 values by more than 9.95 deviations if
it is one of them), and nothing is judged before there are as many. After a lasting jump the window takes the
new level for normal within a share of 1 / (1 + 3.2²) of its length: 9 of 100 steps, so that a jump is one spike
and not several. The 10 steps are counted from a spike's first, so RMS_t that stays high is a spike every 10
steps.

Everything is decided from the past, one value at a time. So `LossSpikes` and `RmsSpikes`, which are fed while
training, find what `find_spikes` and `find_rms_spikes` find of the same values, at any moment. What cannot be
known earlier is whether a first deviation of the loss starts a spike: the second decides it, up to 9 steps
later.

Source: Wortsman et al. 2023, Section 3.4 and Appendix E.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


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
    """Deviations of a rising sequence of steps, made into spikes: at least `needs` of them in `merge` steps."""

    def __init__(self, warmup: int, merge: int, needs: int) -> None:
        self.warmup = _whole("warmup", warmup, 0)
        self.merge = _whole("merge", merge, 1)
        self.needs = _whole("needs", needs, 1)
        if needs > merge:
            raise ValueError(f"needs: got {needs}, takes 1 to merge={merge}, the steps of a spike")
        self._last = 0  # the last step that was given
        self._until = 0  # steps before this one belong to a spike that is known
        self._pending: list[tuple[int, float, float]] = []

    def next_step(self, step: int | None) -> int:
        """The step of a value: as given, or one after the last."""
        step = self._last + 1 if step is None else step
        if _whole("step", step, 1) <= self._last:
            raise ValueError(f"step: got {step} after {self._last}, takes steps that rise")
        self._last = step
        return step

    def deviation(self, step: int, value: float, threshold: float) -> Spike | None:
        """Take a step that deviates; the spike, if this one makes it known."""
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
        self.deviations = _positive("deviations", deviations)
        self.window = _whole("window", window, 2)
        self._events = _Events(warmup, merge, needs)
        self._past: deque[float] = deque(maxlen=window)

    def add(self, loss: float, step: int | None = None) -> Spike | None:
        """Take the loss of a step.

        Args:
            loss: the loss.
            step: counted from 1; by default the one after the last.

        Returns:
            A spike that this loss makes known, once each; else None.

        Raises:
            ValueError: for a step that is not after the last.
        """
        loss, step = float(loss), self._events.next_step(step)
        threshold = self._threshold() if len(self._past) == self.window else math.nan
        # Two comparisons that NaN fails, each to its side: before the window is full nothing is judged, and a
        # loss that is no number deviates.
        judged = not math.isnan(threshold)
        deviates = judged and (loss > threshold or not loss < math.inf)
        if math.isfinite(loss):
            self._past.append(loss)
        return self._events.deviation(step, loss, threshold) if deviates else None

    def _threshold(self) -> float:
        past = list(self._past)
        # fsum rounds once and dist scales by itself: a loss of 1e300 in the window leaves nothing behind.
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
        self.threshold = _positive("threshold", threshold)
        self._events = _Events(warmup, merge, needs=1)

    def add(self, rms: float, step: int | None = None) -> Spike | None:
        """Take RMS_t of a step; NaN (a rule without second moment) is no spike, infinity is one.

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
        raise ValueError(f"steps: got {len(steps)} for {len(values)} {name}, takes one for each")
    return zip(steps, values, strict=True)


def _whole(name: str, got: int, least: int) -> int:
    if not isinstance(got, int) or isinstance(got, bool) or got < least:
        raise ValueError(f"{name}: got {got!r}, takes a whole number from {least} on")
    return got


def _positive(name: str, got: float) -> float:
    if not 0 < got < math.inf:
        raise ValueError(f"{name}: got {got!r}, takes a number above 0")
    return float(got)
