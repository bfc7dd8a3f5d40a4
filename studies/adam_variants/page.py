"""Tables, facts and the reading of the 8-bit paper's optimizers: the paper's figures beside ours.

Differences are between runs of one seed, which share their weights and their batches; what they are held
against is how far the 32-bit row's own results lie apart over the seeds.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from studies.adam_variants import training as rows
from studies.adam_variants.training import name_of
from studies.collage_training.page import text
from studies.eight_bit_adam import plan as planned
from studies.shared import readings, tables
from studies.shared.readings import Reading
from studies.shared.tables import Results, fill_in, machine, per, place_of, several, significant, table

# Table 1, by task and row: the language models of 1.5 billion parameters (perplexity), RoBERTa-base (perplexity),
# ResNet-50 on ImageNet (accuracy in per cent).
TABLE_1 = {
    ("language", "32-bit Adam"): "9.0", ("language", "32-bit Adafactor"): "8.9", ("language", "8-bit Adam"): "9.0",
    ("masked", "32-bit Adam"): "3.49", ("masked", "32-bit Adafactor"): "3.59", ("masked", "8-bit Adam"): "3.48",
    ("images", "32-bit Momentum"): "77.1", ("images", "8-bit Momentum"): "77.2",
}  # fmt: skip
# Table 7, of language models; its 32-bit Adam has no stable embedding, which Table 3 has at 16.3.
TABLE_7 = {"32-bit Adam": "16.7", "8-bit Adam": "16.4", "32-bit AdaGrad": "19.4", "8-bit AdaGrad": "19.7"}
TITLES = {
    "language": "causal language model",
    "masked": "masked language model",
    "images": "characters in pictures",
}
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
FAMILIES = [(kind, family) for kind, families in rows.FAMILIES.items() for family in families]


def made(results: Results, kind: str, row: str) -> list[Results]:
    """A row's runs by seed, at the learning rate of its family's."""
    rate = rate_of(results, kind, rows.variant(row).family)
    return tables.runs_of(results, kind=kind, row=row, lr=rate)


def rate_of(results: Results, kind: str, family: str) -> float | None:
    """The learning rate that a family got: that of the lowest loss of its 32-bit row with seed 0."""
    runs = tables.runs_of(results, kind=kind, row=rows.family(family)[0].name, seed=0)
    losses = {run["lr"]: run["validation_loss"] for run in runs if run["validation_loss"] is not None}
    return min(losses, key=lambda lr: losses[lr]) if losses else None


def judged(results: Results, kind: str, row: str) -> list[Results]:
    """By seed, what a task is judged by, `value`: accuracy in per cent, or loss; None for a run that diverged.

    A loss above that of a uniform guess is one that has left: there is nothing to compare.
    """
    guess = math.log(results["training"]["vocabulary"])

    def value(run: Results) -> float | None:
        if kind == "images":
            return None if run["accuracy"] is None else 100 * run["accuracy"]
        return None if (loss := run["validation_loss"]) is None or loss > guess else loss

    return [{"seed": run["seed"], "value": value(run)} for run in made(results, kind, row)]


def form_of(kind: str) -> str:
    """How differences are shown."""
    return "+.2f" if kind == "images" else "+.4f"


def minus_32_bit(results: Results, kind: str, row: str) -> str:
    """A row's loss, or accuracy in per cent, minus that of its family's 32-bit row, by seed."""
    wide = rows.family(rows.variant(row).family)[0].name
    apart = tables.apart(judged(results, kind, row), judged(results, kind, wide), "value")
    return "" if row == wide else several(apart, form_of(kind))


def compared(kind: str, results: Results) -> str:
    """All rows of a task."""
    images = kind == "images"

    def paper(row: rows.Variant) -> str:
        seven = TABLE_7.get(row.name) if kind == "language" else None
        return "; ".join(filter(None, (TABLE_1.get((kind, row.name)), seven and f"Table 7: {seven}")))

    def first(key: str) -> Callable[[rows.Variant], Any]:
        return lambda row: next((tables.at(run, key) for run in made(results, kind, row.name)), None)

    return table(
        [row for family in rows.FAMILIES[kind] for row in rows.family(family)],
        (TITLES[kind], "name"),
        ("what is kept", "title"),
        ("paper", paper),
        ("accuracy, % here" if images else "perplexity here", lambda row: shown(results, kind, row.name)),
        ("minus 32-bit" if images else "loss minus 32-bit", lambda row: minus_32_bit(results, kind, row.name)),
        ("learning rate", first("lr"), "g"),
        ("bytes of states", first("bytes.states"), ".2f"),
        ("ms a step", first("step_ms"), ".1f"),
        words=2,
    )


def shown(results: Results, kind: str, row: str) -> str:
    """The median over seeds with its ends: accuracy in per cent, or perplexity; or why there is none."""
    runs = [run["value"] for run in judged(results, kind, row)]
    if not runs:
        reasons = [r["failed"] for r in results["runs"] if (r["kind"], r["row"]) == (kind, row) and "failed" in r]
        return reasons[0].removeprefix("RuntimeError: ") if reasons else "not run"
    values = sorted(x if kind == "images" else math.exp(x) for x in runs if x is not None)
    bad = f"{len(runs) - len(values)} of {len(runs)} diverged" if len(values) < len(runs) else ""
    ends = f" ({values[0]:.2f} … {values[-1]:.2f})" if len(values) > 1 else ""
    return ", ".join(filter(None, (f"{statistics.median(values):.2f}{ends}" if values else "", bad)))


def ablation_rates(results: Results) -> list[float]:
    """Learning rates of the ablation, from low to high."""
    return sorted({run["lr"] for run in results["runs"] if run["kind"] == "ablation"})


def ablated(results: Results, arm: planned.Arm, lr: float) -> list[Results]:
    """The ablation's runs of a row at a learning rate."""
    return tables.runs_of(results, kind="ablation", row=name_of(arm), lr=lr)


def ablation(results: Results) -> str:
    """Table 3 at several learning rates: how many runs were unstable, and the others' median perplexity."""

    def unstable(lr: float, arm: planned.Arm) -> str:
        runs = ablated(results, arm, lr)
        return f"{sum(run['unstable'] is not None for run in runs)} of {len(runs)}" if runs else ""

    def perplexity(lr: float, arm: planned.Arm) -> str:
        losses = [run["validation_loss"] for run in ablated(results, arm, lr) if run["unstable"] is None]
        return significant(math.exp(min(statistics.median(losses), 99.0)), 4) if losses else ""

    return table(
        planned.ARMS,
        ("states", lambda arm: name_of(arm).rsplit(", ", 1)[0]),
        ("embedding", lambda arm: name_of(arm).rsplit(", ", 1)[1].removesuffix(" embedding")),
        ("paper: unstable", lambda arm: arm.paper and f"{arm.paper[0]} %"),
        ("perplexity", lambda arm: arm.paper and f"{arm.paper[1]}"),
        *per(ablation_rates(results), "lr {:g}: ", ("unstable", unstable), ("perplexity", perplexity)),
        words=2,
    )


def sweep(results: Results) -> str:
    """Validation losses by which learning rates were chosen."""

    def tried(number: int, place: tuple[str, str]) -> str:
        kind, family = place
        lr = rows.RATES[family][number]
        runs = tables.runs_of(results, kind=kind, row=rows.family(family)[0].name, lr=lr, seed=0)
        loss = runs[0]["validation_loss"] if runs else None
        return f"{lr:g}: {'diverged' if loss is None else f'{loss:.4f}'}" if runs else ""

    return table(
        FAMILIES,
        ("task", lambda place: TITLES[place[0]]),
        ("optimizer", lambda place: rows.family(place[1])[0].name),
        *per(range(4), lambda number: f"rate {number + 1}", ("", tried)),
        words=2,
    )


def origin(results: Results) -> str:
    """What was run, on what."""
    environment, data = results["environment"], results["data"]
    peers = [f"{x} {v}" for x in ("bitsandbytes", "torchao", "flashoptim") if (v := environment[x])[:3] != "not"]
    return fill_in(
        results,
        "`{command}`: {sizes}, {training[steps]} steps of {training[batch]} × {training[sequence]} tokens of "
        "{text}, vocabulary {training[vocabulary]:,}, in fp32; pictures: {training[image_steps]} steps of "
        "{training[image_batch]}; ablation: {training[ablation_steps]} steps; {where}. {left}",
        sizes=tables.sizes(data),
        text=text(data),
        where=", ".join([machine(results), *peers]),
        left=tables.left_out(results),
    )


def facts(results: Results) -> dict[str, str]:
    """Numbers in sentences, such as `language_8_bit_Adam` for its loss minus the 32-bit row's."""
    named: dict[str, str] = {}
    for kind, row in ((kind, row.name) for kind, family in FAMILIES for row in rows.family(family)):
        key = f"{kind}_{place_of(row)}"
        if runs := made(results, kind, row):
            named[key] = minus_32_bit(results, kind, row).partition(" ")[0]
            named[f"median_{key}"] = shown(results, kind, row).partition(" ")[0]
            named[f"bytes_{key}"] = f"{runs[0]['bytes']['states']:.2f}"
    return named


def reading(results: Results) -> str:
    """Every statement of the paper, and how it reads here."""
    return readings.table([*(_pair(results, *pair) for pair in PAIRS), *_parts(results)])


def _pair(results: Results, kind: str, row: str, reference: str, at: str, paper: str, worse: bool) -> Reading:
    ends = f"ends behind `{reference}`" if worse else f"ends where `{reference}` does"
    metric, sign = ("accuracy", -1) if kind == "images" else ("loss", 1)
    mine, theirs = (judged(results, kind, name) for name in (row, reference))
    apart = tables.apart(mine, theirs, "value")
    known = {run["seed"]: run["value"] for run in theirs}
    both = [(run["value"], known[run["seed"]]) for run in mine if run["seed"] in known]
    lost = sum(value is None and other is not None for value, other in both)
    spread = _spread([x for x in known.values() if x is not None])
    here = f"{metric} {several(apart, form_of(kind))}" if apart else ""
    if lost:
        here = ", ".join(filter(None, (here, f"{lost} of {len(both)} diverged")))
    elif here:
        here += f"; its seeds {spread:{form_of(kind)[1:]}} apart" if spread is not None else "; one seed"
    tells = spread is not None and spread <= TELLING[metric]
    holds = readings.ends([sign * x for x in apart], spread, lost, worse=worse, tells=tells)
    return Reading(f"{TITLES[kind]}: `{row}` {ends}", at, paper, here, holds)


def _spread(values: Sequence[float]) -> float | None:
    return max(values) - min(values) if len(values) > 1 else None


def _parts(results: Results) -> Iterator[Reading]:
    for statement, paper, stabler, other in PARTS:
        (less, of_less), (more, of_more) = (_unstable(results, chosen) for chosen in (stabler, other))
        here = f"{less} of {of_less}, {more} of {of_more}" if of_less and of_more else ""
        holds = readings.rarer(less, of_less, more, of_more) if here else None
        yield Reading(statement, "Table 3", paper, here, holds)


def _unstable(results: Results, chosen: Chosen) -> tuple[int, int]:
    """Unstable runs of some rows at all learning rates, and how many runs there are."""
    arms = [arm for arm in planned.ARMS if chosen(arm)]
    runs = [run for lr in ablation_rates(results) for arm in arms for run in ablated(results, arm, lr)]
    return sum(run["unstable"] is not None for run in runs), len(runs)


TABLES = {kind: functools.partial(compared, kind) for kind in TITLES} | {
    "ablation": ablation, "sweep": sweep, "origin": origin, "reading": reading,
}  # fmt: skip
