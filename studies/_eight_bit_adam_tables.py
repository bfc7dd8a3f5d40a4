"""The tables of the 8-bit study, its picture's numbers, and those in its page's sentences.

Tables look up the runs of the plan. A run that was not made is left out of a median, and its cell is empty.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import _eight_bit_adam_plan as planned
from _eight_bit_adam import STABLE, USUAL, Parts, Trial
from _eight_bit_adam_plan import ARMS, COMPONENTS, Arm
from _tables import Results, markdown, percent

NAMES = {"lr": "learning rate", "beta1": "β1", "beta2": "β2", "eps": "ε"}
# Table 8, by layer norm plus Xavier: none, one, both. Its check marks are lost in our copy; its order tells this.
PAPER_COMPONENTS = ("16.83, 16.84", "16.60 to 16.66", "16.46, 16.47")


class Runs:
    """The runs of a results file, by trial."""

    def __init__(self, results: Results) -> None:
        self.lr: float = results["training"]["lr"]
        self._runs = {}
        for run in results["runs"]:
            fields = run["trial"]
            self._runs[Trial(**fields | {"embedding": Parts(**fields["embedding"])})] = run

    def made(self, trials: Iterable[Trial]) -> list[dict[str, Any]]:
        """Those of the trials that were run."""
        found = [self._runs[trial] for trial in trials if trial in self._runs]
        return [run for run in found if run["error"] is None]

    def loss(self, trial: Trial) -> float | None:
        """A run's validation loss; None if it was unstable or was not made."""
        made = self.made([trial])
        return made[0]["validation_loss"] if made else None

    def losses(self, trials: Sequence[Trial]) -> list[float]:
        """Those of the successful runs."""
        return [loss for trial in trials if (loss := self.loss(trial)) is not None]

    def unstable(self, trials: Sequence[Trial]) -> int:
        """How many were made and were unstable."""
        return sum(run["unstable"] is not None for run in self.made(trials))

    def differences(self, trials: Sequence[Trial], others: Sequence[Trial]) -> list[float]:
        """Loss minus the other's loss, where both were successful."""
        pairs = [(self.loss(a), self.loss(b)) for a, b in zip(trials, others, strict=True)]
        return [a - b for a, b in pairs if a is not None and b is not None]


def reference(arm: Arm) -> Arm:
    """The 32-bit arm with the same embedding."""
    return next(other for other in ARMS if other.codebook is None and other.stable == arm.stable)


def ablation(results: Results) -> str:
    """Table 3."""
    runs = Runs(results)
    head = ["states", "scale for", "stable embedding", "paper: unstable", "perplexity"]
    head += ["here: unstable", "perplexity", "loss above 32-bit", "at worst"]
    rows = []
    for arm in ARMS:
        trials = planned.ablation(arm, runs.lr)
        above = runs.differences(trials, planned.ablation(reference(arm), runs.lr)) if arm.codebook else []
        rows.append([
            f"8-bit, {arm.codebook}" if arm.codebook else "32-bit",
            ("a block" if arm.blocks else "a tensor") if arm.codebook else "",
            "yes" if arm.stable else "no",
            f"{arm.paper[0]} %" if arm.paper else "",
            f"{arm.paper[1]:.1f}" if arm.paper else "",
            f"{runs.unstable(trials)} of {len(runs.made(trials))}",
            perplexity(runs.losses(trials)),
            f"{statistics.median(above):+.4f}" if above else "",
            f"{max(above):+.4f}" if above else "",
        ])  # fmt: skip
    return markdown(head, rows, words=3)


def sensitivity(results: Results) -> str:
    """Figure 3 in numbers."""
    runs = Runs(results)
    seeds = planned.SENSITIVITY_SEEDS
    head = ["changed", "to", *(f"32-bit, seed {s}" for s in seeds), *(f"8-bit, seed {s}" for s in seeds)]
    head += [f"8-bit minus 32-bit, seed {s}" for s in seeds]
    rows = []
    for name, value, wide, narrow in planned.sensitivity(runs.lr):
        cells = [shown(runs, trial) for trial in (*wide, *narrow)]
        gaps = [runs.differences([a], [b]) for a, b in zip(narrow, wide, strict=True)]
        rows.append([NAMES[name], number(value), *cells, *(f"{gap[0]:+.4f}" if gap else "" for gap in gaps)])
    return markdown(head, rows, words=1)


def components(results: Results) -> str:
    """Table 8."""
    runs = Runs(results)
    head = ["layer norm", "Xavier", "32-bit states", "paper", "here", "loss", "minus none's", "± of the seeds"]
    none = planned.components(USUAL, runs.lr)
    rows = []
    for parts in COMPONENTS:
        trials = planned.components(parts, runs.lr)
        losses, change = runs.losses(trials), runs.differences(trials, none)
        rows.append([
            *("yes" if part else "no" for part in (parts.norm, parts.xavier, parts.wide)),
            PAPER_COMPONENTS[parts.norm + parts.xavier],
            perplexity(losses),
            f"{statistics.fmean(losses):.4f}" if losses else "",
            f"{statistics.fmean(change):+.4f}" if change and parts != USUAL else "",
            f"{statistics.stdev(change):.4f}" if len(change) > 1 and parts != USUAL else "",
        ])  # fmt: skip
    return markdown(head, rows, words=3)


def sweep(results: Results) -> str:
    """The losses by which the learning rate was chosen."""
    runs = Runs(results)
    trials = planned.sweep()
    return markdown(
        ["learning rate", *(number(trial.lr) for trial in trials)],
        [["32-bit loss", *(shown(runs, trial) for trial in trials)]],
    )


def origin(results: Results) -> str:
    """What was run, on what."""
    training, environment = results["training"], results["environment"]
    return (
        f"`{results['command']}`: {len(results['runs'])} runs of a {training['model']} model with "
        f"{results['parameters']:,} parameters, each {training['steps']} steps of "
        f"{training['batch'] * training['sequence']:,} tokens in fp32 on {results['data']['source']}; "
        f"{environment['device']}, torch {environment['torch'].partition('+')[0]}.\n"
    )


def shown(runs: Runs, trial: Trial) -> str:
    """A run's loss in a table, or what became of it."""
    made = runs.made([trial])
    if not made:
        return ""
    return "unstable" if made[0]["unstable"] else f"{made[0]['validation_loss']:.4f}"


def perplexity(losses: Sequence[float]) -> str:
    """The median perplexity of successful runs."""
    return f"{math.exp(statistics.median(losses)):.1f}" if losses else ""


def number(value: float) -> str:
    """A hyperparameter: powers of ten below a thousandth."""
    if value >= 1e-4:
        return f"{value:g}"
    mantissa, exponent = f"{value:.0e}".split("e")
    power = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{power}" if mantissa == "1" else f"{mantissa} · 10{power}"


def gaps(runs: Runs, names: Sequence[str] = tuple(NAMES)) -> list[float]:
    """8-bit minus 32-bit loss, the mean over the seeds, for every setting of Figure 3 that both got through."""
    # By their first run: the baseline is in the list once for each hyperparameter.
    rows = {row[3][0]: row for row in planned.sensitivity(runs.lr) if row[0] in names}
    found = [runs.differences(narrow, wide) for _, _, wide, narrow in rows.values()]
    return [statistics.fmean(each) for each in found if each]


def effect(runs: Runs, part: str) -> tuple[float, float]:
    """What a part of the stable embedding adds to the loss, over all combinations of the others and all seeds."""
    with_it = [parts for parts in COMPONENTS if getattr(parts, part)]
    found = []
    for parts in with_it:
        without = Parts(**{**vars(parts), part: False})
        found += runs.differences(planned.components(parts, runs.lr), planned.components(without, runs.lr))
    return statistics.fmean(found), statistics.stdev(found) / math.sqrt(len(found))


def facts(results: Results) -> dict[str, str]:
    """Numbers in the page's sentences."""
    runs = Runs(results)
    every = gaps(runs)
    base = next(row for row in planned.sensitivity(runs.lr) if row[:2] == ("lr", runs.lr))
    seeds = [
        abs(a - b)
        for _, _, wide, narrow in planned.sensitivity(runs.lr)
        for losses in (runs.losses(wide), runs.losses(narrow))
        if len(losses) == 2
        for a, b in [losses]
    ]
    found = {
        "lr": number(runs.lr),
        "runs": f"{len(runs.made(run for run in runs._runs))}",
        "errors": f"{len(results['runs']) - len(runs.made(run for run in runs._runs))}",
        "gap": f"{statistics.fmean(runs.differences(base[3], base[2])):+.4f}",
        "gap_mean": f"{statistics.fmean(every):+.4f}",
        "gap_spread": f"{statistics.stdev(every):.4f}",
        "gap_least": f"{min(every):+.4f}",
        "gap_most": f"{max(every):+.4f}",
        "between_seeds": f"{statistics.fmean(seeds):.3f}",
        "settings": f"{len(every)}",
        "unstable_sensitivity": f"{sum(runs.unstable([*row[2], *row[3]]) for row in planned.sensitivity(runs.lr))}",
    }
    for name in NAMES:
        found[f"gap_{name}"] = f"{min(gaps(runs, [name])):+.4f} to {max(gaps(runs, [name])):+.4f}"
    for part in ("norm", "xavier", "wide"):
        mean, error = effect(runs, part)
        found[f"effect_{part}"] = f"{mean:+.4f} ± {error:.4f}"
    for arm in ARMS:
        trials = planned.ablation(arm, runs.lr)
        scale, embedding = "block" if arm.blocks else "tensor", "stable" if arm.stable else "usual"
        key = f"{arm.codebook or 'fp32'}_{scale}_{embedding}"
        found[f"unstable_{key}"] = percent(runs.unstable(trials) / max(1, len(runs.made(trials))), 2)
        found[f"perplexity_{key}"] = perplexity(runs.losses(trials))
    stable = [run["state_bytes"] for run in runs.made(planned.components(STABLE, runs.lr))]
    usual = [run["state_bytes"] for run in runs.made(planned.components(USUAL, runs.lr))]
    return found | {"bytes_stable": f"{stable[0]:.1f}", "bytes_usual": f"{usual[0]:.1f}"}


TABLES = {
    "ablation": ablation,
    "sensitivity": sensitivity,
    "components": components,
    "sweep": sweep,
    "origin": origin,
}
