"""Tables, facts and the picture of the 8-bit study.

Tables look up the runs of the plan. A run that was not made is left out of a median, and its cell is empty.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any

from matplotlib.figure import Figure

from studies.eight_bit_adam import plan as planned
from studies.eight_bit_adam.plan import ARMS, COMPONENTS, Arm
from studies.eight_bit_adam.training import STABLE, USUAL, Parts, Trial
from studies.shared import pictures
from studies.shared.pictures import COLORS, INK, MUTED, Line
from studies.shared.tables import Results, fill_in, markdown, per, percent, raised, table

VALIDATION, TRAINING = "validation_loss", "training_loss"
NAMES = {"lr": "learning rate", "beta1": "β1", "beta2": "β2", "eps": "ε"}
# Table 8, by layer norm plus Xavier: none, one, both. Its check marks are lost in our copy; its order tells this.
PAPER_COMPONENTS = ("16.83, 16.84", "16.60 to 16.66", "16.46, 16.47")

# Series, and how far to the side their dots are: those of two would cover one another.
STATES = (
    (Line("32-bit Adam", "ink", (), 1.8, "o"), -0.06),
    (Line("8-bit Adam", "series-1", (4, 2), 1.8, "s"), 0.06),
)
APART = {
    VALIDATION: (Line("difference, validation loss", "series-3", (6, 2), 1.8, "D"), 0.06),
    TRAINING: (Line("difference, training loss", "series-2", (2, 1.5), 1.8, "^"), -0.06),
}


class Runs:
    """The runs of a results file, by trial."""

    def __init__(self, results: Results) -> None:
        self.lr: float = results["lr"] if "lr" in results else results["training"]["lr"]
        names = [field.name for field in fields(Trial)]
        self._runs = {}
        for run in results["runs"]:
            found = run.get("trial", run)  # as the committed results have it
            trial = Trial(**{name: found[name] for name in names} | {"embedding": Parts(**found["embedding"])})
            if "failed" not in run:
                self._runs[trial] = run

    @property
    def trials(self) -> list[Trial]:
        """All that are in the file."""
        return list(self._runs)

    def made(self, trials: Iterable[Trial]) -> list[dict[str, Any]]:
        """Those of the trials that were run."""
        return [self._runs[trial] for trial in trials if trial in self._runs]

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

    def trials(arm: Arm) -> list[Trial]:
        return planned.ablation(arm, runs.lr)

    def behind(of: str) -> Any:
        return lambda arm: mean(runs.differences(trials(arm), trials(reference(arm)), of)) if arm.codebook else ""

    scale = {True: "blocks", False: "tensor"}
    return table(
        ARMS,
        ("states", lambda arm: f"{arm.codebook}, {scale[arm.blocks]}" if arm.codebook else "32-bit"),
        ("stable embedding", lambda arm: "yes" if arm.stable else "no"),
        ("paper: unstable", lambda arm: arm.paper and f"{arm.paper[0]} %"),
        ("perplexity", lambda arm: arm.paper and f"{arm.paper[1]:.1f}"),
        ("here: unstable", lambda arm: unstable_of(runs, trials(arm))),
        ("perplexity", lambda arm: perplexity(runs.losses(trials(arm)))),
        ("loss minus 32-bit's", behind(VALIDATION)),
        ("training loss minus 32-bit's", behind(TRAINING)),
        ("v became 0, m did not", lambda arm: middle(runs.lost(trials(arm)))),
        words=2,
    )


def unstable_of(runs: Runs, trials: Sequence[Trial]) -> str:
    return f"{runs.unstable(trials)} of {len(runs.made(trials))}"


def causes(results: Results) -> str:
    """What of linear codes a run does not survive."""
    runs = Runs(results)
    names = ("m and v", "m", "v", "m and v, which never is zero")

    def of(show: Callable[[list[Trial]], str]) -> Any:
        def shown(scale: str, row: tuple[str, tuple[str, bool]]) -> str:
            narrow, zero = row[1]
            return show(planned.causes(narrow, zero, blocks=scale == "blocks", lr=runs.lr))

        return shown

    return table(
        zip(names, planned.CAUSES, strict=True),
        ("linear codes for", lambda row: row[0]),
        *per(
            ("tensor", "blocks"), "{}: ",
            ("unstable", of(lambda trials: unstable_of(runs, trials))),
            ("perplexity", of(lambda trials: perplexity(runs.losses(trials)))),
            ("v became 0, m did not", of(lambda trials: middle(runs.lost(trials)))),
        ),
    )  # fmt: skip


def sensitivity(results: Results) -> str:
    """Figure 3 in numbers."""
    runs, seeds = Runs(results), planned.SENSITIVITY_SEEDS

    def gap(of: str) -> Any:
        def shown(seed: int, row: Any) -> float | None:
            place = seeds.index(seed)
            return next(iter(runs.differences([row[3][place]], [row[2][place]], of)), None)

        return shown

    return table(
        planned.sensitivity(runs.lr),
        ("changed", lambda row: NAMES[row[0]]),
        ("to", lambda row: number(row[1])),
        ("32-bit", lambda row: shown(runs, row[2])),
        ("8-bit", lambda row: shown(runs, row[3])),
        *per(seeds, "8-bit minus 32-bit, seed {}", ("", gap(VALIDATION), "+.4f")),
        *per(seeds, "training loss, seed {}", ("", gap(TRAINING), "+.4f")),
    )


def repeats(results: Results) -> str:
    """The baseline again and again."""
    runs = Runs(results)

    def losses(of: str, seed: int) -> list[list[float]]:
        return [runs.losses(trials, of) for trials in planned.repeats(seed, runs.lr)]

    def each(place: int) -> Any:
        def shown(of: str, seed: int) -> str:
            found = losses(of, seed)[place]
            return f"{statistics.fmean(found):.4f} ± {statistics.stdev(found):.4f}"

        return shown

    def difference(of: str, seed: int) -> float:
        wide, narrow = losses(of, seed)
        return statistics.fmean(narrow) - statistics.fmean(wide)

    columns = (("32-bit", each(0)), ("8-bit", each(1)), ("difference", difference, "+.4f"))
    titles = {VALIDATION: "validation: ", TRAINING: "training: "}
    return table(planned.SENSITIVITY_SEEDS, ("seed", str), *per(titles, titles.get, *columns))


def components(results: Results) -> str:
    """Table 8."""
    runs = Runs(results)

    def trials(parts: Parts) -> list[Trial]:
        return planned.components(parts, runs.lr)

    def behind(of: str) -> Any:
        return lambda parts: "" if parts == USUAL else mean(runs.differences(trials(parts), trials(USUAL), of))

    marks = {True: "yes", False: "no"}
    return table(
        COMPONENTS,
        ("layer norm", lambda parts: marks[parts.norm]),
        ("Xavier", lambda parts: marks[parts.xavier]),
        ("32-bit states", lambda parts: marks[parts.wide]),
        ("paper", lambda parts: PAPER_COMPONENTS[parts.norm + parts.xavier]),
        ("here", lambda parts: perplexity(runs.losses(trials(parts)))),
        ("loss minus none's", behind(VALIDATION)),
        ("training loss minus none's", behind(TRAINING)),
        words=3,
    )


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
    return fill_in(
        results,
        "`{command}`: {count} runs of a {training[model]} model with {parameters:,} parameters, each "
        "{training[steps]} steps of {tokens:,} tokens in fp32 on {data[source]}; {machine}.",
        count=len(results["runs"]),
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
    power = f"10{raised(int(exponent))}"
    return power if mantissa == "1" else f"{mantissa} · {power}"


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


def losses_and_gaps(results: Results) -> Figure:
    """Figure 3: dots are runs, lines the mean over the seeds; a cross at the top is an unstable run.

    The learning rate has an axis of its own, because its losses span much more.
    """
    runs = Runs(results)
    figure, grid = pictures.figure(12.5, 7.2, 2, len(NAMES), sharex="col", height_ratios=(3, 2))
    for column, ((top, bottom), name) in enumerate(zip(grid.T, NAMES, strict=True)):
        rows = [row for row in planned.sensitivity(runs.lr) if row[0] == name]
        for place, (line, aside) in enumerate(STATES):
            _line(top, [runs.losses(row[2 + place]) for row in rows], line, aside)
            for x, row in enumerate(rows):
                if runs.unstable(row[2 + place]):
                    where = {"transform": top.get_xaxis_transform()}
                    top.plot(x + aside, 0.97, "x", color=COLORS[line.color], **where)
        bottom.axhline(0.0, color=MUTED, linewidth=1.0)
        for of, (line, aside) in APART.items():
            _line(bottom, [runs.differences(row[3], row[2], of) for row in rows], line, aside)
        bottom.set_xticks(range(len(rows)), [number(row[1]) for row in rows])
        bottom.set_xlabel(NAMES[name])
        if column:
            bottom.sharey(grid[1, 0])
            bottom.tick_params(labelleft=False)
        if column > 1:
            top.sharey(grid[0, 1])
            top.tick_params(labelleft=False)
    grid[0, 0].set_ylabel("validation loss", color=INK)
    grid[1, 0].set_ylabel("8-bit minus 32-bit", color=INK)
    labels = [axes.get_legend_handles_labels() for axes in grid[:, 0]]
    handles, names = (list(chain.from_iterable(each)) for each in zip(*labels, strict=True))
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _line(axes: Any, found: list[list[float]], line: Line, aside: float) -> None:
    """Dots at each place, and a line through their means."""
    color = COLORS[line.color]
    for x, each in enumerate(found):
        axes.plot([x + aside] * len(each), each, line.marker, color=color, markersize=5, alpha=0.8)
    means = [statistics.fmean(each) if each else math.nan for each in found]
    axes.plot(range(len(found)), means, **replace(line, marker=None).style(label=line.label))


TABLES = {
    "ablation": ablation, "causes": causes, "sensitivity": sensitivity, "repeats": repeats,
    "components": components, "sweep": sweep, "origin": origin,
}  # fmt: skip
PICTURES = {"": losses_and_gaps}
