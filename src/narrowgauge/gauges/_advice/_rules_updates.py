"""Rules about updates: are they too long, are they lost, does the second moment follow the gradient?

Thresholds are the papers' where a paper has one. Collage has none for the share of updates that may be lost, as its
figures compare runs: those thresholds are ours.
"""

from __future__ import annotations

import math

import numpy as np

from narrowgauge._text import listed
from narrowgauge.gauges._advice._rule import (
    Evidence,
    Finding,
    Rule,
    count,
    later_half,
    median,
    medians,
    percent,
    show,
)
from narrowgauge.gauges._history import History, as_number
from narrowgauge.gauges._spike_matching import REACH, RMS_THRESHOLD, find_precursors

# Ours. A model's update is off by a twentieth of its length, or a tensor's by a tenth: rounding of single elements
# averages out along an update, so storages that keep updates stay within a hundredth.
MODEL_QUALITY, TENSOR_QUALITY = 0.95, 0.9
# Ours. Counts of lost updates alone say little (a tensor can lose most of them and keep the large ones; stochastic
# rounding loses most on purpose). They count beside the quality, and alone only where a tensor loses all of them.
ALL_LOST = 0.999
VISIBLE_LOST, STORED_LOST = 0.1, 0.01
# Ours. RMS_t is about 1 where the second moment is an average of the gradient's square (SwitchBack, Section 3.4). A
# half means a moment four times too large, for half of the tensors at least, while gradients fell by less than a
# fifth.
STALE_RATIO, STALE_SHARE, STEADY_GRADIENT = 0.5, 0.5, 0.8


def rms_spikes(history: History) -> Finding | None:
    """RMS spikes: the second moment underestimates the gradient, and the update is too long."""
    found = find_precursors(history)
    peaks = {name: _peak(history, name) for name, steps in found.rms.items() if steps}
    if not peaks:
        return None
    # The paper found the relation to loss spikes in the embedding, and none in the middle of the network.
    evidence = sorted(peaks.values(), key=lambda e: (not history.is_embedding(e.name), -e.value, e.name))
    worst, followed = evidence[0], [step for step, (name, _) in found.matched.items() if name in peaks]
    clipped = history.clips_updates(worst.name)
    if clipped and not followed:
        return None
    if followed:
        name, before = found.matched[followed[0]]
        relation = f"{count(len(followed), 'loss spike')} of {len(found.loss)} followed one within {REACH} steps"
        relation += f" (step {followed[0]} after {name} at step {before})."
        if found.chance is not None:
            relation += f" The probability of so many by chance is {show(found.chance)}."
        evidence = [_loss_at(history, step) for step in followed] + evidence
    else:
        relation = "No loss spike has followed so far." if len(history.loss.steps) else "No losses were recorded."
        if not history.is_embedding(worst.name):
            relation += " In the paper only RMS spikes of embeddings preceded loss spikes."
    betas = history.group_of(worst.name).get("betas")
    beta2 = as_number(betas[1]) if isinstance(betas, list) and len(betas) == 2 else None
    values = {
        "worst": worst.name, "rms": show(worst.value), "step": worst.step, "threshold": show(RMS_THRESHOLD),
        "spikes": count(sum(map(len, found.rms.values())), "RMS spike"), "tensors": count(len(peaks), "tensor"),
        "relation": relation, "now": "" if beta2 is None else f" ({beta2:.15g} now)",
    }  # fmt: skip
    return Finding(evidence, values, "clipped" if clipped else "unclipped", mild=not followed)


def other_loss_spikes(history: History) -> Finding | None:
    """Loss spikes without an RMS spike before them. A loss that is not finite has a rule of its own."""
    found = find_precursors(history)
    evidence = [_loss_at(history, step) for step in found.loss if step not in found.matched]
    evidence = [e for e in evidence if math.isfinite(e.value)]
    if not evidence:
        return None

    def measured(step: int) -> bool:  # RMS_t of some tensor at each of the eight steps before
        wanted = set(range(max(1, step - REACH), step))
        return any(wanted <= set(history.series("update", "rms", name).steps.tolist()) for name in found.rms)

    unseen = sum(not measured(e.step) for e in evidence)
    values = {"spikes": count(len(evidence), "loss spike"), "first": evidence[0].step, "unseen": unseen}
    return Finding(evidence, values, "unseen" if unseen else "seen")


def lost_updates(history: History) -> Finding | None:
    """Updates that are rounded away in what is stored."""
    whole = medians(history, "update", "descent_quality", [""]).get("")
    quality, shares = (medians(history, "update", field) for field in ("descent_quality", "lost"))
    moving = {name for name in quality if median(later_half(history.series("update", "norm", name))) > 0}
    still = [name for name in sorted(moving & set(shares)) if shares[name].value >= ALL_LOST]
    low = [e for e in quality.values() if e.name in moving and e.value < TENSOR_QUALITY]
    low.sort(key=lambda e: (e.value, e.name))
    evidence = [Evidence("effective descent quality", e.name, e.step, e.value, TENSOR_QUALITY) for e in low]
    parts = []
    model_loses = whole is not None and whole.value < MODEL_QUALITY
    if whole is not None and model_loses:
        evidence.insert(0, Evidence("effective descent quality", "", whole.step, whole.value, MODEL_QUALITY))
        parts.append(f"Over the whole model {percent(whole.value)} of the update's length arrives along it.")
    if not evidence:
        return None
    if still:
        verb = "does" if len(still) == 1 else "do"
        parts.append(f"{listed(still)} {verb} not move at all: every update is lost.")
    others = [e.name for e in low if e.name not in still]
    if others:
        parts.append(f"Less than {percent(TENSOR_QUALITY)} arrives in {listed(others)}.")
    storages = sorted({storage for e in low if (storage := history.low_word_storage(e.name))})
    case = "alone" if len(low) < len(quality) and still and not others and not model_loses else "low words missing"
    if storages or _loses_only_visibly(history):
        case = "low words insufficient"
    values = {"parts": " ".join(parts), "storage": f" (weights='{storages[0]}')" if storages else ""}
    return Finding(evidence, values, case)


def _loses_only_visibly(history: History) -> bool:
    """Whether some update is lost to the model and not to what is stored: there are low words.

    For records of a run whose header has no groups.
    """
    if history.header.get("groups"):
        return False
    for name in ["", *history.names("update")]:
        stored, visible = (history.series("update", f, name).values for f in ("lost", "lost_visible"))
        if len(stored) == len(visible) and (visible > stored).any():
            return True
    return False


def updates_in_low_words(history: History) -> Finding | None:
    """Updates that the model does not see at once, and that are stored."""
    fields = ("lost", "lost_visible", "descent_quality")
    stored, visible, quality = (medians(history, "update", field, [""]).get("") for field in fields)
    if stored is None or visible is None or quality is None:
        return None
    if visible.value < VISIBLE_LOST or stored.value > STORED_LOST or quality.value < MODEL_QUALITY:
        return None
    evidence = [
        Evidence("lost updates, visible", "", visible.step, visible.value, VISIBLE_LOST),
        Evidence("lost updates, stored", "", stored.step, stored.value, STORED_LOST),
    ]
    return Finding(evidence, {"visible": percent(visible.value), "stored": percent(stored.value)})


def stale_second_moments(history: History) -> Finding | None:
    """A second moment that grows and no longer falls: beta2 rounded to 1, or a decay that is rounded away."""
    # RMS_t of embeddings alone, where updates are not measured, says nothing: rows without a token count as zeros.
    ratios = {
        name: e
        for name, e in medians(history, "update", "rms").items()
        if len(history.series("update", "norm", name).steps)
    }
    evidence = []
    for name, ratio in ratios.items():
        gradient = history.series("gradient", "mean", name).since(history.settled).finite
        if len(gradient.steps) < 4 or ratio.value > STALE_RATIO:
            continue
        middle = int(gradient.steps[len(gradient.steps) // 2])
        before, now = median(gradient.until(middle)), median(gradient.since(middle))
        if now >= STEADY_GRADIENT * before > 0:
            evidence.append(Evidence("RMS_t", name, ratio.step, ratio.value, STALE_RATIO))
    if not evidence or len(evidence) < STALE_SHARE * len(ratios):
        return None
    evidence.sort(key=lambda e: (e.value, e.name))
    values = {
        "threshold": show(STALE_RATIO), "number": len(evidence), "tensors": count(len(ratios), "tensor"),
        "lowest": evidence[0].name, "rms": show(evidence[0].value),
    }  # fmt: skip
    return Finding(evidence, values)


def _peak(history: History, name: str) -> Evidence:
    """The highest RMS_t of a tensor that has spikes; a spike may start at a lower value."""
    series = history.series("update", "rms", name).since(history.settled)
    at = int(np.nanargmax(series.values))
    return Evidence("RMS_t", name, int(series.steps[at]), float(series.values[at]), RMS_THRESHOLD)


def _loss_at(history: History, step: int) -> Evidence:
    series = history.loss
    return Evidence("loss", "", step, float(series.values[series.steps == step][-1]))


_KEEP_LOW_WORDS = (
    "Keep low words: weights='split8' or 'expansion' (Collage-light), or round with weights='stochastic'."
)

RULES = (
    Rule(
        "second moment out of date", "RMS_t >= 2.3; a change if a loss spike follows within 8 steps", rms_spikes,
        "{worst}'s RMS_t reached {rms} at step {step}; {spikes} of at least {threshold} in {tensors}. {relation}",
        {
            "unclipped": "Clip updates (ng.optim.StableAdamW, or clip_updates=True) or lower beta2{now}.",
            "clipped": "Updates are clipped already: lower beta2{now} or the learning rate.",
        },
        "SwitchBack, Sections 3.4 and 3.5, Appendix E", weight=3, mild=("watch", 1),
    ),
    Rule(
        "loss spikes of another cause", "loss spikes with no RMS spike in the 8 steps before", other_loss_spikes,
        {
            "seen": "{spikes} without an RMS spike in the 8 steps before, first at step {first}.",
            "unseen": "{spikes} without an RMS spike in the 8 steps before, first at step {first}. Before {unseen} "
            "of them RMS_t was not measured at every step, so an RMS spike may have been missed.",
        },
        {
            "seen": "Look at the data of these steps; lower the learning rate, or clip gradients to a norm of 1.",
            "unseen": "Measure RMS_t of embeddings at every step (rms_every=1): do RMS spikes come first?",
        },
        "SwitchBack, Sections 3.3 and 3.5, Appendix E", "watch",
    ),
    Rule(
        "lost updates", "effective descent quality < 0.95 (model), < 0.9 (tensor)", lost_updates,
        "{parts}",
        {
            "low words missing": _KEEP_LOW_WORDS,
            "alone": f"{_KEEP_LOW_WORDS} These tensors alone are enough, in a parameter group of their own.",
            "low words insufficient": "Low words are kept{storage} and do not suffice: use "
            "weights='split' or 'master'.",
        },
        "Collage, Sections 3.2 and 5.1, Definitions 3.2 and 3.3", weight=2,
    ),
    Rule(
        "updates wait in low words", "lost updates: visible >= 0.1, stored <= 0.01", updates_in_low_words,
        "{visible} of the updates do not show in the parameters at once, and {stored} are lost in what is stored: "
        "the low words hold them until they add up.",
        "Nothing needs to be done.",
        "Collage, Section 4.2 and Equation 2", "note",
    ),
    Rule(
        "second moment does not decay", "RMS_t <= 0.5 in half of the tensors while gradients do not fall",
        stale_second_moments,
        "RMS_t stays below {threshold} in {number} of {tensors} though their gradients have not fallen ({lowest}: "
        "{rms}): the second moment is too large, and steps are too small.",
        "A beta2 of 0.999 is 1 in bf16: keep the second moment as an expansion (Collage-plus), in 'log8' or fp32.",
        "Collage, Section 4.2 and Table 1", weight=1,
    ),
)  # fmt: skip
