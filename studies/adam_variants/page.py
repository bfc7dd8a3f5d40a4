"""Tables and facts of the 8-bit paper's optimizers: the paper's figures beside ours.

Differences are between runs of one seed, which share their weights and their batches; what they are held
against is how far the 32-bit row's own results lie apart over the seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from studies.adam_variants import rows
from studies.adam_variants.training import name_of
from studies.collage_training.page import left_out, text
from studies.eight_bit_adam import plan as planned
from studies.shared.tables import Results, markdown, significant

# Table 1, by task and row: the language models of 1.5 billion parameters (perplexity), RoBERTa-base (perplexity),
# ResNet-50 on ImageNet (accuracy in per cent).
TABLE_1 = {
    ("language", "32-bit Adam"): "9.0", ("language", "32-bit Adafactor"): "8.9", ("language", "8-bit Adam"): "9.0",
    ("masked", "32-bit Adam"): "3.49", ("masked", "32-bit Adafactor"): "3.59", ("masked", "8-bit Adam"): "3.48",
    ("images", "32-bit Momentum"): "77.1", ("images", "8-bit Momentum"): "77.2",
}  # fmt: skip
# Table 7; its 32-bit Adam has no stable embedding, which Table 3 has at 16.3.
TABLE_7 = {"32-bit Adam": "16.7", "8-bit Adam": "16.4", "32-bit AdaGrad": "19.4", "8-bit AdaGrad": "19.7"}
TITLES = {
    "language": "causal language model",
    "masked": "masked language model",
    "images": "characters in pictures",
}


def made(results: Results, kind: str, row: str, lr: float | None = None) -> list[Results]:
    """A row's runs by seed, at the learning rate of its family's if none is given."""
    rate = rate_of(results, kind, rows.variant(row).family) if lr is None else lr
    found = [
        run
        for run in results["runs"]
        if (run["kind"], run["row"]) == (kind, row) and "failed" not in run and run["lr"] == rate
    ]
    return sorted(found, key=lambda run: run["seed"])


def rate_of(results: Results, kind: str, family: str) -> float | None:
    """The learning rate that a family got: that of the lowest loss of its 32-bit row with seed 0."""
    first = rows.family(family)[0].name
    losses = {
        run["lr"]: run["validation_loss"]
        for run in results["runs"]
        if (run["kind"], run["row"], run["seed"]) == (kind, first, 0) and run.get("validation_loss") is not None
    }
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
    reference = {
        run["seed"]: value(run) for run in made(results, kind, rows.family(rows.variant(row).family)[0].name)
    }
    return [
        mine - theirs
        for run in made(results, kind, row)
        if (mine := value(run)) is not None and (theirs := reference.get(run["seed"])) is not None
    ]


def compared(results: Results, kind: str) -> str:
    """All rows of a task."""
    lines = []
    for family in rows.FAMILIES[kind]:
        for row in rows.family(family):
            runs = made(results, kind, row.name)
            said = [
                f"{x}{y}"
                for x, y in (("", TABLE_1.get((kind, row.name))), ("Table 7: ", _seven(kind, row.name)))
                if y
            ]
            line = [row.name, row.title, "; ".join(said)]
            if not runs:
                lines.append([*line, _why_not(results, kind, row.name), "", "", "", ""])
                continue
            wide = row is rows.family(family)[0]
            line += [
                _shown(results, kind, runs),
                "" if wide else _signed(differences(results, kind, row.name), kind),
            ]
            line += [f"{runs[0]['lr']:g}", f"{runs[0]['bytes']['states']:.2f}", f"{runs[0]['step_ms']:.1f}"]
            lines.append(line)
    metric = "accuracy, %" if kind == "images" else "perplexity"
    minus = "minus 32-bit" if kind == "images" else "loss minus 32-bit"
    head = (
        TITLES[kind], "what is kept", "paper", f"{metric} here", minus, "learning rate", "bytes of states",
        "ms a step",
    )  # fmt: skip
    return markdown(head, lines, words=2)


def _seven(kind: str, row: str) -> str | None:
    return TABLE_7.get(row) if kind == "language" else None


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


def _signed(values: Sequence[float], kind: str) -> str:
    if not values:
        return ""
    digits = 2 if kind == "images" else 4
    mean = f"{statistics.fmean(values):+.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):+.{digits}f} … {max(values):+.{digits}f})"


def language(results: Results) -> str:
    """Tables 1 and 7: the causal model."""
    return compared(results, "language")


def masked(results: Results) -> str:
    """Table 1: the masked model."""
    return compared(results, "masked")


def images(results: Results) -> str:
    """Table 1: momentum."""
    return compared(results, "images")


def ablation_rates(results: Results) -> list[float]:
    """Learning rates of the ablation, from low to high."""
    return sorted({run["lr"] for run in results["runs"] if run["kind"] == "ablation"})


def ablated(results: Results, row: str, lr: float) -> list[Results]:
    """The ablation's runs of a row at a learning rate."""
    return [
        run
        for run in results["runs"]
        if (run["kind"], run["row"], run["lr"]) == ("ablation", row, lr) and "failed" not in run
    ]


def ablation(results: Results) -> str:
    """Table 3 at several learning rates: how many runs were unstable, and the others' median perplexity."""
    rates = ablation_rates(results)
    head = ["states", "embedding", "paper: unstable", "perplexity"]
    for lr in rates:
        head += [f"lr {lr:g}: unstable", "perplexity"]
    lines = []
    for arm in planned.ARMS:
        name = name_of(arm)
        states, embedding = name.rsplit(", ", 1)
        line = [states, embedding.removesuffix(" embedding")]
        line += [f"{arm.paper[0]} %", f"{arm.paper[1]}"] if arm.paper else ["", ""]
        for lr in rates:
            runs = ablated(results, name, lr)
            good = [run["validation_loss"] for run in runs if run["unstable"] is None]
            line.append(f"{len(runs) - len(good)} of {len(runs)}" if runs else "")
            line.append(significant(math.exp(min(statistics.median(good), 99.0)), 4) if good else "")
        lines.append(line)
    return markdown(head, lines, words=2)


def sweep(results: Results) -> str:
    """Validation losses by which learning rates were chosen."""
    lines = []
    for kind, families in rows.FAMILIES.items():
        for family in families:
            first = rows.family(family)[0].name
            cells = []
            for lr in rows.RATES[family]:
                runs = [run for run in made(results, kind, first, lr) if run["seed"] == 0]
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
    torch = environment["torch"].partition("+")[0]
    missing = f"{len(results['unfinished'])} runs were left out for want of time." if results["unfinished"] else ""
    return (
        f"`{results['command']}`: {sizes}, {training['steps']} steps of {training['batch']} × "
        f"{training['sequence']} tokens of {text(data)}, vocabulary {training['vocabulary']:,}, in fp32; pictures: "
        f"{training['image_steps']} steps of {training['image_batch']}; ablation: {training['ablation_steps']} "
        f"steps; {environment['device']}, {', '.join([f'torch {torch}', *peers])}. "
        f"{missing or left_out({'unfinished': [], 'runs': []})}\n"
    )


def facts(results: Results) -> dict[str, str]:
    """Numbers in sentences, such as `language_8_bit_Adam` for its loss minus the 32-bit row's."""
    named = {"runs": str(len(results["runs"])), "seeds": str(results["training"]["seeds"])}
    for kind, families in rows.FAMILIES.items():
        for family in families:
            if (lr := rate_of(results, kind, family)) is not None:
                named[f"lr_{kind}_{family}"] = f"{lr:g}"
            for row in rows.family(family):
                key = f"{kind}_" + "".join(c if c.isalnum() else "_" for c in row.name)
                if runs := made(results, kind, row.name):
                    named[key] = _signed(differences(results, kind, row.name), kind).partition(" ")[0]
                    named[f"median_{key}"] = _shown(results, kind, runs).partition(" ")[0]
                    named[f"bytes_{key}"] = f"{runs[0]['bytes']['states']:.2f}"
    return named


TABLES: dict[str, Callable[..., str]] = {
    "language": language,
    "masked": masked,
    "images": images,
    "ablation": ablation,
    "sweep": sweep,
    "origin": origin,
}
