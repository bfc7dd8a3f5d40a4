"""The tables of the 8-bit study, its picture's numbers, and those in its page's sentences.

Tables look up the runs of the plan. A run that was not made is left out of a median, and its cell is empty.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from studies.eight_bit_adam import plan as planned
from studies.eight_bit_adam.plan import ARMS, COMPONENTS, Arm
from studies.eight_bit_adam.training import STABLE, USUAL, Parts, Trial
from studies.shared.tables import Results, markdown, percent

VALIDATION, TRAINING = "validation_loss", "training_loss"
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

    @property
    def trials(self) -> list[Trial]:
        """All that are in the file."""
        return list(self._runs)

    def made(self, trials: Iterable[Trial]) -> list[dict[str, Any]]:
        """Those of the trials that were run."""
        found = [self._runs[trial] for trial in trials if trial in self._runs]
        return [run for run in found if run["error"] is None]

    def loss(self, trial: Trial, of: str = VALIDATION) -> float | None:
        """A run's loss at the end; None if it was unstable or was not made."""
        made = self.made([trial])
        return made[0][of] if made and made[0]["unstable"] is None else None

    def losses(self, trials: Sequence[Trial], of: str = VALIDATION) -> list[float]:
        """Those of the successful runs."""
        return [loss for trial in trials if (loss := self.loss(trial, of)) is not None]

    def unstable(self, trials: Sequence[Trial]) -> int:
        """How many were made and were unstable."""
        return sum(run["unstable"] is not None for run in self.made(trials))

    def differences(self, trials: Sequence[Trial], others: Sequence[Trial], of: str = VALIDATION) -> list[float]:
        """Loss minus the other's loss, where both were successful."""
        pairs = [(self.loss(a, of), self.loss(b, of)) for a, b in zip(trials, others, strict=True)]
        return [a - b for a, b in pairs if a is not None and b is not None]

    def lost(self, trials: Sequence[Trial]) -> list[float]:
        """Of each run, the share of the elements whose v was zero where m was not."""
        return [run["lost"] for run in self.made(trials) if run["lost"] is not None]


def reference(arm: Arm) -> Arm:
    """The 32-bit arm with the same embedding."""
    return next(other for other in ARMS if other.codebook is None and other.stable == arm.stable)


def ablation(results: Results) -> str:
    """Table 3."""
    runs = Runs(results)
    head = ["states", "stable embedding", "paper: unstable", "perplexity", "here: unstable", "perplexity"]
    head += ["loss minus 32-bit's", "training loss minus 32-bit's", "v became 0, m did not"]
    rows = []
    for arm in ARMS:
        trials, wide = planned.ablation(arm, runs.lr), planned.ablation(reference(arm), runs.lr)
        apart = [runs.differences(trials, wide, of) if arm.codebook else [] for of in (VALIDATION, TRAINING)]
        rows.append([
            f"{arm.codebook}, {'blocks' if arm.blocks else 'tensor'}" if arm.codebook else "32-bit",
            "yes" if arm.stable else "no",
            f"{arm.paper[0]} %" if arm.paper else "",
            f"{arm.paper[1]:.1f}" if arm.paper else "",
            f"{runs.unstable(trials)} of {len(runs.made(trials))}",
            perplexity(runs.losses(trials)),
            *map(mean, apart),
            middle(runs.lost(trials)),
        ])  # fmt: skip
    return markdown(head, rows, words=2)


def causes(results: Results) -> str:
    """What of linear codes a run does not survive."""
    runs = Runs(results)
    head = ["linear codes for"]
    for scale in ("tensor", "blocks"):
        head += [f"{scale}: unstable", "perplexity", "v became 0, m did not"]
    names = ("m and v", "m", "v", "m and v, which never is zero")
    rows = []
    for name, (narrow, zero) in zip(names, planned.CAUSES, strict=True):
        cells = []
        for blocks in (False, True):
            trials = planned.causes(narrow, zero, blocks=blocks, lr=runs.lr)
            cells += [f"{runs.unstable(trials)} of {len(runs.made(trials))}", perplexity(runs.losses(trials))]
            cells.append(middle(runs.lost(trials)))
        rows.append([name, *cells])
    return markdown(head, rows, words=1)


def sensitivity(results: Results) -> str:
    """Figure 3 in numbers."""
    runs = Runs(results)
    seeds = planned.SENSITIVITY_SEEDS
    head = ["changed", "to", "32-bit", "8-bit", *(f"8-bit minus 32-bit, seed {s}" for s in seeds)]
    head += [f"training loss, seed {s}" for s in seeds]
    rows = []
    for name, value, wide, narrow in planned.sensitivity(runs.lr):
        cells = [shown(runs, trials) for trials in (wide, narrow)]
        for of in (VALIDATION, TRAINING):
            gaps = [runs.differences([a], [b], of) for a, b in zip(narrow, wide, strict=True)]
            cells += [f"{gap[0]:+.4f}" if gap else "" for gap in gaps]
        rows.append([NAMES[name], number(value), *cells])
    return markdown(head, rows, words=1)


def repeats(results: Results) -> str:
    """The baseline again and again."""
    runs = Runs(results)
    head, rows = ["seed"], []
    for loss in ("validation", "training"):
        head += [f"{loss}: 32-bit", "8-bit", "difference"]
    for seed in planned.SENSITIVITY_SEEDS:
        cells = [str(seed)]
        for of in (VALIDATION, TRAINING):
            wide, narrow = (runs.losses(trials, of) for trials in planned.repeats(seed, runs.lr))
            cells += [f"{statistics.fmean(each):.4f} ± {statistics.stdev(each):.4f}" for each in (wide, narrow)]
            cells.append(f"{statistics.fmean(narrow) - statistics.fmean(wide):+.4f}")
        rows.append(cells)
    return markdown(head, rows)


def components(results: Results) -> str:
    """Table 8."""
    runs = Runs(results)
    head = [
        "layer norm",
        "Xavier",
        "32-bit states",
        "paper",
        "here",
        "loss minus none's",
        "training loss minus none's",
    ]
    none = planned.components(USUAL, runs.lr)
    rows = []
    for parts in COMPONENTS:
        trials = planned.components(parts, runs.lr)
        apart = [runs.differences(trials, none, of) if parts != USUAL else [] for of in (VALIDATION, TRAINING)]
        rows.append([
            *("yes" if part else "no" for part in (parts.norm, parts.xavier, parts.wide)),
            PAPER_COMPONENTS[parts.norm + parts.xavier],
            perplexity(runs.losses(trials)),
            *map(mean, apart),
        ])  # fmt: skip
    return markdown(head, rows, words=3)


def sweep(results: Results) -> str:
    """The losses by which the learning rate was chosen."""
    runs = Runs(results)
    trials = planned.sweep()
    return markdown(
        ["learning rate", *(number(trial.lr) for trial in trials)],
        [["32-bit loss", *(shown(runs, [trial]) for trial in trials)]],
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


def shown(runs: Runs, trials: Sequence[Trial]) -> str:
    """The mean loss of runs in a table, or what became of one of them; nothing if one was not made."""
    if len(runs.made(trials)) < len(trials):
        return ""
    return "unstable" if runs.unstable(trials) else f"{statistics.fmean(runs.losses(trials)):.4f}"


def perplexity(losses: Sequence[float]) -> str:
    """The median perplexity of successful runs."""
    return f"{math.exp(statistics.median(losses)):.1f}" if losses else ""


def mean(found: Sequence[float]) -> str:
    """A mean with its standard error; nothing of fewer than two."""
    if len(found) < 2:
        return ""
    average = round(statistics.fmean(found), 3) + 0.0  # no minus before a zero
    return f"{average:+.3f} ± {statistics.stdev(found) / math.sqrt(len(found)):.3f}"


def middle(shares: Sequence[float]) -> str:
    """A median share."""
    return percent(statistics.median(shares), 2) if shares else ""


def number(value: float) -> str:
    """A hyperparameter: powers of ten below a thousandth."""
    if value >= 1e-4:
        return f"{value:g}"
    mantissa, exponent = f"{value:.0e}".split("e")
    power = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{power}" if mantissa == "1" else f"{mantissa} · 10{power}"


def settings(runs: Runs) -> list[tuple[str, float, list[Trial], list[Trial]]]:
    """Those of Figure 3, each once: the baseline is in its list once for each hyperparameter."""
    return list({row[3][0]: row for row in planned.sensitivity(runs.lr)}.values())


def gaps(runs: Runs, of: str = VALIDATION) -> list[float]:
    """8-bit minus 32-bit loss of every pair of runs of Figure 3 that both got through."""
    return [gap for _, _, wide, narrow in settings(runs) for gap in runs.differences(narrow, wide, of)]


def effect(runs: Runs, parts: Sequence[Parts], others: Sequence[Parts]) -> str:
    """Loss of embeddings minus that of others: by seed, its mean over the embeddings; of these mean and error."""
    pairs = [
        (planned.components(a, runs.lr), planned.components(b, runs.lr)) for a, b in zip(parts, others, strict=True)
    ]
    found = []
    for i in range(len(planned.COMPONENT_SEEDS)):
        apart = [gap for a, b in pairs for gap in runs.differences([a[i]], [b[i]])]
        found += [statistics.fmean(apart)] if apart else []
    return mean(found)


def facts(results: Results) -> dict[str, str]:
    """Numbers in the page's sentences."""
    runs = Runs(results)
    every, trained = gaps(runs), gaps(runs, TRAINING)
    usual_rates = [row for row in settings(runs) if row[2][0].lr <= runs.lr]
    close = [gap for row in usual_rates for gap in runs.differences(row[3], row[2], TRAINING)]
    made = runs.made(runs.trials)
    bad = [run["unstable"] for run in made if run["unstable"]]
    found = {
        "lr": number(runs.lr),
        "runs": f"{len(made)}",
        "pairs": f"{len(every)}",
        "gap": mean(every),
        "gap_one": f"{statistics.stdev(every):.3f}",
        "gap_training": mean(trained),
        "close_pairs": f"{len(close)}",
        "close": mean(close),
        "close_one": f"{statistics.stdev(close):.3f}",
        "unstable": f"{len(bad)}",
        "not_finite": f"{sum('not finite' in why for why in bad)}",
        "unstable_sensitivity": f"{sum(runs.unstable([*row[2], *row[3]]) for row in settings(runs))}",
    }
    arms = {
        f"{arm.codebook or 'fp32'}_{'block' if arm.blocks else 'tensor'}_{'stable' if arm.stable else 'usual'}": (
            planned.ablation(arm, runs.lr)
        )
        for arm in ARMS
    }
    for name in ("fp32_tensor", "dynamic_tensor", "dynamic_block"):
        found[f"stable_{name}"] = mean(runs.differences(arms[f"{name}_stable"], arms[f"{name}_usual"]))
    for name in ("stable", "usual"):
        apart = runs.differences(arms[f"dynamic_tensor_{name}"], arms[f"dynamic_block_{name}"])
        found[f"tensor_{name}"] = mean(apart)
    lost = runs.lost(arms["dynamic_tensor_usual"])
    found["lost_least"], found["lost_most"] = (
        percent(share, 2) if lost else "" for share in (min(lost), max(lost))
    )
    linear = [run["unstable"] for name, trials in arms.items() if "linear" in name for run in runs.made(trials)]
    steps = [int(why.split()[4]) for why in linear if why and "not finite" in why]
    found["first_step"], found["last_step"] = (str(f(steps, default="")) for f in (min, max))

    def of(norm: bool, xavier: bool) -> list[Parts]:
        return [Parts(norm, xavier, wide) for wide in (False, True)]

    for name, parts in {"norm": of(True, False), "xavier": of(False, True), "both": of(True, True)}.items():
        found[f"effect_{name}"] = effect(runs, parts, of(False, False))
    narrow = [parts for parts in COMPONENTS if not parts.wide]
    found["effect_wide"] = effect(runs, [Parts(parts.norm, parts.xavier, True) for parts in narrow], narrow)
    stable = [run["state_bytes"] for run in runs.made(planned.components(STABLE, runs.lr))]
    usual = [run["state_bytes"] for run in runs.made(planned.components(USUAL, runs.lr))]
    return found | {"bytes_stable": f"{stable[0]:.1f}", "bytes_usual": f"{usual[0]:.1f}"}


TABLES = {
    "ablation": ablation,
    "causes": causes,
    "sensitivity": sensitivity,
    "repeats": repeats,
    "components": components,
    "sweep": sweep,
    "origin": origin,
}
