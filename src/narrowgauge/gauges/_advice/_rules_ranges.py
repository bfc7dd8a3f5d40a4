"""Rules about ranges: values that are not finite, loss scales, growing features, narrow formats, coarse codes.

What a tensor would lose in float8 is no fault of a run in wider formats: the report's figure shows it, and advice
is for runs whose layers multiply in float8.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from narrowgauge._text import listed
from narrowgauge.gauges._advice._rule import (
    MIN_MEASUREMENTS,
    Evidence,
    Finding,
    Rule,
    count,
    medians,
    percent,
    show,
)
from narrowgauge.gauges._history import History

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


def nonfinite_loss(history: History) -> Finding | None:
    """A loss that is inf or NaN."""
    series = history.loss
    bad = np.flatnonzero(~np.isfinite(series.values))
    if not len(bad):
        return None
    step, value = int(series.steps[bad[0]]), float(series.values[bad[0]])
    stays = len(bad) > 1 and len(bad) == len(series.values) - bad[0]
    first = _first_nonfinite(history, step)
    origin = ""
    if first:
        origin = f" The first tensors with inf or NaN: {listed([e.name for e in first])}, at step {first[0].step}."
    values = {
        "value": show(value), "step": step, "origin": origin,
        "extent": " and every later step" if stays else f", {count(len(bad), 'step')} in all",
    }  # fmt: skip
    return Finding([Evidence("loss", "", step, value), *first], values)


def _first_nonfinite(history: History, until: int) -> list[Evidence]:
    """The tensors that had inf or NaN first, at one step up to `until`."""
    found = []
    for kind in ("activation", "activation_gradient", "gradient"):
        for name in history.names(kind):
            series = history.series(kind, "nonfinite", name)
            at = np.flatnonzero((series.values > 0) & (series.steps <= until))
            if len(at):
                quantity = f"inf and NaN in the {kind.replace('_', ' ')}"
                found.append(Evidence(quantity, name, int(series.steps[at[0]]), float(series.values[at[0]])))
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
        evidence.append(Evidence("inf and NaN in the gradient", names[i], int(steps[last]), float(counts[i, last])))
    few = culprits and len(culprits) <= max(1, FEW_SHARE * len(names))
    once = len(events) == 1
    values = {
        "events": count(len(events), "measured step"), "steps": len(steps),
        "each_time": "" if once else "each time ",
        "culprits": evidence[0].name if once else listed([e.name for e in evidence]),
        "involved": count(int((shares > 0).sum()), "tensor"), "tensors": len(names),
    }  # fmt: skip
    return Finding(evidence, values, "few" if few else "many", mild=once)


def falling_loss_scale(history: History) -> Finding | None:
    """A loss scale that is lowered more often than it is raised."""
    series = history.series("step", "loss_scale").finite
    if len(series.steps) < 2:
        return None
    drops = series.steps[1:][series.values[1:] < series.values[:-1]]
    span = int(series.steps[-1] - series.steps[0])
    allowed = FIRST_DROPS + span // GROWTH_INTERVAL
    value = float(series.values[-1])
    if len(drops) <= allowed and not (len(drops) and value < 1):
        return None
    evidence = [
        Evidence("times the loss scale was lowered", "", int(drops[-1]), float(len(drops)), float(allowed)),
        Evidence("loss scale", "", int(series.steps[-1]), value),
    ]
    values = {"times": count(len(drops), "time"), "steps": span + 1}
    return Finding(evidence, values | {"highest": show(float(series.values.max())), "now": show(value)})


def growing_features(history: History) -> Finding | None:
    """Feature magnitudes that grow with depth, of the blocks' outputs."""
    found = list(medians(history, "activation", "mean", next(iter(history.blocks().values()), [])).values())
    if len(found) < MIN_BLOCKS:
        return None
    first, largest = found[0], max(found[1:], key=lambda e: e.value)
    # Growth with depth, and not one block that stands out: the second half is above the first.
    half = len(found) // 2
    low, high = (np.median([e.value for e in part]) for part in (found[:half], found[-half:]))
    bound = FEATURE_GROWTH * first.value
    if not (first.value > 0 and largest.value >= bound and high > low):
        return None
    evidence = [
        Evidence("E|x|", largest.name, largest.step, largest.value, bound),
        Evidence("E|x|", first.name, first.step, first.value),
    ]
    values = {"small": show(first.value), "first": first.name, "large": show(largest.value), "last": largest.name}
    return Finding(evidence, values)


def float8_losses(history: History, kind: str, noun: str) -> Finding | None:
    """What tensors of one kind would lose in float8, where layers multiply in float8."""
    if not history.uses_float8:
        return None
    evidence, total = [], 0
    for form in ("e4m3", "e5m2"):
        for loss, bound in FLOAT8_LOSSES.items():
            shares = medians(history, kind, f"formats.{form}.{loss}")
            total = max(total, len(shares))
            evidence += [Evidence(f"share of {loss} in {form}", e.name, e.step, e.value, bound)
                         for e in shares.values() if e.value >= bound]  # fmt: skip
    if not evidence:
        return None
    evidence.sort(key=lambda e: (-e.value / (e.threshold or 1), e.quantity, e.name))
    worst = evidence[0]
    values = {
        "number": len({e.name for e in evidence}), "total": total, "noun": noun, "worst": worst.name,
        "share": percent(worst.value), "form": worst.quantity.split()[-1],
        "fate": "overflow" if "overflow" in worst.quantity else "round to zero",
    }  # fmt: skip
    return Finding(evidence, values)


def coarse_states(history: History) -> Finding | None:
    """Quantized moments that are far from the exact ones."""
    bounds = {"relative_norm": ("relative error of the state", STATE_ERROR, ""),
              "flushed": ("share of the state rounded to zero", FLUSHED, "[v]")}  # fmt: skip
    evidence = [
        Evidence(quantity, e.name, e.step, e.value, bound)
        for field, (quantity, bound, slot) in bounds.items()
        for e in medians(history, "state", field).values()
        if e.value >= bound and e.name.endswith(slot)
    ]
    if not evidence:
        return None

    def of_embedding(e: Evidence) -> bool:
        return history.is_embedding(e.name.split(" [")[0])

    evidence.sort(key=lambda e: (not of_embedding(e), -e.value / (e.threshold or 1), e.name))
    worst, names = evidence[0], list(dict.fromkeys(e.name for e in evidence))
    values = {"worst": worst.name, "quantity": worst.quantity, "share": percent(worst.value)}
    values |= {"states": count(len(names), "state"), "names": listed(names)}
    return Finding(evidence, values, "embedding" if of_embedding(worst) else "other")


def no_gradient(history: History) -> Finding | None:
    """Parameters whose gradient, or update, was zero at every measured step."""
    evidence: list[Evidence] = []
    for kind, field, quantity in (
        ("gradient", "absmax", "largest |gradient|"),
        ("update", "norm", "norm of the update"),
    ):
        known = {e.name for e in evidence}
        for name in history.names(kind):
            series = history.series(kind, field, name)
            if len(series.steps) >= MIN_MEASUREMENTS and not series.values.any() and name not in known:
                evidence.append(Evidence(quantity, name, int(series.steps[-1]), 0.0))
    return Finding(evidence, {"names": listed([e.name for e in evidence])}) if evidence else None


def not_trained(history: History) -> Finding | None:
    """Parameters without measurements: frozen, not the optimizer's, or never given a gradient."""
    measured = max(
        (len(history.series("gradient", "absmax", n).steps) for n in history.names("gradient")), default=0
    )
    frozen, apart = history.listed_parameters("frozen"), history.listed_parameters("apart")
    seen = {*history.names("gradient"), *frozen, *apart}
    known = isinstance(history.header.get("groups"), list) and measured >= MIN_MEASUREMENTS
    without = [name for name in history.parameters if name not in seen] if known else []
    parts = [
        f"{listed(names)} {'is' if len(names) == 1 else 'are'} {what}."
        for names, what in ((frozen, "frozen"), (apart, "not among the optimizer's parameters"))
        if names
    ]
    if without:
        parts.append(f"{listed(without)} never had a gradient in {measured} measured steps.")
    names = (*without, *apart, *frozen)
    evidence = [Evidence("measured gradients", name, history.last_step, 0.0) for name in names]
    return Finding(evidence, {"parts": " ".join(parts)}) if parts else None


_KINDS = {
    "gradient": "gradients", "activation_gradient": "gradients of activations", "activation": "activations",
}  # fmt: skip
_NOT_LOST = "Collage, Definition 3.2: an update of zero is not a lost one"

RULES = (
    Rule(
        "loss not finite", "loss", nonfinite_loss,
        "The loss is {value} at step {step}{extent}.{origin}",
        "Go back to a checkpoint before that step, lower the learning rate or lengthen the warm-up, and skip "
        "gradients with inf or NaN (nonfinite='skip').",
        "SwitchBack, Appendix G", weight=5,
    ),
    Rule(
        "gradients not finite",
        "inf and NaN in gradients > 0; few culprits: in >= 80% of the steps, <= a quarter of the tensors",
        nonfinite_gradients,
        {
            "few": "Gradients had inf or NaN at {events} of {steps}, {each_time}in {culprits}.",
            "many": "Gradients had inf or NaN at {events} of {steps}, in {involved} of {tensors}.",
        },
        {
            "few": "Skip the tensor and not the step: use a fixed scale with a check of each tensor "
            "(ng.scaling.TensorLossScaler), or nonfinite='skip'.",
            "many": "Lower the loss scale or the learning rate, or train in bf16.",
        },
        "SwitchBack, Appendix G", weight=4, mild=("watch", 2),
    ),
    Rule(
        "loss scale falls", "times lowered > 3 and once in 2000 steps; or a scale below 1", falling_loss_scale,
        "The loss scale was lowered {times} in {steps} steps, from {highest} to {now}.",
        "Use a fixed scale and skip single tensors (ng.scaling.TensorLossScaler), or train in bf16.",
        "SwitchBack, Section 2.1 and Appendix G", weight=2,
    ),
    Rule(
        "coarse states", "relative error >= 0.1; share of v rounded to zero >= 0.01", coarse_states,
        "{worst}: {quantity} {share}; {states} in all: {names}.",
        {
            "embedding": "Give embeddings 32-bit states (an option of ng.optim.split_decay) or use "
            "ng.nn.StableEmbedding.",
            "other": "Use 'log8' codes or 32 bits for these states, or smaller blocks.",
        },
        {
            "embedding": "8-bit Optimizers, Section 2.3 and Appendix C",
            "other": "8-bit Optimizers, Section 2.1 and Appendix D",
        },
        weight=1,
    ),
    Rule(
        "no gradient", "largest |gradient| or norm of the update = 0", no_gradient,
        "{names} had no gradient other than zero, or no update, at any measured step: nothing was lost there, and "
        "nothing was learned.",
        "Check that the loss depends on it, or freeze it.",
        _NOT_LOST, "watch",
    ),
    Rule(
        "not trained", "no gradient in 3 measured steps or more", not_trained,
        "{parts}",
        "If this is not on purpose: check that the loss depends on these parameters, and what the optimizer was "
        "given.",
        _NOT_LOST, "note",
    ),
    Rule(
        "features grow with depth", "E|x| of a block >= 4 times that of the first", growing_features,
        "E|x| grows from {small} in {first} to {large} in {last}.",
        "Before these layers go to e4m3 with one scale a tensor, give each block a layer scale that starts at 0 "
        "(ng.nn.LayerScale).",
        "SwitchBack, Section 2.3 and Figure 2", "note", weight=2,
    ),
    *(
        Rule(
            f"{noun} in float8", "share of underflow >= 0.1 or overflow >= 0.001",
            partial(float8_losses, kind=kind, noun=noun),
            "{number} of {total} {noun} would lose a share in float8 without a scale, most of all {worst}: "
            "{share} would {fate} in {form}.",
            "Layers that multiply in float8 need a scale for each tensor or row, as SwitchBack's have, or e5m2 "
            "instead of e4m3.",
            "SwitchBack, Sections 2.2 and 2.3", "note", weight=1,
        )
        for kind, noun in _KINDS.items()
    ),
)  # fmt: skip
