"""Which runs the 8-bit study makes: lists of trials, which its tables look up again.

A run that two lists have is made once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from studies.eight_bit_adam.training import STABLE, USUAL, Parts, Trial

# Section 4, "Sensitivity Analysis"; the learning rate is the model's, found by `sweep`.
BASELINE = Trial("dynamic", True, STABLE, lr=0.0, beta1=0.9, beta2=0.995, eps=1e-7, seed=0)
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
# Around the paper's values; of the rates their share of the best.
VARIED = {
    "lr": (0.25, 0.5, 1.0, 2.0, 4.0),
    "beta1": (0.8, 0.87, 0.9, 0.93),
    "beta2": (0.98, 0.99, 0.995, 0.999),
    "eps": (1e-8, 1e-7, 1e-6, 1e-5),
}
SENSITIVITY_SEEDS = (0, 1)
COMPONENT_SEEDS = (0, 1, 2)
NUDGES = (0, 1, 2, 3, 4)
# Section 4, "Ablation Analysis": the values of each hyperparameter; the rates are shares of the best.
ABLATED = {
    "eps": (1e-8, 1e-7, 1e-6),
    "beta1": (0.90, 0.87, 0.93),
    "beta2": (0.999, 0.99, 0.98),
    "lr": (1.0, 0.75, 1.25),
}
# An orthogonal array (L9): in nine runs each value meets each value of every other hyperparameter once.
SQUARES = [(a, b, (a + b) % 3, (a + 2 * b) % 3) for a, b in product(range(3), repeat=2)]


@dataclass(frozen=True)
class Arm:
    """A row of Table 3. `paper` is its share of unstable runs in per cent and its perplexity, if it is in there."""

    codebook: str | None
    blocks: bool
    stable: bool
    paper: tuple[int, float] | None = None

    @property
    def base(self) -> Trial:
        embedding = STABLE if self.stable else USUAL
        return replace(BASELINE, codebook=self.codebook, blocks=self.blocks, embedding=embedding)


ARMS = (
    Arm(None, False, False, (0, 16.7)),
    Arm(None, False, True, (0, 16.3)),
    Arm("linear", False, False, (90, 253.0)),
    Arm("linear", False, True, (50, 194.4)),
    Arm("linear", True, False),
    Arm("linear", True, True),
    Arm("dynamic", False, False, (10, 18.6)),
    Arm("dynamic", False, True, (0, 17.7)),
    Arm("dynamic", True, False, (0, 16.8)),
    Arm("dynamic", True, True, (0, 16.4)),
)
# Table 8: all parts of the stable embedding, one by one.
COMPONENTS = tuple(Parts(norm, xavier, wide) for norm, xavier, wide in product((False, True), repeat=3))
# What of linear codes a run does not survive: (moments in 8 bits, whether v may be zero).
CAUSES = (("mv", True), ("m", True), ("v", True), ("mv", False))


def digits(x: float) -> float:
    """A number that a results file gives back as it was."""
    return float(f"{x:.4g}")


def sweep() -> list[Trial]:
    """32-bit runs by which the learning rate is chosen."""
    return [replace(in_32_bits(BASELINE), lr=lr) for lr in RATES]


def in_32_bits(trial: Trial) -> Trial:
    """The same with 32-bit states; blocks mean nothing there."""
    return replace(trial, codebook=None, blocks=False)


def sensitivity(lr: float) -> Iterator[tuple[str, float, list[Trial], list[Trial]]]:
    """Figure 3: (hyperparameter, value, 32-bit runs, 8-bit runs), one hyperparameter at a time."""
    base = replace(BASELINE, lr=lr)
    for name, values in VARIED.items():
        for value in values:
            changed = replace(base, **{name: digits(value * lr) if name == "lr" else value})
            eight = [replace(changed, seed=seed) for seed in SENSITIVITY_SEEDS]
            yield name, getattr(changed, name), [in_32_bits(trial) for trial in eight], eight


def ablation(arm: Arm, lr: float) -> list[Trial]:
    """Table 3: an arm under nine settings of its hyperparameters."""
    found = []
    for places in SQUARES:
        changes = {name: values[i] for (name, values), i in zip(ABLATED.items(), places, strict=True)}
        found.append(replace(arm.base, **changes | {"lr": digits(changes["lr"] * lr)}))
    return found


def components(parts: Parts, lr: float) -> list[Trial]:
    """Table 8: 8-bit runs of the baseline with these parts of the stable embedding."""
    return [replace(BASELINE, lr=lr, embedding=parts, seed=seed) for seed in COMPONENT_SEEDS]


def causes(narrow: str, zero: bool, *, blocks: bool, lr: float) -> list[Trial]:
    """The ablation's runs with linear codes and the stable embedding, one moment or one code taken out."""
    arm = Arm("linear", blocks, True)
    return [replace(trial, narrow=narrow, zero=zero) for trial in ablation(arm, lr)]


def repeats(seed: int, lr: float) -> tuple[list[Trial], list[Trial]]:
    """The baseline in 32 and in 8 bits, from initial weights that differ by millionths."""
    eight = [replace(BASELINE, lr=lr, seed=seed, nudge=nudge) for nudge in NUDGES]
    return [in_32_bits(trial) for trial in eight], eight


def everything(lr: float) -> list[Trial]:
    """All runs, the sweep's too, each once."""
    return list(dict.fromkeys([*sweep(), *plan(lr)]))


def plan(lr: float) -> list[Trial]:
    """All runs but the sweep's, each once, the most wanted first."""
    trials = [trial for *_, narrow, wide in sensitivity(lr) for trial in (*narrow, *wide)]
    trials += [trial for arm in ARMS for trial in ablation(arm, lr)]
    trials += [trial for parts in COMPONENTS for trial in components(parts, lr)]
    for seed in SENSITIVITY_SEEDS:
        trials += [trial for some in repeats(seed, lr) for trial in some]
    for blocks, (narrow, zero) in product((False, True), CAUSES):
        trials += causes(narrow, zero, blocks=blocks, lr=lr)
    return list(dict.fromkeys(trials))


CHECKED = 6  # runs of a check, beside the sweep
