"""Advice about ranges: what is not finite, loss scales, features that grow, formats too narrow, codes too coarse.

What a tensor would lose in float8 is no fault of a run in wider formats: the report's figure shows it to those who
plan to go there, and advice is for runs whose layers are there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from narrowgauge.gauges._advice import HABIT, Advice, Evidence, count, habits, listed, percent, show, worst
from narrowgauge.gauges._history import History
from narrowgauge.gauges._run_options import listed_in, uses_float8

# Ours: a tensor is the culprit if it takes part in so large a share of the steps with inf or NaN, and culprits are
# few if they are at most so large a share of all tensors. SwitchBack never saw one beyond block 0.
CULPRIT_SHARE, FEW_SHARE = 0.8, 0.25
# A scaler doubles after 2000 steps without inf or NaN and halves at each (SwitchBack, Section 2.1): one that halves
# more often than once in as many steps falls. The first halvings find the scale.
GROWTH_INTERVAL, FIRST_DROPS = 2000, 3
# Ours: SwitchBack's Figure 2 shows the growth and names no number.
FEATURE_GROWTH, LEAST_BLOCKS = 4.0, 3
# Ours.
UNDERFLOW, OVERFLOW = 0.1, 0.001
FLOAT8_LOSSES = (
    ("e4m3", "underflow", UNDERFLOW), ("e5m2", "underflow", UNDERFLOW),
    ("e4m3", "overflow", OVERFLOW), ("e5m2", "overflow", OVERFLOW),
)  # fmt: skip
# Ours. Block-wise dynamic codes of a normal's moments are off by 0.01 to 0.03 of their norm; a share of v that
# rounds to zero is divided by eps alone.
STATE_ERROR, FLUSHED = 0.1, 0.01


def not_finite(history: History) -> Iterator[Advice]:
    """A loss that is inf or NaN."""
    series = history.loss
    broken = series.steps[~np.isfinite(series.values)]
    if not len(broken):
        return
    step, value = int(broken[0]), float(series.values[~np.isfinite(series.values)][0])
    text = f"The loss is {show(value)} at step {step}"
    text += ", and stays so." if _stays(series.values) else f", and at {count(len(broken), 'step')} in all."
    origin = _first_broken(history, step)
    if origin:
        text += f" The first tensors with inf or NaN: {listed([e.name for e in origin])}, at step {origin[0].step}."
    yield Advice(
        "loss not finite", "change", text,
        "Go back to a checkpoint before it, lower the learning rate or lengthen the warm-up, and let the "
        "optimizer skip such gradients (nonfinite='skip').",
        "SwitchBack, Appendix G", worst([Evidence("loss", "", step, value, None), *origin]), weight=5,
    )  # fmt: skip


def _stays(values: np.ndarray) -> bool:
    broken = np.flatnonzero(~np.isfinite(values))
    return bool(len(broken) > 1 and len(broken) == len(values) - broken[0])


def _first_broken(history: History, until: int) -> list[Evidence]:
    found = []
    for kind in ("activation", "activation_gradient", "gradient"):
        for name in history.names(kind):
            series = history.series(kind, "nonfinite", name)
            at = np.flatnonzero((series.values > 0) & (series.steps <= until))
            if len(at):
                quantity = f"inf and NaN in the {kind.replace('_', ' ')}"
                found.append(Evidence(quantity, name, int(series.steps[at[0]]), float(series.values[at[0]]), None))
    first = min((e.step for e in found), default=0)
    return [e for e in found if e.step == first]


def broken_gradients(history: History) -> Iterator[Advice]:
    """Gradients with inf or NaN: in the same few tensors each time, or all over."""
    names, steps, counts = history.matrix("gradient", "nonfinite")
    if not names or not (counts > 0).any():
        return
    broken = counts > 0
    events = np.flatnonzero(broken.any(axis=0))
    shares = broken[:, events].mean(axis=1)
    culprits = [i for i in np.argsort(-shares, kind="stable") if shares[i] >= CULPRIT_SHARE]
    few = culprits and len(culprits) <= max(1, FEW_SHARE * len(names))
    involved = culprits or [i for i in np.argsort(-shares, kind="stable") if shares[i] > 0]
    found = []
    for i in involved:
        last = int(np.flatnonzero(broken[i])[-1])
        found.append(
            Evidence("inf and NaN in the gradient", names[i], int(steps[last]), float(counts[i, last]), None)
        )
    text = f"Gradients had inf or NaN at {count(len(events), 'measured step')} of {len(steps)}"
    if few:
        text += (
            f", each time in {listed([e.name for e in found])}." if len(events) > 1 else f", in {found[0].name}."
        )
        action = (
            "Skip the tensor and not the step: a scaler with a fixed scale that checks each tensor "
            "(ng.scaling.TensorLossScaler), or nonfinite='skip'."
        )
    else:
        text += f", in {count(len([s for s in shares if s > 0]), 'tensor')} of {len(names)}."
        action = "Lower the loss scale or the learning rate, or train in bf16."
    often = len(events) > 1
    yield Advice(
        "gradients not finite", "change" if often else "watch", text, action, "SwitchBack, Appendix G",
        worst(found), weight=4 if often else 2,
    )  # fmt: skip


def falling_scale(history: History) -> Iterator[Advice]:
    """A loss scale that is halved more often than it is doubled."""
    series = history.series("step", "loss_scale").finite
    if len(series.steps) < 2:
        return
    drops = series.steps[1:][series.values[1:] < series.values[:-1]]
    allowed = FIRST_DROPS + int(series.steps[-1] - series.steps[0]) // GROWTH_INTERVAL
    value, last = float(series.values[-1]), int(series.steps[-1])
    if len(drops) <= allowed and not (len(drops) and value < 1):
        return
    span = int(series.steps[-1] - series.steps[0]) + 1
    text = (
        f"The loss scale was lowered {count(len(drops), 'time')} in {span} steps, from "
        f"{show(float(series.values.max()))} to {show(value)}."
    )
    yield Advice(
        "loss scale falls", "change", text,
        "Keep a fixed scale and skip single tensors (ng.scaling.TensorLossScaler), or train in bf16.",
        "SwitchBack, Section 2.1 and Appendix G",
        (
            Evidence("times the loss scale was lowered", "", int(drops[-1]), float(len(drops)), float(allowed)),
            Evidence("loss scale", "", last, value, None),
        ),
        weight=2,
    )  # fmt: skip


def growing_features(history: History) -> Iterator[Advice]:
    """Feature magnitudes that grow with depth: of the blocks' outputs, where those are recorded."""
    found = habits(history, "activation", "mean", next(iter(blocks(history).values()), []))
    if len(found) < LEAST_BLOCKS:
        return
    magnitudes = list(found.values())
    first, last = magnitudes[0], max(magnitudes[1:], key=lambda e: e.value)
    # Growth with depth, and not one block that stands out: the second half lies above the first.
    half = len(magnitudes) // 2
    low, high = (np.median([e.value for e in part]) for part in (magnitudes[:half], magnitudes[-half:]))
    if not (first.value > 0 and last.value >= FEATURE_GROWTH * first.value and high > low):
        return
    yield Advice(
        "features grow with depth", "note",
        f"E|x| grows from {show(first.value)} in {first.name} to {show(last.value)} in {last.name}.",
        "Before these layers go to e4m3 with one scale a tensor, give each block a layer scale that starts "
        "at 0 (ng.nn.LayerScale).",
        "SwitchBack, Section 2.3 and Figure 2",
        (
            Evidence("E|x|", last.name, last.step, last.value, FEATURE_GROWTH * first.value),
            Evidence("E|x|", first.name, first.step, first.value, None),
        ),
        weight=2,
    )  # fmt: skip


def blocks(history: History, kind: str = "activation") -> dict[str, list[str]]:
    """Modules that repeat through the depth, "h.0", "h.1", …, by their pattern "h.#"; the shortest first.

    What repeats inside of a block as well, experts or heads, has two numbers and is left out.
    """
    found: dict[str, list[str]] = {}
    for name in history.names(kind):
        found.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "#", name), []).append(name)
    order = sorted((p for p in found if p.count("#") == 1), key=lambda p: (p.count("."), p))
    return {pattern: sorted(found[pattern], key=_number) for pattern in order if len(found[pattern]) > 1}


def _number(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())


def narrow_formats(history: History) -> Iterator[Advice]:
    """What tensors would lose in float8, for each kind of tensor; where layers are in float8."""
    if not uses_float8(history):
        return
    words = {
        "gradient": "gradients", "activation_gradient": "gradients of activations", "activation": "activations",
    }  # fmt: skip
    for kind, word in words.items():
        over, total = [], 0
        for form, loss, bound in FLOAT8_LOSSES:
            shares = habits(history, kind, f"formats.{form}.{loss}")
            total = max(total, len(shares))
            over += [Evidence(f"share of {loss} in {form}", e.name, e.step, e.value, bound)
                     for e in shares.values() if e.value >= bound]  # fmt: skip
        if not over:
            continue
        over.sort(key=lambda e: (-e.value / (e.threshold or 1), e.quantity, e.name))
        first, names = over[0], {e.name for e in over}
        overflows = "overflow" in first.quantity
        ends = "lie beyond the largest number" if overflows else "round to zero"
        yield Advice(
            f"{word} in float8", "note",
            f"{len(names)} of {total} {word} would lose a share in float8 without a scale, most of all "
            f"{first.name}: {percent(first.value)} would {ends} in {first.quantity.split()[-1]}.",
            "The layers that multiply in float8 want a scale for each tensor or row, as SwitchBack's have, or e5m2 "
            "for e4m3.",
            "SwitchBack, Sections 2.2 and 2.3", worst(over), weight=1,
        )  # fmt: skip


def coarse_states(history: History) -> Iterator[Advice]:
    """Moments in 8 bits that are far from what they should be."""
    errors, flushed = (habits(history, "state", field) for field in ("relative_norm", "flushed"))
    bad = [
        *(Evidence("relative error of the state", e.name, e.step, e.value, STATE_ERROR)
          for e in errors.values() if e.value >= STATE_ERROR),
        *(Evidence("share of the state rounded to zero", e.name, e.step, e.value, FLUSHED)
          for e in flushed.values() if e.value >= FLUSHED and e.name.endswith("[v]")),
    ]  # fmt: skip
    if not bad:
        return
    bad.sort(key=lambda e: (not history.is_embedding(e.name.split(" [")[0]), -e.value / (e.threshold or 1), e.name))
    first, names = bad[0], list(dict.fromkeys(e.name for e in bad))
    text = f"{first.name}: {first.quantity} {percent(first.value)}; {count(len(names), 'state')} in all: "
    text += f"{listed(names)}."
    if history.is_embedding(first.name.split(" [")[0]):
        action = "Give embeddings 32-bit states (an option of ng.optim.split_decay) or use ng.nn.StableEmbedding."
        source = "8-bit Optimizers, Section 2.3 and Appendix C"
    else:
        action = "Keep these states in 'log8' codes or in 32 bits, or take smaller blocks."
        source = "8-bit Optimizers, Section 2.1 and Appendix D"
    yield Advice("coarse states", "change", text, action, source, worst(bad), weight=1)


def no_gradient(history: History) -> Iterator[Advice]:
    """Gradients that are zero throughout, parameters that never moved."""
    dead = []
    for name in history.names("gradient"):
        series = history.series("gradient", "absmax", name)
        if len(series.steps) >= 3 and not series.values.any():
            dead.append(Evidence("largest |gradient|", name, int(series.steps[-1]), 0.0, None))
    for name in history.names("update"):
        series = history.series("update", "norm", name)
        if len(series.steps) >= 3 and not series.values.any() and name not in {e.name for e in dead}:
            dead.append(Evidence("norm of the update", name, int(series.steps[-1]), 0.0, None))
    if dead:
        names = [e.name for e in dead]
        yield Advice(
            "no gradient", "watch",
            f"{listed(names)} had no gradient other than zero, or no update, at any measured step: nothing "
            "was lost there, nothing was learned.",
            "Check that the loss depends on it, or freeze it.",
            "Collage, Definition 3.2: an update of zero is not a lost one", worst(dead),
        )  # fmt: skip


def not_trained(history: History) -> Iterator[Advice]:
    """Parameters of which nothing was measured: frozen, another optimizer's, or never given a gradient."""
    measured = max(
        (len(history.series("gradient", "absmax", n).steps) for n in history.names("gradient")), default=0
    )
    frozen, apart = listed_in(history, "frozen"), listed_in(history, "apart")
    known = isinstance(history.header.get("groups"), list)
    seen = {*history.names("gradient"), *frozen, *apart}
    without = [name for name in history.parameters if name not in seen] if known and measured >= HABIT else []
    parts = [
        f"{listed(names)} {'is' if len(names) == 1 else 'are'} {what}."
        for names, what in ((frozen, "frozen"), (apart, "not among the optimizer's parameters"))
        if names
    ]
    if without:
        parts.append(f"{listed(without)} never had a gradient in {measured} measured steps.")
    if parts:
        step = history.last_step
        found = [
            Evidence("gradients that were seen", name, step, 0.0, None) for name in (*without, *apart, *frozen)
        ]
        yield Advice(
            "not trained", "note", " ".join(parts),
            "If this is not on purpose: check that the loss depends on what never had a gradient, and what the "
            "optimizer was given.",
            "Collage, Definition 3.2: an update of zero is not a lost one", worst(found),
        )  # fmt: skip
