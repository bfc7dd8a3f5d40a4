"""The spikes of a recorded run, and which loss spikes had an RMS spike before them.

The paper found that loss spikes follow RMS spikes of the embedding, and that those of a layer in the middle tell
nothing (Figure 20). So a loss spike is matched with RMS spikes of embeddings, where RMS_t of any is recorded; with
those of all tensors else. What a run judges starts later than its first step: the start is left out, and a loss has
to have a hundred before it.

Source: SwitchBack, Section 3.4 and Appendix E.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.gauges._history import History, Series
from narrowgauge.gauges._matches import match_spikes
from narrowgauge.gauges._spikes import LossSpikes, RmsSpikes, find_rms_spikes, find_spikes

RMS_THRESHOLD = RmsSpikes().threshold
LOSS_DEVIATIONS = LossSpikes().deviations
LOSS_WINDOW = LossSpikes().window
# How many steps after an RMS spike a loss spike is looked for.
REACH = 8


@dataclass(frozen=True)
class Precursors:
    """Spikes of a run.

    Attributes:
        loss: steps at which loss spikes start.
        rms: the same of RMS_t, for each parameter of which it is recorded.
        matched: for a loss spike that follows an RMS spike, that one's tensor and step.
        chance: the probability that at least as many follow by chance; None if none did or nothing was judged.
        judged: the steps at which a loss spike could have been found; None if there were none yet.
    """

    loss: list[int]
    rms: dict[str, list[int]]
    matched: dict[int, tuple[str, int]]
    chance: float | None
    judged: range | None


def find_precursors(history: History) -> Precursors:
    """The spikes of what was recorded so far; worked out once for as long as nothing is added."""
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
    tellers = [name for name in rms if history.is_embedding(name)] or list(rms)
    at = {step: name for name in reversed(tellers) for step in rms[name]}
    judged = _judged(series, warmup)
    match = match_spikes(list(at), loss, most=REACH, judged=judged)
    matched = {step: (at[before], before) for step, before in match.pairs if before is not None}
    return Precursors(loss, rms, matched, match.probability if matched and judged else None, judged)


def _judged(series: Series, warmup: int) -> range | None:
    if len(series.steps) <= LOSS_WINDOW:
        return None
    return range(max(warmup + 1, int(series.steps[LOSS_WINDOW])), int(series.steps[-1]) + 1) or None
