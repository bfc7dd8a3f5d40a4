"""The rules of advice: each looks for one sign of trouble in a run's history.

A rule compares a measured number with a threshold. If the number crosses it, the rule says in one sentence what it
found, in another what to do, and names the finding of a paper that it rests on. `RULES`, at the end, is the list.

Thresholds are the papers' where a paper has one, and ours otherwise, with the reason beside them. Collage has none
for the share of updates that may be lost, as its figures compare runs. What a tensor would lose in float8 is no
fault of a run in wider formats: the report's figure shows it, and advice is for runs whose layers multiply in
float8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from narrowgauge._text import listed
from narrowgauge.gauges._history import STOCHASTIC, History, Series, as_number
from narrowgauge.gauges._spike_matching import REACH, RMS_THRESHOLD, find_precursors

Urgency = Literal["change", "watch", "note"]

MIN_MEASUREMENTS = 3  # a median of fewer measurements is not compared with a threshold
# Ours. A flat loss with a standard deviation of a tenth stays a fifth above its first value for half of a run in
# less than one run of a hundred. Near zero a fifth is little, so the rise is at least a tenth of what was learned.
LOSS_RISE, LEARNED_SHARE, MIN_LOSSES = 0.2, 0.1, 20
# Ours. A tensor is a culprit if it is in 80% of the steps with inf or NaN, and culprits are few if they are at most
# a quarter of the tensors. SwitchBack never saw one beyond block 0.
CULPRIT_SHARE, FEW_SHARE = 0.8, 0.25
# A scaler doubles after 2000 steps without inf or NaN and halves at each (SwitchBack, Section 2.1): one that halves
# more often than once in 2000 steps falls. The first three halvings find the scale.
GROWTH_INTERVAL, FIRST_DROPS = 2000, 3
# Ours: SwitchBack's Figure 2 shows the growth and gives no number.
FEATURE_GROWTH, MIN_BLOCKS = 4.0, 3
# Ours.
FLOAT8_LOSSES = {"underflow": 0.1, "overflow": 0.001}
# Ours. Block-wise dynamic codes of a normal's moments are off by 0.01 to 0.03 of their norm. An element of v that
# rounds to zero is divided by eps alone.
STATE_ERROR, FLUSHED = 0.1, 0.01
# Ours. A model's update is off by a twentieth of its length, or a tensor's by a tenth: rounding of single elements
# averages out along an update, so storages that keep updates stay within a hundredth.
MODEL_QUALITY, TENSOR_QUALITY = 0.95, 0.9
# Ours. Counts of lost updates alone say little (a tensor can lose most of them and keep the large ones; stochastic
# rounding loses most on purpose). They count beside the quality, and alone only where a tensor loses all of them.
ALL_LOST = 0.999
SKIPPED = "skipped steps"  # what an alarm is of when a scaler skips many steps in a row
VISIBLE_LOST, STORED_LOST = 0.1, 0.01
# Ours. RMS_t is about 1 where the second moment is an average of the gradient's square (SwitchBack, Section 3.4). A
# half means a moment four times too large, for half of the tensors at least, while gradients fell by less than a
# fifth.
STALE_RATIO, STALE_SHARE, STEADY_GRADIENT = 0.5, 0.5, 0.8

_KEEP_LOW_WORDS = "Keep low words: weights='split8' or 'expansion' (Collage-light)"
_NOT_LOST = "Collage, Definition 3.2: an update of zero is not a lost one"


@dataclass(frozen=True)
class Evidence:
    """A number that led to advice.

    Attributes:
        quantity: what was measured, such as "RMS_t".
        name: the tensor's name; "" is the whole model or the run.
        step: the step of the value; of a median, its last step.
        value: the number.
        threshold: what it was compared with; None where the value itself is the finding.
    """

    quantity: str
    name: str
    step: int
    value: float
    threshold: float | None = None

    def __str__(self) -> str:
        bound = "" if self.threshold is None else f", threshold {show(self.threshold)}"
        return f"{self.name or 'the run'}: {self.quantity} {show(self.value)} at step {self.step}{bound}"

    @property
    def excess(self) -> float:
        """How far the value is above its threshold."""
        return self.value / (self.threshold or 1)


@dataclass(frozen=True)
class Finding:
    """What a rule found; see `Advice`."""

    finding: str
    action: str
    source: str
    evidence: Sequence[Evidence]
    urgency: Urgency = "change"
    weight: float = 0.0


def show(value: float) -> str:
    """A number with three significant digits."""
    if not math.isfinite(value):
        return {math.inf: "inf", -math.inf: "-inf"}.get(value, "NaN")
    return str(int(value)) if value == int(value) and abs(value) < 1e6 else f"{value:.3g}"


def _percent(share: float) -> str:
    """A share in per cent; 0% and 100% only if it is exactly that."""
    if 0 < share < 0.001:
        return "under 0.1%"
    return "over 99.9%" if 0.999 < share < 1 else f"{100 * share:.3g}%"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _at(index: int, series: Series, quantity: str, name: str = "", threshold: float | None = None) -> Evidence:
    """One value of a series."""
    return Evidence(quantity, name, int(series.steps[index]), float(series.values[index]), threshold)


def _later_half(series: Series) -> Series:
    return series.since(int(series.steps[len(series.steps) // 2])) if len(series.steps) else series


def _median(series: Series) -> float:
    """Median of the finite values; NaN if there is none."""
    values = series.finite.values
    return float(np.median(values)) if len(values) else math.nan


def _medians(
    history: History,
    kind: str,
    field: str,
    quantity: str = "",
    threshold: float | None = None,
    names: Sequence[str] | None = None,
) -> dict[str, Evidence]:
    """By tensor the median over the later half of its measurements; without those measured fewer than 3 times.

    Measurements before a change of the tensor's storages do not count.
    """
    found = {}
    for name in history.names(kind) if names is None else names:
        series = history.series(kind, field, name).since(history.changed(name) + 1)
        late = _later_half(series).finite
        if len(series.steps) >= MIN_MEASUREMENTS and len(late.steps):
            found[name] = Evidence(quantity or field, name, int(late.steps[-1]), _median(late), threshold)
    return found


# Ranges: values that are not finite, loss scales, growing features, narrow formats, coarse codes


def nonfinite_loss(history: History) -> Finding | None:
    """A loss that is inf or NaN."""
    series = history.loss
    bad = np.flatnonzero(~np.isfinite(series.values))
    if not len(bad):
        return None
    loss = _at(bad[0], series, "loss")
    stays = len(bad) > 1 and len(bad) == len(series.values) - bad[0]
    extent = " and every later step" if stays else f", {_count(len(bad), 'step')} in all"
    finding = f"The loss is {show(loss.value)} at step {loss.step}{extent}."
    first = _first_nonfinite(history, loss.step)
    if first:
        names = listed([e.name for e in first])
        finding += f" The first tensors with inf or NaN: {names}, at step {first[0].step}."
    counted = history.series("step", "skipped").values
    if math.isfinite(series.values[-1]) and (_skips(history) or counted.any()):
        return Finding(
            f"{finding} Steps with inf or NaN in the gradients are skipped, and the loss is finite again.",
            "Nothing needs to be undone. If it comes back, look at the data, or lower the learning rate.",
            "SwitchBack, Appendix G", [loss, *first], "watch", weight=3,
        )  # fmt: skip
    skip = "Such gradients are skipped" if _skips(history) else "Skip gradients with inf or NaN"
    return Finding(
        finding,
        "Go back to a checkpoint before that step, and lower the learning rate or lengthen the warm-up. "
        f"{skip} (nonfinite='skip').",
        "SwitchBack, Appendix G", [loss, *first], weight=5,
    )  # fmt: skip


def all_skipped(history: History) -> Finding | None:
    """A loss scaler that skipped many steps in a row, after the last one that was taken."""
    alarms = [alarm for alarm in history.alarms if alarm.get("of") == SKIPPED]
    steps = history.series("step", "seconds").steps
    if not alarms or (len(steps) and steps[-1] > alarms[-1].get("taken", 0)):
        return None
    last = alarms[-1]
    taken = _count(int(last.get("taken", 0)), "step")
    return Finding(
        f"After {taken} the loss scaler skipped at least {last.get('value')} in a row: their gradients have inf or "
        "NaN, and nothing is trained.",
        "Look whether the loss is finite, and at the data of these steps. If it is, lower the learning rate or "
        "begin with a smaller loss scale.",
        "SwitchBack, Appendix G", [], weight=6,
    )  # fmt: skip


def rising_loss(history: History) -> Finding | None:
    """A loss that ends above its start, or far above where it had been. One that spikes and comes back does not."""
    series = history.loss.finite
    steps, losses = series
    if len(losses) < MIN_LOSSES or not math.isfinite(history.loss.values[-1]):
        return None
    size = max(5, len(losses) // 10)
    parts = losses[len(losses) % size :].reshape(-1, size)
    medians = np.median(parts, axis=1)
    best = int(medians.argmin())
    start, low, end = _at(0, series, "loss"), float(medians[best]), float(medians[-1])
    rise = LOSS_RISE * abs(start.value)
    if losses[len(losses) // 2 :].min() > start.value + rise:
        before = start
    else:
        rise = max(LOSS_RISE * abs(low), LEARNED_SHARE * (start.value - low))
        # Noise: nearly all of the last losses are above nearly all of the lowest.
        if np.quantile(parts[-1], 0.1) <= np.quantile(parts[best], 0.9) + rise:
            return None
        before = Evidence(f"median of {size} losses", "", int(steps[len(losses) % size :][best * size]), low)
    now = Evidence(f"median of {size} losses", "", int(steps[-1]), end, before.value + rise)
    return Finding(
        f"The loss rose from {show(before.value)} at step {before.step} to {show(end)} at step {now.step}.",
        "Lower the learning rate, or lengthen the warm-up.",
        "SwitchBack, Section 3.3 and Figure 13", [now, before], weight=5,
    )  # fmt: skip


def _skips(history: History) -> bool:
    """Whether the optimizer skips gradients with inf or NaN."""
    return any(history.group_of(name).get("nonfinite") == "skip" for name in history.parameters)


def _first_nonfinite(history: History, until: int) -> list[Evidence]:
    """The tensors that had inf or NaN first, at one step up to `until`."""
    found = []
    for kind in ("activation", "activation_gradient", "gradient"):
        for name in history.names(kind):
            series = history.series(kind, "nonfinite", name)
            at = np.flatnonzero((series.values > 0) & (series.steps <= until))
            if len(at):
                found.append(_at(at[0], series, f"inf and NaN in the {kind.replace('_', ' ')}", name))
    first = min((e.step for e in found), default=0)
    return [e for e in found if e.step == first]


def nonfinite_gradients(history: History) -> Finding | None:
    """Gradients with inf or NaN: each time in the same few tensors, or in many."""
    names, steps, counts = history.matrix("gradient", "nonfinite")
    bad = counts > 0
    if not bad.any():
        return None
    events = np.flatnonzero(bad.any(axis=0))
    shares = bad[:, events].mean(axis=1)
    order = np.argsort(-shares, kind="stable")
    culprits = [i for i in order if shares[i] >= CULPRIT_SHARE]
    evidence = []
    for i in culprits or [i for i in order if shares[i] > 0]:
        last = int(np.flatnonzero(bad[i])[-1])
        evidence.append(_at(last, Series(steps, counts[i]), "inf and NaN in the gradient", names[i]))
    once = len(events) == 1
    finding = f"Gradients had inf or NaN at {_count(len(events), 'measured step')} of {len(steps)}, "
    if culprits and len(culprits) <= max(1, FEW_SHARE * len(names)):
        finding += f"in {evidence[0].name}." if once else f"each time in {listed([e.name for e in evidence])}."
        action = (
            "Skip the tensor and not the step: use a fixed scale with a check of each tensor "
            "(ng.scaling.TensorLossScaler)" + ("." if _skips(history) else ", or nonfinite='skip'.")
        )
    else:
        finding += f"in {_count(int((shares > 0).sum()), 'tensor')} of {len(names)}."
        action = "Lower the learning rate; in fp16 lower the loss scale, or train in bf16."
        if len(history.series("step", "loss_scale").steps):
            action = "Lower the loss scale or the learning rate, or train in bf16."
    if once:
        return Finding(finding, action, "SwitchBack, Appendix G", evidence, "watch", weight=2)
    return Finding(finding, action, "SwitchBack, Appendix G", evidence, weight=4)


def falling_loss_scale(history: History) -> Finding | None:
    """A loss scale that is lowered more often than it is raised."""
    series = history.series("step", "loss_scale").finite
    if len(series.steps) < 2:
        return None
    drops = series.steps[1:][series.values[1:] < series.values[:-1]]
    span = int(series.steps[-1] - series.steps[0])
    allowed = FIRST_DROPS + span // GROWTH_INTERVAL
    now = _at(-1, series, "loss scale")
    if len(drops) <= allowed and not (len(drops) and now.value < 1):
        return None
    lowered = Evidence("times the loss scale was lowered", "", int(drops[-1]), float(len(drops)), float(allowed))
    return Finding(
        f"The loss scale was lowered {_count(len(drops), 'time')} in {span + 1} steps, "
        f"from {show(float(series.values.max()))} to {show(now.value)}.",
        "Use a fixed scale and skip single tensors (ng.scaling.TensorLossScaler), or train in bf16.",
        "SwitchBack, Section 2.1 and Appendix G", [lowered, now], weight=2,
    )  # fmt: skip


def growing_features(history: History) -> Finding | None:
    """Feature magnitudes that grow with depth, of the blocks' outputs."""
    blocks = next(iter(history.blocks().values()), [])
    found = list(_medians(history, "activation", "mean", "E|x|", names=blocks).values())
    if len(found) < MIN_BLOCKS:
        return None
    first, last = found[0], max(found[1:], key=lambda e: e.value)
    # Growth with depth, and not one block that stands out: the second half is above the first.
    half = len(found) // 2
    low, high = (np.median([e.value for e in part]) for part in (found[:half], found[-half:]))
    bound = FEATURE_GROWTH * first.value
    if not (first.value > 0 and last.value >= bound and high > low):
        return None
    return Finding(
        f"E|x| grows from {show(first.value)} in {first.name} to {show(last.value)} in {last.name}.",
        "Before these layers go to e4m3 with one scale a tensor, give each block a layer scale that starts at 0 "
        "(ng.nn.LayerScale).",
        "SwitchBack, Section 2.3 and Figure 2",
        [Evidence("E|x|", last.name, last.step, last.value, bound), first], "note", weight=2,
    )  # fmt: skip


def float8_losses(history: History, kind: str, noun: str) -> Finding | None:
    """What tensors of one kind would lose in float8, where layers multiply in float8."""
    if not history.uses_float8:
        return None
    # Norms and biases are not multiplied.
    names = [name for name in history.names(kind) if len(history.parameters.get(name, (0, 0))) > 1]
    evidence, total = [], 0
    for form in ("e4m3", "e5m2"):
        for loss, bound in FLOAT8_LOSSES.items():
            quantity = f"share of {loss} in {form}"
            shares = _medians(history, kind, f"formats.{form}.{loss}", quantity, bound, names)
            total = max(total, len(shares))
            evidence += [e for e in shares.values() if e.value >= bound]
    if not evidence:
        return None
    evidence.sort(key=lambda e: (-e.excess, e.quantity, e.name))
    worst, number = evidence[0], len({e.name for e in evidence})
    fate = "overflow" if "overflow" in worst.quantity else "round to zero"
    return Finding(
        f"{number} of {total} {noun} would lose a share in float8 without a scale, most of all {worst.name}: "
        f"{_percent(worst.value)} would {fate} in {worst.quantity.split()[-1]}.",
        "Layers that multiply in float8 need a scale for each tensor or row. All plans of ng.linear have one.",
        "SwitchBack, Sections 2.2 and 2.3", evidence, "note", weight=1,
    )  # fmt: skip


def coarse_states(history: History) -> Finding | None:
    """Quantized moments that are far from the exact ones."""
    errors = _medians(history, "state", "relative_norm", "relative error of the state", STATE_ERROR)
    fed_back = _medians(history, "state", "fed_back")  # to the weight, so that the step loses nothing
    zeros = _medians(history, "state", "flushed", "share of the state rounded to zero", FLUSHED)
    evidence = [e for e in errors.values() if e.value >= STATE_ERROR and e.name not in fed_back]
    evidence += [e for e in zeros.values() if e.value >= FLUSHED and e.name.endswith("[v]")]
    if not evidence:
        return None

    def of_embedding(e: Evidence) -> bool:
        return history.is_embedding(e.name.split(" [")[0])

    evidence.sort(key=lambda e: (not of_embedding(e), -e.excess, e.name))
    worst, names = evidence[0], list(dict.fromkeys(e.name for e in evidence))
    if of_embedding(worst):
        action = "Give embeddings 32-bit states (an option of ng.optim.split_decay) or use ng.nn.StableEmbedding."
        source = "8-bit Optimizers, Section 2.3 and Appendix C"
    else:
        action = "Use 'log8' codes or 32 bits for these states, or smaller blocks."
        source = "8-bit Optimizers, Section 2.1 and Appendix D"
    return Finding(
        f"{worst.name}: {worst.quantity} {_percent(worst.value)}; {_count(len(names), 'state')} in all: "
        f"{listed(names)}.",
        action, source, evidence, weight=1,
    )  # fmt: skip


# Parameters that do not learn


def no_gradient(history: History) -> Finding | None:
    """Parameters whose gradient, or update, was zero at every measured step."""
    found: dict[str, Evidence] = {}
    measured = (("gradient", "absmax", "largest |gradient|"), ("update", "norm", "norm of the update"))
    for kind, field, quantity in measured:
        for name in history.names(kind):
            series = history.series(kind, field, name)
            if history.series("gradient", "nonfinite", name).values.any():
                continue  # the others of its steps may have been skipped
            if len(series.steps) >= MIN_MEASUREMENTS and not series.values.any():
                found.setdefault(name, _at(-1, series, quantity, name))
    if not found:
        return None
    return Finding(
        f"{listed(list(found))} had no gradient other than zero, or no update, at any measured step: nothing was "
        "lost there, and nothing was learned.",
        "Check that the loss depends on it, or freeze it.",
        _NOT_LOST, list(found.values()), "watch",
    )  # fmt: skip


def not_trained(history: History) -> Finding | None:
    """Parameters without measurements: frozen, not the optimizer's, or never given a gradient."""
    with_gradient = history.names("gradient")
    measured = max((len(history.series("gradient", "absmax", name).steps) for name in with_gradient), default=0)
    stepped = set(history.names("update"))  # some were unfrozen or added later
    frozen, apart = ([n for n in history.listed_parameters(k) if n not in stepped] for k in ("frozen", "apart"))
    known = isinstance(history.header.get("groups"), list) and measured >= MIN_MEASUREMENTS
    seen = {*with_gradient, *frozen, *apart}
    without = [name for name in history.parameters if name not in seen] if known else []
    parts = [
        f"{listed(names)} {'is' if len(names) == 1 else 'are'} {what}."
        for names, what in ((frozen, "frozen"), (apart, "not among the optimizer's parameters"))
        if names
    ]
    if without:
        parts.append(f"{listed(without)} never had a gradient in {measured} measured steps.")
    if not parts:
        return None
    return Finding(
        " ".join(parts),
        "If this is not on purpose: check that the loss depends on these parameters, and what the optimizer was "
        "given.",
        _NOT_LOST,
        [Evidence("measured gradients", name, history.last_step, 0.0) for name in (*without, *apart, *frozen)],
        "note",
    )  # fmt: skip


# Updates: are they too long, are they lost, does the second moment follow the gradient?


def rms_spikes(history: History) -> Finding | None:
    """RMS spikes: the second moment underestimates the gradient, and the update is too long."""
    found = find_precursors(history)
    peaks = {name: _peak(history, name) for name, steps in found.rms.items() if steps}
    if not peaks:
        return None
    # The paper found the relation to loss spikes in the embedding, and none in the middle of the network.
    evidence = sorted(peaks.values(), key=lambda e: (not history.is_embedding(e.name), -e.value, e.name))
    worst, followed = evidence[0], [step for step, (name, _) in found.matched.items() if name in peaks]
    clipped, rises = history.clips_updates(worst.name), rising_loss(history) is not None
    if clipped and not followed and not found.within:
        return None
    if followed:
        name, before = found.matched[followed[0]]
        relation = f"{_count(len(followed), 'loss spike')} of {len(found.loss)} followed one within {REACH} steps"
        relation += f" (step {followed[0]} after {name} at step {before})."
        if found.chance is not None:
            relation += f" The probability of so many by chance is {show(found.chance)}."
        evidence = [_loss_at(history, step) for step in followed] + evidence
    elif rises:
        relation = "The loss rose."
    else:
        relation = f"So far no loss spike began 1 to {REACH} steps after one."
        if not len(history.loss.steps):
            relation = "No losses were recorded."
        if not history.is_embedding(worst.name):
            relation += " In the paper only RMS spikes of embeddings preceded loss spikes."
    together = [step for step, (_, rms) in found.within.items() if step == rms]
    if together:
        relation += f" Gradients and loss jumped together at {_steps(together)}."
    for step, (name, rms) in [(step, each) for step, each in found.within.items() if step not in together][:1]:
        relation += f" {name}'s RMS spike of step {rms} came within the loss spike that began at step {step}."
    betas = history.group_of(worst.name).get("betas")
    beta2 = as_number(betas[1]) if isinstance(betas, list) and len(betas) == 2 else None
    now = "" if beta2 is None else f" ({beta2:.15g} now)"
    if clipped:
        action = f"Updates are clipped already: lower beta2{now} or the learning rate."
    else:
        begin = "Clip" if followed or rises else "If loss spikes come, clip"
        action = f"{begin} updates (ng.optim.StableAdamW, or clip_updates=True) or lower beta2{now}."
    if found.within:
        action = f"Look at the data of {_steps(list(found.within))}. {action}"
        evidence = [_loss_at(history, step) for step in found.within] + evidence
    return Finding(
        f"{worst.name}'s RMS_t reached {show(worst.value)} at step {worst.step}; "
        f"{_count(sum(map(len, found.rms.values())), 'RMS spike')} of at least {show(RMS_THRESHOLD)} in "
        f"{_count(len(peaks), 'tensor')}. {relation}",
        action, "SwitchBack, Sections 3.4 and 3.5, Appendix E", evidence,
        "change" if followed else "watch", weight=3 if followed else 1,
    )  # fmt: skip


def _steps(steps: Sequence[int]) -> str:
    return f"{'step' if len(steps) == 1 else 'steps'} {listed(list(map(str, steps)))}"


def _peak(history: History, name: str) -> Evidence:
    """The highest RMS_t of a tensor that has spikes; a spike may start at a lower value."""
    series = history.series("update", "rms", name).since(history.settled)
    return _at(int(np.nanargmax(series.values)), series, "RMS_t", name, RMS_THRESHOLD)


def _loss_at(history: History, step: int) -> Evidence:
    return _at(int(np.searchsorted(history.loss.steps, step)), history.loss, "loss")


def other_loss_spikes(history: History) -> Finding | None:
    """Loss spikes without an RMS spike before or within them. A loss that is not finite has a rule of its own."""
    found = find_precursors(history)
    alone = [step for step in found.loss if step not in found.matched and step not in found.within]
    evidence = [_loss_at(history, step) for step in alone]
    evidence = [e for e in evidence if math.isfinite(e.value)]
    if not evidence:
        return None

    def measured(step: int) -> bool:  # RMS_t of some tensor at each of the eight steps before
        wanted = set(range(max(1, step - REACH), step))
        return any(wanted <= set(history.series("update", "rms", name).steps.tolist()) for name in found.rms)

    finding = f"{_count(len(evidence), 'loss spike')} without an RMS spike in the 8 steps before, first at step "
    finding += f"{evidence[0].step}."
    unseen = sum(not measured(e.step) for e in evidence)
    if unseen:
        finding += f" Before {unseen} of them RMS_t was not measured at every step, so an RMS spike may have been "
        finding += "missed."
        action = "Measure RMS_t of embeddings at every step (rms_every=1): do RMS spikes come first?"
    else:
        action = "Look at the data of these steps; lower the learning rate, or clip gradients to a norm of 1."
    return Finding(finding, action, "SwitchBack, Sections 3.3 and 3.5, Appendix E", evidence, "watch")


def lost_updates(history: History) -> Finding | None:
    """Updates that are rounded away in what is stored."""
    quantity = "effective descent quality"
    whole = _medians(history, "update", "descent_quality", quantity, MODEL_QUALITY, [""]).get("")
    quality = _medians(history, "update", "descent_quality", quantity, TENSOR_QUALITY)
    shares = _medians(history, "update", "lost")
    moving = {
        name
        for name in quality
        # Of few elements that are rounded stochastically a measured step often moves none, and others do.
        if history.weights.get(name) != STOCHASTIC
        and _median(_later_half(history.series("update", "norm", name))) > 0
    }
    still = [name for name in sorted(moving & set(shares)) if shares[name].value >= ALL_LOST]
    low = [e for e in quality.values() if e.name in moving and e.value < TENSOR_QUALITY]
    low.sort(key=lambda e: (e.value, e.name))
    evidence, parts = low, []
    model_loses = whole is not None and whole.value < MODEL_QUALITY
    if whole is not None and model_loses:
        evidence = [whole, *low]
        parts.append(f"Over the whole model {_percent(whole.value)} of the update's length arrives along it.")
    if not evidence:
        return None
    if still:
        verb = "does" if len(still) == 1 else "do"
        parts.append(f"{listed(still)} {verb} not move at all: every update is lost.")
    others = [e.name for e in low if e.name not in still]
    if others:
        parts.append(f"Less than {_percent(TENSOR_QUALITY)} arrives in {listed(others)}.")
    storages = sorted({storage for e in low if (storage := history.low_word_storage(e.name))})
    urgency: Urgency = "change"
    if storages or _loses_only_visibly(history):
        urgency = "watch"  # where the learning rate is low, such losses have not been seen to cost anything
        storage = f" (weights='{storages[0]}')" if storages else ""
        action = (
            f"Low words are kept{storage}, and these updates are smaller, as where the learning rate is low. If "
            "the loss ends above that of fp32 weights, use weights='split' or 'master', the recipe "
            "'adamw8bit-split', or for norms recipe.apply(model, keep_fp32='norms')."
        )
    else:
        rounding = "" if STOCHASTIC in history.weights.values() else f", or round with weights='{STOCHASTIC}'"
        action = f"{_KEEP_LOW_WORDS}{rounding}."
        if len(low) < len(quality) and still and not others and not model_loses:
            action += " These tensors alone are enough, in a parameter group of their own."
            action += " recipes.Adapt widens them while a training runs."
    source = "Collage, Sections 3.2 and 5.1, Definitions 3.2 and 3.3"
    return Finding(" ".join(parts), action, source, evidence, urgency, weight=2)


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

    def whole(field: str, quantity: str = "", threshold: float | None = None) -> Evidence | None:
        return _medians(history, "update", field, quantity, threshold, [""]).get("")

    visible = whole("lost_visible", "lost updates, visible", VISIBLE_LOST)
    stored = whole("lost", "lost updates, stored", STORED_LOST)
    quality = whole("descent_quality")
    if stored is None or visible is None or quality is None:
        return None
    if visible.value < VISIBLE_LOST or stored.value > STORED_LOST or quality.value < MODEL_QUALITY:
        return None
    if rising_loss(history):
        return None  # something needs to be done
    return Finding(
        f"{_percent(visible.value)} of the updates do not show in the parameters at once, and "
        f"{_percent(stored.value)} are lost in what is stored: the low words hold them until they add up.",
        "Nothing needs to be done.",
        "Collage, Section 4.2 and Equation 2", [visible, stored], "note",
    )  # fmt: skip


def stale_second_moments(history: History) -> Finding | None:
    """A second moment that stays too large: its decay is rounded away in bf16, or earlier gradients were larger."""
    # RMS_t of embeddings alone, where updates are not measured, says nothing: rows without a token count as zeros.
    measured = [name for name in history.names("update") if len(history.series("update", "norm", name).steps)]
    ratios = _medians(history, "update", "rms", "RMS_t", STALE_RATIO, measured)
    evidence = []
    for name, ratio in ratios.items():
        gradient = history.series("gradient", "mean", name).since(history.settled).finite
        if len(gradient.steps) < 4 or ratio.value > STALE_RATIO:
            continue
        middle = int(gradient.steps[len(gradient.steps) // 2])
        before, now = _median(gradient.until(middle)), _median(gradient.since(middle))
        if now >= STEADY_GRADIENT * before > 0:
            evidence.append(ratio)
    if not evidence or len(evidence) < STALE_SHARE * len(ratios):
        return None
    evidence.sort(key=lambda e: (e.value, e.name))
    lowest = evidence[0]
    if any(history.second_moments.get(e.name) == "bf16" for e in evidence):
        action = "A beta2 of 0.999 is 1 in bf16: "
        action += "keep the second moment as an expansion (Collage-plus), in 'log8' or fp32."
        source = "Collage, Section 4.2 and Table 1"
    else:
        action = "Earlier gradients were much larger, and the second moment still averages over them: "
        action += "lower the learning rate, or lengthen the warm-up."
        source = "SwitchBack, Section 3.4"
    return Finding(
        f"RMS_t stays below {show(STALE_RATIO)} in {len(evidence)} of {_count(len(ratios), 'tensor')} though their "
        f"gradients have not fallen ({lowest.name}: {show(lowest.value)}): the second moment is too large, and "
        "steps are too small.",
        action, source, evidence, weight=1,
    )  # fmt: skip


RULES: dict[str, Callable[[History], Finding | None]] = {
    "every step skipped": all_skipped,
    "loss not finite": nonfinite_loss,
    "loss rises": rising_loss,
    "gradients not finite": nonfinite_gradients,
    "loss scale falls": falling_loss_scale,
    "coarse states": coarse_states,
    "no gradient": no_gradient,
    "not trained": not_trained,
    "features grow with depth": growing_features,
    "gradients in float8": partial(float8_losses, kind="gradient", noun="gradients"),
    "gradients of activations in float8": partial(
        float8_losses, kind="activation_gradient", noun="gradients of activations"
    ),
    "activations in float8": partial(float8_losses, kind="activation", noun="activations"),
    "second moment out of date": rms_spikes,
    "loss spikes of another cause": other_loss_spikes,
    "lost updates": lost_updates,
    "updates wait in low words": updates_in_low_words,
    "second moment does not decay": stale_second_moments,
}
