"""What the 8-bit paper says of its optimizers, held against the runs of `adam_variants`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from studies.adam_variants import page as tables
from studies.adam_variants.page import ablated, ablation_rates, made
from studies.adam_variants.training import name_of
from studies.eight_bit_adam import plan as planned
from studies.shared import readings
from studies.shared.readings import Reading
from studies.shared.tables import Results, several

ADAM, SUM, MOMENTUM = "32-bit Adam", "32-bit AdaGrad", "32-bit Momentum"
# Task, row, the row it is held against, where, the paper's figures, and whether it is behind there.
PAIRS = (
    ("language", "8-bit Adam", ADAM, "Table 1", "perplexity 9.0 and 9.0, 1.5B", False),
    ("language", "8-bit Adam, dynamic", ADAM, "Table 1", "perplexity 9.0 and 9.0, 1.5B", False),
    ("masked", "8-bit Adam", ADAM, "Table 1", "perplexity 3.48 and 3.49", False),
    ("masked", "8-bit Adam, dynamic", ADAM, "Table 1", "perplexity 3.48 and 3.49", False),
    ("images", "8-bit Momentum", MOMENTUM, "Table 1", "accuracy 77.2 and 77.1", False),
    ("images", "8-bit Momentum, dynamic", MOMENTUM, "Table 1", "accuracy 77.2 and 77.1", False),
    ("language", "32-bit Adafactor", ADAM, "Table 1", "perplexity 8.9 and 9.0, 1.5B", False),
    ("masked", "32-bit Adafactor", ADAM, "Table 1", "perplexity 3.59 and 3.49", True),
    ("language", SUM, ADAM, "Table 7", "perplexity 19.4 and 16.7", True),
    ("language", "8-bit AdaGrad", SUM, "Table 7", "perplexity 19.7 and 19.4", True),
    ("language", "8-bit AdaGrad, dynamic", SUM, "Table 7", "perplexity 19.7 and 19.4", True),
)
# Statement, the paper's shares of unstable runs, and which rows are meant to be the stabler and the less stable.
Chosen = Callable[[planned.Arm], bool]
PARTS: tuple[tuple[str, str, Chosen, Chosen], ...] = (
    (
        "Dynamic codes make fewer runs unstable than linear ones", "90 and 50 % of linear, 10 and 0 % of dynamic",
        lambda arm: arm.codebook == "dynamic", lambda arm: arm.codebook == "linear",
    ),
    (
        "Blocks make fewer runs unstable, dynamic codes", "10 and 0 % without, 0 % with; 1.3B: 80 % without",
        lambda arm: arm.codebook == "dynamic" and arm.blocks,
        lambda arm: arm.codebook == "dynamic" and not arm.blocks,
    ),
    (
        "The stable embedding makes fewer 8-bit runs unstable", "90 to 50 %, 10 to 0 %, 0 to 0 %",
        lambda arm: arm.codebook is not None and arm.stable,
        lambda arm: arm.codebook is not None and not arm.stable,
    ),
)  # fmt: skip

# Where seeds lie further apart than this, in nats or points, that two rows end alike is no finding.
TELLING = {"loss": 0.25, "accuracy": 2.0}


def reading(results: Results) -> str:
    """Every statement of the paper, and how it reads here."""
    return readings.table([*(_pair(results, *pair) for pair in PAIRS), *_parts(results)])


def _pair(results: Results, kind: str, row: str, reference: str, at: str, paper: str, worse: bool) -> Reading:
    title = tables.TITLES[kind]
    statement = f"{title}: `{row}` {f'ends behind `{reference}`' if worse else f'ends where `{reference}` does'}"
    metric, value = tables.metric(results, kind)
    runs, theirs = made(results, kind, row), {run["seed"]: run for run in made(results, kind, reference)}
    sign = -1 if kind == "images" else 1
    both = [(value(run), value(theirs[run["seed"]])) for run in runs if run["seed"] in theirs]
    costs = [sign * (mine - other) for mine, other in both if mine is not None and other is not None]
    lost = sum(mine is None and other is not None for mine, other in both)
    known = [x for run in theirs.values() if (x := value(run)) is not None]
    spread = max(known) - min(known) if len(known) > 1 else None
    form = "+.2f" if kind == "images" else "+.4f"
    here = several([sign * cost for cost in costs], form)
    here = f"{metric} {here}" if here else ""
    if lost:
        here = ", ".join(filter(None, (here, f"{lost} of {len(both)} diverged")))
    elif here:
        here += f"; its seeds {spread:{form[1:]}} apart" if spread is not None else "; one seed"
    if worse:
        return Reading(statement, at, paper, here, readings.behind(costs, spread, lost > 0))
    tells = spread is not None and spread <= TELLING[metric]
    return Reading(statement, at, paper, here, readings.alike(costs, spread, lost > 0, tells=tells))


def _parts(results: Results) -> Iterator[Reading]:
    for statement, paper, stabler, other in PARTS:
        (less, of_less), (more, of_more) = (_unstable(results, chosen) for chosen in (stabler, other))
        here = f"{less} of {of_less}, {more} of {of_more}" if of_less and of_more else ""
        holds = readings.rarer(less, of_less, more, of_more) if here else None
        yield Reading(statement, "Table 3", paper, here, holds)


def _unstable(results: Results, chosen: Chosen) -> tuple[int, int]:
    """Unstable runs of some rows at all learning rates, and how many runs there are."""
    names = [name_of(arm) for arm in planned.ARMS if chosen(arm)]
    runs = [run for lr in ablation_rates(results) for name in names for run in ablated(results, name, lr)]
    return sum(run["unstable"] is not None for run in runs), len(runs)
