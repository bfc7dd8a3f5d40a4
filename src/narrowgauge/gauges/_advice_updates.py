"""Advice about updates: are they too large, do they arrive, does the second moment follow?

Thresholds are the papers' where a paper has one. Collage gives none for what share of updates may be lost: its
figures compare runs. Those are ours, and said to be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from narrowgauge.gauges._advice import Advice, Evidence, count, habits, late, listed, median, percent, show, worst
from narrowgauge.gauges._history import History, as_number
from narrowgauge.gauges._precursors import RMS_THRESHOLD, Precursors, find_precursors
from narrowgauge.gauges._run_options import clips, group_of, low_words

# Ours. A model's update is off by a twentieth of its length, or a tensor's by a tenth: rounding of single elements
# averages out along an update, so that storages that keep updates stay within a hundredth.
MODEL_QUALITY = 0.95
TENSOR_QUALITY = 0.9
# Ours. Counts of lost updates alone say little (a tensor can lose most and keep the large ones; stochastic rounding
# loses most on purpose): they are looked at beside the quality, and alone only where all of a tensor's are lost.
ALL_LOST = 0.999
VISIBLE_LOST, STORED_KEPT = 0.1, 0.01
# Ours. RMS_t is about 1 where the second moment is an average of the gradient's square (SwitchBack, Section 3.4). A
# half means one four times too large, for half of the tensors at least, while gradients have not fallen by a fifth.
STALE_RATIO, STALE_SHARE, STEADY_GRADIENT = 0.5, 0.5, 0.8


def out_of_date(history: History) -> Iterator[Advice]:
    """RMS spikes: the second moment underestimates the gradient, and the update is too long."""
    found = find_precursors(history)
    peaks = {name: _peak(history, name) for name, steps in found.rms.items() if steps}
    if not peaks:
        return
    # The paper found the relation to loss spikes in the embedding, and none in the middle of the network.
    order = sorted(peaks.values(), key=lambda e: (not history.is_embedding(e.name), -e.value, e.name))
    first, total = order[0], sum(len(steps) for steps in found.rms.values())
    followed = [step for step, (name, _) in found.matched.items() if name in peaks]
    clipped = clips(history, first.name)
    if clipped and not followed:
        return
    text = f"{first.name}'s RMS_t reached {show(first.value)} at step {first.step}"
    text += f"; {count(total, 'RMS spike')} of at least {show(RMS_THRESHOLD)} in {count(len(peaks), 'tensor')}."
    evidence = [*order]
    if followed:
        pairs = [(found.matched[step], step) for step in followed]
        (name, before), step = pairs[0]
        text += f" {count(len(pairs), 'loss spike')} of {len(found.loss)} followed one within 8 steps"
        text += f" (step {step} after {name} at step {before})."
        if found.chance is not None:
            text += f" By chance alone so many would with a probability of {show(found.chance)}."
        evidence = [_loss_at(history, step) for step in followed] + evidence
    else:
        text += " No loss spike has followed so far." if len(history.loss.steps) else " No losses were recorded."
        if not history.is_embedding(first.name):
            text += (
                " In the paper's runs those of embeddings foretold loss spikes, and those of other layers did not."
            )
    action = "Clip updates (ng.optim.StableAdamW, or clip_updates=True) or lower beta2."
    if clipped:
        action = "Updates are clipped already: lower beta2 or the learning rate."
    beta2 = _beta2(history, first.name)
    if beta2 is not None:
        action = action.replace("lower beta2", f"lower beta2 ({beta2:.15g} now)")
    yield Advice(
        "second moment out of date", "change" if followed else "watch", text, action,
        "SwitchBack, Sections 3.4 and 3.5, Appendix E", worst(evidence), weight=3 if followed else 1,
    )  # fmt: skip


def unexplained(history: History) -> Iterator[Advice]:
    """Loss spikes without an RMS spike before them; a loss that is not finite has a rule of its own."""
    found = find_precursors(history)
    alone = [
        step for step in found.loss if step not in found.matched and math.isfinite(_loss_at(history, step).value)
    ]
    if not alone:
        return
    text = (
        f"{count(len(alone), 'loss spike')} without an RMS spike in the 8 steps before, first at step {alone[0]}."
    )
    unseen = [step for step in alone if not _seen(history, found, step)]
    if unseen:
        text += (
            f" Before {len(unseen)} of them RMS_t was not measured at every step, so that one may have been missed."
        )
        action = "Measure RMS_t of embeddings at every step (rms_every=1) to see whether spikes of it precede them."
    else:
        action = "Look at the data of these steps; lower the learning rate, or clip gradients to a norm of 1."
    evidence = [_loss_at(history, step) for step in alone]
    source = "SwitchBack, Sections 3.3 and 3.5, Appendix E"
    yield Advice("loss spikes of another cause", "watch", text, action, source, worst(evidence))


def lost(history: History) -> Iterator[Advice]:
    """Updates that are rounded away in what is stored."""
    whole = habits(history, "update", "descent_quality", [""]).get("")
    quality = habits(history, "update", "descent_quality")
    shares = habits(history, "update", "lost")
    moving = {name for name in quality if median(late(history.series("update", "norm", name))) > 0}
    still = [shares[name] for name in sorted(moving & set(shares)) if shares[name].value >= ALL_LOST]
    low = sorted(
        (e for e in quality.values() if e.name in moving and e.value < TENSOR_QUALITY),
        key=lambda e: (e.value, e.name),
    )
    bad = whole is not None and whole.value < MODEL_QUALITY
    if not (bad or low):
        return
    parts = []
    if whole is not None and bad:
        parts.append(f"Over the whole model {percent(whole.value)} of the update's length arrives along it.")
    if still:
        names = [e.name for e in still]
        parts.append(
            f"{listed(names)} {'does' if len(names) == 1 else 'do'} not move at all: every update is lost."
        )
    others = [e.name for e in low if e.name not in {e.name for e in still}]
    if others:
        parts.append(f"Less than {percent(TENSOR_QUALITY)} arrives in {listed(others)}.")
    evidence = [Evidence("effective descent quality", e.name, e.step, e.value, TENSOR_QUALITY) for e in low]
    if whole is not None and bad:
        evidence.insert(0, Evidence("effective descent quality", "", whole.step, whole.value, MODEL_QUALITY))
    action = "Keep low words: weights='split8' or 'expansion' (Collage-light), or round with weights='stochastic'."
    kept = sorted({words for e in low if (words := low_words(history, e.name))})
    if kept or has_low_words(history):
        which = f" (weights='{kept[0]}')" if kept else ""
        action = f"Low words are kept{which} and do not suffice: take weights='split' or 'master'."
    elif len(low) < len(quality) and still and not others and not bad:
        action += " The tensors named alone would do, in a parameter group of their own."
    yield Advice(
        "lost updates", "change", " ".join(parts), action, "Collage, Sections 3.2 and 5.1, Definitions 3.2 and 3.3",
        worst(evidence), weight=2,
    )  # fmt: skip


def visible_only(history: History) -> Iterator[Advice]:
    """Updates that the model does not see at once and that are kept all the same."""
    shares = {f: habits(history, "update", f, [""]).get("") for f in ("lost", "lost_visible", "descent_quality")}
    stored, visible, quality = shares.values()
    if stored is None or visible is None or quality is None:
        return
    if visible.value < VISIBLE_LOST or stored.value > STORED_KEPT or quality.value < MODEL_QUALITY:
        return
    yield Advice(
        "updates wait in low words", "note",
        f"{percent(visible.value)} of the updates do not show in the parameters at once, and "
        f"{percent(stored.value)} are lost in what is stored: they wait in the low words until they add up.",
        "Nothing is to be done.",
        "Collage, Section 4.2 and Equation 2",
        (
            Evidence("lost updates, visible", "", visible.step, visible.value, VISIBLE_LOST),
            Evidence("lost updates, stored", "", stored.step, stored.value, STORED_KEPT),
        ),
    )  # fmt: skip


def frozen_moment(history: History) -> Iterator[Advice]:
    """A second moment that grows and no longer falls: beta2 rounded to 1, or decay that is rounded away."""
    # Of embeddings alone, as where updates are not measured, it says nothing: rows without a token count as zeros.
    ratios = habits(history, "update", "rms")
    ratios = {name: e for name, e in ratios.items() if len(history.series("update", "norm", name).steps)}
    stale = []
    for name, ratio in ratios.items():
        gradient = history.series("gradient", "mean", name).since(history.settled).finite
        if len(gradient.steps) < 4 or ratio.value > STALE_RATIO:
            continue
        middle = int(gradient.steps[len(gradient.steps) // 2])
        before, now = median(gradient.until(middle)), median(gradient.since(middle))
        if now >= STEADY_GRADIENT * before > 0:
            stale.append(Evidence("RMS_t", name, ratio.step, ratio.value, STALE_RATIO))
    if not stale or len(stale) < STALE_SHARE * len(ratios):
        return
    stale.sort(key=lambda e: (e.value, e.name))
    yield Advice(
        "second moment does not decay", "change",
        f"RMS_t stays below {show(STALE_RATIO)} in {len(stale)} of {count(len(ratios), 'tensor')} though "
        f"their gradients have not fallen ({stale[0].name}: {show(stale[0].value)}): the second moment is "
        "too large, and steps are too small.",
        "A beta2 of 0.999 is 1 in bf16: keep the second moment as an expansion (Collage-plus), in 'log8' or "
        "fp32.",
        "Collage, Section 4.2 and Table 1", worst(stale), weight=1,
    )  # fmt: skip


def has_low_words(history: History) -> bool:
    """Whether more is stored than the model sees: somewhere an update is lost to it and not to what is stored.

    What a header without groups leaves to be guessed.
    """
    if history.header.get("groups"):
        return False
    for name in ["", *history.names("update")]:
        stored, visible = (history.series("update", f, name).values for f in ("lost", "lost_visible"))
        if len(stored) == len(visible) and (visible > stored).any():
            return True
    return False


def _beta2(history: History, name: str) -> float | None:
    betas = group_of(history, name).get("betas")
    return as_number(betas[1]) if isinstance(betas, list) and len(betas) == 2 else None


def _peak(history: History, name: str) -> Evidence:
    """The highest RMS_t of a tensor that has spikes; a spike starts lower."""
    series = history.series("update", "rms", name).since(history.settled)
    at = int(np.nanargmax(series.values))
    return Evidence("RMS_t", name, int(series.steps[at]), float(series.values[at]), RMS_THRESHOLD)


def _loss_at(history: History, step: int) -> Evidence:
    series = history.loss
    return Evidence("loss", "", step, float(series.values[series.steps == step][-1]), None)


def _seen(history: History, found: Precursors, step: int) -> bool:
    """Whether RMS_t was measured at each of the eight steps before, in some tensor."""
    wanted = set(range(max(1, step - 8), step))
    return any(wanted <= set(history.series("update", "rms", name).steps.tolist()) for name in found.rms)
