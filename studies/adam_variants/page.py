"""Tables and facts of the 8-bit paper's optimizers: the paper's figures beside ours.

Differences are between runs of one seed, which share their weights and their batches; what they are held
against is how far the 32-bit row's own results lie apart over the seeds.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from studies.adam_variants import rows
from studies.adam_variants.training import name_of
from studies.collage_training.page import text
from studies.eight_bit_adam import plan as planned
from studies.shared import tables
from studies.shared.tables import Results, machine, markdown, place_of, several, significant, table

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


def made(results: Results, kind: str, row: str, lr: float | None = None) -> list[Results]:
    """A row's runs by seed, at the learning rate of its family's if none is given."""
    rate = rate_of(results, kind, rows.variant(row).family) if lr is None else lr
    return tables.runs_of(results, kind=kind, row=row, lr=rate)


def rate_of(results: Results, kind: str, family: str) -> float | None:
    """The learning rate that a family got: that of the lowest loss of its 32-bit row with seed 0."""
    runs = tables.runs_of(results, kind=kind, row=rows.family(family)[0].name, seed=0)
    losses = {run["lr"]: run["validation_loss"] for run in runs if run["validation_loss"] is not None}
    return min(losses, key=lambda lr: losses[lr]) if losses else None


def metric(results: Results, kind: str) -> tuple[str, Callable[[Results], float | None]]:
    """What a task is judged by, larger or smaller, and a run's; None for one that diverged.

    A loss above that of a uniform guess is one that has left: there is nothing to compare.
    """
    if kind == "images":
        return "accuracy", lambda run: None if run["accuracy"] is None else 100 * run["accuracy"]
    guess = math.log(results["training"]["vocabulary"])
    return "loss", lambda run: None if (x := run["validation_loss"]) is None or x > guess else x


def differences(results: Results, kind: str, row: str) -> list[float]:
    """A row's loss, or accuracy in per cent, minus that of its family's 32-bit row, by seed."""
    _, value = metric(results, kind)
    wide = rows.family(rows.variant(row).family)[0].name
    mine, reference = (
        [{"seed": run["seed"], "value": value(run)} for run in made(results, kind, name)] for name in (row, wide)
    )
    return tables.apart(mine, reference, "value")


def compared(kind: str, results: Results) -> str:
    """All rows of a task."""
    form, images = ("+.2f" if kind == "images" else "+.4f"), kind == "images"
    lines = []
    for row in (row for family in rows.FAMILIES[kind] for row in rows.family(family)):
        papers = (("", TABLE_1.get((kind, row.name))), ("Table 7: ", TABLE_7.get(row.name)))
        said = [f"{x}{y}" for x, y in papers if y and (not x or kind == "language")]
        line, runs = [row.name, row.title, "; ".join(said)], made(results, kind, row.name)
        if not runs:
            lines.append([*line, _why_not(results, kind, row.name), "", "", "", ""])
            continue
        wide = row is rows.family(row.family)[0]
        line += [_shown(results, kind, runs), "" if wide else several(differences(results, kind, row.name), form)]
        first = runs[0]
        lines.append([*line, f"{first['lr']:g}", f"{first['bytes']['states']:.2f}", f"{first['step_ms']:.1f}"])
    head = (
        TITLES[kind], "what is kept", "paper", "accuracy, % here" if images else "perplexity here",
        "minus 32-bit" if images else "loss minus 32-bit", "learning rate", "bytes of states", "ms a step",
    )  # fmt: skip
    return markdown(head, lines, words=2)


def _why_not(results: Results, kind: str, row: str) -> str:
    reasons = [r["failed"] for r in results["runs"] if (r["kind"], r["row"]) == (kind, row) and "failed" in r]
    return reasons[0].removeprefix("RuntimeError: ") if reasons else "not run"


def _shown(results: Results, kind: str, runs: Sequence[Results]) -> str:
    """The median over seeds with its ends: accuracy in per cent, or perplexity."""
    _, value = metric(results, kind)
    values = sorted(x if kind == "images" else math.exp(x) for run in runs if (x := value(run)) is not None)
    bad = f"{len(runs) - len(values)} of {len(runs)} diverged" if len(values) < len(runs) else ""
    if not values:
        return bad
    shown = f"{statistics.median(values):.2f}"
    shown += f" ({values[0]:.2f} … {values[-1]:.2f})" if len(values) > 1 else ""
    return f"{shown}, {bad}" if bad else shown


def ablation_rates(results: Results) -> list[float]:
    """Learning rates of the ablation, from low to high."""
    return sorted({run["lr"] for run in results["runs"] if run["kind"] == "ablation"})


def ablated(results: Results, row: str, lr: float) -> list[Results]:
    """The ablation's runs of a row at a learning rate."""
    return tables.runs_of(results, kind="ablation", row=row, lr=lr)


def ablation(results: Results) -> str:
    """Table 3 at several learning rates: how many runs were unstable, and the others' median perplexity."""

    def good(arm: planned.Arm, lr: float) -> list[float]:
        runs = ablated(results, name_of(arm), lr)
        return [run["validation_loss"] for run in runs if run["unstable"] is None]

    def unstable(arm: planned.Arm, lr: float) -> str:
        runs = ablated(results, name_of(arm), lr)
        return f"{len(runs) - len(good(arm, lr))} of {len(runs)}" if runs else ""

    def perplexity(arm: planned.Arm, lr: float) -> str:
        losses = good(arm, lr)
        return significant(math.exp(min(statistics.median(losses), 99.0)), 4) if losses else ""

    def at(lr: float) -> list[Any]:
        shown = ((f"lr {lr:g}: unstable", unstable), ("perplexity", perplexity))
        return [(title, functools.partial(show, lr=lr)) for title, show in shown]

    return table(
        planned.ARMS,
        ("states", lambda arm: name_of(arm).rsplit(", ", 1)[0]),
        ("embedding", lambda arm: name_of(arm).rsplit(", ", 1)[1].removesuffix(" embedding")),
        ("paper: unstable", lambda arm: arm.paper and f"{arm.paper[0]} %"),
        ("perplexity", lambda arm: arm.paper and f"{arm.paper[1]}"),
        *(column for lr in ablation_rates(results) for column in at(lr)),
        words=2,
    )


def sweep(results: Results) -> str:
    """Validation losses by which learning rates were chosen."""
    lines = []
    for kind, family in ((kind, family) for kind, families in rows.FAMILIES.items() for family in families):
        first, cells = rows.family(family)[0].name, []
        for lr in rows.RATES[family]:
            runs = tables.runs_of(results, kind=kind, row=first, lr=lr, seed=0)
            loss = runs[0]["validation_loss"] if runs else None
            cells.append(f"{lr:g}: {'diverged' if loss is None else f'{loss:.4f}'}" if runs else "")
        lines.append([TITLES[kind], first, *cells])
    most = max(len(line) for line in lines) - 2
    return markdown(("task", "optimizer", *(f"rate {n}" for n in range(1, most + 1))), lines, words=2)


def origin(results: Results) -> str:
    """What was run, on what."""
    training, environment, data = results["training"], results["environment"], results["data"]
    sizes = ", ".join(f"{name} of {count:,} parameters" for name, count in data["parameters"].items())
    peers = [f"{x} {v}" for x in ("bitsandbytes", "torchao", "flashoptim") if (v := environment[x])[:3] != "not"]
    left = len(results["unfinished"])
    missing = f"{left} runs were left out for want of time." if left else "All runs were made."
    return (
        f"`{results['command']}`: {sizes}, {training['steps']} steps of {training['batch']} × "
        f"{training['sequence']} tokens of {text(data)}, vocabulary {training['vocabulary']:,}, in fp32; pictures: "
        f"{training['image_steps']} steps of {training['image_batch']}; ablation: {training['ablation_steps']} "
        f"steps; {', '.join([machine(results), *peers])}. {missing}\n"
    )


def facts(results: Results) -> dict[str, str]:
    """Numbers in sentences, such as `language_8_bit_Adam` for its loss minus the 32-bit row's."""
    named = {"runs": str(len(results["runs"])), "seeds": str(results["training"]["seeds"])}
    for kind, family in ((kind, family) for kind, families in rows.FAMILIES.items() for family in families):
        if (lr := rate_of(results, kind, family)) is not None:
            named[f"lr_{kind}_{family}"] = f"{lr:g}"
        for row in rows.family(family):
            key = f"{kind}_{place_of(row.name)}"
            if runs := made(results, kind, row.name):
                form = "+.2f" if kind == "images" else "+.4f"
                named[key] = several(differences(results, kind, row.name), form).partition(" ")[0]
                named[f"median_{key}"] = _shown(results, kind, runs).partition(" ")[0]
                named[f"bytes_{key}"] = f"{runs[0]['bytes']['states']:.2f}"
    return named


TABLES = {kind: functools.partial(compared, kind) for kind in TITLES} | {
    "ablation": ablation, "sweep": sweep, "origin": origin,
}  # fmt: skip
